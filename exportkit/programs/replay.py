"""Runs a traced program in torch on calls of other kinds than it was traced with, where it may have taken one path.

In comes an export; out go the recorded calls for which its program returns something else than the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from exportkit._torch_compat.graph import is_assertion
from exportkit.calls.call import Call
from exportkit.probing.missing import completed_call
from exportkit.probing.simplify import as_simplified
from exportkit.running.tolerances import outputs_close

if TYPE_CHECKING:
    from exportkit.programs.exported import Exported

_VIEWS = ("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default")


def unlike_the_model(exported: Exported, calls: Iterable[int]) -> list[int]:
    """Returns those of the recorded calls for which the program returns something else, or nothing at all.

    Args:
        exported: The export.
        calls: Numbers of recorded calls.
    """
    return [index for index in calls if not _returns_the_same(exported, index)]


def returns(exported: Exported, arguments: Call, expected: Mapping[str, torch.Tensor]) -> bool:
    """Returns whether the program returns for some arguments what the model returned.

    Args:
        exported: The export.
        arguments: A call with all inputs of the program.
        expected: What the model returned, by path.
    """
    try:
        returned = _run(exported, arguments.tensors())
    except Exception:  # whatever an operator raises for sizes that the trace did not foresee
        return False
    joined = exported.joined_outputs
    expected, got = as_simplified(expected, joined, ()), as_simplified(returned, joined, ())
    return outputs_close(expected, {path: tensor for path, tensor in got.items() if path in expected})


def _returns_the_same(exported: Exported, index: int) -> bool:
    arguments = completed_call(exported.plan, exported.observation, index, exported.fills.values)
    return returns(exported, arguments, exported.observation.calls[index].outputs.tensors())


def _run(exported: Exported, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    program, paths = exported.program, iter(exported.captured.input_paths)
    weights = {**program.state_dict, **program.constants}
    values = []
    for spec in program.graph_signature.input_specs:
        if spec.target is not None:
            values.append(weights[spec.target])
        elif isinstance(spec.arg, torch.export.graph_signature.TensorArgument):
            values.append(inputs[next(paths)].clone())
        else:
            values.append(getattr(spec.arg, "value", None))
    with torch.no_grad():
        results = _Runner(program.graph_module).run(*values)
    returned = [
        result
        for result, spec in zip(results, program.graph_signature.output_specs, strict=True)
        if spec.kind.name == "USER_OUTPUT" and isinstance(result, torch.Tensor)
    ]
    return dict(zip(exported.captured.output_paths, returned, strict=True))


class _Runner(torch.fx.Interpreter):
    """Runs a graph without its assertions, at sizes at which a view may have to be a copy, or have no elements."""

    def run_node(self, n: torch.fx.Node) -> Any:
        """Returns the value of a node."""
        if is_assertion(n):
            return None
        if str(n.target) in _VIEWS:
            source, shape = self.fetch_args_kwargs_from_env(n)[0]
            return source.reshape(_closed(shape, n.meta["val"].shape) if source.numel() == 0 else shape)
        return super().run_node(n)


def _closed(shape: Sequence[int], traced: Sequence[Any]) -> list[int]:
    """The shape of a view of nothing, where a size of -1 is open: it is what was traced, if that is a number."""
    pairs = zip(shape, traced, strict=True)
    return [size if size != -1 else known if isinstance(known, int) else 0 for size, known in pairs]
