"""From a call that is not proven to the module where it begins to differ: in comes the call, out comes a locator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from exportkit.calls.call import Call
from exportkit.divergence.locate import locate_divergence
from exportkit.divergence.locate_outputs import locate_outputs
from exportkit.divergence.located import Located
from exportkit.onnx_files.onnx_model import OnnxModel
from exportkit.probing.simplify import as_simplified
from exportkit.programs.exported import Exported
from exportkit.running.compare import Difference
from exportkit.running.eager import run_eager
from exportkit.trees import flatten

Tensors = Mapping[str, torch.Tensor]

MODEL, GRAPH, AROUND = "The model", "onnxruntime", "What feeds the graph and reads its outputs"
CHANGED = "run again, it does not return what this call expects of it: it was changed since, or is random"
SMALL = "more than the proof allows, but no module does more to it than rounding"


@dataclass(frozen=True)
class Locator:
    """Looks for the module where one call begins to differ.

    Attributes:
        onnx_model: The graph.
        arguments: The call.
        expected: What the model returned, by path.
        compare: Compares what was returned with what was expected, and yields a difference for each output.
        wrong: Paths of the outputs that the proof calls different; none of a call that was refused.
        where: What the proof says of it.
    """

    onnx_model: OnnxModel
    arguments: Call
    expected: Tensors
    compare: Callable[[Tensors, Tensors], Iterable[Difference]]
    wrong: Sequence[str]
    where: str

    def __call__(self, model: torch.nn.Module | None) -> Located:
        """Returns where it is, given the model in PyTorch, or what is known without it.

        Args:
            model: The model; None for the one that was exported, if it is there.
        """
        exported = self.onnx_model.exported
        if model is None and isinstance(exported, Exported):
            model = exported.model
        if model is None:
            found = self._by_outputs()
            return found if found.diverges else replace(found, stage=AROUND, reason=self._agreeing())
        args, kwargs = self.arguments.args_kwargs()
        call = (tuple(args), dict(kwargs))
        found = locate_divergence(model, self.onnx_model, call, method=exported.method, wrong=self.wrong)
        return found if found.diverges else self._beside(model, found)

    def _by_outputs(self) -> Located:
        args, kwargs = self.arguments.args_kwargs()
        onnx_model = self.onnx_model
        tensors = as_simplified(self.expected, onnx_model.exported.joined_outputs, ())
        wanted = {name: tensors[path] for name, path in onnx_model.file.outputs.items() if path in tensors}
        wrong = [name for name, path in onnx_model.file.outputs.items() if path in self.wrong]
        return locate_outputs(onnx_model.path, onnx_model.feeds(*args, **kwargs), wanted, wrong=wrong)

    def _beside(self, model: torch.nn.Module, found: Located) -> Located:
        """What differs where the modules of the graph do not: never nothing, as the proof did not go through."""
        returned = flatten(run_eager(model, self.onnx_model.exported.method, self.arguments)).tensors()
        if any(difference.reason is not None for difference in self.compare(self.expected, returned)):
            return replace(found, stage=MODEL, reason=CHANGED)
        args, kwargs = self.arguments.args_kwargs()
        results = self.onnx_model.session.run(self.onnx_model.feeds(*args, **kwargs))
        graph = {self.onnx_model.file.outputs[name]: tensor for name, tensor in results.items()}
        known = as_simplified(returned, self.onnx_model.exported.joined_outputs, ())
        wrong = [d for d in self.compare(known, graph) if d.reason is not None and d.path in self.wrong]
        if wrong:
            return replace(found, stage=GRAPH, tensor=wrong[0].path, largest=wrong[0].absolute, reason=SMALL)
        return replace(found, stage=AROUND, reason=self._agreeing())

    def _agreeing(self) -> str:
        return f"the graph by itself agrees, while the proof says: {self.where}"
