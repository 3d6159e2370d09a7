"""The contract of an ONNX graph: all that is needed to call it without the model.

A translation makes it, a saved folder stores and loads it, and `exportkit.onnx_files.graph` runs from it.

Inputs and outputs are named as onnxruntime-genai and optimum expect. ``past_key_values.layers[0].keys`` is
``past_key_values.0.key`` as an input and ``present.0.key`` as an output; in an encoder-decoder cache,
``past_key_values.0.decoder.key`` and ``past_key_values.0.encoder.key``. Any other path keeps its parts, joined by dots:
``data.inner.scale``, ``extras.0``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from exportkit.calls.observation import WrittenArgument
from exportkit.calls.signature import Signature
from exportkit.onnx_files.quantised import Quantised
from exportkit.plan.leaves import unique_name
from exportkit.plan.plan import Plan
from exportkit.probing.missing import MissingDefaults, dependent_outputs
from exportkit.probing.simplify import as_simplified
from exportkit.programs.domain import Domain
from exportkit.programs.program import TracedProgram
from exportkit.running.compare import Tensors
from exportkit.trees import Tree, flatten, set_stored_length, stored_length

Runtime = Literal["genai", "onnxruntime"]  # what graphs are made for; both run fused operators
WEIGHTS = ".data"  # end of the names of files that hold weights, which may be many gigabytes
_HALVES = {"self_attention_cache": "decoder", "cross_attention_cache": "encoder"}
_STATES = {"keys": "key", "values": "value"}
_CACHE = re.compile(
    r"^(?:(?P<root>.*?)\.)?(?:(?P<half>self_attention_cache|cross_attention_cache)\.)?layers\[(?P<layer>\d+)\]\.(?P<state>.+)$"
)


def weights_beside(path: Path) -> Path:
    """Returns the file with the weights of an ONNX file."""
    return path.with_name(path.name + WEIGHTS)


@dataclass(frozen=True)
class Contract:
    """How one ONNX graph is called.

    Attributes:
        path: The file; its weights are beside it in ``<name>.data``.
        inputs: Path of the leaf by name of the graph's input, in order. Inputs that the model ignores are left out.
        outputs: Path of the leaf by name of the graph's output, in order.
        output_axes: Names or sizes of the axes of each output, by path of its leaf.
        opset: The ONNX opset.
        model_name: Class of the model.
        method: The exported method.
        target: Path in the model of the method that the graph stands in for; ``__call__`` if the hooks of the model
            are part of the graph.
        signature: Parameters of the method.
        plan: What varies.
        domain: Where the graph may be used.
        defaults: Values for missing inputs.
        structure: Structure of what the model returns; its tensors mean nothing. Counters in its caches are the number
            of new tokens if the plan has no variable for it.
        joined_outputs: Paths of lists that the graph returns as one tensor.
        member_rows: Rows of each tensor of such a list, by its path, if they are always the same.
        dependent: Outputs that are only returned if an input is given, with that input, both by path.
        stateful: Whether the graph takes and returns a state that the model keeps on its modules.
        wraps: Whether the graph returns the result of the model together with everything else that a call changes.
        half_dtypes: The dtypes in half precision in which the model computes something.
        written: Arguments that the model changes in place, by name.
        rules: Names of the rewrites that were in force during the trace.
        sizes: Sizes of the variables during the trace.
        seconds: Duration of each stage.
        runtime: What the graph was fused for; None for a graph of operators that every runtime has.
        quantised: How its weights were quantised; None if they were not.
    """

    path: Path
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    output_axes: Mapping[str, tuple[str | int, ...]]
    opset: int
    model_name: str
    method: str
    target: str
    signature: Signature
    plan: Plan
    domain: Domain
    defaults: MissingDefaults
    structure: Tree
    joined_outputs: tuple[str, ...] = ()
    member_rows: Mapping[str, int] = field(default_factory=dict)
    dependent: Mapping[str, str] = field(default_factory=dict)
    stateful: bool = False
    wraps: bool = False
    half_dtypes: tuple[str, ...] = ()
    written: Mapping[str, WrittenArgument] = field(default_factory=dict)
    rules: tuple[str, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict, compare=False)
    runtime: Runtime | None = None
    quantised: Quantised | None = None

    @functools.cached_property
    def numbers(self) -> tuple[str, ...]:
        """Paths of the outputs that are tensors in the graph, and Python numbers in the model."""
        constants = self.structure.constants()
        return tuple([path for path in self.outputs.values() if path in constants])

    @functools.cached_property
    def pairs(self) -> frozenset[str]:
        """Paths of the outputs that are pairs of real numbers in the graph, and complex in the model."""
        returned = self.structure.tensors()
        return frozenset({path for path in self.outputs.values() if path in returned and returned[path].is_complex()})

    def simplified(self, tensors: Tensors) -> Tensors:
        """Returns outputs of the model by the paths that they have in the graph: a list may be one tensor there."""
        return as_simplified(tensors, self.joined_outputs)

    @classmethod
    def of(
        cls,
        traced: TracedProgram,
        path: Path,
        inputs: Mapping[str, str],
        outputs: Mapping[str, str],
        output_axes: Mapping[str, tuple[str | int, ...]],
        opset: int,
        *,
        runtime: Runtime | None = None,
    ) -> Contract:
        """Returns the contract of a file that a program was translated to.

        Args:
            traced: The program.
            path: The file.
            inputs: Path of the leaf by name of the graph's input.
            outputs: Path of the leaf by name of the graph's output.
            output_axes: Names or sizes of the axes of each output, by path of its leaf.
            opset: The ONNX opset.
            runtime: What the graph was fused for.
        """
        observation = traced.observation
        return cls(
            path,
            inputs,
            outputs,
            output_axes,
            opset,
            model_name=observation.model_name,
            method=traced.method,
            target=observation.target,
            signature=observation.signature,
            plan=traced.plan,
            domain=traced.domain,
            defaults=traced.defaults,
            structure=_counting_new_tokens(traced),
            joined_outputs=traced.joined_outputs,
            member_rows=traced.member_rows,
            dependent=dependent_outputs(observation, traced.output_paths, traced.joined_outputs),
            stateful=traced.stateful,
            wraps=traced.wraps,
            half_dtypes=traced.half_dtypes,
            written=observation.written,
            rules=traced.rules,
            sizes=traced.sizes,
            seconds=traced.seconds,
            runtime=runtime,
        )


def input_names(paths: Sequence[str]) -> list[str]:
    """Returns the graph's name for each input leaf."""
    return _unique([_name(path, None) for path in paths], taken=())


def output_names(paths: Sequence[str], inputs: Iterable[str]) -> list[str]:
    """Returns the graph's name for each output leaf; a name that an input has too gets the prefix ``output.``."""
    taken = set(inputs)
    names = []
    for path in paths:
        name = _name(path, "present")
        name = f"output.{name.removeprefix('[')}" if name in taken or name[:1].isdigit() else name
        names.append(name or "output")
    return _unique(names, taken)


def _name(path: str, cache_root: str | None) -> str:
    """A name without brackets; the caches of outputs are called ``cache_root``."""
    match = _CACHE.match(path)
    if match is None:
        return _dotted(path)
    root = cache_root or _dotted(match["root"] or "past_key_values")
    half = f".{_HALVES[match['half']]}" if match["half"] else ""
    return f"{root}.{match['layer']}{half}.{_STATES.get(match['state'], _dotted(match['state']))}"


def _dotted(path: str) -> str:
    return re.sub(r"\[['\"]?(.*?)['\"]?\]", r".\1", path).strip(".")


def _unique(names: Sequence[str], taken: Iterable[str]) -> list[str]:
    seen = set(taken)
    found = []
    for name in names:
        found.append(unique_name(name, seen))
        seen.add(found[-1])
    return found


def _counting_new_tokens(traced: TracedProgram) -> Tree:
    """The structure of what the model returns. Counters in its caches are what a call adds, if that never varies."""
    call = traced.observation.calls[0]
    added = stored_length(call.outputs.build()) - stored_length(call.values())
    if traced.plan.new_tokens is not None or added <= 0:
        return traced.outputs
    value = traced.outputs.build()
    set_stored_length(value, added)
    return flatten(value)
