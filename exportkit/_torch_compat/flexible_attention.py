"""torch.nn.attention.flex_attention: what the function calls, and how it maps a modification over places."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import torch

from exportkit._torch_compat import require

_Modification = Callable[..., torch.Tensor]
_MODULE, _OPERATORS = "torch.nn.attention.flex_attention", "torch._higher_order_ops.flex_attention"


def flexible_attention_attributes(
    operator: Callable[..., Any] | None = None, mask: Callable[..., Any] | None = None
) -> list[tuple[Any, dict[str, Any]]]:
    """Returns attributes with which ``flex_attention`` compiles nothing.

    Called outside of ``torch.compile``, the function compiles its operator for each size. In a ``TorchDispatchMode``
    that fails, and so does every later call.

    Args:
        operator: Takes the place of the operator; by default, its definition in torch, and functions that the caller
            has compiled run uncompiled as well.
        mask: Takes the place of ``create_mask``; block masks then hold what it returns, and no blocks.

    Returns:
        The attributes to replace, by owner; none if nothing has imported the function.
    """
    owner = sys.modules.get(_MODULE)
    if owner is None:
        return []
    made = {
        "flex_attention_hop": operator or require(sys.modules[_OPERATORS], "math_attention"),
        "setup_compilation_env": lambda: contextlib.nullcontext("eager"),
        "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True,
    }
    if mask is not None:
        made |= {
            "create_mask": mask,
            "_convert_mask_to_block_mask": lambda mask, **_: (mask, None),
            "_dense_to_ordered": lambda blocks: (blocks, blocks),
            "_transpose_ordered": lambda *blocks: blocks,
        }
    for name in made:
        require(owner, name)
    if operator is not None:
        return [(owner, made)]
    from torch._dynamo import eval_frame

    require(eval_frame, "_stance")
    eager = require(eval_frame, "DynamoStance")("force_eager")
    return [(owner, made), (eval_frame, {"_stance": eager})]


def changes_nothing(modification: _Modification) -> bool:
    """Returns whether this is the modification of scores, or the mask, that stands for none."""
    owner = sys.modules[_MODULE]
    return modification in (require(owner, "_identity"), require(owner, "noop_mask"))


def is_mask(modification: _Modification) -> bool:
    """Returns whether a function takes a place, and not a score as well."""
    owner = sys.modules[_MODULE]
    kind = require(owner, "_get_mod_type")(modification)
    return bool(kind is require(owner, "_ModificationType").MASK_MOD)


def mapped_over_places(modification: _Modification, scores: int) -> _Modification:
    """Returns a modification for all places, given the positions along each axis.

    Args:
        modification: Computes one value for one place.
        scores: How many arguments, before the positions, have the four axes of the scores.
    """
    owner = sys.modules[_MODULE]
    return require(owner, "_vmap_for_bhqkv")(modification, prefix=(0,) * scores)  # type: ignore[no-any-return]
