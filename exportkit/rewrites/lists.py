"""Lists with a tensor for each image become lists of one tensor: a trace has no list of symbolic length.

Encoders iterate over the images (``list(features)``) or split rows at sizes that they read from a tensor, and whoever
gets the list concatenates it again. While this rule is in force, such a list holds all of it as one tensor. That is
right as far as elements are only ever concatenated, which the proof at other counts shows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from exportkit._torch_compat.tracing import traced_tensor_classes
from exportkit.rewrites.attributes import replaced_attributes
from exportkit.rewrites.expert_loops import is_mask

SYMBOLIC_LENGTH = "the length of this tensor is symbolic"
_LISTING = {"unbind", "tolist", "split", "split_with_sizes"}


class Sizes:
    """What ``tolist`` gives for a tensor of symbolic length: sizes that only a split may take."""


class ListingNoted(TorchFunctionMode):
    """Notes whether a list is made along the first axis of a tensor that has one of the given sizes.

    Args:
        sizes: Sizes that belong to dynamic axes alone.

    Attributes:
        found: Whether one is.
        of_places: Whether one is made of the places where a mask is not zero.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        super().__init__()
        self.found = self.of_places = False
        self._sizes = set(sizes.values())
        self._places: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        result = func(*args, **(kwargs or {}))
        if not args or not isinstance(args[0], torch.Tensor):
            return result
        if name == "nonzero" and isinstance(result, torch.Tensor) and is_mask(args[0]):
            self._places.append(result)
        elif name == "unbind" and any(args[0] is places for places in self._places):
            self.of_places = True
        elif name in _LISTING:
            self.found |= self._is_dynamic(name, args, kwargs or {})
        return result

    def _is_dynamic(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        if name == "unbind" and kwargs.get("dim", args[1] if len(args) > 1 else 0) != 0:
            return False
        if name.startswith("split"):
            return len(args) > 1 and isinstance(args[1], list | tuple) and len(args[1]) in self._sizes
        return args[0].ndim > 0 and args[0].shape[0] in self._sizes


@contextlib.contextmanager
def lists_of_one(_model: torch.nn.Module) -> Iterator[None]:
    """Puts methods in force that make one element of what is listed along an axis of symbolic length."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced_attributes(torch.Tensor, {"__iter__": _iter, "__len__": _len, "split": _split}))
        stack.enter_context(replaced_attributes(torch, {"split": _torch_split}))
        for cls in (torch.Tensor, *traced_tensor_classes()):
            stack.enter_context(replaced_attributes(cls, {"tolist": _tolist_of(cls)}))
        yield


def _is_symbolic(tensor: torch.Tensor) -> bool:
    return tensor.ndim > 0 and isinstance(tensor.shape[0], torch.SymInt)


_tensor_iter, _tensor_len, _tensor_split, _split_function = (
    torch.Tensor.__iter__, torch.Tensor.__len__, torch.Tensor.split, torch.split,
)  # fmt: skip


def _iter(self: torch.Tensor) -> Iterator[torch.Tensor]:
    return iter([self.flatten(0, 1)]) if self.ndim > 1 and _is_symbolic(self) else _tensor_iter(self)


def _len(self: torch.Tensor) -> int:
    if _is_symbolic(self):  # list() then does without the length; anybody else fails, instead of freezing it
        raise TypeError(SYMBOLIC_LENGTH)
    return _tensor_len(self)


def _split(self: torch.Tensor, split_size: Any, dim: int = 0) -> Any:
    return (self,) if _are_unknown(split_size) else _tensor_split(self, split_size, dim)


def _torch_split(tensor: torch.Tensor, split_size_or_sections: Any, dim: int = 0) -> Any:
    if _are_unknown(split_size_or_sections):
        return (tensor,)
    return _split_function(tensor, split_size_or_sections, dim)


def _are_unknown(sizes: Any) -> bool:
    """Whether these sizes of parts are those of a list that is one tensor here; another rule may leave a None."""
    return isinstance(sizes, Sizes) or (isinstance(sizes, list) and None in sizes)


def _tolist_of(cls: type) -> Any:
    original = cls.tolist

    def tolist(self: torch.Tensor) -> Any:
        return Sizes() if self.ndim == 1 and _is_symbolic(self) else original(self)

    return tolist
