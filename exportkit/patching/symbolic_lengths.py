"""Lengths of tensors that stay symbolic where a model asks Python for an int.

``len(tensor)`` and transformers' ``torch_int`` make an int of a symbolic length, which fixes it. Here both names are
shadowed in the modules of Python that define the model's classes.
"""

from __future__ import annotations

import builtins
import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

from exportkit.patching.attributes import replaced_attributes

_LIBRARIES = ("torch", "builtins", "exportkit")


@contextlib.contextmanager
def symbolic_lengths(model: torch.nn.Module) -> Iterator[None]:
    """Shadows what makes ints of lengths, in the modules that define the classes of the model's parts."""
    names = {cls.__module__ for module in model.modules() for cls in type(module).__mro__}
    own = [sys.modules[name] for name in sorted(names) if name.partition(".")[0] not in _LIBRARIES]
    with contextlib.ExitStack() as stack:
        for module in own:
            shadows = {"len": _length, **({"torch_int": _int} if hasattr(module, "torch_int") else {})}
            stack.enter_context(replaced_attributes(module, shadows))
        yield


def _length(value: Any) -> Any:
    return value.shape[0] if isinstance(value, torch.Tensor) and value.ndim else builtins.len(value)


def _int(value: Any) -> Any:
    return value if isinstance(value, torch.SymInt) else int(value)
