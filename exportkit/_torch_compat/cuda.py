"""Runs models on CUDA as on the CPU: operators raise for invalid values, and float32 is not rounded to TF32.

On CUDA, an index that is out of bounds fails an assertion on the device, and no later operator of the process can use
the device any more. Models are run on calls for which they may raise, so this has to be an exception on CUDA, too.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch

from exportkit._torch_compat import require
from exportkit._torch_compat.graph import given_by_name, schema_of
from exportkit._torch_compat.tracing import dispatch_mode

# Operators that take an index along an axis, with the names of both; the axis is the first one where there is none.
_ALONG = {
    "embedding": ("weight", "indices", None), "_embedding_bag": ("weight", "indices", None),
    "_embedding_bag_forward_only": ("weight", "indices", None), "gather": ("self", "index", "dim"),
    "scatter": ("self", "index", "dim"), "scatter_add": ("self", "index", "dim"),
    "scatter_reduce": ("self", "index", "dim"), "index_select": ("self", "index", "dim"),
    "index_add": ("self", "index", "dim"), "index_copy": ("self", "index", "dim"),
    "index_fill": ("self", "index", "dim"), "index_reduce": ("self", "index", "dim"),
}  # fmt: skip
_BY_LIST = {"index", "index_put", "_index_put_impl", "_unsafe_index", "_unsafe_index_put"}
_NEGATIVE = {"index_fill"}  # counts from the end, too


class _IndicesChecked:
    """What is done with each operator; see `dispatch_mode`."""

    supports_higher_order_operators = True  # loops and branches run as they are
    devices: Collection[str]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Returns what an operator returns.

        Raises:
            IndexError: if an index is out of bounds.
            RuntimeError: if another value is invalid for the operator.
        """
        kwargs = kwargs or {}
        name = _checked_name(func) if isinstance(func, torch._ops.OpOverload) else ""
        if name:
            given = given_by_name(func, args, kwargs)
            if name in _OTHERS:
                _OTHERS[name](given, self._is_checked)
            for index, size, axis, least in _indices(name, given):
                if self._is_checked(index):
                    _require_inside(index, size, axis, least)
        return func(*args, **kwargs)

    def _is_checked(self, value: Any) -> bool:
        is_plain = type(value) in (torch.Tensor, torch.nn.Parameter)  # those of a trace have no values
        return is_plain and value.device.type in self.devices and value.numel() > 0


@functools.cache
def _checked_name(func: Any) -> str:
    """The name of an operator whose values are checked, otherwise ""; cached, as it is asked for every operator."""
    name = str(schema_of(func).name).removeprefix("aten::").removesuffix("_")
    return name if name in _ALONG or name in _BY_LIST or name in _OTHERS else ""


def _indices(name: str, given: dict[str, Any]) -> Iterable[tuple[Any, int, int, int]]:
    """Yields each index of an operator with the size and the number of its axis, and the least value."""
    if name in _ALONG:
        source, index, axis = _ALONG[name]
        tensor, number = given[source], given[axis] if axis else 0
        if tensor.ndim:
            yield given[index], tensor.shape[number], number, -tensor.shape[number] if name in _NEGATIVE else 0
    elif name in _BY_LIST:
        number = 0
        for index in given["indices"]:
            if index is None:
                number += 1
            elif index.dtype in (torch.bool, torch.uint8):
                number += index.ndim
            else:
                size = given["self"].shape[number]
                yield index, size, number, -size
                number += 1


def _require_inside(index: torch.Tensor, size: int, axis: int, least: int) -> None:
    low, high = index.min().item(), index.max().item()
    if low < least or high >= size:
        wrong = low if low < least else high
        raise IndexError(f"index {wrong} is out of bounds for dimension {axis} with size {size}")


def _assert_async(given: dict[str, Any], is_checked: Any) -> None:
    if is_checked(given["self"]) and not bool(given["self"].all()):
        raise RuntimeError(given.get("assert_msg", "Expected Tensor with all nonzero values."))


def _nll_loss(given: dict[str, Any], is_checked: Any) -> None:
    target, classes = given["target"], given["self"].shape[1 if given["self"].ndim > 1 else 0]
    if is_checked(target):
        kept = target[target != given["ignore_index"]]
        if kept.numel():
            _require_inside(kept, classes, 1, 0)


def _take(given: dict[str, Any], is_checked: Any) -> None:
    size = given["self"].numel()
    if is_checked(given["index"]):
        _require_inside(given["index"], size, 0, -size)


def _multinomial(given: dict[str, Any], is_checked: Any) -> None:
    weights = given["self"]
    if is_checked(weights) and not bool((weights.isfinite() & (weights >= 0)).all()):
        raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")


def _probabilities(given: dict[str, Any], is_checked: Any) -> None:
    if is_checked(given["self"]) and not bool(((given["self"] >= 0) & (given["self"] <= 1)).all()):
        raise RuntimeError("all elements of input should be between 0 and 1")


_OTHERS = {
    "_assert_async": _assert_async, "binary_cross_entropy": _probabilities, "multinomial": _multinomial,
    "nll_loss_forward": _nll_loss, "nll_loss2d_forward": _nll_loss, "take": _take,
}  # fmt: skip


def indices_checked(devices: Collection[str]) -> contextlib.AbstractContextManager[Any]:
    """Returns a context manager in which operators on devices raise the errors that they raise on the CPU.

    These are IndexError and RuntimeError, for invalid values. Checking an operator waits for the device, which takes
    time.

    Args:
        devices: Types of the devices.
    """
    return dispatch_mode(_IndicesChecked, devices=devices)


@contextlib.contextmanager
def _without_tf32() -> Iterator[None]:
    """Lets float32 be computed in float32, whatever the process is set to."""
    cudnn = torch.backends.cudnn
    with contextlib.ExitStack() as stack:
        try:  # the older settings, which raise an error where the newer ones were used
            precision, convolutions = torch.get_float32_matmul_precision(), cudnn.allow_tf32
        except RuntimeError:
            for holder in _precisions():
                stack.callback(setattr, holder, "fp32_precision", holder.fp32_precision)
                holder.fp32_precision = "ieee"
        else:
            if precision != "highest":
                stack.callback(torch.set_float32_matmul_precision, precision)
                torch.set_float32_matmul_precision("highest")
            if convolutions:
                stack.callback(setattr, cudnn, "allow_tf32", True)
                cudnn.allow_tf32 = False
        yield


def uses_tf32() -> bool:
    """Returns whether torch may round the factors of float32 products on CUDA, convolutions included, to TF32."""
    return any(holder.fp32_precision == "tf32" for holder in _precisions())


def multiplies_in_tf32() -> bool:
    """Returns whether torch may round the factors of products of float32 matrices on CUDA to TF32."""
    return bool(_precisions()[0].fp32_precision == "tf32")


def _precisions() -> list[Any]:
    """What holds the precision of float32 in matrix products, convolutions and recurrent layers."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return [matmul, *(require(cudnn, name) for name in ("conv", "rnn"))]


@contextlib.contextmanager
def as_on_cpu(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Lets operators on CUDA raise for invalid values as on the CPU, and compute float32 in float32.

    Args:
        tensors: What operators may be given; if none of it is on CUDA, nothing changes.
    """
    with contextlib.ExitStack() as stack:
        if any(tensor.is_cuda for tensor in tensors):
            stack.enter_context(_without_tf32())
            stack.enter_context(indices_checked(("cuda",)))
        yield
