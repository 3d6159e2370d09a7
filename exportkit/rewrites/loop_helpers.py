"""What the source of a loop of symbolic length refers to, in place of Python's own functions and operators."""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any

import torch

from exportkit._torch_compat.pytree import tree_map
from exportkit._torch_compat.symbolic_shapes import has_static_value
from exportkit.rewrites.loop_elements import element
from exportkit.rewrites.loop_indices import item, rows, with_item
from exportkit.rewrites.loop_lists import (
    Chunks,
    Iteration,
    Iterations,
    Stacked,
    StackedLists,
    product_of,
    segments,
    starred,
    steps_of_parts,
    turns,
    until,
)
from exportkit.rewrites.loop_names import names_of_code
from exportkit.rewrites.loop_positions import Position, exact, is_int, part_between, plain, small_exponent
from exportkit.rewrites.loop_runs import run
from exportkit.rewrites.loop_values import (
    are_equal,
    boolean,
    both,
    bunch,
    checked,
    chosen,
    either,
    extended,
    is_one_of,
    joined,
    kept,
    one_of_two,
    only_if,
    opposite,
    truth,
    written,
)
from exportkit.rewrites.symbolic_lists import Parts, SizeList, SymbolicList, as_read, range_limits
from exportkit.trees.tree import is_integer

# Iterations of a loop with a limit that may end early: fewer are traced one by one; of more, none runs after the end.
_FEWEST_ITERATIONS, _MOST_ITERATIONS = 4, 128


def _is_symbolic_size(value: Any) -> bool:
    if torch.compiler.is_dynamo_compiling():  # of an inner loop; there, symbolic sizes are of type int
        return isinstance(value, int) and not has_static_value(value)
    return isinstance(value, torch.SymInt)


class Helpers:
    """What the source of a loop refers to."""

    @staticmethod
    def steps(iterated: Any, ends_early: bool = False, flag: Any = None) -> Any:
        """Returns the iterations of a loop over something; the thing itself if its length is a number.

        Args:
            iterated: The thing.
            ends_early: Whether the loop may end before the last iteration, by the value of a tensor.
            flag: The place, among the values that iterations leave, of what is true once it has ended; None for others.
        """
        if isinstance(iterated, Iterations) and iterated.count is None:
            return iterated.ending(flag)
        if ends_early and isinstance(iterated, range) and len(iterated) >= _FEWEST_ITERATIONS:
            found = Helpers._of_range(iterated.start, iterated.stop, iterated.step)
            if len(iterated) <= _MOST_ITERATIONS:
                return found
            return iterated if flag is None else found.ending(flag)
        if isinstance(iterated, StackedLists):
            elements = iterated.elements
            return Iterations(elements, lambda element, _: element, lambda: tree_map(itemgetter(0), elements))
        if isinstance(iterated, Parts):
            return steps_of_parts(iterated)
        if isinstance(iterated, SymbolicList) and not isinstance(iterated, SizeList):  # numbers, see `tolist`
            iterated = iterated.whole()
        if isinstance(iterated, torch.Tensor) and iterated.ndim and _is_symbolic_size(iterated.shape[0]):
            return Iterations(iterated, lambda element, _: element, lambda: iterated[0])
        return iterated

    nested, starred, until = staticmethod(itertools.product), staticmethod(starred), staticmethod(until)
    turns, are_equal = staticmethod(turns), staticmethod(are_equal)

    @staticmethod
    def are_symbolic(*iterated: Any) -> bool:
        """Returns whether a loop, or each of several nested ones, has a symbolic length."""
        return all(isinstance(each, Iterations) for each in iterated)

    @staticmethod
    def range(*limits: Any) -> Any:
        """Returns the iterations of ``range``."""
        start, stop, step = range_limits(*limits)
        if not any(map(_is_symbolic_size, limits)):
            return range(*limits)
        if not all(map(is_int, limits)) or (_is_symbolic_size(step) and not start + step < stop):
            return _one_by_one(start, stop, step)
        if _is_symbolic_size(step):
            raise TypeError("the step of a loop is symbolic")
        return Helpers._of_range(start, stop, step)

    @staticmethod
    def _of_range(start: Any, stop: Any, step: int) -> Iterations:
        least, most = (start, stop - 1) if step > 0 else (stop + 1, start)

        def given(element: torch.Tensor, iteration: Iteration) -> Position:
            first = least + step if iteration.is_later and step > 0 else least
            return Position(element, first, most, is_idle=iteration.is_idle)

        return Iterations(torch.arange(start, stop, step), given, lambda: start)

    @staticmethod
    def enumerate(iterated: Any, start: int = 0) -> Any:
        """Returns the iterations of ``enumerate``."""
        steps = Helpers.steps(iterated)
        if not isinstance(steps, Iterations):
            return enumerate(steps, start)
        return Helpers.zip(Helpers.range(start, steps.count + start), steps)

    @staticmethod
    def zip(*iterated: Any, **options: Any) -> Any:
        """Returns the iterations of ``zip``."""
        all_steps = [Helpers.steps(each) for each in iterated]
        if not any(isinstance(steps, Iterations) for steps in all_steps):
            return zip(*all_steps, **options)  # noqa: B905 (the options of the caller)
        if not all(isinstance(steps, Iterations) for steps in all_steps):
            raise TypeError("zip() mixes iterables of symbolic and fixed length")
        if not all(steps.count == all_steps[0].count for steps in all_steps):
            if options.get("strict"):
                raise TypeError("zip(strict=True) gets iterables whose lengths may differ")
            count = functools.reduce(torch.sym_min, [steps.count for steps in all_steps])
            all_steps = [steps.until(count) for steps in all_steps]
        givens, firsts = [steps.given for steps in all_steps], [steps.first for steps in all_steps]
        return Iterations(
            tuple(steps.elements for steps in all_steps),
            lambda elements, iteration: tuple(
                [given(each, iteration) for given, each in zip(givens, elements, strict=True)]
            ),
            lambda: tuple([first() for first in firsts]),
        )

    @staticmethod
    def product(function: Callable[..., Any], *iterated: Any, **options: Any) -> Any:
        """Returns the iterations of ``itertools.product``, if this is the function."""
        all_steps = [Helpers.steps(each) for each in iterated] * options.get("repeat", 1)
        if not any(isinstance(steps, Iterations) for steps in all_steps):
            return function(*iterated, **options)
        if function is not itertools.product or not all(isinstance(steps, Iterations) for steps in all_steps):
            raise TypeError("itertools.product() mixes iterables of symbolic and fixed length")
        return product_of(all_steps)

    run = staticmethod(run)
    bunch, extended, joined = staticmethod(bunch), staticmethod(extended), staticmethod(joined)
    truth, is_tensor, boolean = staticmethod(truth), staticmethod(torch.is_tensor), staticmethod(boolean)
    opposite, both, either = staticmethod(opposite), staticmethod(both), staticmethod(either)
    checked = staticmethod(checked)
    is_one_of, chosen, one_of_two = staticmethod(is_one_of), staticmethod(chosen), staticmethod(one_of_two)
    written, only_if, kept = staticmethod(written), staticmethod(only_if), staticmethod(kept)
    element = staticmethod(element)
    plain, part, put = staticmethod(plain), staticmethod(part_between), staticmethod(with_item)

    @staticmethod
    def tensor(make: type, data: Any) -> Any:
        """Returns ``torch.Tensor(data)``, also of a list of symbolic length."""
        return data.whole().to(torch.get_default_dtype()) if isinstance(data, SymbolicList) else make(data)

    @staticmethod
    def reversed(iterated: Any) -> Any:
        """Returns the iterations of ``reversed``."""
        steps = Helpers.steps(iterated)
        if not isinstance(steps, Iterations):
            return reversed(steps)
        flipped = tree_map(lambda tensor: tensor.flip(0), steps.elements)

        def given(element: Any, iteration: Iteration) -> Any:
            return steps.given(element, Iteration(is_idle=iteration.is_idle))

        return Iterations(flipped, given, lambda: steps.given(tree_map(lambda tensor: tensor[0], flipped), Iteration()))

    @staticmethod
    def unbind(owner: Any, *args: Any, **options: Any) -> Any:
        """Returns the slices of a tensor, as ``owner.unbind`` does; the owner is the tensor, or ``torch``."""
        tensor, dim = _arguments_of(owner, args, options, dim=0)
        return Helpers._slices(tensor, dim, keeps_axis=False) or owner.unbind(*args, **options)

    @staticmethod
    def chunk(owner: Any, *args: Any, **options: Any) -> Any:
        """Returns the chunks of a tensor, which may be its slices."""
        tensor, count, dim = _arguments_of(owner, args, options, chunks=1, dim=0)
        is_each = isinstance(tensor, torch.Tensor) and _is_symbolic_size(count) and tensor.shape[dim] == count
        found = Helpers._slices(tensor, dim, keeps_axis=True) if is_each else None
        return found or owner.chunk(*args, **options)

    @staticmethod
    def split(owner: Any, *args: Any, **options: Any) -> Any:
        """Returns the parts of a tensor, or of a string."""
        tensor, size, dim = _arguments_of(owner, args, options, split_size=None, dim=0)
        if isinstance(tensor, torch.Tensor) and isinstance(size, SizeList):
            return segments(tensor, size.whole(), dim % tensor.ndim)
        is_number = type(size) is int and isinstance(tensor, torch.Tensor) and _is_symbolic_size(tensor.shape[dim])
        if is_number and size > 1:
            return Chunks(tensor, size, dim % tensor.ndim)
        found = Helpers._slices(tensor, dim, keeps_axis=True) if is_number and size == 1 else None
        return found or owner.split(*args, **options)

    @staticmethod
    def _slices(tensor: Any, dim: Any, keeps_axis: bool) -> Stacked | None:
        if not isinstance(tensor, torch.Tensor) or not _is_symbolic_size(tensor.shape[dim]):
            return None
        slices = tensor.movedim(dim, 0)
        return Stacked([slices.unsqueeze(dim % tensor.ndim + 1) if keeps_axis else slices])

    @staticmethod
    def tolist(value: Any, is_iterated: bool = False) -> Any:
        """Returns ``value.tolist()``, or a list of symbolic length, if the tensor has such a length.

        Args:
            value: The tensor, or the list.
            is_iterated: Whether a loop runs over it, which computes with numbers as Python does.
        """
        if isinstance(value, SizeList):
            return value.whole() if is_iterated else value
        if not (isinstance(value, torch.Tensor) and value.ndim and _is_symbolic_size(value.shape[0])):
            return value.tolist() if hasattr(value, "tolist") else value
        if is_iterated:
            return as_read(value)
        return SizeList(as_read(value)) if value.ndim == 1 and is_integer(value) else value.tolist()

    @staticmethod
    def number(value: Any) -> Any:
        """Returns a tensor without axes in place of ``value.item()``."""
        return as_read(value.reshape(())) if isinstance(value, torch.Tensor) else value.item()

    @staticmethod
    def wide(value: Any, is_compared: bool, is_float: bool) -> Any:
        """Returns a number that was read from a tensor with the range, or the precision, that it has in Python.

        Args:
            value: The number, which Python computes with.
            is_compared: Whether a comparison depends on it, so that its rounding matters.
            is_float: Whether it becomes a float.
        """
        value = plain(value)
        if not isinstance(value, torch.Tensor) or value.ndim or value.is_complex():
            return value
        if is_compared and (is_float or value.is_floating_point()):
            return value.to(torch.float64)
        return value.to(torch.int64) if value.dtype is torch.bool else value

    @staticmethod
    def view(value: Any, name: str) -> Any:
        """Returns ``value.T`` and the like by an operator: torch takes attributes of a weight for further inputs."""
        if not isinstance(value, torch.Tensor):
            return getattr(value, name)
        if name == "T":
            return value.permute([*range(value.ndim)][::-1])
        if name == "mT":
            return value.transpose(-2, -1)
        if name in ("H", "mH"):
            return value.adjoint()
        if name == "data":
            return value.detach()
        return torch.real(value) if name == "real" else torch.imag(value)

    @staticmethod
    def int(value: Any, is_read: bool) -> Any:
        """Returns a tensor without axes in place of ``int(tensor)``, and ``int(value)`` for anything else.

        Args:
            value: The number.
            is_read: Whether it is an element of a tensor. Python computes others in double precision, and may round
                them to another integer.
        """
        if not isinstance(value, torch.Tensor):
            return int(value)
        if value.is_floating_point() and not is_read:
            raise TypeError("a number that is computed from others becomes an int")
        return value.reshape(()).to(torch.int64)

    @staticmethod
    def quotient(left: Any, right: Any) -> Any:
        """Returns a tensor without axes in place of ``int(left / right)`` if one of them is a tensor."""
        left, right = plain(left), plain(right)
        is_whole = isinstance(left, torch.Tensor) and not left.is_floating_point() and is_int(right)
        if is_whole and not left.is_complex() and right > 0:
            return torch.div(left, right, rounding_mode="trunc").reshape(()).to(torch.int64)
        return Helpers.int(left / right, False)

    @staticmethod
    def power(base: Any, exponent: Any) -> Any:
        """Returns ``base ** exponent``."""
        return plain(base) ** small_exponent(base, plain(exponent))

    @staticmethod
    def shifted(number: Any, places: Any) -> Any:
        """Returns ``number << places``."""
        return plain(number) << small_exponent(number, plain(places))

    @staticmethod
    def floored(left: Any, right: Any) -> Any:
        """Returns ``left // right``."""
        return exact(left) // exact(right)

    @staticmethod
    def remainder(left: Any, right: Any) -> Any:
        """Returns ``left % right``."""
        return exact(left) % exact(right)

    @staticmethod
    def product_of_matrices(left: Any, right: Any) -> Any:
        """Returns ``left @ right``; of slices of unknown length, torch 2.13 compiles ``right @ left``."""
        return rows(left) @ rows(right)

    @staticmethod
    def item(value: Any, index: Any) -> Any:
        """Returns ``value[index]`` in the body of a loop."""
        return item(value.whole() if isinstance(value, Stacked) else value, index)

    @staticmethod
    def attribute(owner: Any, name: str, root: Any, read: tuple[str, ...]) -> Any:
        """Returns an attribute for which a loop has a local name; None if it is not set.

        Args:
            owner: What has the attribute.
            name: The attribute.
            root: The object that the body knows by name, such as ``self``.
            read: The attributes of this object that the body reads.
        """
        if owner is root:
            users = [function for each in read for function in _functions(type(root), each)]
        else:
            users = [function for each in dir(type(owner)) for function in _functions(type(owner), each)]
        for user in users:
            if _mentions(user, type(owner), name, set()):
                raise TypeError(f"the loop sets the attribute {name}, which {user.__name__}() also uses")
        return getattr(owner, name, None)

    @staticmethod
    def refuse(reason: str) -> None:
        """Raises an error."""
        raise TypeError(reason)

    @staticmethod
    def counted(start: Any, stop: Any, step: Any) -> Any:
        """Returns what the counter of a loop is after it."""
        if abs(step) == 1:
            return torch.sym_max(start, stop) if step > 0 else torch.sym_min(start, stop)
        return start + step * torch.sym_max(0, -((start - stop) // step))


def _arguments_of(owner: Any, args: tuple[Any, ...], options: dict[str, Any], **names: Any) -> list[Any]:
    """The tensor of a call of ``tensor.split`` or ``torch.split``, and its other arguments, or their defaults.

    The method itself would do, but torch cannot compile a question about one, such as ``method.__self__``.
    """
    tensor = owner
    if not isinstance(owner, torch.Tensor) and owner is not torch:  # a method of the model, or of a string
        return [None, *names.values()]
    if owner is torch:
        named = [options[name] for name in ("input", "tensor") if name in options]
        tensor, *args = [*named, *args] or [None]  # type: ignore[assignment]
    given = dict(zip(names, args, strict=False)) | options
    given |= {name: options[f"{name}_or_sections"] for name in names if f"{name}_or_sections" in options}
    return [tensor, *({**names, **given}[name] for name in names)]


def _functions(cls: type, name: str) -> list[types.FunctionType]:
    """The methods of this name in a class and its bases, or what a property calls; those of bases for ``super()``."""
    held = [vars(each)[name] for each in cls.__mro__ if name in vars(each)]
    found = [each.fget if isinstance(each, property) else getattr(each, "__func__", each) for each in held]
    return [each for each in found if isinstance(each, types.FunctionType)]


def _mentions(function: types.FunctionType, cls: type, name: str, seen: set[str]) -> bool:
    """Whether a method, or one that it calls, uses an attribute."""
    names = names_of_code(function.__code__) - seen
    seen |= names
    return name in names or any(
        _mentions(each, cls, name, seen) for called in names for each in _functions(cls, called)
    )


def _one_by_one(start: Any, stop: Any, step: Any) -> Iterator[Any]:
    """``range`` that keeps its numbers symbolic, for few iterations."""
    while start < stop:
        yield start
        start = start + step
