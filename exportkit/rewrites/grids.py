"""Grids of patches ``(images, 3)`` in a trace: what encoders derive from them is computed in the graph.

transformers loops over the grids in Python (positions of patches, windows, boundaries of segments), which a trace would
freeze. Here the same values follow from the grids by comparisons and divisions, for as many rows as there are patches.
Boundaries of frames have one entry for each row, with repetitions: `attention.attend_in_segments` reads them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from exportkit._torch_compat.modules import forward_parameters
from exportkit._torch_compat.traced_values import at_least
from exportkit._torch_compat.tracing import apart_from_modes
from exportkit._torch_compat.transformers import VISION_MODULES, interpolation_taps
from exportkit.overrides import Attribute, classes_of, replaced
from exportkit.rewrites.attention import has_grids

_WINDOWS = 1 << 12  # more than the windows of an image along an axis
_local = threading.local()


def has_encoder_of_grids(model: torch.nn.Module, arguments: Mapping[str, Any]) -> bool:
    """Returns whether the arguments hold grids of patches, and the model uses functions that loop over them."""
    return has_grids(arguments) and bool(_users(model))


@contextlib.contextmanager
def grids_in_graph(model: torch.nn.Module) -> Iterator[None]:
    """Replaces transformers' functions of grids by the functions of the same names below."""
    handles, rows = [], list(getattr(_local, "rows", []))
    for module in model.modules():
        parameters = forward_parameters(module)
        if not {"grid_thw", "target_sizes"}.isdisjoint(parameters):
            handles.append(module.register_forward_pre_hook(_entered, with_kwargs=True))
            handles.append(module.register_forward_hook(_left, always_call=True))
        if {"lengths", "image_shapes"}.issubset(parameters):
            handles.append(module.register_forward_pre_hook(_with_shapes_of_rows, with_kwargs=True))
    try:
        with replaced(_users(model)):
            yield
    finally:
        _local.rows = rows  # torch runs no hook if a call is given up by a BaseException
        for handle in handles:
            handle.remove()


def _users(model: torch.nn.Module) -> list[tuple[Attribute, Any]]:
    """Each name in a Python module that stands for a function of grids, with the function that replaces it."""
    defined_in = {cls.__module__ for cls in classes_of(model)}
    modules = [sys.modules[name] for name in sorted({*defined_in, *VISION_MODULES} & {*sys.modules})]
    named = [(module, name, value) for module in modules for name, value in vars(module).items()]
    functions = [each for each in named if isinstance(each[2], types.FunctionType) and _is_ours(each[2])]
    return [(Attribute(module, name), globals()[value.__name__]) for module, name, value in functions]


# What functions are called with, to find out whether those below give the same.
_EXAMPLE = ((1, 4, 6), (2, 8, 4), (1, 2, 2))
_CALLS: dict[str, list[dict[str, Any]]] = {
    "get_vision_position_ids": [{"spatial_merge_size": 2}, {"spatial_merge_size": 1, "include_temporal": True}],
    "get_vision_cu_seqlens": [{}, {"merge_temporal": True}],
    "get_vision_window_index": [
        {"spatial_merge_size": 2, "window_size": 8, "patch_size": 2},
        {"spatial_merge_size": 1, "window_size": 3, "patch_size": 1},
    ],
    "get_vision_interpolation_indices_and_weights": [
        {"num_grid_per_side": 5, "spatial_merge_size": 2},
        {"num_grid_per_side": 3, "mode": "bicubic", "align_corners": True, "padding": "zeros"},
    ],
    "get_vision_nearest_position_ids": [{"num_patches_per_side": side} for side in (5, 6)],
    "get_vision_frame_index": [{}],
    "get_vision_temporal_merge_index": [{"grid_thw": ((2, 4, 6), (2, 8, 3)), "kernel_height": 2, "kernel_width": 3}],
    "get_vision_pixel_shuffle_index": [{"merge_size": 1}, {"merge_size": 2}],
}


@functools.cache
def _is_ours(function: types.FunctionType) -> bool:
    """Whether the function of the same name below gives the same for examples, apart from repeated boundaries."""
    if function.__name__ not in _CALLS:
        return function.__name__ == get_max_seqlen.__name__ and function.__module__ in VISION_MODULES
    with apart_from_modes(), contextlib.suppress(Exception):  # a function of other arguments
        for given in _CALLS[function.__name__]:
            grids = torch.tensor(given.get("grid_thw", _EXAMPLE))
            options = {name: value for name, value in given.items() if name != "grid_thw"}
            if "target_sizes" in inspect.signature(function).parameters:
                grids = grids[:, 1:]
            expected, found = (call(grids, **options) for call in (function, globals()[function.__name__]))
            pairs = zip(*((each if isinstance(each, tuple) else (each,)) for each in (expected, found)), strict=True)
            if not all(_is_equal(*pair) for pair in pairs):
                return False
        return True
    return False


def _is_equal(expected: torch.Tensor, found: torch.Tensor) -> bool:
    if expected.is_floating_point() or expected.ndim != 1:
        return expected.shape == found.shape and torch.allclose(expected, found.to(expected.dtype), atol=1e-6)
    if expected[0] == 0 and (expected.diff() > 0).all():  # boundaries
        found = found.unique_consecutive()
    return torch.equal(expected, found.to(expected.dtype))


def _entered(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
    """Notes how many patches a module got: rows ``(patches, ...)``, or one sequence ``(1, patches, dim)``."""
    shape = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)).shape
    is_sequence = "target_sizes" in forward_parameters(module)
    rows = shape[0] if not is_sequence else shape[1] if len(shape) == 3 else None
    _local.rows = [*getattr(_local, "rows", []), rows]


def is_in_encoder() -> bool:
    """Returns whether this thread runs a module that gets grids, under `grids_in_graph`."""
    return bool(getattr(_local, "rows", []))


def _left(*_: Any) -> None:
    _local.rows = _local.rows[:-1]


def _with_shapes_of_rows(module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Returns the arguments with one image shape per row, because ``lengths`` has one entry per row here."""
    bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
    segments = (bound.arguments["lengths"] > 0).cumsum(0) - 1
    bound.arguments["image_shapes"] = bound.arguments["image_shapes"][segments]
    return bound.args[1:], bound.kwargs


@dataclass(frozen=True)
class Rows:
    """For each row: its image, that image's grid, where the image starts, and the place in its frame."""

    index: torch.Tensor
    image: torch.Tensor
    start: torch.Tensor
    frames: torch.Tensor
    height: torch.Tensor
    width: torch.Tensor

    @property
    def frame(self) -> torch.Tensor:
        """The frame of the image that a patch is in."""
        return (self.index - self.start) // (self.height * self.width)

    @property
    def frame_start(self) -> torch.Tensor:
        """The first patch of its frame."""
        return self.start + self.frame * self.height * self.width

    def place(self, merge: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the row and column of each patch; patches come in square blocks of ``merge`` by ``merge``."""
        within = self.index - self.frame_start
        blocks = self.width // merge
        row = within // (merge * merge * blocks) * merge + (within // merge) % merge
        column = (within // (merge * merge)) % blocks * merge + within % merge
        return row, column


def rows_of(grid: torch.Tensor, merge: int = 1, multiple_of: Any = 1, count: Any = None) -> Rows:
    """Returns the rows of patches, or of merged patches, of grids.

    A graph cannot raise an error, so grids for which a model raises lead to an index that is out of range.

    Args:
        grid: Frames, height and width of each image ``(images, 3)``.
        merge: How many patches along an axis are merged.
        multiple_of: What height and width are multiples of; a number, or one for each image.
        count: How many rows there are; otherwise, as many as the encoder was given.
    """
    grid = grid.to(torch.int64)
    frames, height, width = grid[:, 0], grid[:, 1] // merge, grid[:, 2] // merge
    sizes = frames * height * width
    ends = sizes.cumsum(0)
    if count is None:
        given = (getattr(_local, "rows", None) or [None])[-1]
        count = ends[-1].item() if given is None else given // (merge * merge)
    index = torch.arange(count, device=grid.device)
    image = (index[:, None] >= ends[None]).sum(-1)
    is_right = (height % multiple_of + width % multiple_of).sum() + (sizes.sum() - count).abs() == 0
    image = torch.where(is_right, image, grid.shape[0])
    return Rows(index, image, (ends - sizes)[image], frames[image], height[image], width[image])


def _popped(kwargs: dict[str, Any] | None, *names: str) -> list[Any] | None:
    found = [kwargs.pop(name, None) if kwargs is not None else None for name in names]
    return found if all(value is not None for value in found) else None


def get_vision_position_ids(
    grid_thw: torch.Tensor,
    spatial_merge_size: Any,
    include_temporal: bool = False,
    kwargs: dict[str, Any] | None = None,
) -> torch.Tensor:
    """Returns the row and column of each patch in its image, ``(patches, 2)``, after the frame if that is wanted."""
    given = _popped(kwargs, "position_ids")
    if given:
        return given[0]  # type: ignore[no-any-return]
    rows = rows_of(grid_thw, multiple_of=spatial_merge_size)
    merge = spatial_merge_size if isinstance(spatial_merge_size, int) else spatial_merge_size[rows.image]
    row, column = rows.place(merge)
    return torch.stack([rows.frame, row, column] if include_temporal else [row, column], dim=-1)


def get_vision_cu_seqlens(
    grid_thw: torch.Tensor, merge_temporal: bool = False, kwargs: dict[str, Any] | None = None
) -> torch.Tensor:
    """Returns the boundaries of frames, or of whole images: 0, and where the segment of each row ends."""
    given = _popped(kwargs, "cu_seqlens")
    if given:
        return given[0]  # type: ignore[no-any-return]
    rows = rows_of(grid_thw)
    area = rows.height * rows.width
    ends = rows.start + area * rows.frames if merge_temporal else rows.frame_start + area
    return torch.nn.functional.pad(ends, (1, 0))


def get_max_seqlen(
    _cu_seqlens: torch.Tensor, _config: Any, kwargs: dict[str, Any] | None = None, kwarg_name: str = "max_seqlen"
) -> int:
    """Returns a length that is never read: attention with a mask needs none."""
    given = _popped(kwargs, kwarg_name)
    return given[0] if given else 1


def get_vision_window_index(
    grid_thw: torch.Tensor,
    spatial_merge_size: int,
    window_size: int,
    patch_size: int,
    kwargs: dict[str, Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the order of merged patches, window by window, and the boundaries of the windows in patches."""
    given = _popped(kwargs, "window_index", "cu_window_seqlens")
    if given:
        return given[0], given[1]
    side = window_size // spatial_merge_size // patch_size
    rows = rows_of(grid_thw, spatial_merge_size)
    row, column = rows.place(1)
    window = (rows.frame_start * _WINDOWS + row // side) * _WINDOWS + column // side
    order = (window * (side * side) + row % side * side + column % side).argsort()
    ordered = window[order]
    is_last = ordered != torch.nn.functional.pad(ordered, (0, 1), value=-1)[1:]
    ends = (is_last.nonzero().squeeze(1) + 1) * spatial_merge_size**2
    return order, torch.nn.functional.pad(ends, (1, 0))


def get_vision_interpolation_indices_and_weights(  # noqa: PLR0917 - as it is called
    grid_thw: torch.Tensor,
    num_grid_per_side: int,
    mode: str = "bilinear",
    align_corners: bool = False,
    spatial_merge_size: int = 1,
    padding: str = "border",
    kwargs: dict[str, Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the entries of a square table of position embeddings that each patch mixes, and their weights."""
    given = _popped(kwargs, "interp_indices", "interp_weights")
    if given:
        return given[0], given[1]
    rows = rows_of(grid_thw)
    row, column = rows.place(spatial_merge_size)
    taps = interpolation_taps()
    along_rows, row_weights = taps(row, rows.height, num_grid_per_side, mode, align_corners, padding)
    along_columns, column_weights = taps(column, rows.width, num_grid_per_side, mode, align_corners, padding)
    indices = (along_rows[:, :, None] * num_grid_per_side + along_columns[:, None]).flatten(1)
    return indices, (row_weights[:, :, None] * column_weights[:, None]).flatten(1)


def get_vision_nearest_position_ids(
    target_sizes: torch.Tensor, num_patches_per_side: int, kwargs: dict[str, Any] | None = None
) -> torch.Tensor:
    """Returns the entry of a square table of position embeddings that is nearest to each patch, ``(patches,)``."""
    given = _popped(kwargs, "position_ids")
    if given:
        return given[0]  # type: ignore[no-any-return]
    side = num_patches_per_side
    with apart_from_modes():  # as numbers: a runtime may round a range of fractions in a different way
        borders = torch.arange(1 / side, 1.0, 1 / side).tolist()
    boundaries = torch.tensor(borders, device=target_sizes.device)
    rows = rows_of(torch.nn.functional.pad(target_sizes, (1, 0), value=1))
    row, column = rows.place(1)
    along_rows, along_columns = (
        (place[:, None] / size[:, None] >= boundaries).sum(-1)
        for place, size in ((row, rows.height), (column, rows.width))
    )
    return along_rows * side + along_columns


def get_vision_pixel_shuffle_index(
    grid_thw: torch.Tensor, merge_size: int, kwargs: dict[str, Any] | None = None
) -> torch.Tensor:
    """Returns the patches, which come row by row, in the order of square blocks."""
    given = _popped(kwargs, "pixel_shuffle_index")
    if given:
        return given[0]  # type: ignore[no-any-return]
    rows = rows_of(grid_thw, multiple_of=merge_size)
    row, column = rows.place(merge_size)
    return rows.frame_start + row * rows.width + column


def get_vision_frame_index(grid_thw: torch.Tensor, kwargs: dict[str, Any] | None = None) -> torch.Tensor:
    """Returns the number of each patch's frame, from 1 on; 0 for images of one frame."""
    given = _popped(kwargs, "frame_index")
    if given:
        return given[0]  # type: ignore[no-any-return]
    rows = rows_of(grid_thw)
    return torch.where(rows.frames > 1, rows.frame + 1, 0)


def get_vision_temporal_merge_index(
    grid_thw: torch.Tensor, kernel_height: int, kernel_width: int, kwargs: dict[str, Any] | None = None
) -> torch.Tensor:
    """Returns the patches of each block ``(blocks, frames, patches)``; all images have the same number of frames."""
    given = _popped(kwargs, "temporal_merge_index")
    if given:
        return given[0]  # type: ignore[no-any-return]
    grids, kernel = grid_thw.to(torch.int64), kernel_height * kernel_width
    sizes = torch.tensor([kernel_height, kernel_width], device=grids.device)
    patches, frames = rows_of(grids).index.shape[0], at_least(grids[:, 0].max().item(), 1)
    blocks = torch.cat([torch.ones_like(grids[:, :1]), grids[:, 1:] // sizes], dim=1)
    block = rows_of(blocks, count=patches // (frames * kernel))
    row, column = block.place(1)
    # The patches of a block: frame, row and column in the block are axes of their own.
    frame, down, across = (
        torch.arange(size, device=grids.device).reshape(-1, *[1] * axes)
        for size, axes in ((frames, 2), (kernel_height, 1), (kernel_width, 0))
    )
    row, column, width, area, start = (
        each[:, None, None, None]
        for each in (row, column, block.width * kernel_width, block.height * block.width * kernel, block.start * kernel)
    )
    index = start * frames + frame * area + (row * kernel_height + down) * width + column * kernel_width + across
    is_right = (grids[:, 1:] % sizes).sum() + (grids[:, 0] - frames).abs().sum() == 0
    return torch.where(is_right, index, patches).flatten(2)
