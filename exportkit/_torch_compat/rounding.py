"""Runs operators of torch with rounding errors that vary from run to run, and with the tie rule of ONNX."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch

from exportkit._torch_compat.graph import given_by_name, schema_of
from exportkit._torch_compat.pytree import tree_leaves
from exportkit._torch_compat.tracing import dispatch_mode

# Operators that return numbers they were given, or none: they do not round. Operators whose results are integers or
# booleans, views, and operators without a floating-point operand are recognized without a list.
_EXACT = {
    "_to_copy", "_unsafe_view", "abs", "amax", "amin", "bernoulli", "block_diag", "cat", "ceil", "clamp", "clamp_max",
    "clamp_min", "clone", "complex", "constant_pad_nd", "copy", "diag_embed", "diagonal_scatter", "embedding",
    "empty_like", "exponential", "fill", "flip", "floor", "full_like", "gather", "hardtanh", "im2col", "index",
    "index_copy", "index_fill", "index_put", "index_select", "isfinite", "kthvalue", "lift_fresh", "masked_fill",
    "masked_scatter", "masked_select", "max", "max_pool1d", "max_pool2d", "max_pool2d_with_indices", "max_pool3d",
    "max_pool3d_with_indices", "maximum", "median", "min", "minimum", "mode", "nan_to_num", "neg", "normal",
    "ones_like", "pixel_shuffle", "pixel_unshuffle", "rand_like", "randn_like", "random", "reflection_pad1d",
    "reflection_pad2d", "reflection_pad3d", "relu", "repeat", "replication_pad1d", "replication_pad2d",
    "replication_pad3d", "resize", "roll", "round", "scatter", "select_scatter", "sgn", "sign", "slice_scatter",
    "sort", "split_with_sizes", "split_with_sizes_copy", "stack", "take", "threshold", "topk", "tril", "triu",
    "trunc", "unbind_copy", "uniform", "where", "zero", "zeros_like",
}  # fmt: skip
# Pointwise operators whose kernels add up on the way to a result that may be much smaller, and how large the terms are.
# The sigmoid of onnxruntime 1.31.1 is off by 6e-8 at -5, where it is 0.007, and its GELU by a quarter of the result.
_TERMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "erfc": torch.ones_like,
    "gelu": torch.abs,
    "sigmoid": torch.ones_like,
    "silu": torch.abs,
}
# Operators without operands that compute numbers close to zero from larger ones.
_RAMPS = {"linspace", "bartlett_window", "blackman_window", "hamming_window", "hann_window"}
# Whole numbers up to this size are left alone: counts, positions, masks and one-hot vectors are exact.
_MOST_EXACT = 2.0**20
_PART = 2**17  # elements that are changed at a time: what fits into a cache takes a third of the time


class _RoundingVaried:
    """What is done with each operator; see `dispatch_mode`."""

    seed: int
    generators: dict[torch.device, torch.Generator]
    constant: Collection[int]
    errors: float
    chooses = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Returns what an operator returns, with other rounding errors."""
        kwargs = kwargs or {}
        schema = schema_of(func)
        name = schema.name.removeprefix("aten::").removesuffix("_")
        if name in ("topk", "sort"):
            self.chooses = True
            return _first_of_equals(name, func, args, kwargs)
        if name in _RAMPS and self.errors:
            result = func(*args, **kwargs)
            if not _is_rounded(result) or not result.numel():
                return result
            if name.endswith("_window"):
                return result + self._errors(torch.ones_like(result))
            errors = self._errors(result.abs().amax().expand_as(result))
            errors[0] = errors[-1] = 0  # where torch has the given numbers
            return torch.where((result == result.round()) & (result != 0), result, result + errors)
        floats = any(isinstance(arg, torch.Tensor) and _is_rounded(arg) for arg in tree_leaves((args, kwargs)))
        if not self.errors or not floats or name in _EXACT:
            return func(*args, **kwargs)
        written = [argument.alias_info is not None for argument in schema.arguments]
        if torch.Tag.pointwise not in func.tags:  # it adds up: how exactly depends on its operands
            weights = all(map(self._is_constant, tree_leaves(args)))  # which may cancel, too
            args = tuple(a if fixed else self._varied(a, weights) for a, fixed in zip(args, written, strict=False))
            if "upsample" in name and args and isinstance(args[0], torch.Tensor):
                args = (self._moved(args[0]), *args[1:])
            if "grid_sampler" in name:
                distance = args[1].abs() + 1  # places are counted from the edges, which are at -1 and 1
                args = (args[0], args[1] + (self._varied(distance) - distance), *args[2:])
        result = func(*args, **kwargs)
        if name in _TERMS and schema.returns[0].alias_info is None:
            terms = _TERMS[name](args[0].to(torch.promote_types(args[0].dtype, torch.float32)))
            result = (result + self._errors(terms) / 2).to(result.dtype)
        if name == "_euclidean_dist":
            result = self._distances(result, *args)
        values = result if isinstance(result, tuple | list) else (result,)
        returned = schema.returns
        if len(returned) != len(values):
            return result
        found = []
        for value, info in zip(values, returned, strict=True):
            alias = info.alias_info
            if alias is None:
                found.append(self._varied(value, weights=True))
                continue
            if alias.is_write and isinstance(value, torch.Tensor) and _is_rounded(value):
                value.copy_(self._varied(value, weights=True))
            found.append(value)
        return type(result)(found) if isinstance(result, tuple | list) else found[0]

    def _moved(self, image: torch.Tensor) -> torch.Tensor:
        """The image as if it was read at coordinates, counted in pixels, that were rounded differently."""
        for axis in range(2, image.ndim):
            length = image.shape[axis]
            shape = [length] + [1] * (image.ndim - 1 - axis)
            places = torch.arange(length, dtype=image.dtype, device=image.device).view(shape)
            errors = self._varied(places + 0.5) - (places + 0.5)
            image = image + errors * image.diff(dim=axis, append=image.narrow(axis, length - 1, 1))
        return image

    def _distances(self, result: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """Distances whose squares were rounded differently: torch computes them as ``a² + b² - 2ab``, in one product.

        The error of the sum is bounded by those of its terms: one for each column, and one for each of the squares.
        """
        squares = first.square().sum(-1).unsqueeze(-1) + second.square().sum(-1).unsqueeze(-2)
        return (result.square() + self._errors(squares) * (first.shape[-1] + 2)).abs().sqrt()

    def _is_constant(self, value: Any) -> bool:
        """Whether a value is a weight, or not a number that is rounded."""
        is_rounded = isinstance(value, torch.Tensor) and not value.is_nested and _is_rounded(value)
        return not is_rounded or value.untyped_storage().data_ptr() in self.constant

    def _varied(self, value: Any, weights: bool = False) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(self._varied(part, weights) for part in value)
        if not isinstance(value, torch.Tensor) or value.is_nested or not _is_rounded(value) or not value.numel():
            return value
        if not weights and self._is_constant(value):
            return value
        if value.is_complex():
            return torch.view_as_complex(self._varied(torch.view_as_real(value), weights))
        found = torch.empty_like(value)  # as value lies in memory, if nothing is left out there
        source = value if value.stride() == found.stride() else value.contiguous()
        found = found if source is value else torch.empty_like(source)
        for part, to in zip(*(_parts(tensor) for tensor in (source, found)), strict=True):
            wide = part if part.itemsize >= 4 else part.to(torch.float32)
            errors = self._errors(wide, torch.finfo(value.dtype).eps)
            fixed = (wide == wide.round()) & (wide.abs() <= _MOST_EXACT)
            if not errors.sum().isfinite():
                fixed |= ~errors.isfinite()
            to.copy_(torch.where(fixed, part, errors.add_(wide).to(value.dtype)))
        return found

    def _errors(self, value: torch.Tensor, unit: float | None = None) -> torch.Tensor:
        """Random errors of up to one unit in the last place of each value, in its dtype if no ``unit`` is given."""
        if value.device not in self.generators:
            self.generators[value.device] = torch.Generator(value.device).manual_seed(self.seed)
        noise = torch.rand(value.shape, generator=self.generators[value.device], device=value.device, dtype=value.dtype)
        unit = torch.finfo(value.dtype).eps if unit is None else unit
        return noise.sub_(0.5).mul_(2 * self.errors * unit).mul_(value)


def _parts(value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The elements of a tensor without gaps, in the order of the memory, in parts that a processor keeps at hand."""
    size = _PART if value.device.type == "cpu" else value.numel()
    return tuple(value.as_strided((value.numel(),), (1,), value.storage_offset()).split(size))


def _is_rounded(value: torch.Tensor) -> bool:
    if value.layout is not torch.strided:
        return False
    return (value.is_floating_point() and value.itemsize > 1) or value.is_complex()


def _first_of_equals(name: str, func: Any, args: Any, kwargs: Any) -> Any:
    """The result of ``topk`` or ``sort`` that has the first of equal elements first."""
    given = given_by_name(func, args, kwargs)
    if "out" in given or "values" in given or given["self"].ndim == 0:
        return func(*args, **kwargs)
    axis, descending = given.get("dim", -1), given.get("largest", True) if name == "topk" else given.get("descending")
    if not isinstance(axis, int):
        return func(*args, **kwargs)
    ordered = torch.sort(given["self"], dim=axis, descending=bool(descending), stable=True)
    if name == "sort":
        return tuple(ordered)
    return tuple(part.narrow(axis, 0, given["k"]).contiguous() for part in ordered)


def rounding_varied(seed: int, constant: Iterable[torch.Tensor] = (), errors: float = 1.0) -> Any:
    """Returns a context manager in which every operator rounds differently, and takes the first of equal elements.

    An operator returns its result with a random relative error of up to one unit in the last place. If it adds up, its
    operands get such an error too, so that cancellation shows. ``topk`` and ``sort`` choose among equal elements as
    ONNX does: https://onnx.ai/onnx/operators/onnx__TopK.html. Seen in torch 2.13.

    Args:
        seed: For the random numbers; those that the model draws are not affected.
        constant: Tensors, such as weights, that get no error of their own, and neither do views of them.
        errors: How large the errors are, in units in the last place; 0 for the tie rule alone.
    """
    storages = {tensor.untyped_storage().data_ptr() for tensor in constant if tensor.layout is torch.strided}
    return dispatch_mode(_RoundingVaried, seed=seed, generators={}, constant=storages, errors=errors)
