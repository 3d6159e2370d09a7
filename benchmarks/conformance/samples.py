"""Samples of torch's operators, from torch's own database, and the edge values that are put into them.

Samples of one operator and dtype form one model, which takes the tensors of all samples in a row: exporting it costs
little more than exporting a single sample.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import optree
import torch

Tensors = tuple[torch.Tensor, ...]

# The size of the samples' tensors; a few samples are much larger, and slow.
_LARGEST = 100_000


@dataclass(frozen=True)
class Sample:
    """One call of an operator: its tensors, and everything else with the structure of the arguments."""

    function: Any
    leaves: tuple[Any, ...]
    structure: optree.PyTreeSpec

    @classmethod
    def of(cls, function: Any, given: Any) -> Sample:
        """Returns the sample for one SampleInput of torch."""
        leaves, structure = optree.tree_flatten((given.input, tuple(given.args), dict(given.kwargs)), none_is_leaf=True)
        return cls(function, tuple(leaves), structure)

    @property
    def tensors(self) -> Tensors:
        """The tensors among the arguments."""
        return tuple(leaf.detach().clone() for leaf in self.leaves if isinstance(leaf, torch.Tensor))

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the tensors that the operator returns."""
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        first, args, kwargs = optree.tree_unflatten(self.structure, leaves)
        returned = optree.tree_leaves(self.function(first, *args, **kwargs))
        return [leaf for leaf in returned if isinstance(leaf, torch.Tensor)]

    @property
    def kind(self) -> str:
        """What tells this sample from others of the operator: ranks of tensors, and all other arguments."""
        return str([f"{leaf.dtype}{leaf.ndim}" if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves])


class Samples(torch.nn.Module):
    """A model that runs several samples."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        super().__init__()
        self.samples = list(samples)

    @property
    def tensors(self) -> Tensors:
        """The tensors of all samples."""
        return tuple(tensor for sample in self.samples for tensor in sample.tensors)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(result for results in self.results(tensors) for result in results)

    def results(self, tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Returns the results of each sample."""
        given = iter(tensors)
        return [sample.run(list(itertools.islice(given, len(sample.tensors)))) for sample in self.samples]


def samples_of(operator: Any, dtype: torch.dtype, count: int) -> list[Sample]:
    """Returns some samples of an operator, as different as possible.

    Args:
        operator: The OpInfo.
        dtype: The dtype of the samples.
        count: How many.
    """
    found: dict[str, Sample] = {}
    torch.manual_seed(0)
    for given in itertools.islice(operator.sample_inputs("cpu", dtype, requires_grad=False), 200):
        sample = Sample.of(operator.op, given)
        tensors = sample.tensors
        strided = all(tensor.layout == torch.strided and not tensor.is_quantized for tensor in tensors)
        if strided and sum(tensor.numel() for tensor in tensors) <= _LARGEST:
            found.setdefault(sample.kind, sample)
    known = list(found.values())
    return [known[round(i * (len(known) - 1) / max(count - 1, 1))] for i in range(min(count, len(known)))]


def value_sets(tensors: Tensors, dtype: torch.dtype) -> Iterator[tuple[str, Tensors]]:
    """Yields the edge values for tensors of a dtype, each with its name; other tensors keep their values."""
    for name, pattern in _patterns(dtype).items():
        yield (
            name,
            tuple(
                _filled(tensor, pattern, start) if tensor.dtype == dtype else tensor
                for start, tensor in enumerate(tensors)
            ),
        )


def _patterns(dtype: torch.dtype) -> dict[str, list[float | None]]:
    """Values by name; None leaves an element as it is."""
    if dtype == torch.bool:
        return {"all true": [True], "all false": [False]}
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        large = [min(2**bits + 1, limits.max) for bits in (24, 31, 53)]
        extremes: list[float | None] = [limits.min, limits.max, 0, -1, 1] if limits.min else [limits.max, 0, 1]
        negative: dict[str, list[float | None]] = {"negative": [-3, -1, 7, -8, 2]} if limits.min else {}
        return {"extremes": extremes, "large": [*large, 3], "ties": [1, 1, 2, 2, 1], **negative}
    limits = torch.finfo(dtype)
    return {
        "NaN": [None, None, float("nan")],
        "infinity": [None, float("inf"), None, -float("inf")],
        "zeros": [0.0, -0.0, None],
        "tiny": [1e-7, limits.tiny / 16, -1e-7, -limits.tiny / 16, 3e-8],
        "large": [min(value, limits.max / 8) * sign for value in (1e8, 100.0, 20000001.0) for sign in (1, -1)],
        "extremes": [limits.max, limits.min, limits.tiny, None],
        "ties": [0.5, 0.5, 1.5, 2.5, -0.5, -0.5],
    }


def _filled(tensor: torch.Tensor, pattern: Sequence[float | None], start: int) -> torch.Tensor:
    """The tensor with the pattern in its elements, again and again, from one of the pattern's values on."""
    flat = tensor.flatten().tolist()
    values = [pattern[(start + i) % len(pattern)] for i in range(len(flat))]
    filled = [old if new is None else new for old, new in zip(flat, values, strict=True)]
    return torch.tensor(filled, dtype=tensor.dtype).reshape(tensor.shape)


def size_sets(tensors: Tensors, dynamic: Sequence[bool]) -> Iterator[tuple[str, Tensors]]:
    """Yields the tensors with other sizes of the axes that are dynamic, each with its name.

    Args:
        tensors: The tensors.
        dynamic: Which of them have a first axis of any size.
    """
    sizes = {"twice the rows": lambda x: torch.cat([x, x]), "one row": lambda x: x[:1], "no rows": lambda x: x[:0]}
    for name, resize in sizes.items() if any(dynamic) else ():
        yield name, tuple(resize(x) if varies else x for x, varies in zip(tensors, dynamic, strict=True))
