"""Quantisation that a trace cannot enter: the same arithmetic with other operators of torch."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import torch

from exportkit.overrides import ChildOf, replaced

# As torch chooses the steps that inputs are rounded to; it leaves out one of 8 bits, so that kernels do not overflow.
_LEVELS = 127.0
_LEAST_STEP = 6.1e-5


class _DynamicLinear(torch.nn.Module):
    """A linear layer with weights of 8 bits, whose input is rounded to 7 bits between its extremes."""

    weight: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor

    def __init__(self, layer: Any) -> None:
        super().__init__()
        weight, self.bias = layer.weight(), layer.bias()
        by_row = weight.qscheme() in (torch.per_channel_affine, torch.per_channel_affine_float_qparams)
        scale = weight.q_per_channel_scales()[:, None] if by_row else torch.tensor(weight.q_scale())
        zero = weight.q_per_channel_zero_points()[:, None] if by_row else torch.tensor(weight.q_zero_point())
        for name, value in (("weight", weight.int_repr()), ("scale", scale.float()), ("zero", zero.float())):
            self.register_buffer(name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low, high = -x.amin().double().neg().relu(), x.amax().double().relu()
        step = (high - low) / _LEVELS
        zero = torch.where(step == 0, 0.0, -low / step).round().float()
        step = torch.where(step == 0, 0.1, torch.where(step < _LEAST_STEP, _LEAST_STEP, step))
        step = step.float()
        rounded = ((x * (1 / step)).round() + zero).clamp(0.0, _LEVELS) - zero
        weight = (self.weight.float() - self.zero) * self.scale
        return torch.nn.functional.linear(rounded * step, weight, self.bias)


def layers_of(model: torch.nn.Module) -> list[tuple[str, Any]]:
    """Returns the parts of a model that are quantised dynamically, with their paths."""
    module = sys.modules.get("torch.ao.nn.quantized.dynamic")  # imported if there is such a layer
    kinds = () if module is None else (module.Linear,)
    found = [(name, part) for name, part in model.named_modules() if name and type(part) in kinds]
    return [(name, part) for name, part in found if part.weight().is_quantized]


def dynamic_layers(model: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
    """Replaces dynamically quantised layers by layers that can be traced."""
    replacements = []
    for path, layer in layers_of(model):
        parent, _, name = path.rpartition(".")
        replacements.append((ChildOf(model.get_submodule(parent), name), _DynamicLinear(layer)))
    return replaced(replacements)


def _rounded(values: torch.Tensor, scale: Any, zero: Any, low: int, high: int) -> Any:
    """Numbers as the nearest of a few levels."""
    scale, zero = (torch.as_tensor(value, dtype=torch.float32) for value in (scale, zero))
    levels = ((values.float() * scale.reciprocal()).round() + zero).clamp(low, high)
    return ((levels - zero) * scale).to(values.dtype)


def _rounded_by_channel(
    values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, axis: int, low: int, high: int
) -> Any:
    shape = [-1 if other == axis % values.ndim else 1 for other in range(values.ndim)]
    return _rounded(values, scale.view(shape), zero.view(shape), low, high)


# Kernels by composite operator.
FAKE_QUANTISATION: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.fake_quantize_per_tensor_affine.default: _rounded,
    torch.ops.aten.fake_quantize_per_tensor_affine.tensor_qparams: _rounded,
    torch.ops.aten.fake_quantize_per_channel_affine.default: _rounded_by_channel,
}
