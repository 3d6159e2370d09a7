"""Runs operators of torch with sampled products: of a large matrix of weights, only a few entries are read.

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
        return weight is not None and weight.numel() == matrix.numel()


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


def sampled_products(parameters: Iterable[torch.Tensor]) -> contextlib.AbstractContextManager[Any] | None:
    """Returns a context manager in which products with large parameters read a few of their entries.

    Each row of the result depends on the same row of the other factor, as in a whole product, and equal operators give
    equal results. Seen in torch 2.13.

    Args:
        parameters: The parameters of a model.

    Returns:
        The context manager, or None if whole products take less time.
    """
    large = {p.data_ptr(): p for p in parameters if p.ndim == 2 and p.numel() >= LARGE and not p.is_meta}
    if sum(map(torch.numel, large.values())) < ENOUGH:
        return None
    return dispatch_mode(_SampledProducts, weights=large, known=_known())


@functools.cache
def _known() -> MutableMapping[torch.Tensor, Any]:
    """What was sampled of each weight, as long as it lives: an export asks many questions of one model."""
    from torch.utils.weak import WeakIdKeyDictionary

    return WeakIdKeyDictionary()
