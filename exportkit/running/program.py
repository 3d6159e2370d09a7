"""Runs exported programs in torch, node by node, on the sizes they were traced with and on any other."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, TensorArgument

from exportkit._torch_compat.cuda import as_on_cpu
from exportkit._torch_compat.graph import asserts_recorded_path, is_assertion, schema_of
from exportkit._torch_compat.random_numbers import fixed_numbers
from exportkit.calls.call import Call
from exportkit.running.module_state import tensors_kept

_VIEWS = ("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default")


class UnrecordedPath(Exception):
    """Raised for a call in which the model decides by values as it did in no recorded call."""


_reused: ContextVar[Mapping[torch.fx.Node, torch.fx.Node] | None] = ContextVar("reused", default=None)
_STATE = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR, InputKind.CUSTOM_OBJ)


@contextlib.contextmanager
def values_reused(nodes: Mapping[torch.fx.Node, torch.fx.Node]) -> Iterator[None]:
    """Gives nodes the values of others before them instead of computing them, for the time of a ``with`` block."""
    token = _reused.set(nodes)
    try:
        yield
    finally:
        _reused.reset(token)


@dataclass(frozen=True)
class ProgramRunner:
    """An exported program that takes calls of its model.

    Attributes:
        program: The program.
        input_paths: Leaf path of each tensor that it takes, in order.
        output_paths: Leaf path of each tensor that it returns, in order.
    """

    program: torch.export.ExportedProgram
    input_paths: Sequence[str]
    output_paths: Sequence[str]

    def __call__(self, call: Call, /) -> dict[str, torch.Tensor]:
        """Returns the outputs for copies of the tensors of a call, by path.

        Raises:
            Exception: whatever an operator raises for sizes that the trace did not foresee.
        """
        tensors, signature = call.tensors(), self.program.graph_signature
        inputs: dict[str, Any] = {}
        for name, path in zip(tensor_placeholders(self.program), self.input_paths, strict=True):
            inputs[name] = tensors[path].clone()
        for spec in signature.input_specs:
            if isinstance(spec.arg, ConstantArgument):
                inputs[spec.arg.name] = spec.arg.value
        returned = []
        with fixed_numbers(call.seed):
            results = run_nodes(self.program, inputs)
        for result, output in zip(results, signature.output_specs, strict=True):
            if output.kind is OutputKind.USER_OUTPUT and isinstance(result, torch.Tensor):
                returned.append(result)
        return dict(zip(self.output_paths, returned, strict=True))


def run_nodes(
    program: torch.export.ExportedProgram,
    inputs: Mapping[str, Any],
    keep: Callable[[torch.fx.Node, Any], None] | None = None,
) -> Sequence[Any]:
    """Returns what a program returns, without running its assertions.

    Args:
        program: The program.
        inputs: Values by name of the node that stands for the input; None for one that is not there.
        keep: Is given each node and its value, before the next node runs.
    """
    known = {**tensors_by_node(program), **inputs}
    values = [known.get(node.name) for node in program.graph.nodes if node.op == "placeholder"]
    buffers = [known[spec.arg.name] for spec in program.graph_signature.input_specs if spec.kind is InputKind.BUFFER]
    tensors = [value for value in known.values() if isinstance(value, torch.Tensor)]
    with torch.no_grad(), tensors_kept(buffers), as_on_cpu(tensors):
        results: Sequence[Any] = _Interpreter(program.graph_module, keep).run(*values, enable_io_processing=False)
    return results


def tensor_placeholders(program: torch.export.ExportedProgram) -> list[str]:
    """Returns the names of the nodes that stand for the inputs which are tensors, in order."""
    return [
        spec.arg.name
        for spec in program.graph_signature.input_specs
        if spec.kind is InputKind.USER_INPUT and isinstance(spec.arg, TensorArgument)
    ]


def tensors_by_node(program: torch.export.ExportedProgram) -> dict[str, Any]:
    """Returns parameters, buffers and constants by name of the node that stands for each."""
    known: dict[str, Any] = {**program.state_dict, **program.constants}
    return {spec.arg.name: known[spec.target] for spec in program.graph_signature.input_specs if spec.kind in _STATE}


class _Interpreter(torch.fx.Interpreter):
    """Runs a graph at sizes at which a view may have to be a copy, or have no elements."""

    def __init__(self, module: torch.fx.GraphModule, keep: Callable[[torch.fx.Node, Any], None] | None) -> None:
        self._keep, self._reused = keep, _reused.get() or {}
        super().__init__(module, garbage_collect_values=not self._reused)

    def run_node(self, n: torch.fx.Node) -> Any:
        """Returns the value of a node.

        Raises:
            UnrecordedPath: if the call takes no recorded path, also if an operator fails before the graph asserts that.
        """
        try:
            return self._value_of(n)
        except UnrecordedPath:
            raise
        except Exception:
            self._assert_paths_after(n)
            raise

    def _assert_paths_after(self, failed: torch.fx.Node) -> None:
        """Runs what does not depend on a node that failed, up to a write that cannot be done, for its assertions."""
        later = list(itertools.dropwhile(lambda node: node is not failed, failed.graph.nodes))
        for node in later if any(map(asserts_recorded_path, later)) else ():
            try:
                self.env[node] = self._value_of(node)
            except UnrecordedPath:
                raise
            except Exception:
                if getattr(schema_of(node.target), "is_mutable", False):
                    return

    def _value_of(self, n: torch.fx.Node) -> Any:
        if is_assertion(n):
            if asserts_recorded_path(n) and not self.fetch_args_kwargs_from_env(n)[0][0]:
                raise UnrecordedPath(n.args[1])
            return None
        if n in self._reused:
            if n.op == "placeholder":
                super().run_node(n)  # which takes it off the list of inputs
            return self.env[self._reused[n]]
        if str(n.target) in _VIEWS:
            source, shape = self.fetch_args_kwargs_from_env(n)[0]
            if source.numel() == 0:  # a size of -1 is open: it is the traced one, if that is a number
                traced = n.meta["val"].shape
                shape = [
                    size if size != -1 else known if isinstance(known, int) else 0
                    for size, known in zip(shape, traced, strict=True)
                ]
            result = source.reshape(shape)
        else:
            result = super().run_node(n)
        if self._keep is not None:
            self._keep(n, result)
        return result
