"""What encoders derive from grids of patches ``(images, 3)``, computed inside the graph.

transformers loops over the grids in Python (positions of patches, windows, boundaries of segments), which a trace would
freeze. Here the same values follow from the grids by comparisons and divisions, for as many rows as there are patches.
Boundaries of segments have one entry for each row, with repetitions: `packed_attention.segments` reads them.
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
from exportkit.rewrites.attributes import replaced_attributes
from exportkit.rewrites.packed_attention import has_grids

_WINDOWS = 1 << 12  # more windows than an image has along an axis
_local = threading.local()


def has_encoder_of_grids(model: torch.nn.Module, arguments: Mapping[str, Any]) -> bool:
    """Returns whether the arguments hold grids of patches, and functions that loop over them are used."""
    return has_grids(arguments) and bool(_users(model))


@contextlib.contextmanager
def grids_in_graph(model: torch.nn.Module) -> Iterator[None]:
    """Puts the functions of this module in the place of those of transformers."""
    handles = []
    for module in model.modules():
        if "grid_thw" in inspect.signature(type(module).forward).parameters:
            handles.append(module.register_forward_pre_hook(_entered, with_kwargs=True))
            handles.append(module.register_forward_hook(_left, always_call=True))
    try:
        with contextlib.ExitStack() as stack:
            for user, name, function in _users(model):
                stack.enter_context(replaced_attributes(user, {name: function}))
            yield
    finally:
        for handle in handles:
            handle.remove()


def _users(model: torch.nn.Module) -> list[tuple[Any, str, Any]]:
    """Modules of Python, name and replacement of each function in them that loops over grids."""
    library = vision_functions()
    ours = {id(function): globals()[name] for name, function in library.items() if name in globals()}
    defined_in = {cls.__module__ for module in model.modules() for cls in type(module).__mro__}
    modules = [sys.modules[name] for name in sorted({*defined_in, *VISION_MODULES} & {*sys.modules})]
    return [(m, name, ours[id(value)]) for m in modules for name, value in list(vars(m).items()) if id(value) in ours]


def _entered(_module: torch.nn.Module, args: Any, kwargs: Any) -> None:
    rows = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)).shape[0]
    _local.rows = [*getattr(_local, "rows", []), rows]


def _left(*_: Any) -> None:
    _local.rows = _local.rows[:-1]


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
        """Row and column of each patch, which come in square blocks of ``merge`` by ``merge``."""
        within = self.index - self.frame_start
        blocks = self.width // merge
        row = within // (merge * merge * blocks) * merge + (within // merge) % merge
        column = (within // (merge * merge)) % blocks * merge + within % merge
        return row, column


def _rows_of(grid: torch.Tensor, merge: int = 1) -> _Rows:
    """Rows of patches, or of merged patches, of grids; as many as the encoder was given."""
    grid = grid.to(torch.int64)
    frames, height, width = grid[:, 0], grid[:, 1] // merge, grid[:, 2] // merge
    ends = (frames * height * width).cumsum(0)
    given = getattr(_local, "rows", None)
    count = given[-1] // (merge * merge) if given else int(ends[-1])
    index = torch.arange(count, device=grid.device)
    image = (index[:, None] >= ends[None]).sum(-1)
    starts = ends - frames * height * width
    return _Rows(index, image, starts[image], frames[image], height[image], width[image])


def _popped(kwargs: dict[str, Any] | None, *names: str) -> Any:
    found = [kwargs.pop(name, None) if kwargs is not None else None for name in names]
    return found if all(value is not None for value in found) else None


def get_vision_position_ids(
    grid_thw: torch.Tensor,
    spatial_merge_size: Any,
    include_temporal: bool = False,
    kwargs: dict[str, Any] | None = None,
) -> torch.Tensor:
    """Returns row and column of each patch in its image, ``(patches, 2)``, the frame before them if wanted."""
    given = _popped(kwargs, "position_ids")
    if given:
        return given[0]
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
        return given[0]
    rows = _rows_of(grid_thw)
    area = rows.height * rows.width
    ends = rows.start + area * rows.frames if merge_temporal else rows.frame_start + area
    return torch.nn.functional.pad(ends, (1, 0))


def get_max_seqlen(
    _cu_seqlens: torch.Tensor, _config: Any, kwargs: dict[str, Any] | None = None, kwarg_name: str = "max_seqlen"
) -> int:
    """Returns a length that nobody reads: attention with a mask needs none."""
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
    """Returns which entries of a square table of position embeddings each patch mixes, and their weights."""
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
