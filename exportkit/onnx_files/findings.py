"""Operators whose values in onnxruntime are not always torch's: a finding for each that a program contains.

The operators and values are those that ``make conformance`` finds, less those that have a translation of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from exportkit._torch_compat.graph import arguments_of, dtype_of, nodes_in, operator_name
from exportkit.plan.leaves import Finding


def operator_findings(program: torch.export.ExportedProgram, translated: torch.onnx.ONNXProgram) -> list[Finding]:
    """Returns a finding for each kind of operator that onnxruntime computes differently for some values.

    Args:
        program: As torch.export returned it.
        translated: What it was translated to; its program has the operators that torch.onnx decomposed it to.
    """
    found: dict[str, list[str]] = {}
    for name, node in [*_operators(program), *_operators(translated.exported_program)]:
        for concerned, values, concerns in _VALUES:
            names = found.setdefault(values, [])
            if name in concerned.split() and name not in names and (concerns is None or concerns(node)):
                names.append(name)
    texts = {", ".join(sorted(names)): values for values, names in found.items() if names}
    return [Finding("operator", names, f"onnxruntime, {names}: {values}.") for names, values in texts.items()]


def _operators(program: torch.export.ExportedProgram | None) -> Iterator[tuple[str, torch.fx.Node]]:
    for node in nodes_in(program.graph_module) if program is not None else ():
        if name := operator_name(node.target):
            yield name, node


def _argument(name: str, node: torch.fx.Node) -> Any:
    """An argument of a node by name; None if it is left out."""
    return arguments_of(node).get(name)


def _returns_integers(node: torch.fx.Node) -> bool:
    return dtype_of(node) is torch.int64


def _has_rare_order(node: torch.fx.Node) -> bool:
    order = _argument("ord", node)
    return order is not None and order not in (0, 1, 2) and abs(order) != float("inf")


_Condition = Callable[[torch.fx.Node], bool]

# Names of operators, what is different, and which uses of them it concerns; None for all.
_VALUES: tuple[tuple[str, str, _Condition | None], ...] = (
    (
        "max_pool1d max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices "
        "adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d max_pool2d_with_indices_backward",
        "NaN in the input is ignored, where torch returns NaN; minus infinity beside padding becomes the lowest number",
        None,
    ),
    (
        "topk sort argsort msort kthvalue",
        "NaN is not ordered as the largest value, and indices of equal values may be in a different order",
        None,
    ),
    (
        "group_norm native_group_norm",
        "with infinite inputs, some results are infinite instead of NaN",
        None,
    ),
    (
        "upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d",
        "next to infinite inputs, infinities and NaN may stand for each other",
        None,
    ),
    (
        "_upsample_bilinear2d_aa _upsample_bicubic2d_aa",
        "with align_corners, values differ",
        lambda node: bool(_argument("align_corners", node)),
    ),
    (
        "avg_pool2d avg_pool3d",
        "with divisor_override and ceil_mode, values differ",
        lambda node: bool(_argument("divisor_override", node)),
    ),
    (
        "grid_sampler grid_sampler_2d grid_sampler_3d",
        "NaN and infinities in the grid pick different pixels",
        None,
    ),
    ("linalg_vector_norm", "powers of small and large values are lost", _has_rare_order),
    ("scatter_reduce index_reduce", "NaN may be ignored where the largest or smallest is kept", None),
    ("lerp", "with infinite inputs, some results are infinite instead of NaN", None),
    ("multi_margin_loss multilabel_margin_loss", "NaN and infinities are included where torch leaves them out", None),
    ("stft istft _fft_r2c _fft_c2r _fft_c2c", "NaN and infinities spread to all results", None),
    ("elu celu selu", "results of inputs between -1e-3 and 0 have an absolute error of up to 6e-8", None),
    ("unique_dim unique _unique2 unique_consecutive", "rows that contain NaN are treated as equal", None),
    ("logspace", "with a tensor as a limit and a single step, the result has no axis", None),
    (
        "bucketize searchsorted",
        "places among limits that are not sorted differ; with neither limits nor values, the shape differs",
        None,
    ),
    (
        "cholesky_solve linalg_solve_triangular",
        "for a matrix that is singular or not positive definite, there are infinities or NaN",
        None,
    ),
    (
        "pow",
        "powers of odd integers differ where exponents are above 63",
        lambda node: _returns_integers(node) and isinstance(_argument("exponent", node), torch.fx.Node),
    ),
    ("_unsafe_masked_index", "an index that is out of range picks a different element", None),
    (
        "prod cumprod addbmm einsum trace",
        "64-bit integers beyond 2^53 are rounded",
        _returns_integers,
    ),
)
