"""torch's own versions of numpy functions, whose arrays hold tensors; Dynamo traces calls of numpy with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from exportkit._torch_compat import require


def array_functions() -> Any:
    """Returns torch's module with the functions of numpy. Seen in torch 2.13."""
    return require(torch, "_numpy")


def array_type() -> Any:
    """Returns the class of arrays that these functions return. Its ``tensor`` is what they hold."""
    return require(array_functions(), "ndarray")


def array_dtype() -> type:
    """Returns the class of the dtypes of these arrays."""
    return type(array_functions().dtype("int64"))


def numbers_of_numpy_taken() -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns a dict of torch, and items for it with which its functions take numbers of numpy beside arrays.

    They take them for numbers of Python, and look their types up.
    """
    from torch._numpy import _normalizations

    normalizers: dict[str, Any] = require(_normalizations, "normalizers")

    def taking(normalize: Any) -> Any:
        def normalized(value: Any, *options: Any) -> Any:
            return normalize(np.asarray(value) if isinstance(value, np.generic) else value, *options)

        return normalized

    names = [name for name in normalizers if "Scalar" in str(name)]
    return normalizers, {name: taking(normalizers[name]) for name in names}
