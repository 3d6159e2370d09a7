"""What libraries do at export: torch's decompositions, and the patches of transformers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from exportkit._torch_compat.graph import decomposition_attributes, recurrent_loops
from exportkit._torch_compat.transformers import exporter_patches
from exportkit.overrides import Attribute, replaced, replaced_attributes

aten = torch.ops.aten


def operators_at_any_length() -> contextlib.AbstractContextManager[None]:
    """Decomposes recurrent layers and ``max_pool1d`` so that their inputs may have a symbolic length.

    torch makes an LSTM as many steps as there are tokens, and the pool asks for the length as a number. The graph has
    the same operators either way, and so has the ONNX file.
    """
    attributes = decomposition_attributes({**recurrent_loops(), aten.max_pool1d.default: _max_pool1d})
    return replaced([(Attribute(owner, name), value) for owner, values in attributes for name, value in values.items()])


def _max_pool1d(
    inputs: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> Any:
    """The pool over a plane of height one, whose size torch computes without asking for a number."""
    sizes = [1, *kernel], [1, *(stride or kernel)], [0, *padding], [1, *dilation]
    return aten.max_pool2d(inputs.unsqueeze(-2), *sizes, ceil_mode).squeeze(-2)


@contextlib.contextmanager
def library_patches(_model: torch.nn.Module) -> Iterator[None]:
    """Applies all export patches of transformers, and undoes them; nothing where it has none."""
    with contextlib.ExitStack() as stack:
        for backend in ("dynamo", "onnx"):
            for target, name, make in exporter_patches(backend):
                stack.enter_context(replaced_attributes(target, {name: make(getattr(target, name))}))
        yield
