"""``torch.einsum`` in the form that ONNX has: one dtype, and a letter for every axis."""

from __future__ import annotations

import functools
import string
from collections.abc import Sequence
from typing import Any

import torch

from exportkit.onnx_files.decomposition import SMALL_INTEGERS, Decomposition


def _einsum(equation: str, tensors: Sequence[torch.Tensor], **_options: Any) -> torch.Tensor:
    kind = functools.reduce(torch.promote_types, [tensor.dtype for tensor in tensors])
    computed = torch.int32 if kind in SMALL_INTEGERS else kind
    found = torch.einsum(_with_letters(equation, tensors), *[tensor.to(computed) for tensor in tensors])
    return found.to(kind)


def _is_plain(equation: str, tensors: Sequence[torch.Tensor], **_options: Any) -> bool:
    kinds = {tensor.dtype for tensor in tensors}
    is_product = len(tensors) > 1  # a sum of one operand may have another dtype
    return not is_product or ("." not in equation and len(kinds) == 1 and kinds.isdisjoint(SMALL_INTEGERS))


def _with_letters(equation: str, tensors: Sequence[torch.Tensor]) -> str:
    """The equation with letters for the axes that an ellipsis stands for, of which an operand may have fewer.

    ONNX requires the same number of them in every operand and in the result.
    """
    equation = equation.replace(" ", "")
    if "." not in equation:
        return equation
    terms, arrow, result = equation.partition("->")
    operands = terms.split(",")
    counts = [tensor.ndim - len(term.replace(".", "")) for term, tensor in zip(operands, tensors, strict=True)]
    letters = "".join(letter for letter in string.ascii_letters if letter not in equation)[: max(counts)]
    if not arrow:
        named = terms.replace(",", "").replace(".", "")
        result = "..." + "".join(letter for letter in sorted({*named}) if named.count(letter) == 1)
    written = [
        term.replace("...", letters[len(letters) - count :]) for term, count in zip(operands, counts, strict=True)
    ]
    return ",".join(written) + "->" + result.replace("...", letters)


EINSUM: dict[Any, Any] = {torch.ops.aten.einsum.default: Decomposition(_einsum, _is_plain)}
