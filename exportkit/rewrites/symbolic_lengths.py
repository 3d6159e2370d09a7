"""Lengths of tensors that stay symbolic where a model asks Python for an int.

``len(tensor)``, ``int(length)`` and transformers' ``torch_int`` make an int of a symbolic length, which fixes it. Here
these names are shadowed in the modules of Python that define the model's classes.
"""

from __future__ import annotations

import builtins
import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

from exportkit.rewrites.attributes import replaced_attributes

_LIBRARIES = ("torch", "builtins", "exportkit")


@contextlib.contextmanager
def symbolic_lengths(model: torch.nn.Module) -> Iterator[None]:
    """Shadows what makes ints of lengths, in the modules that define the classes of the model's parts."""
    names = {cls.__module__ for module in model.modules() for cls in type(module).__mro__}
    own = [sys.modules[name] for name in sorted(names) if name.partition(".")[0] not in _LIBRARIES]
    with contextlib.ExitStack() as stack:
        for module in own:
            shadows = {"len": _length, "int": _Int, **({"torch_int": _Int} if hasattr(module, "torch_int") else {})}
            stack.enter_context(replaced_attributes(module, shadows))
        yield


def _length(value: Any) -> Any:
    return value.shape[0] if isinstance(value, torch.Tensor) and value.ndim else builtins.len(value)


class _Symbolic(type):
    """Makes its class stand for ``int``, which is also a type that values are checked against."""

    def __call__(cls, *args: Any, **options: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], torch.SymInt | torch.SymFloat):
            return torch.sym_int(args[0])
        return builtins.int(*args, **options)

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, builtins.int)

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, builtins.int)


class _Int(builtins.int, metaclass=_Symbolic):
    pass
