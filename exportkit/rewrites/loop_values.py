"""What a loop computes while it is traced: tests of tensors, values that a test chooses, and what iterations add to.

The source of a loop calls these functions in place of Python's operators and branches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from exportkit._torch_compat.pytree import tree_flatten, tree_unflatten
from exportkit._torch_compat.traced_values import asserted
from exportkit.rewrites.branches import EQUALITIES
from exportkit.rewrites.loop_lists import Stacked, parts_of
from exportkit.rewrites.loop_positions import Position, is_int, plain
from exportkit.rewrites.symbolic_lists import SymbolicList

CAUGHT = "the error of a check in a loop may be caught"
# Stands for what no iteration has added yet to a list: it is taken for whatever one adds, which the count leaves out.
NOTHING = "nothing yet"


def truth(value: Any) -> Any:
    """Returns whether a value counts as true, as a tensor without axes if it is a tensor."""
    value = plain(value)
    if not isinstance(value, torch.Tensor):
        return value
    value = value.reshape(())
    return value if value.dtype is torch.bool else value != 0


def checked(value: Any, passing: bool, is_idle: torch.Tensor | str | None) -> Any:
    """Returns the tested value unless it is a tensor, which is asserted to be ``passing``; that is returned then.

    Args:
        value: What the check tests.
        passing: What it has to be.
        is_idle: Whether the iteration changes nothing, so that it may be anything; `CAUGHT` if no error is to be made
            of the check.
    """
    value = truth(value)
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(is_idle, str):
        raise TypeError(is_idle)
    passes = value if passing else ~value
    asserted(passes if is_idle is None else passes | is_idle, "a check in a loop")
    return passing


def boolean(value: Any) -> Any:
    """Returns ``bool(value)``, as a tensor if the value is one."""
    return truth(value) if isinstance(plain(value), torch.Tensor) else bool(value)


def are_equal(owner: Any, name: str, *args: Any, **options: Any) -> Any:
    """Returns what ``torch.equal`` or ``torch.allclose`` returns for tensors of the same shape, as a tensor.

    Args:
        owner: What has the function: torch, a tensor, or something else, whose function is called.
        name: The name of the function.
        *args: Its arguments.
        **options: Those with names.
    """
    values = [plain(value) for value in (args if owner is torch else (owner, *args))]
    if len(values) < 2 or not all(isinstance(value, torch.Tensor) for value in values[:2]):
        return getattr(owner, name)(*args, **options)
    left, right = values[:2]
    is_alike = left.ndim == right.ndim and all(left.shape[axis] == right.shape[axis] for axis in range(left.ndim))
    return False if name == "equal" and not is_alike else EQUALITIES[name](*values, **options).all()


def opposite(value: Any) -> Any:
    """Returns ``not value``."""
    value = truth(value)
    return ~value if isinstance(value, torch.Tensor) else not value


def both(value: Any, other: Callable[..., Any], numbers: tuple[Any, ...]) -> Any:
    """Returns ``value and other(*numbers)`` in a test."""
    value = truth(value)
    if not isinstance(value, torch.Tensor):
        return value and other(*numbers)
    second = truth(other(*[only_if(number, value, True) for number in numbers]))
    if isinstance(second, torch.Tensor):
        return value & second
    # beside a tensor, torch makes a constant of a condition on sizes
    return value if second else torch.zeros_like(value)


def either(value: Any, other: Callable[..., Any], numbers: tuple[Any, ...]) -> Any:
    """Returns ``value or other(*numbers)`` in a test."""
    return opposite(both(opposite(value), lambda *given: opposite(other(*given)), numbers))


def is_one_of(value: Any, items: tuple[Any, ...]) -> Any:
    """Returns ``value in items``."""
    value = plain(value)
    if not isinstance(value, torch.Tensor):
        return value in items
    none = torch.zeros_like(value, dtype=torch.bool)
    return functools.reduce(lambda found, each: found | truth(value == plain(each)), items, none)


def as_tensor(value: Any) -> Any:
    """Returns a number as a tensor, as precise as it is in Python; other values as they are."""
    if isinstance(value, float):
        return torch.as_tensor(value, dtype=torch.float64)
    return torch.as_tensor(value) if isinstance(value, int) else value


def kept(value: Any) -> Any:
    """Returns what an iteration gets, with its number as a tensor, for the code after the loop."""
    return torch.as_tensor(plain(value)) if is_int(value) else plain(value)


def written(old: Any, new: Any) -> Any:
    """Returns a tensor that a decision changes in place as the same object, but in the body of a loop operator."""
    is_same = isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor) and old.dtype == new.dtype
    if torch.compiler.is_dynamo_compiling() or new is old or not is_same or old.ndim != new.ndim:
        return new
    return old.copy_(new)


def only_if(value: Any, test: torch.Tensor, holds: bool) -> Any:
    """Returns a value for one side of a decision: an iteration's number indexes nothing unless ``test == holds``."""
    if not isinstance(value, Position):
        return value
    is_idle = ~test if holds else test
    is_idle = is_idle if value.is_idle is None else is_idle | value.is_idle
    return Position(value.base, value.least, value.most, factor=value.factor, offset=value.offset, is_idle=is_idle)


def one_of_two(test: Any, first: Callable[..., Any], other: Callable[..., Any], numbers: tuple[Any, ...]) -> Any:
    """Returns ``first(*numbers) if test else other(*numbers)``."""
    test = truth(test)
    if not isinstance(test, torch.Tensor):
        return first(*numbers) if test else other(*numbers)
    sides = [f(*[only_if(number, test, holds) for number in numbers]) for f, holds in ((first, True), (other, False))]
    return chosen(test, *sides)


def chosen(test: torch.Tensor, first: Any, other: Any) -> Any:
    """Returns nested values chosen by a test."""
    (firsts, form), (others, other_form) = tree_flatten(first), tree_flatten(other)
    if form != other_form:
        raise TypeError("the branches of an `if` assign values of different structures to one name")
    return tree_unflatten([_chosen(test, a, b) for a, b in zip(firsts, others, strict=True)], form)


def _chosen(test: torch.Tensor, first: Any, other: Any) -> Any:
    first, other = plain(first), plain(other)
    for one, two in ((first, other), (other, first)):
        if isinstance(one, str) and one == NOTHING:
            return two
    if first is other or (type(first) is type(other) and isinstance(first, int | float | str) and first == other):
        return first
    if any(isinstance(each, bool) for each in (first, other)):
        first, other = torch.as_tensor(first), torch.as_tensor(other)
    elif all(isinstance(each, int | float) for each in (first, other)) and float in (type(first), type(other)):
        first, other = as_tensor(float(first)), as_tensor(float(other))
    kinds = torch.Tensor | int | float | torch.SymInt | torch.SymFloat
    if not isinstance(first, kinds) or not isinstance(other, kinds):
        raise TypeError("the branches of an `if` assign values to one name that are not tensors")
    if isinstance(first, torch.Tensor) and isinstance(other, torch.Tensor):
        if first.dtype != other.dtype or first.ndim != other.ndim:
            raise TypeError("the branches of an `if` assign tensors of different dtypes or ranks to one name")
        if any(first.shape[axis] != other.shape[axis] for axis in range(first.ndim)):
            raise TypeError("the branches of an `if` assign tensors of different shapes to one name")
    return torch.where(test, first, other)


def bunch(items: Any) -> torch.Tensor:
    """Returns what an iteration adds to a list as one tensor."""
    if isinstance(items, SymbolicList):
        return items.whole()
    return torch.stack([torch.as_tensor(plain(each)) for each in items])


def extended(items: Any, bunches: Stacked) -> Stacked:
    """Returns a list to which every iteration adds several elements."""
    return Stacked([*parts_of(items), *[part.flatten(0, 1) for part in bunches.parts]])


def joined(tensor: Any, elements: SymbolicList, dim: Any, in_front: bool) -> torch.Tensor:
    """Returns what a tensor becomes to which every iteration adds a slice; None for a tensor that the loop begins."""
    new = elements.joined(dim)
    if tensor is None:
        return new
    return torch.cat([new, tensor] if in_front else [tensor, new], dim)
