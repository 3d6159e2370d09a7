"""Sizes as keys: dictionaries and sets in which models look lengths up, such as tables of positions by length.

A symbolic size has no hash in torch. Here it has one, and is a key that no dictionary has yet, so a trace takes the
way of a length that was never seen. Where a dictionary has keys, that is a decision: sizes are compared with them, so
that the trace records on which sizes its way depends.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import operator
from collections.abc import Iterator, Mapping, MutableMapping, MutableSet, Set
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch

from exportkit._torch_compat.symbolic_shapes import traced_expression
from exportkit._torch_compat.traced_values import depends_on_values, size_in_trace
from exportkit.overrides import replaced_attributes
from exportkit.rewrites.branches import is_model_code
from exportkit.rewrites.lengths import Cached

_MOST_KEYS = 32  # each may cost some runs of the model at its size
_MOST_SIZES = 4  # in a tuple that is a key
_DEPTH = 3  # self.tables.positions
_Container = Mapping[Any, Any] | Set[Any]
_numbers = itertools.count()


@dataclass
class SizeKeys:
    """The sizes that were looked up during a trace.

    Attributes:
        skipped: Whether a container had an entry for the sizes of the trace, which the trace did not take.
    """

    skipped: bool = False
    _trace: int = field(default_factory=lambda: next(_numbers))  # a key of another trace is another one
    _containers: dict[int, _Container] = field(default_factory=dict)
    _sizes: dict[Any, torch.SymInt] = field(default_factory=dict)  # by expression
    _site: Any = None  # where the last sizes were looked up, as one tuple or one after the other
    _pending: list[torch.SymInt] = field(default_factory=list)  # these sizes
    _keys: set[tuple[int, ...]] = field(default_factory=set)  # the numbers in keys that they may meet

    def hash_of(self, size: torch.SymInt, frame: FrameType) -> int | None:
        """Returns the hash of a size; None if it is unknown where it is looked up.

        Args:
            size: The size.
            frame: The code that looks it up.
        """
        expression = traced_expression(size)
        if not is_model_code(frame.f_code.co_filename):  # an OrderedDict asks again when its keys are listed
            return hash((expression, self._trace)) if expression in self._sizes else None
        if depends_on_values(size):
            return None
        site = id(frame), frame.f_lasti
        if site != self._site:
            self.settle()
            self._site = site
        found = _containers(frame)
        self._keys |= {tuple(_numbers_in(key)) for container in found for key in container}
        equal = [size == other for known, other in self._sizes.items() if known != expression]
        if not found or len(self._keys) > _MOST_KEYS or any(equal):  # as in len({height, width})
            return None
        self._containers |= {id(container): container for container in found}
        self._sizes[expression] = size
        self._pending.append(size)
        return hash((expression, self._trace))

    def settle(self) -> None:
        """Compares the sizes that were looked up last with keys: all of a key first, then parts, as others are static.

        What is decided for a part decides for the whole, so that torch would not record it any more.
        """
        longest = min(_MOST_SIZES, len(self._pending))
        for count in range(longest, 0, -1):
            parts = {part for key in self._keys for part in itertools.combinations(key, count)}
            for start, part in itertools.product(range(len(self._pending) - count + 1), sorted(parts)):
                sizes = self._pending[start : start + count]
                if part == tuple(map(size_in_trace, sizes)):
                    self.skipped = True
                else:
                    bool(functools.reduce(operator.and_, map(operator.eq, sizes, part)))
        self._site, self._pending, self._keys = None, [], set()

    def forget(self) -> None:
        """Removes the sizes from where the trace put them."""
        for container in self._containers.values():
            if isinstance(container, MutableMapping | MutableSet) and any(map(_is_symbolic, container)):
                kept: Any = [key for key in container if not _is_symbolic(key)]
                if isinstance(container, MutableMapping):
                    kept = {key: container[key] for key in kept}
                container.clear()
                container.update(kept)  # type: ignore[union-attr]


@contextlib.contextmanager
def size_keys() -> Iterator[SizeKeys]:
    """Lets sizes be keys while a trace runs the model."""
    keys, original = SizeKeys(), torch.SymInt.__hash__

    def hash_of(size: torch.SymInt) -> int:
        expression, frame = traced_expression(size), inspect.currentframe()
        if expression.is_Integer:
            return hash(int(expression))
        found = keys.hash_of(size, frame.f_back) if frame is not None and frame.f_back is not None else None
        return original(size) if found is None else found

    with replaced_attributes(torch.SymInt, {"__hash__": hash_of}):
        try:
            yield keys
            keys.settle()
        finally:
            keys.forget()


def _containers(frame: FrameType) -> list[_Container]:
    """The dictionaries and sets that code can reach by the names in it, apart from those with other keys.

    There are none if it can reach a function with a cache: that would keep the size, and what the trace makes of it.
    """
    code, given = frame.f_code, dict(frame.f_locals)
    if code.co_flags & inspect.CO_VARKEYWORDS:
        arguments = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
        given.pop(code.co_varnames[arguments], None)
    names, found = code.co_names, list[_Container]()
    pending = [*given.values(), *code.co_consts]  # the set in ``length in {3, 5}`` is a constant
    pending += [frame.f_globals[name] for name in names if name in frame.f_globals]
    for _ in range(_DEPTH):
        if any(isinstance(value, Cached) for value in pending):
            return []
        inner = []
        for value in pending:
            is_container = isinstance(value, Mapping | Set)
            if is_container and (not value or any(_numbers_in(key) or _is_symbolic(key) for key in value)):
                found.append(value)
            inner += [vars(owner)[name] for owner in _owners(value) for name in names if name in vars(owner)]
        pending = inner
    return found


def _owners(value: Any) -> Iterator[Any]:
    """Yields what has attributes of a value: the object itself, and its classes."""
    if hasattr(value, "__dict__"):
        yield value
        if not isinstance(value, type):
            yield from type(value).__mro__


def _numbers_in(key: Any) -> list[int]:
    if isinstance(key, tuple):
        return [number for item in key for number in _numbers_in(item)]
    return [int(key)] if isinstance(key, int) and not isinstance(key, bool) else []


def _is_symbolic(key: Any) -> bool:
    return any(map(_is_symbolic, key)) if isinstance(key, tuple) else isinstance(key, torch.SymInt)
