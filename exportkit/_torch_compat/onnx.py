"""torch.onnx and onnxscript: their messages, and the tolerances of their optimiser."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def quiet_onnx_export() -> Iterator[None]:
    """Silences log messages and warnings of torch's ONNX exporter. Seen in torch 2.13, onnxscript 0.7."""
    import logging
    import warnings

    levels = {}
    for logger in map(logging.getLogger, ("torch.onnx", "onnxscript", "onnx_ir")):
        levels[logger] = logger.level
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


def exact_no_ops() -> list[tuple[Any, dict[str, float]]]:
    """Returns the attributes to replace, each with its owner, so that ``x + epsilon`` is never optimised away.

    onnxscript removes ``x + 0`` and ``x * 1``, and takes every constant up to 1e-8 for zero, the epsilon of a norm
    among them. Seen in onnxscript 0.7; the list is empty for versions without these tolerances.
    """
    try:
        from onnxscript.rewriter.rules.common import _no_op

        values = [value for rule in _no_op.rules.rules for node in rule._target_pattern for value in node.inputs]
    except (ImportError, AttributeError):
        return []
    exact = {"_abs_tol": 0.0, "_rel_tol": 0.0}
    return [(value, exact) for value in values if exact.keys() <= vars(value).keys()]
