"""Python numbers that vary between calls as inputs of a graph: 0-d tensors that become numbers again inside the model.

Such a number has no value while the model is traced, so a graph cannot keep one: where Python code decides by it, or
makes a size or an index of it, it stays a constant, and there are several programs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from exportkit._torch_compat.graph import is_assertion, takes_number
from exportkit.calls.call import Signature, number_as_tensor
from exportkit.calls.observation import Observation
from exportkit.trees import flatten

_ARITHMETIC = frozenset({"add", "sub", "mul", "truediv", "neg", "sym_float"})


class WithNumbers(torch.nn.Module):
    """A model that takes some of its Python numbers as 0-d tensors.

    Args:
        model: The model.
        observation: Its calls: which method, and which arguments are given by name.
        names: The arguments.
    """

    def __init__(self, model: torch.nn.Module, observation: Observation, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self._method, self._names = model, observation.method_name, names
        self._signature = observation.signature
        by_position = {name for call in observation.calls for name in call.arguments if name not in call.named}
        self._named = frozenset(observation.signature.names) - by_position
        self.training = model.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the model returns for the numbers in the tensors."""
        values = self._signature.bind(args, kwargs)
        values |= {name: values[name].item() for name in self._names}
        args, kwargs = self._signature.unbind(values, self._named)
        target = self.model if self._method == "forward" else getattr(self.model, self._method)
        return target(*args, **kwargs)


def varying_numbers(observation: Observation) -> dict[str, str]:
    """Returns the arguments that are Python numbers of one type in all calls, and vary, with their types."""
    signature, found = observation.signature, {}
    for name in signature.plain():
        values = [
            call.arguments[name].leaves[0] if call.arguments[name].paths == ("",) else None
            for call in observation.calls
            if name in call.arguments
        ]
        if len(values) < len(observation.calls):
            values.append(signature.defaults.get(name))
        kinds = {type(value) for value in values}
        if len(kinds) == 1 and kinds <= {int, float} and len(set(map(repr, values))) > 1:
            found[name] = kinds.pop().__name__
    return found


def with_numbers(
    model: torch.nn.Module, observation: Observation, numbers: Mapping[str, str]
) -> tuple[WithNumbers, Observation]:
    """Returns the model and its calls with 0-d tensors in place of Python numbers.

    Args:
        model: The model.
        observation: Its calls.
        numbers: The arguments, with the types of the numbers.
    """
    signature = observation.signature
    calls = []
    for call in observation.calls:
        given = dict(call.arguments)
        for name in numbers:
            value = given[name].leaves[0] if name in given else signature.defaults[name]
            given[name] = flatten(number_as_tensor(value))
        ordered = {name: given[name] for name in signature.names if name in given}
        named = call.named | (numbers.keys() - call.arguments.keys())
        calls.append(replace(call, arguments=ordered, named=named, signature=_taking(signature, numbers)))
    changed = replace(
        observation, calls=tuple(calls), signature=_taking(signature, numbers), method_name="forward", further=()
    )
    return WithNumbers(model, observation, tuple(numbers)), changed


def _taking(signature: Signature, numbers: Mapping[str, str]) -> Signature:
    return replace(signature, numbers=numbers)


def is_arithmetic(program: torch.export.ExportedProgram) -> bool:
    """Returns whether a program only calculates with the numbers of its inputs: no size and no index follows from one.

    Args:
        program: A program as torch traced it, with its assertions.
    """
    numbers = [node for node in program.graph.nodes if node.op == "call_function" and "item" in str(node.target)]
    for node in numbers:
        for user in node.users:
            if is_assertion(user):
                return False
            if isinstance(user.meta.get("val"), torch.Tensor):
                if not takes_number(user, node):
                    return False
            elif getattr(user.target, "__name__", "") in _ARITHMETIC:
                numbers.append(user)
            else:
                return False
    return True
