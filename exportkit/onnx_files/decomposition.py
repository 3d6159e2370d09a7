"""What an operator of torch is decomposed to before the translation, and which uses of it stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Function = Callable[..., Any]
SMALL_INTEGERS = (torch.bool, torch.int8, torch.int16, torch.uint8)


@dataclass(frozen=True)
class Decomposition:
    """A function that computes an operator with other operators, unless torch.onnx translates the use correctly.

    Attributes:
        function: Takes the arguments of the operator.
        is_plain: Takes the same arguments, and returns whether the operator stays.
    """

    function: Function
    is_plain: Callable[..., bool]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the result, or ``NotImplemented`` for a use that stays."""
        return NotImplemented if self.is_plain(*args, **kwargs) else self.function(*args, **kwargs)


def applies_to(function: Function, node: torch.fx.Node) -> bool:
    """Returns whether a decomposition may replace the operator of a node."""
    if not isinstance(function, Decomposition) or not all("val" in other.meta for other in node.all_input_nodes):
        return True
    args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), lambda other: other.meta["val"])
    return not function.is_plain(*args, **kwargs)


def either(*functions: Function) -> Function:
    """Returns the result of the first function that does not return ``NotImplemented``."""

    def found(*args: Any, **kwargs: Any) -> Any:
        results = (function(*args, **kwargs) for function in functions)
        return next((result for result in results if result is not NotImplemented), NotImplemented)

    return functions[0] if len(functions) == 1 else found


def computed_in(dtype: torch.dtype, operator: Function) -> Function:
    """Returns an operator that computes in a dtype; its result has the dtype that the operator itself would return.

    Args:
        dtype: The dtype to compute in. Tensors of the same kind (floating-point or integer) are converted to it.
        operator: Returns a tensor of the dtype that it computes in.
    """

    def computed(values: torch.Tensor, *others: Any, **named: Any) -> Any:
        kind = values.dtype
        if dtype.is_floating_point and not kind.is_floating_point:
            kind = torch.get_default_dtype()
        whole = [_converted(other, dtype) for other in others]
        return operator(values.to(dtype), *whole, **named).to(kind)

    return computed


def _converted(value: Any, dtype: torch.dtype) -> Any:
    is_of_kind = isinstance(value, torch.Tensor) and value.is_floating_point() is dtype.is_floating_point
    return value.to(dtype) if is_of_kind else value


def not_of(*dtypes: torch.dtype) -> Callable[..., bool]:
    """Returns a condition for `Decomposition.is_plain`: the first argument has none of these dtypes."""
    return lambda values, *_, **__: values.dtype not in dtypes
