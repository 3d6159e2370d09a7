"""Recurrent layers and pools of any length: torch takes them apart in a way that fixes the length which a trace sees.

An LSTM becomes as many steps as there are, ``max_pool1d`` asks for a number, and pools of a given output size become
averages of windows as large as they are in the trace. Here they are taken apart otherwise, while something is traced or
translated. The graph has the same operators either way, and so has ONNX where it knows them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from exportkit import _torch_compat
from exportkit.patching.attributes import replaced_attributes

aten = torch.ops.aten


@contextlib.contextmanager
def operators_at_any_length() -> Iterator[None]:
    """Lets recurrent layers and pools have inputs of symbolic length, while something is traced or translated."""
    kernels = {
        **_torch_compat.recurrent_loops(),
        aten.max_pool1d.default: _max_pool1d,
        aten.adaptive_avg_pool1d.default: _adaptive_avg_pool1d,
        aten.adaptive_avg_pool2d.default: _adaptive_avg_pool2d,
    }
    with contextlib.ExitStack() as stack:
        for owner, attributes in _torch_compat.decomposition_attributes(kernels):
            stack.enter_context(replaced_attributes(owner, attributes))
        yield


def _max_pool1d(
    inputs: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> torch.Tensor:
    """The pool over a plane that is one high, whose size torch knows without asking for a number."""
    sizes = [1, *kernel], [1, *(stride or kernel)], [0, *padding], [1, *dilation]
    return aten.max_pool2d(inputs.unsqueeze(-2), *sizes, ceil_mode).squeeze(-2)


def _adaptive_avg_pool1d(inputs: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    return _adaptive_avg_pool2d(inputs.unsqueeze(-2), [1, *sizes]).squeeze(-2)


def _adaptive_avg_pool2d(inputs: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """The averages as products with matrices; torch.onnx would take windows of the size that they have in the trace."""
    if set(sizes) == {1}:
        return inputs.mean((-2, -1), keepdim=True)
    if not any(isinstance(length, torch.SymInt) for length in inputs.shape[-2:]):
        return aten._adaptive_avg_pool2d.default(inputs, sizes)
    height, width = (_windows(length, size, inputs) for length, size in zip(inputs.shape[-2:], sizes, strict=True))
    return height @ inputs @ width.transpose(0, 1)


def _windows(length: int, size: int, like: torch.Tensor) -> torch.Tensor:
    """What each input counts for each output, (size, length): outputs are averages from i*length//size on."""
    position = torch.arange(length, device=like.device)
    output = torch.arange(size, device=like.device)[:, None]
    first, end = output * length // size, ((output + 1) * length + size - 1) // size
    return ((position >= first) & (position < end)).to(like.dtype) / (end - first)
