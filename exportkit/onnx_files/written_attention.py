"""Attention that a model writes out: a product, a scale, a soft cap, a mask, a softmax and another product."""

from __future__ import annotations

import math
from typing import Any

import torch

from exportkit._torch_compat.graph import TO_COPY, is_inactive_dropout

aten = torch.ops.aten

_LOWEST = torch.finfo(torch.float32).min


def written_attention(node: torch.fx.Node) -> dict[str, Any] | None:
    """Returns the arguments of the attention that a node is the last step of, by name; None if it is something else.

    Each step must have one user. ``filled`` is a mask of what is hidden, with the number that hides it.
    """
    if node.target is not aten.matmul.default:
        return None
    weights, value = node.args
    softmax = _step(weights, aten.softmax.int)
    if softmax is None or softmax.args[1] not in (-1, 3) or softmax.meta["val"].dtype is not torch.float32:
        return None
    scores = softmax.args[0]
    found = {"value": value, "attn_mask": None, "dropout_p": 0.0, "is_causal": False, "filled": None}
    if (sum_ := _step(scores, aten.add.Tensor)) is not None and not sum_.kwargs:
        for inner, mask in (sum_.args, sum_.args[::-1]):
            given = _scores(inner)
            if given is not None and _is_bias(mask, inner, sum_):
                return {**found, **given, "attn_mask": mask}
        return None
    if (fill := _step(scores, aten.masked_fill.Scalar)) is not None and fill.args[2] in (-math.inf, _LOWEST):
        given = _scores(fill.args[0])
        return None if given is None else {**found, **given, "attn_mask": fill.args[1], "filled": fill.args[2]}
    given = _scores(scores)
    return None if given is None else {**found, **given}


def _scores(value: Any) -> dict[str, Any] | None:
    """The arguments of a product of queries and keys, scaled, with a soft cap."""
    scale, softcap = 1.0, 0.0
    capped = _by_number(value, aten.mul.Tensor)
    if capped is not None and (bent := _step(capped[0], aten.tanh.default)) is not None:
        divided = _by_number(bent.args[0], aten.div.Tensor)
        if divided is None or divided[1] != capped[1] or not capped[1] > 0:
            return None
        value, softcap = divided[0], float(capped[1])
    for target, power in ((aten.mul.Tensor, 1), (aten.div.Tensor, -1)):
        if (scaled := _by_number(value, target)) is not None and scaled[1]:
            value, scale = scaled[0], scale * float(scaled[1]) ** power
    product = _step(value, aten.matmul.default)
    if product is None:
        return None
    query, turned = product.args
    if turned.target is not aten.transpose.int or {axis % 4 for axis in turned.args[1:]} != {2, 3}:
        return None
    return {"query": query, "key": turned.args[0], "scale": scale, "softcap": softcap}


def _step(value: Any, target: Any) -> Any:
    """The node that computes a value by an operator, behind steps that change nothing; None if another one does."""
    while isinstance(value, torch.fx.Node) and len(value.users) == 1 and _changes_nothing(value):
        value = value.args[0]
    is_step = isinstance(value, torch.fx.Node) and value.target is target and len(value.users) == 1
    return value if is_step else None


def _changes_nothing(value: Any) -> bool:
    if is_inactive_dropout(value):
        return True
    return (
        value.target in (aten.to.dtype, TO_COPY, aten.contiguous.default)
        and value.meta["val"].dtype is value.args[0].meta["val"].dtype
    )


def _by_number(value: Any, target: Any) -> tuple[Any, Any] | None:
    """A value and the number that it is multiplied or divided by."""
    step = _step(value, target)
    return (step.args[0], step.args[1]) if step is not None and isinstance(step.args[1], int | float) else None


def _is_bias(mask: Any, scores: Any, result: Any) -> bool:
    """Whether a value is added to scores, and not the scores to a larger value."""
    if not isinstance(mask, torch.fx.Node) or not mask.meta["val"].is_floating_point():
        return False
    return bool(result.meta["val"].shape == scores.meta["val"].shape)
