"""Operators whose sizes torch reads as numbers, written with operators that take sizes of any kind.

A trace would fix the sizes that they are given: ``linspace(0, 1, x.shape[1])`` asks for an int. What they compute is
what torch computes. ``torch.where`` is among them for its conditions of bytes, which a trace refuses; random numbers
are for their generators.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from exportkit._torch_compat.graph import DISTANCES
from exportkit._torch_compat.size_arithmetic import remainder, subtracted_from, without_remainder
from exportkit._torch_compat.traced_values import depends_on_values
from exportkit.rewrites.lengths import holds_sizes
from exportkit.rewrites.packed_sequences import recurrence
from exportkit.rewrites.sized_functions import POOLS, RAMPS, STATISTICS, interpolate
from exportkit.rewrites.symbolic_lists import SizeList, any_symbolic
from exportkit.trees.tree import is_integer

aten = torch.ops.aten
_DRAW = ("bernoulli", "multinomial", "normal", "rand", "randint", "randn", "randperm")
_FILL = ("bernoulli_", "exponential_", "normal_", "random_", "uniform_")


_original: dict[str, Callable[..., Any]] = {
    **{name: getattr(torch, name) for name in ("as_tensor", "triu_indices", "tril_indices", "where")},
    "unique_consecutive": torch.unique_consecutive,
    **{name: getattr(torch.nn.functional, name) for name in ("one_hot", "pad", "scaled_dot_product_attention")},
    **{name: getattr(torch.Tensor, name) for name in ("__setitem__", "fill_diagonal_", "numpy")},
    "Unflatten": torch.nn.Unflatten.__init__,
}


def _as_tensor(data: Any, **options: Any) -> Any:
    if isinstance(data, SizeList):
        return data.whole().to(**options)
    return torch.tensor(data, **options) if holds_sizes(data) else _original["as_tensor"](data, **options)


def _triu_indices(row: Any, col: Any, offset: int = 0, **options: Any) -> Any:
    return _places("triu_indices", row, col, offset, lambda apart: apart >= offset, **options)


def _tril_indices(row: Any, col: Any, offset: int = 0, **options: Any) -> Any:
    return _places("tril_indices", row, col, offset, lambda apart: apart <= offset, **options)


def _places(
    name: str,
    row: Any,
    col: Any,
    offset: int,
    inside: Callable[[torch.Tensor], torch.Tensor],
    *,
    dtype: torch.dtype = torch.int64,
    device: Any = None,
    **options: Any,
) -> Any:
    """The rows and columns of a triangle."""
    if not any_symbolic(row, col):
        return _original[name](row, col, offset, dtype=dtype, device=device, **options)
    apart = torch.arange(col, device=device) - torch.arange(row, device=device)[:, None]
    return inside(apart).nonzero().T.to(dtype)


def _unique_consecutive(
    values: torch.Tensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Any:
    """Counts the axis from the first one; from the last one, a trace gets the number of axes wrong (torch 2.13)."""
    axis = dim if dim is None or dim >= 0 else dim + max(values.ndim, 1)
    return _original["unique_consecutive"](values, return_inverse, return_counts, axis)


def _tensor_split(values: torch.Tensor, sections: int, dim: int = 0) -> Any:
    """The first parts have one more than the last ones, if the length is not a multiple of their number."""
    sizes = [(values.shape[dim] + sections - 1 - part) // sections for part in range(sections)]
    return values.split(sizes, dim)


def _chunk(values: torch.Tensor, chunks: int, dim: int = 0) -> Any:
    """Slices, as ONNX splits into parts of known sizes only."""
    length = values.shape[dim]
    size = (length + chunks - 1) // chunks
    if not any_symbolic(length):
        return values.split(size, dim) if length else [values] * chunks
    return slices_of(values, size, dim)


def slices_of(values: torch.Tensor, size: Any, dim: int) -> list[torch.Tensor]:
    """Returns the parts of a tensor that have a size, and the rest, as slices."""
    count = int((values.shape[dim] + size - 1) // size)
    return [aten.slice(values, dim, part * size, (part + 1) * size) for part in range(count)]


def _cdist(one: torch.Tensor, other: torch.Tensor, p: float = 2.0, compute_mode: int | None = None) -> Any:
    """The same operator for any number of rows: with more than 25, torch takes products of matrices for p = 2."""
    return DISTANCES(one, other, p, compute_mode)


def _take_along_dim(values: torch.Tensor, indices: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Indices outside wrap around (torch 2.13), which they do not in ``gather``."""
    if dim is None:
        return _take_along_dim(values.flatten(), indices.flatten(), 0)
    indices = indices.remainder(values.shape[dim])
    shapes = [list(tensor.shape) for tensor in (values, indices)]
    lengths = [shape[dim] for shape in shapes]
    for shape in shapes:
        shape[dim] = 1
    shape = list(torch.broadcast_shapes(*shapes))
    taken = []
    for tensor, length in zip((values, indices), lengths, strict=True):
        shape[dim] = length
        taken.append(tensor.expand(shape))
    return taken[0].gather(dim, taken[1])


def _kron(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Every number of the left tensor times the right one; torch makes numbers of the sizes."""
    rank = max(left.ndim, right.ndim)
    left, right = (each.reshape([1] * (rank - each.ndim) + [*each.shape]) for each in (left, right))
    for axis in range(rank):
        left, right = left.unsqueeze(2 * axis + 1), right.unsqueeze(2 * axis)
    return (left * right).reshape([left.shape[2 * axis] * right.shape[2 * axis + 1] for axis in range(rank)])


def _one_hot(tensor: torch.Tensor, num_classes: Any = -1) -> Any:
    if not any_symbolic(num_classes):
        return _original["one_hot"](tensor, num_classes)
    return (tensor.unsqueeze(-1) == torch.arange(num_classes, device=tensor.device)).long()


def _divmod(number: Any, divisor: Any) -> Any:
    return number // divisor, number % divisor


@functools.wraps(torch.nn.functional.pad)  # torch looks it up, and modes know it by its name
def _pad(input: torch.Tensor, pad: Any, *options: Any, **named: Any) -> Any:
    return _original["pad"](input, [without_remainder(width) for width in pad], *options, **named)


@functools.wraps(torch.Tensor.__setitem__)  # modes know by the name that it writes
def _set_item(values: torch.Tensor, index: Any, part: Any) -> None:
    """Sets an item; torch's own function makes a number of a symbolic place, and of a tensor without axes."""
    places = index if isinstance(index, tuple) else (index,)
    read = [place for place in places if _is_read(place)]
    others = [place for place in places if not _is_read(place)]
    is_plain = all(place is None or place is ... or type(place) in (int, slice, torch.SymInt) for place in others)
    if is_plain and read:
        _set_item_read(values, places, part)
    elif not (is_plain and any_symbolic(*places)) or any(map(depends_on_values, places)):
        _original["__setitem__"](values, index, part)
    elif isinstance(part, torch.Tensor):
        values[index].copy_(part)
    else:
        values[index].fill_(part)


def _is_read(place: Any) -> bool:
    """Whether this is a tensor of one integer, without axes, that has no value in a trace."""
    is_place = isinstance(place, torch.Tensor) and is_integer(place) and place.dtype is not torch.uint8
    return is_place and place.ndim == 0 and type(place) is not torch.Tensor


def _set_item_read(values: torch.Tensor, places: tuple[Any, ...], part: Any) -> None:
    """Sets an item at tensors without axes, in a view that has all of these axes."""
    view = values[tuple([slice(None) if _is_read(place) else place for place in places])]
    used = sum(place is not None and place is not Ellipsis for place in places)
    indices: list[torch.Tensor | None] = []
    for place in places:
        if place is Ellipsis:
            indices += [None] * (values.ndim - used)
        elif _is_read(place):
            indices.append(place.to(torch.int64))
        elif place is None or isinstance(place, slice):
            indices.append(None)
    item, taken = torch.as_tensor(part, dtype=view.dtype, device=view.device), len(list(filter(_is_read, places)))
    while item.ndim > view.ndim - taken and item.shape[0] == 1:  # leading axes that torch leaves out, too
        item = item[0]
    aten.index_put_(view, indices, item)


def _fill_diagonal_(values: torch.Tensor, fill_value: Any, wrap: bool = False) -> torch.Tensor:
    if values.ndim != 2 or wrap or not any_symbolic(*values.shape):
        found: torch.Tensor = _original["fill_diagonal_"](values, fill_value, wrap)
        return found
    rows, columns = (torch.arange(size, device=values.device) for size in values.shape)
    return values.masked_fill_(rows[:, None] == columns, fill_value)


def _where(condition: torch.Tensor, *args: Any, **options: Any) -> Any:
    condition = condition.bool() if args and condition.dtype is torch.uint8 else condition
    return _original["where"](condition, *args, **options)


def _without_generator(draw: Callable[..., Any]) -> Callable[..., Any]:
    """A function that draws random numbers, which torch does not trace with a generator for sizes that vary."""

    @functools.wraps(draw)
    def drawn(*args: Any, generator: Any = None, **options: Any) -> Any:  # noqa: ARG001
        return draw(*args, **options)

    return drawn


def _numpy(self: torch.Tensor, **options: Any) -> Any:
    """The integers of a tensor of a trace, which compute as Python's; a list along an axis of symbolic length."""
    try:
        return _original["numpy"](self, **options)
    except RuntimeError:
        if not is_integer(self) or self.ndim > 1:
            raise
        return SizeList(self) if any_symbolic(*self.shape) else np.array(self.tolist(), dtype=object)


def _make_unflatten(self: torch.nn.Unflatten, dim: int, unflattened_size: Any) -> None:
    """Takes any sizes: a module that is made during a call may get those of a tensor."""
    is_symbolic = isinstance(unflattened_size, tuple | list) and any_symbolic(*unflattened_size)
    _original["Unflatten"](self, dim, (-1,) if is_symbolic else unflattened_size)
    self.unflattened_size = unflattened_size


def _attend(*args: Any, **options: Any) -> Any:
    """Attention that is told by a comparison of sizes whether it is causal."""
    plain = [bool(value) if isinstance(value, torch.SymBool) else value for value in args]
    named = {name: bool(value) if isinstance(value, torch.SymBool) else value for name, value in options.items()}
    return _original["scaled_dot_product_attention"](*plain, **named)


_CONV_TRANSPOSE = {  # the options of the operator, in order
    "bias": None, "stride": (1,), "padding": (0,), "output_padding": (0,), "groups": 1, "dilation": (1,),
}  # fmt: skip


def _conv_transpose(values: torch.Tensor, weight: torch.Tensor, *options: Any, **named: Any) -> Any:
    """The convolution with all the rows that more padding would add, cut to the size that is wanted."""
    axes = weight.ndim - 2
    if values.ndim == axes + 1:
        return _conv_transpose(values[None], weight, *options, **named)[0]
    given = {**_CONV_TRANSPOSE, **dict(zip(_CONV_TRANSPOSE, options, strict=False)), **named}
    strides, paddings, more, dilations = (
        [*given[name]] * (axes if len(given[name]) == 1 else 1)
        for name in ("stride", "padding", "output_padding", "dilation")
    )
    if any_symbolic(given["groups"]) and axes == 2:
        each_axis = strides, paddings, more, dilations
        return _conv_transpose_in_groups(values, weight, given["bias"], each_axis, given["groups"])
    known = more
    if any_symbolic(*more):
        known = [max(by, apart) - 1 for by, apart in zip(strides, dilations, strict=True)]
    settings = strides, paddings, dilations, True, known, given["groups"]
    found = aten.convolution(values, weight, given["bias"], *settings)
    if known is more:
        return found
    for axis in range(axes):
        reach = dilations[axis] * (weight.shape[2 + axis] - 1) + 1 - 2 * paddings[axis]
        size = (values.shape[2 + axis] - 1) * strides[axis] + reach + more[axis]
        found = found.narrow(2 + axis, 0, size)
    return found


def conv2d_in_groups(  # noqa: PLR0917 (torch's positions)
    images: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
) -> torch.Tensor:
    """Returns a convolution with as many groups as an axis is long, such as the batch, as products of matrices."""
    count, channels, *kernel = weight.shape
    unfold: Any = torch.nn.functional.unfold
    rows = unfold(images.reshape(-1, channels, *images.shape[2:]), kernel, dilation, padding, stride)
    found = weight.reshape(groups, count // groups, -1) @ rows.unflatten(0, (-1, groups))
    sizes = [
        (size + 2 * pad - step * (length - 1) - 1) // by + 1
        for size, pad, step, length, by in zip(images.shape[2:], padding, dilation, kernel, stride, strict=True)
    ]
    found = found.reshape(-1, count, *sizes)
    return found if bias is None else found + bias[:, None, None]  # type: ignore[no-any-return]


def _conv_transpose_in_groups(
    values: torch.Tensor, weight: torch.Tensor, bias: Any, settings: tuple[list[Any], ...], groups: Any
) -> torch.Tensor:
    """A transposed convolution with as many groups as an axis is long: a convolution of the values between zeros."""
    pads: list[Any] = []
    for axis, (stride, padding, more, dilation) in enumerate(zip(*settings, strict=True)):
        size = (values.shape[2 + axis] - 1) * stride + 1
        between = [torch.zeros_like(values)] * (stride - 1)
        values = torch.stack([values, *between], 3 + axis).flatten(2 + axis, 3 + axis).narrow(2 + axis, 0, size)
        around = dilation * (weight.shape[2 + axis] - 1) - padding
        pads = [around, around + more, *pads]
    weight = weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1).flip(2, 3)
    values = torch.nn.functional.pad(values, pads)
    return conv2d_in_groups(values, weight, bias, dilation=settings[-1], groups=groups)


# What takes the place of attributes, by their owner; and kernels by composite operator.
REPLACED: list[tuple[Any, dict[str, Any]]] = [
    (
        torch,
        {
            "as_tensor": _as_tensor,
            **RAMPS,
            "triu_indices": _triu_indices,
            "tril_indices": _tril_indices,
            "unique_consecutive": _unique_consecutive,
            "where": _where,
            **{name: _without_generator(getattr(torch, name)) for name in _DRAW},
        },
    ),
    (
        torch.nn.functional,
        {
            "interpolate": interpolate,
            "one_hot": _one_hot,
            "pad": _pad,
            "scaled_dot_product_attention": _attend,
            **POOLS,
        },
    ),
    (torch.nn.Unflatten, {"__init__": _make_unflatten}),
    (torch.SymInt, {"__divmod__": _divmod, "__rdivmod__": lambda number, by: _divmod(by, number)}),
    (torch.SymInt, {"__mod__": remainder, "__rsub__": subtracted_from}),
    (torch.Tensor, {"__setitem__": _set_item, "fill_diagonal_": _fill_diagonal_, "numpy": _numpy}),
    (torch.Tensor, {name: _without_generator(getattr(torch.Tensor, name)) for name in _FILL}),
]
KERNELS: dict[Any, Callable[..., Any]] = {
    aten.cdist.default: _cdist,
    aten.chunk.default: _chunk,
    aten.conv_transpose1d.default: _conv_transpose,
    aten.conv_transpose2d.input: _conv_transpose,
    aten.conv_transpose3d.input: _conv_transpose,
    aten.kron.default: _kron,
    aten.take_along_dim.default: _take_along_dim,
    aten.tensor_split.sections: _tensor_split,
    aten.rnn_tanh.input: recurrence("rnn_tanh"),
    aten.rnn_relu.input: recurrence("rnn_relu"),
    **STATISTICS,
}
