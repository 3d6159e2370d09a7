"""Python numbers that vary between calls as inputs of a graph: tensors that become numbers again inside the model.

A number that the model only calculates with is a 0-d tensor. It has no value while the model is traced, so a graph
cannot keep one; a number that makes sizes is the size of a tensor, on which conditions can depend. Where a graph can
follow neither, the number stays a constant, and there are several programs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from exportkit._torch_compat.graph import is_assertion, takes_number
from exportkit.arguments.table import further_numbers, numbers_of
from exportkit.calls.call import Call
from exportkit.calls.observation import Observation
from exportkit.calls.signature import NumberKind, number_as_tensor, number_in
from exportkit.running.compare import outputs_close
from exportkit.running.eager import method_of, run_eager
from exportkit.running.program import tensor_placeholders
from exportkit.trees import flatten

_ARITHMETIC = frozenset({"add", "sub", "mul", "truediv", "neg", "sym_float"})

Numbers = Mapping[str, NumberKind]  # by path


class WithNumbers(torch.nn.Module):
    """A model that takes some of its Python numbers as tensors.

    Args:
        model: The model.
        observation: Its calls: which method, and which arguments are given by name.
        numbers: The numbers.
    """

    def __init__(self, model: torch.nn.Module, observation: Observation, numbers: Numbers) -> None:
        super().__init__()
        self.model, self.method, self._signature = model, observation.method_name, observation.signature
        self._numbers = replace(observation.signature, numbers=numbers).numbers_by_name()
        self._named = observation.always_named
        self.training = model.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the model returns for the numbers in the tensors."""
        args, kwargs = self._signature.unbind(self.with_numbers(self._signature.bind(args, kwargs)), self._named)
        return method_of(self.model, self.method)(*args, **kwargs)

    def with_numbers(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns arguments with the numbers in place of the tensors that stand for them."""
        return self._changed(values, number_in)

    def with_tensors(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns arguments with tensors in place of the numbers."""
        return self._changed(values, number_as_tensor)

    def _changed(self, values: Mapping[str, Any], change: Callable[[Any, NumberKind], Any]) -> dict[str, Any]:
        found = dict(values)
        for name, kinds in self._numbers.items():
            tree = flatten(values.get(name))
            leaves = tree.by_path()
            made = {path: change(leaves[path], kind) for path, kind in kinds.items() if leaves.get(path) is not None}
            found[name] = tree.with_leaves(made).build()
        return found


def as_sizes(observation: Observation, numbers: Numbers, sizes: Collection[str]) -> dict[str, NumberKind]:
    """Returns the numbers in which some make sizes: integers that are never negative, and others are left out.

    Args:
        observation: The calls.
        numbers: The numbers.
        sizes: Paths of those that make sizes, or may.
    """
    calls = [*map(dict, map(numbers_of, observation.calls)), *map(further_numbers, observation.further)]
    found: dict[str, NumberKind] = {}
    for path, kind in numbers.items():
        if path not in sizes:
            found[path] = kind
        elif kind == "int" and min(given.get(path, 0) for given in calls) >= 0:
            found[path] = "size"
    return found


def with_numbers(model: torch.nn.Module, observation: Observation, numbers: Numbers) -> tuple[WithNumbers, Observation]:
    """Returns the model and its calls with tensors in place of Python numbers.

    Args:
        model: The model.
        observation: Its calls.
        numbers: The numbers.
    """
    signature = replace(observation.signature, numbers=numbers)
    calls = []
    for call in observation.calls:
        made = signature.numbers_as_tensors(call.values())
        given = {**call.arguments, **{name: flatten(value) for name, value in made.items()}}
        ordered = signature.in_order(given)
        named = call.named | (made.keys() - call.arguments.keys())
        calls.append(replace(call, arguments=ordered, named=named, signature=signature))
    further = []
    for seen in observation.further:
        values = {**observation.signature.defaults, **further_numbers(seen)}
        if all(type(values.get(path)) in (int, float) for path in numbers):
            shapes = {path: tuple(number_as_tensor(values[path], kind).shape) for path, kind in numbers.items()}
            constants = {path: value for path, value in seen.constants.items() if path not in numbers}
            further.append(replace(seen, inputs={**seen.inputs, **shapes}, constants=constants))
    changed = replace(
        observation, calls=tuple(calls), signature=signature, method_name="forward", further=tuple(further)
    )
    return WithNumbers(model, observation, numbers), changed


def decides(model: torch.nn.Module, method: str, calls: Iterable[Call], path: str) -> bool:
    """Returns whether a number makes a difference to a model that takes it as the size of a tensor.

    A program does not show it: the number of tokens in a cache is also the length of its tensors, and the program may
    read that instead.

    Args:
        model: A model that takes the number as a tensor.
        method: Its method.
        calls: Its calls.
        path: Path of the number.
    """
    for call in calls:
        given = call.tensors().get(path)
        if given is None:
            continue
        try:
            same = run_eager(model, method, call)
        except Exception:  # the call cannot be made again
            return True
        try:
            other = run_eager(model, method, call.with_tensors({path: number_as_tensor(given.shape[-1] + 1, "size")}))
        except Exception:
            return True
        if not outputs_close(*(flatten(outputs).tensors() for outputs in (same, other))):
            return True
    return False


@dataclass(frozen=True)
class Uses:
    """What a program does with the numbers among its inputs; it calculates with the others.

    Attributes:
        nothing: Numbers that it does not use.
        sizes: Numbers of which it makes sizes or indices, or about which it asserts something.
    """

    nothing: frozenset[str]
    sizes: frozenset[str]

    @classmethod
    def of(cls, program: torch.export.ExportedProgram, paths: Sequence[str], numbers: Numbers) -> Uses:
        """Returns what a program does with numbers.

        Args:
            program: A program as torch traced it, with its assertions.
            paths: The paths of its inputs.
            numbers: The numbers.
        """
        inputs = dict(zip(tensor_placeholders(program), paths, strict=True))
        found: dict[torch.fx.Node, str] = {}  # the nodes of numbers, and of what is calculated from them
        used, sizes = set[str](), set[str]()
        for node in program.graph.nodes:
            if node.op == "placeholder" and inputs.get(node.name) in numbers:
                found[node] = inputs[node.name]
            for source in [source for source in node.all_input_nodes if source in found]:
                path, is_tensor = found[source], isinstance(node.meta.get("val"), torch.Tensor)
                is_item = source.op == "placeholder" and "item" in str(node.target)
                is_number = not is_tensor and getattr(node.target, "__name__", "") in _ARITHMETIC
                if is_item or (is_number and not is_assertion(node)):
                    found[node] = path
                elif not (numbers[path] == "size" or (is_tensor and takes_number(node, source))):
                    sizes.add(path)
                used |= set() if is_item or is_assertion(node) else {path}
        return cls(frozenset(numbers.keys() - used), frozenset(sizes))
