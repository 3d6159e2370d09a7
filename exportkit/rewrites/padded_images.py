"""Encoders of images of different sizes in one padded tensor, without a loop over the images.

Such an encoder cuts each image out of the padding and puts the patches of all in one sequence, image by image. Here the
patches of all images are computed, and those inside the images selected: the same sequence. Attention is that of
`packed_attention`, within the segments of images.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from exportkit._torch_compat.transformers import as_encoder_forward, own_attention
from exportkit.rewrites.attributes import replaced_attributes
from exportkit.rewrites.packed_attention import IMPLEMENTATION, attend_in_segments

_PARTS = ("patch_conv", "ln_pre", "patch_positional_embedding", "transformer", "patch_size")


def has_padded_images(model: torch.nn.Module, arguments: Mapping[str, Any]) -> bool:
    """Returns whether sizes of images are given, and an encoder cuts these out of the padding."""
    return isinstance(arguments.get("image_sizes"), torch.Tensor) and any(True for _ in _encoders(model))


@contextlib.contextmanager
def padded_images(model: torch.nn.Module) -> Iterator[None]:
    """Puts the forward of this module in force, in the encoders that it knows."""
    encoders = list(_encoders(model))
    with contextlib.ExitStack() as stack:
        for cls in {type(encoder) for encoder in encoders}:
            stack.enter_context(replaced_attributes(cls, {"forward": as_encoder_forward(encode)}))
        configs = [encoder.config for encoder in encoders]
        stack.enter_context(own_attention(configs, IMPLEMENTATION, attend_in_segments))
        yield


def _encoders(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    for module in model.modules():
        known = all(hasattr(module, name) for name in _PARTS)
        known = known and "image_sizes" in inspect.signature(type(module).forward).parameters
        if known and hasattr(sys.modules[type(module).__module__], "generate_block_attention_mask"):
            yield module


def encode(self: Any, pixel_values: torch.Tensor, image_sizes: torch.Tensor, **kwargs: Any) -> Any:
    """Returns the states of the patches inside the images, ``(1, patches, hidden)``.

    Args:
        self: The encoder.
        pixel_values: Images in the upper left corner ``(images, channels, height, width)``.
        image_sizes: Height and width of each ``(images, 2)``.
        kwargs: What else the layers take.
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
