"""Tables of position embeddings in a trace: resized for all images at once.

Some encoders resize their square table of position embeddings for each image in a Python loop, with antialiasing. The
row of a patch is a weighted sum of the rows of the table; the weights follow from its place and its image's size.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from exportkit._torch_compat.tracing import apart_from_modes
from exportkit.overrides import Attribute, replaced
from exportkit.rewrites.grids import rows_of

METHOD = "resize_positional_embeddings"


def has_position_table(model: torch.nn.Module, _arguments: Mapping[str, Any]) -> bool:
    """Returns whether a function below gives the same as the model's method."""
    return bool(_resizing(model))


def table_in_graph(model: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
    """Replaces the method by the function below that takes the same arguments."""
    return replaced([(Attribute(cls, METHOD), staticmethod(function)) for cls, function in _resizing(model)])


def _resizing(model: torch.nn.Module) -> list[tuple[type, Callable[..., torch.Tensor]]]:
    """The classes with the method, and the function that gives the same."""
    classes = dict.fromkeys(cls for module in model.modules() for cls in type(module).__mro__)
    methods = {cls: vars(cls).get(METHOD) for cls in classes}
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
    """The share of each entry of an axis of the table in each place of an axis of another size."""
    scale = side / size[..., None]
    centers = torch.arange(side, device=place.device) + 0.5
    apart = (centers - scale * (place[..., None] + 0.5)).abs()
    shares = (1 - apart / scale.clamp(min=1)).clamp(min=0)
    return shares / shares.sum(-1, keepdim=True)
