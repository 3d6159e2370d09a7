"""Lists, loops and lengths in the Python code of a model that would fix an axis that varies; mixtures of experts.

Encoders iterate over the images (``list(features)``) or split rows at sizes that they read from a tensor, and later
concatenate the list again. A trace has no list of symbolic length, so here such a list holds everything as one tensor.
That is right if elements are only ever concatenated, which the proof at other counts shows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from exportkit._torch_compat.graph import decomposition_attributes
from exportkit._torch_compat.loop_operators import (
    constants_in_loops,
    loops_compiled_afresh,
    recurrent_kernels,
    sizes_in_loops,
    sizes_seen_afresh,
)
from exportkit._torch_compat.modules import conversions_left_out
from exportkit._torch_compat.size_arithmetic import decided_extreme, orders_of_products, views_as_given
from exportkit._torch_compat.traced_values import depends_on_values
from exportkit._torch_compat.tracing import list_device_constructors, traced_tensor_classes
from exportkit._torch_compat.transformers import can_choose_experts
from exportkit.overrides import Attribute, Replacing, attribute_slots, original_attribute, replaced, with_imports
from exportkit.rewrites.attention import flexible_attention
from exportkit.rewrites.packed_sequences import PACK
from exportkit.rewrites.quantised import FAKE_QUANTISATION
from exportkit.rewrites.size_functions import SIZE_FUNCTIONS
from exportkit.rewrites.sized_functions import INVERSE_TRANSFORMS
from exportkit.rewrites.sized_operators import KERNELS, REPLACED
from exportkit.rewrites.symbolic_lists import SYMBOLIC_LENGTH, SizeList, SymbolicList, as_read, has_symbolic_length

aten = torch.ops.aten
_ALIGNED = "_nested_tensor_from_mask_left_aligned"  # asked by an encoder that may leave padding out

_LISTING = {"unbind", "tolist", "split", "split_with_sizes"}


class ListingNoted(TorchFunctionMode):
    """Notes whether a model makes a list along the first axis of a tensor that has one of the given sizes.

    Args:
        sizes: Sizes that occur on dynamic axes only.

    Attributes:
        found: Whether it makes such a list.
        of_places: Whether it makes a list of the nonzero places of a mask.
        packs: Whether it packs padded sequences.
        asks_for_padding: Whether it asks if all padding is behind the sequences.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        super().__init__()
        self.found = self.of_places = self.packs = self.asks_for_padding = False
        self._sizes = set(sizes.values())
        self._places: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        result = func(*args, **(kwargs or {}))
        self.packs |= name == PACK
        self.asks_for_padding |= name == _ALIGNED
        if not args or not isinstance(args[0], torch.Tensor):
            return result
        if name == "nonzero" and isinstance(result, torch.Tensor) and has_one_known_axis(args[0]):
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


def lists_of_one(_model: torch.nn.Module) -> Replacing:
    """Replaces methods so that lists along an axis of symbolic length have one element."""
    methods = {"__iter__": _iter, "__len__": _len, "split": _split}
    functions = [(Attribute(torch, "split"), _torch_split), (Attribute(torch, "as_tensor"), _as_tensor)]
    return replaced(
        [
            *((Attribute(torch.Tensor, name), method) for name, method in methods.items()),
            *with_imports(functions),
            *((Attribute(cls, "tolist"), _tolist_of(cls)) for cls in (torch.Tensor, *traced_tensor_classes())),
        ]
    )


_original: dict[str, Callable[..., Any]] = {
    "__iter__": torch.Tensor.__iter__, "__len__": torch.Tensor.__len__, "split": torch.Tensor.split,
    "torch.split": torch.split, "torch.as_tensor": torch.as_tensor,
}  # fmt: skip


def _iter(self: torch.Tensor) -> Any:
    return iter([self.flatten(0, 1)]) if self.ndim > 1 and has_symbolic_length(self) else _original["__iter__"](self)


def _len(self: torch.Tensor) -> Any:
    if has_symbolic_length(self):  # list() then does without the length; other callers fail instead of fixing it
        raise TypeError(SYMBOLIC_LENGTH)
    return _original["__len__"](self)


def _split(self: torch.Tensor, split_size: Any, dim: int = 0) -> Any:
    return (self,) if _are_unknown(split_size) else _original["split"](self, split_size, dim)


def _torch_split(tensor: torch.Tensor, split_size_or_sections: Any, dim: int = 0) -> Any:
    is_one = _are_unknown(split_size_or_sections)
    return (tensor,) if is_one else _original["torch.split"](tensor, split_size_or_sections, dim)


def _as_tensor(data: Any, dtype: Any = None, device: Any = None) -> torch.Tensor:
    data = data.whole() if isinstance(data, SymbolicList) else data
    return _original["torch.as_tensor"](data, dtype=dtype, device=device)  # type: ignore[no-any-return]


def _are_unknown(sizes: Any) -> bool:
    """Whether these are sizes of a list that is one tensor here; the rewrite of tiles makes a list with None."""
    return isinstance(sizes, SizeList) or (isinstance(sizes, list) and None in sizes)


def _tolist_of(cls: Any) -> Callable[[torch.Tensor], Any]:
    original = cls.tolist

    def tolist(self: torch.Tensor) -> Any:
        return SizeList(as_read(self)) if self.ndim == 1 and has_symbolic_length(self) else original(self)

    return tolist


def operators_at_any_length(tracing: bool = False) -> contextlib.AbstractContextManager[None]:
    """Decomposes recurrent layers and ``max_pool1d``, and rounds quotients, so that lengths may be symbolic.

    torch makes an LSTM as many steps as there are tokens, and the pool asks for the length as a number. The graph has
    the same operators either way, and so has the ONNX file.

    Args:
        tracing: Whether a trace begins, which may not use what torch compiled for the lengths of another one.
    """
    list_device_constructors()
    kernels = {**recurrent_kernels(), aten.max_pool1d.default: _max_pool1d, **KERNELS, **FAKE_QUANTISATION}
    attributes = decomposition_attributes(kernels)
    attributes += [*REPLACED, *SIZE_FUNCTIONS, *INVERSE_TRANSFORMS, sizes_seen_afresh()]
    attributes += (
        [loops_compiled_afresh(), constants_in_loops(), sizes_in_loops(), *flexible_attention()] if tracing else []
    )
    attributes += [views_as_given(), orders_of_products(), conversions_left_out()]
    attributes.append((torch.SymInt, {name: decided_extreme(name) for name in ("__sym_max__", "__sym_min__")}))
    return replaced(with_imports(attribute_slots(attributes)))


def _max_pool1d(
    inputs: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> Any:
    """The pool over a plane of height one, whose size torch computes without asking for a number."""
    sizes = [1, *kernel], [1, *(stride or kernel)], [0, *padding], [1, *dilation]
    return aten.max_pool2d(inputs.unsqueeze(-2), *sizes, ceil_mode).squeeze(-2)


# Experts of transformers: grouped matrix products have no ONNX form, batched ones do.


@dataclass(frozen=True)
class ImplementationOfExperts:
    """The implementation of the experts in a transformers model, and in the models inside it."""

    model: Any

    def read(self) -> Any:
        """Returns the current implementation."""
        return self.model.get_experts_implementation()

    def write(self, implementation: Any) -> None:
        """Chooses an implementation."""
        self.model.set_experts_implementation(implementation)


def batched_experts(model: torch.nn.Module) -> Replacing:
    """Chooses the implementation that can be exported."""
    return replaced([(ImplementationOfExperts(m), "batched_mm") for m in model.modules() if can_choose_experts(m)])


# Loops over experts
#
# Models without a choice iterate over `mask.nonzero()`, the numbers of the chosen experts. A trace cannot do that: how
# many there are is data. Under this rewrite, such a loop takes all experts, and skips none that lacks tokens. That is
# right if an expert without tokens adds nothing, which the proof shows. Routers of such models cast their classifier on
# the way, which a trace does not allow; a cast that changes nothing is left out.

_COUNT = "_exportkit_count"  # set on the result of nonzero(): the length of the mask


class ExpertNumber(list[int]):
    """The number of an expert in place of a row of ``nonzero()``: used as an index it keeps an axis, as a row does."""

    def item(self) -> int:
        """Returns the number."""
        return self[0]


def loops_over_all(_model: torch.nn.Module, left_out: int = 0) -> Replacing:
    """Makes iterations over the nonzero places of a mask of known length go over all of its places.

    Args:
        left_out: How many places at the end of the mask stand for no expert.
    """
    iterate: Callable[[torch.Tensor], Iterator[Any]] = torch.Tensor.__iter__

    def _iter(self: torch.Tensor) -> Iterator[Any]:
        count = vars(self).get(_COUNT)
        return iterate(self) if count is None else iter([ExpertNumber([i]) for i in range(count - left_out)])

    return replaced(
        [
            (Attribute(torch.Tensor, "nonzero"), _counted(torch.Tensor.nonzero)),
            (Attribute(torch.Tensor, "__iter__"), _iter),
            *with_imports([(Attribute(torch, "nonzero"), _counted(torch.nonzero))]),
            (Attribute(torch.Tensor, "numel"), _numel),
            (Attribute(torch.nn.Module, "to"), _to),
        ]
    )


def _counted(nonzero: Callable[..., Any]) -> Callable[..., Any]:
    """The function, noting the length of the mask on its result."""

    def counted(mask: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = nonzero(mask, *args, **kwargs)
        if isinstance(found, torch.Tensor) and has_one_known_axis(mask):
            setattr(found, _COUNT, mask.shape[0])
        return found

    return counted


def _numel(self: torch.Tensor) -> Any:
    """The number of elements; at least 1 for a list of places, so that no expert without tokens is skipped."""
    count = original_attribute(torch.Tensor, "numel")(self)
    return torch.sym_max(count, 1) if self.ndim == 1 and depends_on_values(count) else count


def has_one_known_axis(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor has one axis, of known length."""
    return tensor.ndim == 1 and isinstance(tensor.shape[0], int)


def _to(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
    is_cast = len(args) == 1 and isinstance(args[0], torch.dtype) and not kwargs
    if is_cast and all(tensor.dtype is args[0] for tensor in (*self.parameters(), *self.buffers())):
        return self
    return original_attribute(torch.nn.Module, "to")(self, *args, **kwargs)  # type: ignore[no-any-return]
