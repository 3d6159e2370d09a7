"""A flat explicit signature for tracing: one parameter for each argument that holds tensors, and no Python constants.

torch.export (2.13) cannot trace tensors given through ``*args`` or ``**kwargs``, and constants need not be inputs of a
graph. The traced function takes the elements of both one by one, and fills in the constants itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from exportkit.calls.call import Call, Signature
from exportkit.trees import Tree, flatten


@dataclass(frozen=True)
class Parameter:
    """One parameter of the traced function.

    Attributes:
        path: Path of the value, such as ``args[0]``.
        tree: The value.
        argument: Parameter of the model's method that it belongs to.
        key: Position in ``*args`` or key in ``**kwargs``; None for any other argument.
    """

    path: str
    tree: Tree
    argument: str
    key: int | str | None


@dataclass(frozen=True)
class FlatSignature:
    """Parameters of the traced function by name, and the values of everything else."""

    signature: Signature
    parameters: Mapping[str, Parameter]
    fixed: Mapping[str, Any]

    @classmethod
    def of(cls, call: Call) -> FlatSignature:
        """Returns the flat signature for a call."""
        signature = call.signature
        found: dict[str, Parameter] = {}
        for argument, tree in call.arguments.items():
            for key, part in _parts(signature, argument, tree).items():
                if part.tensors():
                    taken = set(found) | set(call.arguments) - {argument}
                    found[_name(argument, key, taken)] = Parameter(_path(argument, key), part, argument, key)
        return cls(signature, found, call.values())

    def values(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the model's own arguments by parameter, for values of the flat parameters."""
        values = {name: _changeable(self.signature, name, value) for name, value in self.fixed.items()}
        for name, value in given.items():
            parameter = self.parameters[name]
            if parameter.key is None:
                values[parameter.argument] = value
            else:
                values[parameter.argument][parameter.key] = value
        return values


def _parts(signature: Signature, argument: str, tree: Tree) -> dict[Any, Tree]:
    if argument == signature.var_positional:
        return {position: flatten(value) for position, value in enumerate(tree.build())}
    if argument == signature.var_keyword:
        return {key: flatten(value) for key, value in tree.build().items()}
    return {None: tree}


def _name(argument: str, key: int | str | None, taken: set[str]) -> str:
    wanted = argument if key is None else key if isinstance(key, str) else f"{argument}_{key}"
    return wanted if wanted not in taken and wanted.isidentifier() else f"{argument}_{key}"


def _path(argument: str, key: int | str | None) -> str:
    return argument if key is None else f"{argument}[{key}]" if isinstance(key, int) else f"{argument}.{key}"


def _changeable(signature: Signature, name: str, value: Any) -> Any:
    """``*args`` and ``**kwargs`` as new containers whose elements can be replaced."""
    if name == signature.var_positional:
        return list(value)
    return dict(value) if name == signature.var_keyword else value
