"""Positions of tokens and patches that transformers computes in Python loops, computed in the graph.

Text with images: transformers walks over the tokens, run by run, to give text and image tokens a position in three axes
(time, height, width). Here positions follow from cumulative sums: text counts on by one, and an image of grid (t, h, w)
takes a block that starts where the text before it ended, and moves the text after it on by the longer of its sides.

Patches: transformers resizes a table of position embeddings for each image, with antialiasing. The row of a patch is a
weighted sum of the rows of the table; the weights follow from its place and the size of its image.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from exportkit._torch_compat.tracing import apart_from_modes
from exportkit.overrides import Attribute, classes_of, replaced
from exportkit.rewrites.grids import rows_of

ROPE_INDEX_METHOD = "get_rope_index"
_READ = {"input_ids", "mm_token_type_ids", "image_grid_thw", "attention_mask"}
_UNREAD = ("position_ids", "video_grid_thw")  # with these, positions are given or follow from more than images
_STATE = "rope_deltas"


def has_rope_index(model: torch.nn.Module, arguments: Mapping[str, Any]) -> bool:
    """Returns whether positions follow from the grids of images, and `get_rope_index` gives the same as the model."""
    given = {name: arguments[name] for name in _READ if arguments.get(name) is not None}
    if any(arguments.get(name) is not None for name in _UNREAD):
        return False
    if not {"mm_token_type_ids", "image_grid_thw"} <= given.keys():
        return False
    return any(_computes_the_same(module, given) for module in _with_rope_index(model))


def rope_index_in_graph(model: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
    """Replaces the method by `get_rope_index`; what modules keep from one call to the next is restored."""
    slots: list[tuple[Attribute, Any]] = []
    for module in _with_rope_index(model):
        owner = next(cls for cls in type(module).__mro__ if ROPE_INDEX_METHOD in vars(cls))
        slots.append((Attribute(owner, ROPE_INDEX_METHOD), get_rope_index))
        slots += [(Attribute(module, _STATE), vars(module)[_STATE])] if _STATE in vars(module) else []
    return replaced(slots)


def _with_rope_index(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    for module in model.modules():
        method = getattr(type(module), ROPE_INDEX_METHOD, None)
        if method is not None and {*inspect.signature(method).parameters} >= _READ and _merge(module) is not None:
            yield module


def _merge(module: Any) -> Any:
    """How many patches along an axis become one token."""
    config = getattr(getattr(module, "config", None), "vision_config", None)
    return getattr(config, "spatial_merge_size", None)


def _computes_the_same(module: Any, given: Mapping[str, torch.Tensor]) -> bool:
    try:
        expected = module.get_rope_index(**given)
    except Exception:
        return False
    return all(torch.equal(a, b) for a, b in zip(expected, get_rope_index(module, **given), strict=True))


def get_rope_index(
    self: Any,
    input_ids: torch.Tensor,
    mm_token_type_ids: torch.Tensor,
    image_grid_thw: torch.Tensor,
    *,
    attention_mask: torch.Tensor | None = None,
    **_kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns positions ``(3, batch, seq)``, and by how much the last one exceeds the length, ``(batch, 1)``.

    Args:
        self: The module; its config says how many patches are one token.
        input_ids: ``(batch, seq)``.
        mm_token_type_ids: 1 for images, 0 for text, ``(batch, seq)``.
        image_grid_thw: ``(images, 3)``, in patches.
        attention_mask: 0 for padding, which is on one side of the row.
    """
    ones = torch.ones_like(input_ids)
    visible = (ones if attention_mask is None else attention_mask) != 0
    is_image = (mm_token_type_ids != 0) & visible
    starts = is_image & ~torch.nn.functional.pad(is_image[:, :-1], (1, 0))
    grid = torch.cat([image_grid_thw, image_grid_thw.new_ones(1, 3) * _merge(self)])  # never empty
    frames, height, width = grid[:, 0], grid[:, 1] // _merge(self), grid[:, 2] // _merge(self)
    image = (starts.reshape(-1).cumsum(0) - 1).clamp(min=0).reshape(input_ids.shape)

    sizes = frames * height * width
    within = (is_image.reshape(-1).cumsum(0) - 1).reshape(input_ids.shape) - (sizes.cumsum(0) - sizes)[image]
    advance = torch.maximum(height, width)[image]
    text = (visible & ~is_image).cumsum(-1)
    jumps = torch.where(starts, advance, 0).cumsum(-1)
    base = torch.where(is_image, text + jumps - advance, text + jumps - 1)

    columns, area = width[image], (height * width)[image]
    offsets = torch.stack([within // area, within % area // columns, within % columns])
    positions = torch.where(visible, base + torch.where(is_image, offsets, 0), 0).to(input_ids.dtype)
    deltas = positions.amax((0, 2)) + 1 - visible.sum(-1)
    return positions, deltas.unsqueeze(1)


TABLE_METHOD = "resize_positional_embeddings"


def table_in_graph(model: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
    """Replaces the method by the function below that takes the same arguments."""
    return replaced(
        [(Attribute(cls, TABLE_METHOD), staticmethod(function)) for cls, function in resizing_classes(model)]
    )


def resizing_classes(model: torch.nn.Module) -> list[tuple[type, Callable[..., torch.Tensor]]]:
    """The classes with the method, and the function that gives the same."""
    methods = {cls: vars(cls).get(TABLE_METHOD) for cls in classes_of(model)}
    return [
        (cls, function)
        for cls, method in methods.items()
        if isinstance(method, staticmethod)
        for function in (padded_table, packed_table)
        if [*inspect.signature(method.__func__).parameters] == [*inspect.signature(function).parameters]
        if _gives_the_same(method.__func__, function)
    ]


def _gives_the_same(method: Callable[..., torch.Tensor], function: Callable[..., torch.Tensor]) -> bool:
    table = torch.randn(6, 6, 2, generator=torch.Generator().manual_seed(0))
    if function is padded_table:
        given = [(torch.tensor([[3, 5], [6, 6], [1, 14], [12, 2]]), 40)]
    else:
        given = [(torch.tensor([[1, 4, 6], [2, 6, 6], [3, 2, 14], [1, 12, 2]]), merge) for merge in (1, 2)]
    with apart_from_modes():
        pairs = [(method(table, *arguments), function(table, *arguments)) for arguments in given]
    return all(a.shape == b.shape and torch.allclose(a, b, atol=1e-5) for a, b in pairs)


def padded_table(positional_embeddings: torch.Tensor, spatial_shapes: torch.Tensor, max_length: int) -> torch.Tensor:
    """Returns the position embedding of each patch ``(images, max_length, dim)``; of the first one at padding.

    Args:
        positional_embeddings: The table ``(side, side, dim)``.
        spatial_shapes: Height and width of each image ``(images, 2)``, in patches.
        max_length: The number of patches of each image, with padding.
    """
    height, width = spatial_shapes[:, :1], spatial_shapes[:, 1:]
    place = torch.arange(max_length, device=spatial_shapes.device)
    place = torch.where(place < height * width, place, 0)
    return _resized(positional_embeddings, (place // width, height), (place % width, width))


def packed_table(positional_embeddings: torch.Tensor, grid_thw: torch.Tensor, spatial_merge_size: int) -> torch.Tensor:
    """Returns the position embedding of each patch ``(patches, dim)``; patches come in square blocks.

    Args:
        positional_embeddings: The table ``(side, side, dim)``.
        grid_thw: Frames, height and width of each image ``(images, 3)``, in patches.
        spatial_merge_size: The side of a block.
    """
    rows = rows_of(grid_thw, multiple_of=spatial_merge_size)
    row, column = rows.place(spatial_merge_size)
    return _resized(positional_embeddings, (row, rows.height), (column, rows.width))


_Along = tuple[torch.Tensor, torch.Tensor]  # places along an axis, and its size


def _resized(table: torch.Tensor, rows: _Along, columns: _Along) -> torch.Tensor:
    side, _, dim = table.shape
    weights = _antialiased(*rows, side)[..., :, None] * _antialiased(*columns, side)[..., None, :]
    return (weights.flatten(-2) @ table.float().reshape(side * side, dim)).to(table.dtype)


def _antialiased(place: torch.Tensor, size: torch.Tensor, side: int) -> torch.Tensor:
    """The share of each entry of an axis of the table in each place of an axis of a different size."""
    scale = side / size[..., None]
    centers = torch.arange(side, device=place.device) + 0.5
    apart = (centers - scale * (place[..., None] + 0.5)).abs()
    shares = (1 - apart / scale.clamp(min=1)).clamp(min=0)
    return shares / shares.sum(-1, keepdim=True)
