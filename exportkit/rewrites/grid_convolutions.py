"""Convolutions over grids of patches in a trace: all images on one canvas, instead of one image after the other.

An encoder with convolutions reads the grids as numbers, brings the patches of each image in rows and columns, and
convolves image by image in a Python loop. Here such a module gets one grid: a canvas for each frame, as large as the
largest image, that is zero outside the image, and is set to zero again before each convolution, as zero padding does.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from exportkit._torch_compat.modules import forward_parameters
from exportkit._torch_compat.traced_values import at_least
from exportkit._torch_compat.tracing import traced_tensor_classes
from exportkit.overrides import Attribute, original_attribute, replaced
from exportkit.rewrites.grids import has_encoder_of_grids, is_in_encoder, rows_of

_Forward = Callable[..., torch.Tensor]
_EXAMPLE = ((1, 4, 8), (3, 8, 4), (1, 4, 4))  # a module must return the same for these grids


def has_convolved_grids(model: torch.nn.Module, arguments: Mapping[str, Any]) -> bool:
    """Returns whether modules of the model convolve images one by one, and return the same on a canvas."""
    modules = _convolving(model)
    return bool(modules) and has_encoder_of_grids(model, arguments) and all(map(_returns_the_same, modules))


@contextlib.contextmanager
def grids_on_a_canvas(model: torch.nn.Module) -> Iterator[None]:
    """Makes grids stay a tensor where they are read as numbers, and the modules that get them convolve a canvas."""
    classes: tuple[Any, ...] = (torch.Tensor, *traced_tensor_classes())
    slots = [(Attribute(cls, "tolist"), _tolist(cls.tolist)) for cls in classes]
    for cls in {type(module) for module in _convolving(model)}:
        forward = original_attribute(cls, "forward")
        slots.append((Attribute(cls, "forward"), functools.wraps(forward)(_on_a_canvas(forward))))
    with replaced(slots):
        yield


@dataclass(frozen=True, eq=False)
class TracedGrids:
    """Stands for the numbers of grids, which a trace does not have.

    Attributes:
        tensor: The grids ``(images, 3)``.
    """

    tensor: torch.Tensor


def _tolist(original: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    def tolist(self: torch.Tensor) -> Any:
        is_grid = self.ndim == 2 and self.shape[1] == 3 and not self.is_floating_point()
        return TracedGrids(self) if is_grid and is_in_encoder() else original(self)

    return tolist


def _convolving(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules that get patches and grids, and have convolutions of their own."""
    found = []
    for module in model.modules():
        names = forward_parameters(module)[1:3]
        if names == ["hidden_states", "grid_thw"] and _convolutions(module):
            found.append(module)
    return found


def _convolutions(module: torch.nn.Module) -> list[torch.nn.Conv2d]:
    return [part for part in module.children() if isinstance(part, torch.nn.Conv2d)]


def _returns_the_same(module: Any) -> bool:
    linear = next((part for part in module.children() if isinstance(part, torch.nn.Linear)), None)
    if linear is None or any(part.padding_mode != "zeros" for part in _convolutions(module)):
        return False
    count = sum(frames * height * width for frames, height, width in _EXAMPLE)
    weight = linear.weight
    patches = torch.randn(count, linear.in_features, generator=torch.Generator().manual_seed(0)).to(weight)
    forward = original_attribute(type(module), "forward")
    tolerance = 100 * torch.finfo(weight.dtype).eps
    try:
        with torch.no_grad():
            expected = forward(module, patches, [list(grid) for grid in _EXAMPLE])
            found = _on_a_canvas(forward)(module, patches, TracedGrids(torch.tensor(_EXAMPLE, device=weight.device)))
    except Exception:
        return False
    return torch.allclose(expected, found, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


def _on_a_canvas(forward: _Forward) -> _Forward:
    def convolved(self: Any, hidden_states: torch.Tensor, grid_thw: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not isinstance(grid_thw, TracedGrids):
            return forward(self, hidden_states, grid_thw, *args, **kwargs)
        merge = getattr(self, "spatial_merge_size", 1)
        grids = grid_thw.tensor
        frames = at_least(grids[:, 0].sum().item(), 1)
        down, across = (at_least((grids[:, axis] // merge).max().item(), 1) for axis in (1, 2))  # blocks
        rows = rows_of(grids, multiple_of=merge, count=hidden_states.shape[0])
        row, column = rows.place(merge)
        frame = (grids[:, 0].cumsum(0) - grids[:, 0])[rows.image] + rows.frame
        block = (frame * down + row // merge) * across + column // merge
        place = block * merge**2 + row % merge * merge + column % merge
        canvas = hidden_states.new_zeros(frames * down * across * merge**2, hidden_states.shape[1])
        is_filled = hidden_states.new_zeros(frames, 1, down * merge, across * merge, dtype=torch.bool)
        is_filled = is_filled.index_put((frame, torch.zeros_like(frame), row, column), is_filled.new_ones(()))

        def masked(_module: Any, args: tuple[torch.Tensor]) -> Any:
            return torch.where(is_filled, args[0], 0.0)

        with contextlib.ExitStack() as stack:
            for part in _convolutions(self):
                handle = part.register_forward_pre_hook(masked)
                stack.callback(handle.remove)
            grid = [[frames, down * merge, across * merge]]
            result = forward(self, canvas.index_copy(0, place, hidden_states), grid, *args, **kwargs)
        return result[place]

    return convolved
