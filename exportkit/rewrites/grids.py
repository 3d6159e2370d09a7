"""Grids of patches ``(images, 3)`` in a trace: what encoders and decoders derive from them is computed in the graph.

transformers loops over the grids in Python (positions of patches, windows, boundaries of segments), which a trace would
freeze. Here the same values follow from the grids by comparisons and divisions, for as many rows as there are patches.
Boundaries of segments have one entry for each row, with repetitions: `attention.attend_in_segments` reads them.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from exportkit._torch_compat.transformers import VISION_MODULES, interpolation_taps, vision_functions
from exportkit.overrides import Attribute, replaced
from exportkit.rewrites.attention import has_grids

_WINDOWS = 1 << 12  # more than the windows of an image along an axis
_local = threading.local()


def has_encoder_of_grids(model: torch.nn.Module, arguments: Mapping[str, Any]) -> bool:
    """Returns whether the arguments hold grids of patches, and the model uses functions that loop over them."""
    return has_grids(arguments) and bool(_users(model))


@contextlib.contextmanager
def grids_in_graph(model: torch.nn.Module) -> Iterator[None]:
    """Replaces transformers' functions of grids by the functions of the same names below."""
    handles = []
    for module in model.modules():
        parameters = inspect.signature(type(module).forward).parameters
        if "grid_thw" in parameters:
            handles.append(module.register_forward_pre_hook(_entered, with_kwargs=True))
            handles.append(module.register_forward_hook(_left, always_call=True))
        if {"lengths", "image_shapes"} <= {*parameters}:
            handles.append(module.register_forward_pre_hook(_with_shapes_of_rows, with_kwargs=True))
    try:
        with replaced(_users(model)):
            yield
    finally:
        for handle in handles:
            handle.remove()


def _users(model: torch.nn.Module) -> list[tuple[Attribute, Any]]:
    """Each name in a Python module that stands for a function of grids, with the function that replaces it."""
    library = vision_functions()
    ours = {id(function): globals()[name] for name, function in library.items() if name in globals()}
    defined_in = {cls.__module__ for module in model.modules() for cls in type(module).__mro__}
    modules = [sys.modules[name] for name in sorted({*defined_in, *VISION_MODULES} & {*sys.modules})]
    named = [(module, name, value) for module in modules for name, value in vars(module).items()]
    return [(Attribute(module, name), ours[id(value)]) for module, name, value in named if id(value) in ours]


def _entered(_module: torch.nn.Module, args: Any, kwargs: Any) -> None:
    rows = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)).shape[0]
    _local.rows = [*getattr(_local, "rows", []), rows]


def _left(*_: Any) -> None:
    _local.rows = _local.rows[:-1]


def _with_shapes_of_rows(module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Returns the arguments with one image shape per row, because ``lengths`` has one entry per row here."""
    bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
    segments = (bound.arguments["lengths"] > 0).cumsum(0) - 1
    bound.arguments["image_shapes"] = bound.arguments["image_shapes"][segments]
    return bound.args[1:], bound.kwargs


@dataclass(frozen=True)
class _Rows:
    """For each row: its image, that image's grid, where the image starts, and the place in its frame."""

    index: torch.Tensor
    image: torch.Tensor
    start: torch.Tensor
    frames: torch.Tensor
    height: torch.Tensor
    width: torch.Tensor

    @property
    def frame(self) -> torch.Tensor:
        return (self.index - self.start) // (self.height * self.width)

    @property
    def frame_start(self) -> torch.Tensor:
        return self.start + self.frame * self.height * self.width

    def place(self, merge: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Row and column of each patch; patches come in square blocks of ``merge`` by ``merge``."""
        within = self.index - self.frame_start
        blocks = self.width // merge
        row = within // (merge * merge * blocks) * merge + (within // merge) % merge
        column = (within // (merge * merge)) % blocks * merge + within % merge
        return row, column


def _rows_of(grid: torch.Tensor, merge: int = 1) -> _Rows:
    """The rows of patches, or of merged patches, of grids: as many as the encoder was given."""
    grid = grid.to(torch.int64)
    frames, height, width = grid[:, 0], grid[:, 1] // merge, grid[:, 2] // merge
    ends = (frames * height * width).cumsum(0)
    given = getattr(_local, "rows", None)
    count = given[-1] // (merge * merge) if given else int(ends[-1])
    index = torch.arange(count, device=grid.device)
    image = (index[:, None] >= ends[None]).sum(-1)
    starts = ends - frames * height * width
    return _Rows(index, image, starts[image], frames[image], height[image], width[image])


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
    rows = _rows_of(grid_thw)
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
    rows = _rows_of(grid_thw)
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
    rows = _rows_of(grid_thw, spatial_merge_size)
    row, column = rows.place(1)
    window = (rows.frame_start * _WINDOWS + row // side) * _WINDOWS + column // side
    order = (window * (side * side) + row % side * side + column % side).argsort()
    ordered = window[order]
    ends = (ordered[:, None] >= ordered[None]).sum(-1) * spatial_merge_size**2
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
    rows = _rows_of(grid_thw)
    row, column = rows.place(spatial_merge_size)
    taps = interpolation_taps()
    along_rows, row_weights = taps(row, rows.height, num_grid_per_side, mode, align_corners, padding)
    along_columns, column_weights = taps(column, rows.width, num_grid_per_side, mode, align_corners, padding)
    indices = (along_rows[:, :, None] * num_grid_per_side + along_columns[:, None]).flatten(1)
    return indices, (row_weights[:, :, None] * column_weights[:, None]).flatten(1)


# Positions of tokens
#
# transformers walks over the tokens in Python, run by run, to give text and image tokens a position in three axes
# (time, height, width). Here positions follow from cumulative sums: text counts on by one, and an image of grid (t, h,
# w) takes a block that starts where the text before it ended, and moves the text after it on by the longer of its
# sides.

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


# Tables of positions
#
# Some encoders resize their square table of position embeddings for each image in a Python loop, with antialiasing.
# The row of a patch is a weighted sum of the rows of the table; the weights follow from its place and its image's size.

TABLE_METHOD = "resize_positional_embeddings"
_TABLE_ARGUMENTS = ["positional_embeddings", "spatial_shapes", "max_length"]


def has_position_table(model: torch.nn.Module, _arguments: Mapping[str, Any]) -> bool:
    """Returns whether `resized_table` gives the same as the model."""
    table = torch.randn(6, 6, 2, generator=torch.Generator().manual_seed(0))
    given = table, torch.tensor([[3, 5], [6, 6], [1, 14], [12, 2]]), 40
    return any(
        torch.allclose(cls.resize_positional_embeddings(*given), resized_table(*given), atol=1e-5)
        for cls in _with_table(model)
    )


def table_in_graph(model: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
    """Replaces the method by `resized_table`."""
    return replaced([(Attribute(cls, TABLE_METHOD), staticmethod(resized_table)) for cls in _with_table(model)])


def _with_table(model: torch.nn.Module) -> list[Any]:
    classes = dict.fromkeys(cls for module in model.modules() for cls in type(module).__mro__)
    methods = {cls: vars(cls).get(TABLE_METHOD) for cls in classes}
    return [
        cls
        for cls, method in methods.items()
        if isinstance(method, staticmethod)
        if [*inspect.signature(method.__func__).parameters] == _TABLE_ARGUMENTS
    ]


def resized_table(positional_embeddings: torch.Tensor, spatial_shapes: torch.Tensor, max_length: int) -> torch.Tensor:
    """Returns the position embedding of each patch ``(images, max_length, dim)``; of the first one at padding.

    Args:
        positional_embeddings: The table ``(side, side, dim)``.
        spatial_shapes: Height and width of each image ``(images, 2)``, in patches.
        max_length: The number of patches of each image, with padding.
    """
    side, _, dim = positional_embeddings.shape
    height, width = spatial_shapes[:, :1], spatial_shapes[:, 1:]
    place = torch.arange(max_length, device=spatial_shapes.device)
    place = torch.where(place < height * width, place, 0)
    rows, columns = _antialiased(place // width, height, side), _antialiased(place % width, width, side)
    weights = (rows[..., :, None] * columns[..., None, :]).flatten(-2)
    return (weights @ positional_embeddings.float().reshape(side * side, dim)).to(positional_embeddings.dtype)


def _antialiased(place: torch.Tensor, size: torch.Tensor, side: int) -> torch.Tensor:
    """The share of each entry of an axis of the table in each place of an axis of another size."""
    scale = side / size[..., None]
    centers = torch.arange(side, device=place.device) + 0.5
    apart = (centers - scale * (place[..., None] + 0.5)).abs()
    shares = (1 - apart / scale.clamp(min=1)).clamp(min=0)
    return shares / shares.sum(-1, keepdim=True)
