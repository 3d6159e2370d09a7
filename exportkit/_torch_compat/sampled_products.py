"""Runs operators of torch with sampled products: of a large matrix or kernel of weights, only a part is read.

What a model does at some sizes, or with other arguments, does not depend on the values of its weights. So a question
that is answered by running the model several times can be asked of a model with sparse matrices, whose runs take a
fraction of the time.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

import torch

from exportkit._torch_compat.tracing import dispatch_mode

# A matrix of so many elements is sampled if all of them together have enough of them. Otherwise, whole products take
# less time than what is done here with each operator: exporting a Llama of 24 layers took the same time for 38 million
# elements, and exporting one of 12 layers two thirds of the time for 83 million (one thread).
LARGE = 2**18
ENOUGH = 2**26
# Convolutions read their weights once for each pixel, so sampling them pays earlier.
LARGE_KERNEL, ENOUGH_KERNELS = 2**15, 2**22
_CHANNELS = 8  # of the result that are computed; the others are like them
_GOLDEN = (math.sqrt(5) - 1) / 2


class _SampledProducts:
    """What is done with each operator; see `dispatch_mode`."""

    weights: Mapping[int, torch.Tensor]  # by address
    known: MutableMapping[torch.Tensor, dict[tuple[int, torch.Size], _Sampled]]  # by address and shape, of each weight

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Returns what an operator returns, or a sampled product."""
        aten, options = torch.ops.aten, kwargs or {}
        if func is aten.mm.default and self._is_weight(args[1]):
            return self._product(*args)
        if func is aten.addmm.default and self._is_weight(args[2]):
            shift, values, weight = args
            return shift * options.get("beta", 1) + self._product(values, weight) * options.get("alpha", 1)
        if func is aten.convolution.default and args[8] == 1 and self._is_kernel(args[1]):
            return _sampled_convolution(*args)
        return func(*args, **options)

    def _product(self, values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        sampled, key = self.known.setdefault(self.weights[weight.data_ptr()], {}), (weight.data_ptr(), weight.shape)
        if key not in sampled:
            sampled[key] = _Sampled(weight)
        return sampled[key].product(values)

    def _is_weight(self, matrix: torch.Tensor) -> bool:
        if matrix.numel() < LARGE:
            return False
        weight = self.weights.get(matrix.data_ptr())
        return weight is not None and weight.ndim == 2 and weight.numel() == matrix.numel()

    def _is_kernel(self, kernel: torch.Tensor) -> bool:
        if kernel.numel() < LARGE_KERNEL:
            return False
        weight = self.weights.get(kernel.data_ptr())
        return weight is not None and weight.shape == kernel.shape


class _Sampled:
    """A matrix with a few diagonals of a given matrix, and zeros elsewhere.

    Every row has entries. They are scaled so that products are about as large as those of the whole matrix.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        rows, columns = weight.shape
        self.columns, self.width, blocks = columns, min(rows, columns), math.ceil(columns / rows)
        self.starts = [*range(0, rows, columns)] if rows > columns else [0, round(_GOLDEN * rows) % rows]
        column = torch.arange(columns, device=weight.device)
        self.diagonals = []
        for start in self.starts:
            diagonal = weight[(column + start) % rows, column] * math.sqrt(rows / len(self.starts))
            padded = torch.nn.functional.pad(diagonal, (0, blocks * self.width - columns))
            self.diagonals.append(padded.view(blocks, self.width))

    def product(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the product of values ``(rows, inputs)`` with the matrix."""
        result = values.new_zeros(values.shape[0], *self.diagonals[0].shape)
        around = torch.cat([values, values], 1)[:, None]
        for start, diagonal in zip(self.starts, self.diagonals, strict=True):
            result.addcmul_(around.narrow(2, start, self.width), diagonal)
        return result.flatten(1)[:, : self.columns].contiguous()


def _sampled_convolution(
    values: torch.Tensor, kernel: torch.Tensor, bias: torch.Tensor | None, *options: Any
) -> torch.Tensor:
    """A convolution of which a few channels are computed. The others are multiples of these."""
    axis = 1 if options[3] else 0  # of the channels of the result; a transposed convolution has them second
    channels = kernel.shape[axis]
    few = kernel.narrow(axis, 0, min(_CHANNELS, channels))
    part: torch.Tensor = torch.ops.aten.convolution(values, few, None, *options)
    source = torch.arange(channels, device=kernel.device) % few.shape[axis]
    sums = kernel.transpose(0, axis).flatten(1).sum(1)
    shape = (-1, *[1] * (kernel.ndim - 2))
    result = part[:, source].mul_((1 + (sums - sums[source]).tanh() / 2).view(shape))
    result = result if bias is None else result.add_(bias.view(shape))
    is_last = part.ndim == 4 and not part.is_contiguous() and part.is_contiguous(memory_format=torch.channels_last)
    return result.contiguous(memory_format=torch.channels_last if is_last else torch.contiguous_format)


def sampled_products(parameters: Iterable[torch.Tensor]) -> contextlib.AbstractContextManager[Any] | None:
    """Returns a context manager in which products and convolutions with large parameters read a few of their entries.

    Each row of the result depends on the same row of the other factor, as in a whole product, and equal operators give
    equal results. Seen in torch 2.13.

    Args:
        parameters: The parameters of a model.

    Returns:
        The context manager, or None if whole products take less time.
    """
    weights = [parameter for parameter in parameters if not parameter.is_meta]
    matrices = [weight for weight in weights if weight.ndim == 2 and weight.numel() >= LARGE]
    kernels = [weight for weight in weights if weight.ndim > 2 and weight.numel() >= LARGE_KERNEL]
    read = [
        weight
        for found, enough in ((matrices, ENOUGH), (kernels, ENOUGH_KERNELS))
        for weight in (found if sum(map(torch.numel, found)) >= enough else ())
    ]
    by_address = {weight.data_ptr(): weight for weight in read}
    return dispatch_mode(_SampledProducts, weights=by_address, known=_known()) if read else None


@functools.cache
def _known() -> MutableMapping[torch.Tensor, Any]:
    """What was sampled of each weight, as long as it lives: an export asks many questions of one model."""
    from torch.utils.weak import WeakIdKeyDictionary

    return WeakIdKeyDictionary()
