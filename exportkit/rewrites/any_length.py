"""Recurrent layers and ``max_pool1d`` of any length: torch takes them apart in a way that fixes what a trace sees.

An LSTM becomes as many steps as there are, and the pool asks for a number. Here they are taken apart otherwise, while
something is traced or translated. The graph has the same operators either way, and so has ONNX.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from exportkit._torch_compat.graph import decomposition_attributes, recurrent_loops
from exportkit.rewrites.attributes import replaced_attributes

aten = torch.ops.aten


@contextlib.contextmanager
def operators_at_any_length() -> Iterator[None]:
    """Lets recurrent layers and ``max_pool1d`` have inputs of symbolic length, for the time of a ``with`` block."""
    kernels = {**recurrent_loops(), aten.max_pool1d.default: _max_pool1d}
    with contextlib.ExitStack() as stack:
        for owner, attributes in decomposition_attributes(kernels):
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
