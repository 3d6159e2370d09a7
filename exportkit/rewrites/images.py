"""Images of different sizes in a trace: packed tiles, padded images, and features scattered into the embeddings."""

from __future__ import annotations

import builtins
import contextlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from exportkit._torch_compat.modules import forward_parameters
from exportkit._torch_compat.traced_values import depends_on_values
from exportkit._torch_compat.transformers import as_encoder_forward
from exportkit.overrides import Attribute, Replacing, replaced, replaced_attributes, replaced_functions
from exportkit.rewrites.attention import masked_segments
from exportkit.rewrites.symbolic_lists import has_symbolic_length

# Tiles
#
# Models cut images into tiles whose number depends on the size. They lay the tiles of an image side by side, cut away
# the padding, and put a separator after each row of patches, in a Python loop over the images. That moves rows and
# computes nothing: here it is an index into the rows of all tiles, made for the largest arrangement, of which each
# image takes what its size says.

PACK_METHOD = "pack_image_features"
_COUNT = "image_size_to_num_patches"
_ROUNDING = 5e-8  # transformers rounds to seven digits before it cuts


def has_tiles(model: torch.nn.Module, arguments: Mapping[str, Any]) -> bool:
    """Returns whether sizes of images are given, and packing them as here gives the same as the model."""
    sizes = arguments.get("image_sizes")
    if not isinstance(sizes, torch.Tensor) or sizes.ndim != 2:
        return False
    return any(_packs_the_same(module, sizes) for module in _packers(model))


def tiles_in_graph(model: torch.nn.Module) -> Replacing:
    """Packs tiles by one selection, and sends all tiles of all images through the encoder."""
    slots: list[tuple[Attribute, Any]] = []
    for module in _packers(model):
        owner = next(cls for cls in type(module).__mro__ if PACK_METHOD in vars(cls))
        namespace = sys.modules[owner.__module__]
        slots.append((Attribute(owner, PACK_METHOD), pack_image_features))
        slots.append((Attribute(namespace, _COUNT), lambda *_args, **_kwargs: None))  # tiles[:None] are all tiles
        slots.append((Attribute(namespace, "len"), _length_of_one))
    return replaced(slots)


def _packers(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    for module in model.modules():
        method = getattr(type(module), PACK_METHOD, None)
        known = method is not None and "image_newline" in inspect.signature(method).parameters
        pinpoints = getattr(getattr(module, "config", None), "image_grid_pinpoints", None)
        known = known and bool(pinpoints) and hasattr(module, "image_newline")
        if known and hasattr(sys.modules[type(module).__module__], _COUNT):
            yield module


def _length_of_one(value: Any) -> int:
    """A list along an axis of symbolic length has one element in this trace."""
    return 1 if has_symbolic_length(value) else builtins.len(value)


def _packs_the_same(module: Any, sizes: torch.Tensor) -> bool:
    """Whether rows that are all different are packed as the model packs them; all pinpoints are tried as sizes too."""
    config, count = module.config, getattr(sys.modules[type(module).__module__], _COUNT)
    side = config.vision_config.image_size // config.vision_config.patch_size
    sizes = torch.cat([sizes.cpu(), torch.tensor(config.image_grid_pinpoints)])
    counts = [count(size, config.image_grid_pinpoints, config.vision_config.image_size) for size in sizes]
    rows = torch.arange(len(counts) * max(counts) * side**2, dtype=torch.float64)
    tiles = rows.reshape(len(counts), max(counts), side**2, 1)
    newline = torch.tensor([-1.0], dtype=torch.float64)
    extra = {"vision_feature_select_strategy": "full"}
    extra = {k: v for k, v in extra.items() if k in inspect.signature(getattr(type(module), PACK_METHOD)).parameters}
    try:
        own = [image[:n] for image, n in zip(tiles, counts, strict=True)]
        expected, lengths = module.pack_image_features(own, sizes, image_newline=newline, **extra)
    except Exception:
        return False
    got, found = pack_image_features(module, [tiles.flatten(0, 1)], sizes, image_newline=newline)
    return torch.equal(torch.cat(list(expected)), got[0]) and torch.equal(lengths, found)


@dataclass(frozen=True)
class _Arrangement:
    """For each image, the best arrangement in tiles, and the padding around the image in patches."""

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
        image_features: A list of one tensor ``(images * tiles, patches, dim)``, with the same number of tiles for each
            image.
        image_sizes: Height and width of each image ``(images, 2)``.
        image_newline: The separator after each row of patches ``(dim,)``.
    """
    vision = self.config.vision_config
    side = vision.image_size // vision.patch_size
    pinpoints = torch.tensor(self.config.image_grid_pinpoints, device=image_sizes.device)
    arrangement = _arranged(image_sizes, pinpoints, vision.image_size, side)
    features = image_features[0]
    images, patches = image_sizes.shape[0], features.shape[1]
    most = [max(sizes) * side // vision.image_size for sizes in zip(*self.config.image_grid_pinpoints, strict=True)]
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


def _arranged(sizes: torch.Tensor, pinpoints: torch.Tensor, tile: int, side: int) -> _Arrangement:
    """The pinpoint that keeps most of the image and wastes least; of equal ones, the first."""
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
    """The row of features at each place of the largest arrangement, -1 for a separator; and which places are used."""
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


# Padding
#
# An encoder of images of different sizes in one padded tensor cuts each image out of the padding, and puts the patches
# of all images in one sequence. Here the patches of the whole tensor are computed, and those inside the images
# selected: the same sequence. Attention is packed attention, within the segments of images.

ENCODER_PARTS = ("patch_conv", "ln_pre", "patch_positional_embedding", "transformer", "patch_size")


def has_padded_images(model: torch.nn.Module, arguments: Mapping[str, Any]) -> bool:
    """Returns whether sizes of images are given, and an encoder cuts images of these sizes out of the padding."""
    return isinstance(arguments.get("image_sizes"), torch.Tensor) and bool(_encoders(model))


@contextlib.contextmanager
def padded_images(model: torch.nn.Module) -> Iterator[None]:
    """Replaces the forward of the encoders, and lets them attend within images."""
    encoders = _encoders(model)
    forwards = [(Attribute(cls, "forward"), as_encoder_forward(encode)) for cls in {type(e) for e in encoders}]
    with replaced(forwards), masked_segments([encoder.config for encoder in encoders]):
        yield


def _encoders(model: torch.nn.Module) -> list[Any]:
    return [
        module
        for module in model.modules()
        if all(hasattr(module, name) for name in ENCODER_PARTS)
        and "image_sizes" in forward_parameters(module)
        and hasattr(sys.modules[type(module).__module__], "generate_block_attention_mask")
    ]


def encode(self: Any, pixel_values: torch.Tensor, image_sizes: torch.Tensor, **kwargs: Any) -> Any:
    """Returns the states of the patches inside the images, ``(1, patches, hidden)``.

    Args:
        self: The encoder.
        pixel_values: Images, each in the upper left corner, ``(images, channels, height, width)``.
        image_sizes: Height and width of each ``(images, 2)``.
        kwargs: Other arguments of the layers.
    """
    embeds = self.patch_conv(pixel_values.to(self.patch_conv.weight.dtype))
    row, column = (torch.arange(size, device=embeds.device) for size in embeds.shape[-2:])
    height, width = (image_sizes // self.patch_size).unbind(-1)
    inside = (row[None, :, None] < height[:, None, None]) & (column[None, None] < width[:, None, None])
    chosen = inside.flatten().nonzero().squeeze(-1)
    patches = embeds.permute(0, 2, 3, 1).flatten(0, 2)[chosen].unsqueeze(0)
    patches = self.ln_pre(patches)
    places = torch.stack(torch.broadcast_tensors(row[:, None], column[None]), dim=-1)
    places = places.expand(*inside.shape, 2).flatten(0, 2)[chosen]
    boundaries = torch.nn.functional.pad((height * width).cumsum(0), (1, 0))
    return self.transformer(
        patches,
        attention_mask=None,
        position_embeddings=self.patch_positional_embedding(patches, places),
        cu_seq_lens_q=boundaries,
        **kwargs,
    )


# Features in embeddings
#
# Models scatter rows of features to the places of placeholder tokens. onnxruntime raises if there are fewer rows than
# such tokens: a placeholder that the model generated itself, without an image, would end the run. Eager mode leaves the
# embedding of such a token alone, and so does the graph. Eager models check that there are as many rows as tokens; a
# graph does not compute that.


@contextlib.contextmanager
def guarded_scatter(model: torch.nn.Module) -> Iterator[None]:
    """Replaces masked_scatter by one that needs no source for every place, and drops checks of counts in a trace."""
    with (
        replaced_attributes(torch.Tensor, {"masked_scatter": scatter_rows}),
        replaced_functions(model, {"torch_compilable_check": check_unless_of_values}),
    ):
        yield


def check_unless_of_values(condition: Any, *args: Any, **kwargs: Any) -> None:
    """Checks a condition as transformers does, except for conditions on values in a trace, such as counts of tokens.

    Args:
        condition: A bool or a tensor, or a callable that returns one.
        *args: The message, and the error to raise.
        **kwargs: The same by name.
    """
    from transformers.utils import torch_compilable_check  # type: ignore[attr-defined]

    if not (torch.compiler.is_exporting() and depends_on_values(condition)):
        torch_compilable_check(condition, *args, **kwargs)


def scatter_rows(self: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Returns ``self.masked_scatter(mask, source)``, with the values of ``self`` after the end of the source.

    Args:
        self: Embeddings ``(batch, seq, hidden)``, or any other tensor.
        mask: Booleans that broadcast to its shape.
        source: Values in order: whole rows where the mask selects whole rows.
    """
    width = self.shape[-1]
    mask = mask.expand(self.shape)
    if mask.stride(-1) != 0:  # single elements, which need not make up whole rows
        return _scattered(self.reshape(-1, 1), mask.reshape(-1), source.reshape(-1, 1)).reshape(self.shape)
    rows = mask[..., 0].reshape(-1)
    return _scattered(self.reshape(-1, width), rows, source.reshape(-1, width)).reshape(self.shape)


def _scattered(target: torch.Tensor, chosen: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    padded = torch.cat([source.to(target.dtype), target.new_zeros(1, target.shape[1])])  # so that it is never empty
    count = padded.shape[0] - 1
    position = chosen.to(torch.int64).cumsum(0) - 1
    wanted = (chosen & (position < count)).unsqueeze(-1)
    return torch.where(wanted, padded[position.clamp(min=0, max=count)], target)
