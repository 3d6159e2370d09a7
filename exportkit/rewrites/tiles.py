"""Images cut into tiles whose number depends on their size: features packed by one selection inside the graph.

Models lay the tiles of an image side by side, cut away the padding, and put a separator behind each row of patches, in
a Python loop over the images. That moves rows about and computes nothing: here it is an index into the rows of all
tiles, made for the largest arrangement, of which each image takes what its size says.
"""

from __future__ import annotations

import builtins
import contextlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from exportkit.rewrites.attributes import replaced_attributes

_PACK, _COUNT = "pack_image_features", "image_size_to_num_patches"
_ROUNDING = 5e-8  # transformers rounds to seven digits before it cuts


def has_tiles(model: torch.nn.Module, arguments: Mapping[str, Any]) -> bool:
    """Returns whether sizes of images are given, and packing them as here gives what the model gives."""
    sizes = arguments.get("image_sizes")
    if not isinstance(sizes, torch.Tensor) or sizes.ndim != 2:
        return False
    return any(_computes_the_same(module, sizes) for module in _packers(model))


@contextlib.contextmanager
def tiles_in_graph(model: torch.nn.Module) -> Iterator[None]:
    """Puts the packing of this module in force, and lets all tiles of all images go through the encoder."""
    with contextlib.ExitStack() as stack:
        for module in _packers(model):
            owner = next(cls for cls in type(module).__mro__ if _PACK in vars(cls))
            stack.enter_context(replaced_attributes(owner, {_PACK: pack_image_features}))
            names = {_COUNT: lambda *_args, **_kwargs: None, "len": _length_of_one}  # tiles[:None] are all of them
            stack.enter_context(replaced_attributes(sys.modules[owner.__module__], names))
        yield


def _packers(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    for module in model.modules():
        method = getattr(type(module), _PACK, None)
        known = method is not None and "image_newline" in inspect.signature(method).parameters
        pinpoints = getattr(getattr(module, "config", None), "image_grid_pinpoints", None)
        known = known and bool(pinpoints) and hasattr(module, "image_newline")
        if known and hasattr(sys.modules[type(module).__module__], _COUNT):
            yield module


def _length_of_one(value: Any) -> int:
    """A list along an axis of symbolic length has one element in this trace."""
    symbolic = isinstance(value, torch.Tensor) and value.ndim > 0 and isinstance(value.shape[0], torch.SymInt)
    return 1 if symbolic else builtins.len(value)


def _computes_the_same(module: Any, sizes: torch.Tensor) -> bool:
    """Whether rows that are all different are packed as the model packs them; all pinpoints are tried as sizes too."""
    config, count = module.config, getattr(sys.modules[type(module).__module__], _COUNT)
    side = config.vision_config.image_size // config.vision_config.patch_size
    sizes = torch.cat([sizes.cpu(), torch.tensor(config.image_grid_pinpoints)])
    counts = [count(size, config.image_grid_pinpoints, config.vision_config.image_size) for size in sizes]
    rows = torch.arange(len(counts) * max(counts) * side**2, dtype=torch.float64)
    tiles = rows.reshape(len(counts), max(counts), side**2, 1)
    newline = torch.tensor([-1.0], dtype=torch.float64)
    extra = {"vision_feature_select_strategy": "full"}
    extra = {k: v for k, v in extra.items() if k in inspect.signature(getattr(type(module), _PACK)).parameters}
    try:
        own = [image[:n] for image, n in zip(tiles, counts, strict=True)]
        expected, lengths = module.pack_image_features(own, sizes, image_newline=newline, **extra)
    except Exception:
        return False
    got, found = pack_image_features(module, [tiles.flatten(0, 1)], sizes, image_newline=newline)
    return torch.equal(torch.cat(list(expected)), got[0]) and torch.equal(lengths, found)


@dataclass(frozen=True)
class _Arrangement:
    """Of each image: the best arrangement of tiles, in tiles, and the padding around what it shows, in patches."""

    tile_rows: torch.Tensor
    tile_columns: torch.Tensor
    top: torch.Tensor
    left: torch.Tensor


def pack_image_features(
    self: Any, image_features: Any, image_sizes: torch.Tensor, *_args: Any, image_newline: Any = None, **_kwargs: Any
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Returns the packed features of all images ``(rows, dim)`` as a list of one, and how many rows each image has.

    Args:
        self: The module.
        image_features: A list of one, the features ``(images * tiles, patches, dim)`` of as many tiles for each image.
        image_sizes: Height and width of each image ``(images, 2)``.
        image_newline: What is put behind each row of patches ``(dim,)``.
    """
    vision = self.config.vision_config
    side = vision.image_size // vision.patch_size
    pinpoints = torch.tensor(self.config.image_grid_pinpoints, device=image_sizes.device)
    arrangement = _arranged(image_sizes, pinpoints, vision.image_size, side)
    features = image_features[0]
    images, patches = image_sizes.shape[0], features.shape[1]
    most = [int(size) * side // vision.image_size for size in pinpoints_max(self.config.image_grid_pinpoints)]
    index, valid = _canvas(arrangement, side, most, image_newline is not None)
    rows = features.reshape(images, -1, features.shape[2])
    start = torch.arange(images, device=index.device)[:, None] * rows.shape[1]
    table = rows.flatten(0, 1)
    if image_newline is not None:
        table = torch.cat([table, image_newline[None].to(table)])
    index = torch.where(index < 0, images * rows.shape[1], start + index)
    base = torch.arange(patches, device=index.device)
    index = torch.cat([start + base, torch.where(valid, index, 0)], dim=1)
    valid = torch.cat([torch.ones_like(start + base, dtype=torch.bool), valid], dim=1)
    return [table[index[valid]]], valid.sum(1)


def pinpoints_max(pinpoints: list[list[int]]) -> tuple[int, int]:
    """Returns the largest height and the largest width of all arrangements."""
    return max(height for height, _ in pinpoints), max(width for _, width in pinpoints)


def _arranged(sizes: torch.Tensor, pinpoints: torch.Tensor, tile: int, side: int) -> _Arrangement:
    """The pinpoint that keeps most of the image and wastes least, the first one of equals."""
    height, width = sizes[:, :1].double(), sizes[:, 1:].double()
    scale = torch.minimum(pinpoints[:, 1] / width, pinpoints[:, 0] / height)
    kept = torch.minimum((width * scale).floor() * (height * scale).floor(), width * height)
    wasted = pinpoints.prod(-1) - kept
    order = torch.arange(pinpoints.shape[0], device=sizes.device)
    best = pinpoints[((kept * 2**26 - wasted) * 2**8 - order).argmax(-1)]
    rows, columns = best[:, 0] // tile, best[:, 1] // tile
    high, wide = (rows * side).double(), (columns * side).double()
    height, width = height[:, 0], width[:, 0]
    is_wider = width / height > wide / high
    top = torch.where(is_wider, (high - (height * (wide / width) + _ROUNDING).floor()) // 2, 0.0)
    left = torch.where(is_wider, 0.0, (wide - (width * (high / height) + _ROUNDING).floor()) // 2)
    return _Arrangement(rows, columns, top.long(), left.long())


def _canvas(arrangement: _Arrangement, side: int, most: list[int], newline: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Row of features at each place of the largest arrangement, -1 for a separator, and which places there are."""
    device = arrangement.top.device
    row, column = torch.arange(most[0], device=device)[:, None], torch.arange(most[1] + 1, device=device)[None]
    rows, columns, top, left = (
        values[:, None, None]
        for values in (arrangement.tile_rows, arrangement.tile_columns, arrangement.top, arrangement.left)
    )
    tile = 1 + row // side * columns + column // side
    index = tile * side**2 + row % side * side + column % side
    shown_row = (row >= top) & (row < rows * side - top)
    shown_column = (column >= left) & (column < columns * side - left)
    is_separator = (column == most[1]) & newline
    return torch.where(is_separator, -1, index).flatten(1), (shown_row & (shown_column | is_separator)).flatten(1)
