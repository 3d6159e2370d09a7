"""Sizes as keys: dictionaries and sets in which models look lengths up, such as tables of positions by length.

A symbolic size has no hash in torch. Here it has one, and is a key that no dictionary has yet, so a trace takes the
cache-miss branch. Where a dictionary has keys, that is a decision: sizes are compared with them, so that the trace
records on which sizes its decisions depend.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import itertools
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, MutableSet, Set
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch

from exportkit._torch_compat.symbolic_shapes import traced_expression
from exportkit._torch_compat.traced_values import depends_on_values, size_in_trace
from exportkit.overrides import replaced_attributes
from exportkit.rewrites.lengths import Cached
from exportkit.rewrites.model_code import is_model_code, parsed

_MOST_KEYS = 32  # each may cost some runs of the model at its size
_MOST_SIZES = 4  # in a tuple that is a key
_DEPTH = 4  # self.encoder.tables[0]
_MOST_ITEMS = 64
_DIGITS = re.compile(r"\d{1,9}")
_LOOKS_UP = {"getattr", "hasattr", "get_buffer", "get_parameter", "get_submodule"}
_Container = Mapping[Any, Any] | Set[Any]
_numbers = itertools.count()


@dataclass
class SizeKeys:
    """The sizes that were looked up during a trace.

    Attributes:
        skipped: Whether a container had an entry for the sizes of the trace, which the trace did not take.
    """

    skipped: bool = False
    _trace: int = field(default_factory=lambda: next(_numbers))  # keys of different traces differ
    _containers: dict[int, _Container] = field(default_factory=dict)
    _sizes: dict[Any, torch.SymInt] = field(default_factory=dict)  # by expression
    _line: Any = None  # where the last sizes were looked up, as one tuple or one after the other
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
        self._go_to(frame)
        found = _containers(frame)
        self._keys |= {tuple(_numbers_in(key)) for container in found for key in container}
        equal = [size == other for known, other in self._sizes.items() if known != expression]
        is_long = any(len(numbers) > 2 * _MOST_SIZES for numbers in self._keys)
        if not found or is_long or len(self._keys) > _MOST_KEYS or any(equal):  # as in len({height, width})
            return None
        self._containers |= {id(container): container for container in found}
        self._sizes[expression] = size
        self._pending.append(size)
        return hash((expression, self._trace))

    def note_text(self, size: torch.SymInt, frame: FrameType) -> None:
        """Compares a size with the numbers in texts that code can reach, as it may look the text of the size up.

        Args:
            size: The size.
            frame: The code that makes a text of it.
        """
        is_known = traced_expression(size).is_Integer or depends_on_values(size)
        if is_known or not is_model_code(frame.f_code.co_filename):
            return
        self._go_to(frame)
        texts = [item for item in frame.f_code.co_consts if isinstance(item, str)]
        found = _reachable(frame, Mapping | Set | torch.nn.ModuleDict | torch.nn.ParameterDict)
        texts += [key for container in found for key in container if isinstance(key, str)]
        if not _LOOKS_UP.isdisjoint(frame.f_code.co_names):
            owners = [owner for owner in frame.f_locals.values() if isinstance(owner, torch.nn.Module)]
            texts += [name for owner in owners for name in dir(owner)]
        numbers = {tuple(map(int, _DIGITS.findall(text))) for text in texts}
        self._keys |= {each for each in numbers if len(each) <= _MOST_SIZES}  # more are those of a docstring
        self._pending.append(size)

    def _go_to(self, frame: FrameType) -> None:
        line = id(frame), frame.f_lineno
        if line != self._line:
            self.settle()
            self._line = line

    def settle(self) -> None:
        """Compares the sizes that were looked up last with keys: all of a key first, then parts, as others are static.

        What is decided for a part decides for the whole, so that torch would not record it any more.
        """
        longest = min(_MOST_SIZES, len(self._pending))
        for count in range(longest, 0, -1):
            parts = {part for key in self._keys for part in itertools.combinations(key, count)}
            parts_of_sizes = [self._pending[start:][:count] for start in range(len(self._pending) - count + 1)]
            different = {tuple(map(traced_expression, sizes)): sizes for sizes in parts_of_sizes}
            for sizes, part in itertools.product(different.values(), sorted(parts)[:_MOST_KEYS]):
                if part == tuple(map(size_in_trace, sizes)):
                    self.skipped = True
                else:
                    bool(functools.reduce(operator.and_, map(operator.eq, sizes, part)))
        self._line, self._pending, self._keys = None, [], set()

    def forget(self) -> None:
        """Removes the sizes from where the trace put them."""
        for container in self._containers.values():
            if isinstance(container, MutableMapping | MutableSet) and any(map(_has_symbolic_part, container)):
                kept: Any = [key for key in container if not _has_symbolic_part(key)]
                if isinstance(container, MutableMapping):
                    kept = {key: container[key] for key in kept}
                container.clear()
                container.update(kept)  # type: ignore[union-attr]


@contextlib.contextmanager
def size_keys() -> Iterator[SizeKeys]:
    """Lets sizes be keys while a trace runs the model."""
    keys, original = SizeKeys(), torch.SymInt.__hash__
    text_of: Callable[[torch.SymInt], str] = torch.SymInt.__repr__

    def noted_text(size: torch.SymInt) -> str:
        frame = inspect.currentframe()
        if frame is not None and frame.f_back is not None:
            keys.note_text(size, frame.f_back)
        return text_of(size)

    def hash_of(size: torch.SymInt) -> int:
        expression, frame = traced_expression(size), inspect.currentframe()
        if expression.is_Integer:
            return hash(int(expression))
        found = keys.hash_of(size, frame.f_back) if frame is not None and frame.f_back is not None else None
        return original(size) if found is None else found

    with replaced_attributes(torch.SymInt, {"__hash__": hash_of, "__repr__": noted_text}):
        try:
            yield keys
            keys.settle()
        finally:
            keys.forget()


def _containers(frame: FrameType) -> list[_Container]:
    """The dictionaries and sets that code can reach by the names in it, apart from those with other keys.

    There are none if it can reach a function with a cache: that would keep the size, and what the trace makes of it.
    """
    if any(_reachable(frame, Cached)):
        return []
    code = frame.f_code
    last = max(line for *_, line in code.co_lines() if line)
    found = itertools.chain(
        _reachable(frame, Mapping | Set),
        (keys for line, keys in _written_keys(code.co_filename) if code.co_firstlineno <= line <= last),
    )
    return [each for each in found if not each or any(_numbers_in(key) or _has_symbolic_part(key) for key in each)]


@functools.lru_cache(maxsize=64)
def _written_keys(file: str) -> tuple[tuple[int, frozenset[Any]], ...]:
    """The keys of each dictionary that code writes out, as in ``{3: a, 5: b}[length]``, and its line."""
    tables = [node for node in ast.walk(parsed(file)) if isinstance(node, ast.Dict)]
    return tuple((table.lineno, frozenset(_constants(table.keys))) for table in tables)


def _constants(nodes: Iterable[ast.expr | None]) -> Iterator[Any]:
    for node in nodes:
        if isinstance(node, ast.Constant | ast.Tuple):
            with contextlib.suppress(ValueError):  # what is in the tuple is computed
                yield ast.literal_eval(node)


def _reachable(frame: FrameType, kind: Any) -> Iterator[Any]:
    """Yields the objects of a kind that code can reach by the names in it, without the dictionary of its keywords."""
    code, given = frame.f_code, dict(frame.f_locals)
    if code.co_flags & inspect.CO_VARKEYWORDS:
        arguments = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
        given.pop(code.co_varnames[arguments], None)
    names = code.co_names
    pending = [*given.values(), *code.co_consts]  # the set in ``length in {3, 5}`` is a constant
    pending += [frame.f_globals[name] for name in names if name in frame.f_globals]
    for _ in range(_DEPTH):
        yield from (value for value in pending if isinstance(value, kind))
        inner = [held[name] for value in pending for held in _attributes(value) for name in names if name in held]
        pending = [*inner, *(item for value in pending for item in _items(value))]


def _items(value: Any) -> Iterable[Any]:
    """The items of a small list or dictionary, which may be tables themselves."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return items if len(items) <= _MOST_ITEMS else ()


def _attributes(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yields the attributes of a value by name: its own, the modules in it, and those of its classes."""
    if hasattr(value, "__dict__"):
        yield vars(value)
        if isinstance(value, torch.nn.Module):
            yield dict(value.named_children())
        if not isinstance(value, type):
            yield from map(vars, type(value).__mro__)


def _numbers_in(key: Any) -> list[int]:
    if isinstance(key, tuple):
        return [number for item in key for number in _numbers_in(item)]
    return [int(key)] if isinstance(key, int) and not isinstance(key, bool) else []


def _has_symbolic_part(key: Any) -> bool:
    return any(map(_has_symbolic_part, key)) if isinstance(key, tuple) else isinstance(key, torch.SymInt)
