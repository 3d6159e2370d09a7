"""Constants in translations, and the axes that an operator is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir
from onnxscript import opset18

op: Any = opset18  # its annotations know values of one graph, not numbers


def constant(value: Any, dtype: onnx_ir.DataType) -> Any:
    """Returns a number, or a list of numbers, as a value of a dtype."""
    return op.Constant(value=onnx_ir.tensor(value, dtype=dtype))


def number(value: float, like: Any) -> Any:
    """Returns a number with the dtype of an argument. Values that a translation itself makes have no known dtype."""
    return constant(value, like.dtype)


def ints(*values: int) -> Any:
    """Returns integers as a list, such as axes or sizes."""
    return op.Constant(value_ints=list(values))


def axes_of(dim: int | Sequence[int] | None, rank: int) -> list[int]:
    """Returns the axes that a reduction is given as a list; all of them if it is given none."""
    if isinstance(dim, int):
        return [dim]
    return [*(dim or range(rank))]
