"""Operators whose sizes torch reads as numbers, written with operators that take sizes of any kind.

A trace would fix the sizes that they are given: ``linspace(0, 1, x.shape[1])`` asks for an int. What they compute is
what torch computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from exportkit._torch_compat.graph import scan

aten = torch.ops.aten


def _is_symbolic(*sizes: Any) -> bool:
    return any(isinstance(size, torch.SymInt) for size in sizes)


_original: dict[str, Callable[..., Any]] = {
    name: getattr(torch, name) for name in ("as_tensor", "linspace", "triu_indices", "tril_indices")
}


def _as_tensor(data: Any, **options: Any) -> Any:
    is_number = isinstance(data, torch.SymInt | torch.SymFloat | torch.SymBool)
    return torch.tensor(data, **options) if is_number else _original["as_tensor"](data, **options)


def _linspace(start: Any, end: Any, steps: Any, *, dtype: torch.dtype | None = None, **options: Any) -> Any:
    if not _is_symbolic(steps) or "out" in options or (dtype is not None and dtype.is_complex):
        return _original["linspace"](start, end, steps, dtype=dtype, **options)
    place = torch.arange(steps, dtype=torch.float64, **options)
    last = torch.full((), steps - 1, dtype=torch.float64, device=place.device)
    step = (end - start) / last.clamp(min=1)  # a single step is the start
    values = torch.where(2 * place < steps, start + step * place, end - step * (last - place))
    return values.to(dtype or torch.get_default_dtype())


def _triu_indices(row: Any, col: Any, offset: int = 0, **options: Any) -> Any:
    return _places("triu_indices", row, col, offset, lambda apart: apart >= offset, **options)


def _tril_indices(row: Any, col: Any, offset: int = 0, **options: Any) -> Any:
    return _places("tril_indices", row, col, offset, lambda apart: apart <= offset, **options)


def _places(
    name: str,
    row: Any,
    col: Any,
    offset: int,
    inside: Callable[[torch.Tensor], torch.Tensor],
    *,
    dtype: torch.dtype = torch.int64,
    device: Any = None,
    **options: Any,
) -> Any:
    """The rows and columns of a triangle."""
    if not _is_symbolic(row, col):
        return _original[name](row, col, offset, dtype=dtype, device=device, **options)
    apart = torch.arange(col, device=device) - torch.arange(row, device=device)[:, None]
    return inside(apart).nonzero().T.to(dtype)


def _tensor_split(values: torch.Tensor, sections: int, dim: int = 0) -> Any:
    """The first parts have one more than the last ones, if the length is not a multiple of their number."""
    sizes = [(values.shape[dim] + sections - 1 - part) // sections for part in range(sections)]
    return values.split(sizes, dim)


def _chunk(values: torch.Tensor, chunks: int, dim: int = 0) -> Any:
    """Slices, as ONNX splits into parts of known sizes only."""
    length = values.shape[dim]
    size = (length + chunks - 1) // chunks
    if not _is_symbolic(length):
        return values.split(size, dim) if length else [values] * chunks
    count = int((length + size - 1) // size)
    return [aten.slice(values, dim, part * size, (part + 1) * size) for part in range(count)]


def _recurrence(activation: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """A plain recurrent layer as one loop operator for each layer and direction."""

    def run(  # noqa: PLR0917 (torch's positions)
        inputs: torch.Tensor,
        first: torch.Tensor,
        weights: list[torch.Tensor],
        has_biases: bool,
        count: int,
        dropout: float,
        is_training: bool,
        is_bidirectional: bool,
        batch_first: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        values, last = inputs.transpose(0, 1) if batch_first else inputs, []
        directions, size = 2 if is_bidirectional else 1, 4 if has_biases else 2
        for layer in range(count):
            found = []
            for index in range(layer * directions, (layer + 1) * directions):
                kernel, inner, *biases = weights[index * size : (index + 1) * size]
                tokens = torch.nn.functional.linear(values, kernel, *biases[:1])
                is_reverse = index % directions == 1
                state, outputs = _run(
                    activation, inner, biases[1:], first[index], tokens.flip(0) if is_reverse else tokens
                )
                found.append(outputs.flip(0) if is_reverse else outputs)
                last.append(state)
            values = torch.cat(found, dim=-1)
            if layer < count - 1:
                values = torch.dropout(values, dropout, is_training)
        return values.transpose(0, 1) if batch_first else values, torch.stack(last)

    return run


def _run(activation: Any, weight: torch.Tensor, bias: Any, state: torch.Tensor, tokens: torch.Tensor) -> Any:
    def step(state: torch.Tensor, token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        new = activation(token + torch.nn.functional.linear(state, weight, *bias))
        return new, new.clone()

    return scan(step, state.clone(), tokens)  # a view starts at an offset, which the loop operator makes a number


# Python functions of torch by name, and kernels by composite operator.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "as_tensor": _as_tensor,
    "linspace": _linspace,
    "triu_indices": _triu_indices,
    "tril_indices": _tril_indices,
}
KERNELS: dict[Any, Callable[..., Any]] = {
    aten.chunk.default: _chunk,
    aten.tensor_split.sections: _tensor_split,
    aten.rnn_tanh.input: _recurrence(torch.tanh),
    aten.rnn_relu.input: _recurrence(torch.relu),
}
