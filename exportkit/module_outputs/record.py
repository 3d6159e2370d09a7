"""Finds the modules of a model that specs select, and collects what they return in one call, as tuples by key.

A spec is a class, the end of a module's path, a regular expression for paths, an `OutputRecorder`, or a list of these.
A value is the tensor that the module returned, so gradients flow through it. If a layer changes it in place later, the
value is a copy from before the change, which shares memory until then.
"""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from exportkit._torch_compat.memory import copies_on_write, memory_address, version_of
from exportkit._torch_compat.modules import paths_of_modules
from exportkit._torch_compat.tracing import is_tracing, is_transformed
from exportkit.errors import CaptureError, InvalidRequestError, InvalidTypeError, nearest_text

FIRST_INPUT_KEY = "hidden_states"  # its values begin with the input of the first module
_SPLIT = ("attentions", "cross_attentions")  # a list of two under the first key records the second one too


@dataclass(frozen=True)
class OutputRecorder:
    """Selects modules to record, and which of their outputs.

    A module is selected if it is an instance of ``target_class``, or its path ends with ``class_name``, or its class
    has that name. ``layer_name`` must also be a dotted part of its path; it distinguishes modules of the same class in
    a block by the name of their attribute.

    Attributes:
        target_class: A module class, or None.
        index: Position or name of the output in a tuple, list, dict or dataclass. A single tensor is recorded as it is.
        layer_name: Part of the path, such as ``"crossattention"``.
        class_name: End of the path, or the name of the class.
        capture_initial_hidden_state: Whether the values under ``hidden_states`` begin with the first module's input.

    Example:
        >>> OutputRecorder(torch.nn.Linear, index=1, layer_name="crossattention").layer_name
        'crossattention'
    """

    target_class: type[torch.nn.Module] | None = None
    index: int | str = 0
    layer_name: str | None = None
    class_name: str | None = None
    capture_initial_hidden_state: bool = True


@dataclass(frozen=True)
class OutputTarget:
    """A parsed spec, recorded under ``key``."""

    key: str
    recorder: OutputRecorder
    spec: Any
    pattern: re.Pattern[str] | None = None


class Match(NamedTuple):
    """A module to record, and why; ``position`` is its place in the model."""

    module: torch.nn.Module
    path: str
    position: int
    target: OutputTarget


def targets_of(specs: Mapping[str, Any]) -> list[OutputTarget]:
    """Returns the specs as targets.

    Raises:
        InvalidTypeError: if a spec is not valid.
    """
    if not isinstance(specs, Mapping):
        raise InvalidTypeError(
            "Specs must be a dict of what to record, by key.", expected="a dict", got=type(specs).__name__
        )
    targets = []
    for key, spec in specs.items():
        several = list(spec) if isinstance(spec, list | tuple) else [spec]
        split = key == _SPLIT[0] and len(several) == 2 and _SPLIT[1] not in specs
        for position, one in enumerate(several):
            targets.append(_target(_SPLIT[position] if split else key, one))
    return targets


def keys_of(targets: Iterable[OutputTarget]) -> list[str]:
    """Returns the different keys, in order."""
    return list(dict.fromkeys(target.key for target in targets))


def matches_of(model: torch.nn.Module, targets: Iterable[OutputTarget]) -> list[Match]:
    """Returns the modules that the targets select, each once per key even if several paths lead to it."""
    found = []
    for position, (module, names) in enumerate(paths_of_modules(model).items()):
        keys: list[str] = []
        for target in targets:
            if _means(target, module, names) and target.key not in keys:
                keys.append(target.key)
                found.append(Match(module, names[0], position, target))
    return found


def require_matches(model: torch.nn.Module, targets: Iterable[OutputTarget], matches: Iterable[Match]) -> None:
    """Raises for keys that match no module.

    Raises:
        InvalidRequestError: with the names that are most similar to the spec.
    """
    found = {match.target.key for match in matches}
    for target in targets:
        if target.key not in found:
            raise InvalidRequestError(
                f"No module matches the spec for {target.key!r}.",
                where=type(model).__name__,
                got=_described(target),
                hint=f"nearest: {nearest_text(_text(target), _names(model))}.",
            )


def _target(key: str, spec: Any) -> OutputTarget:
    if isinstance(spec, OutputRecorder) or _is_foreign_recorder(spec):
        return OutputTarget(key, _own(spec, key), spec)
    index = 0 if "hidden_states" in key else 1
    if isinstance(spec, type) and issubclass(spec, torch.nn.Module):
        return OutputTarget(key, OutputRecorder(spec, index), spec)
    if isinstance(spec, str) and spec:
        return OutputTarget(key, OutputRecorder(None, index, class_name=spec), spec)
    if isinstance(spec, re.Pattern):
        return OutputTarget(key, OutputRecorder(None, index), spec, spec)
    raise InvalidTypeError(
        f"The spec for {key!r} is not valid.",
        expected="a module class, the end of a module's path, a compiled regular expression, an OutputRecorder, or a "
        "list of these",
        got=repr(spec),
    )


def _is_foreign_recorder(spec: Any) -> bool:
    """Whether it is the OutputRecorder of transformers, which has the same fields."""
    return all(hasattr(spec, name) for name in ("target_class", "index", "layer_name", "class_name"))


def _own(spec: Any, key: str) -> OutputRecorder:
    if spec.target_class is None and not spec.class_name:
        raise InvalidRequestError(
            f"The OutputRecorder for {key!r} selects no module.", expected="target_class or class_name", got=repr(spec)
        )
    if isinstance(spec, OutputRecorder):
        return spec
    initial = getattr(spec, "capture_initial_hidden_state", True)
    return OutputRecorder(spec.target_class, spec.index, spec.layer_name, spec.class_name, initial)


def _means(target: OutputTarget, module: torch.nn.Module, paths: list[str]) -> bool:
    recorder, name = target.recorder, target.recorder.class_name
    if target.pattern is not None:
        return any(target.pattern.search(path) is not None for path in paths)
    if recorder.target_class is not None and isinstance(module, recorder.target_class):
        return recorder.layer_name is None or any(_is_below(recorder.layer_name, path) for path in paths)
    if name is None:
        return False
    by_name = type(module).__name__ == name
    for path in paths:  # noqa: SIM110  # a generator takes longer than all the rest
        if (by_name or f".{path}".endswith(name)) and _is_below(recorder.layer_name, path):
            return True
    return False


def _is_below(layer_name: str | None, path: str) -> bool:
    return layer_name is None or f".{layer_name.strip('.')}." in f".{path}."


def _text(target: OutputTarget) -> str:
    if target.pattern is not None:
        return re.sub(r"\\[a-zA-Z]|[^\w.]", "", target.pattern.pattern)
    recorder = target.recorder
    return recorder.class_name or str(getattr(recorder.target_class, "__name__", ""))


def _described(target: OutputTarget) -> str:
    recorder = target.recorder
    if target.pattern is not None:
        return f"the regular expression {target.pattern.pattern!r}"
    what = f"class {recorder.target_class.__qualname__}" if recorder.target_class else f"name {recorder.class_name!r}"
    return what if recorder.layer_name is None else f"{what} below {recorder.layer_name!r}"


def _names(model: torch.nn.Module) -> list[str]:
    """Paths, their last parts, and class names: everything that a spec may name."""
    names: list[str] = []
    for path, module in model.named_modules():
        names += [type(module).__name__, path.rsplit(".", 1)[-1], path]
    return [name for name in dict.fromkeys(names) if name and not name.isdigit()]


class Selection:
    """Which values of a key to keep: positions, where negative ones count from the end. All others become None."""

    def __init__(self, indices: Iterable[int]) -> None:
        self._indices = frozenset(indices)
        self._tail = max((-index for index in self._indices if index < 0), default=0)

    def dropped(self, count: int) -> int | None:
        """Returns the position that is certainly not needed once there are ``count`` values, or None."""
        position = count - 1 - self._tail
        return position if position >= 0 and position not in self._indices else None

    def __call__(self, position: int, count: int) -> bool:
        """Returns whether a value out of ``count`` is needed."""
        return position in self._indices or position - count in self._indices


@dataclasses.dataclass(slots=True)
class _Entry:
    """A value, and a copy in case it is changed in place after ``version``; if ``shared``, both still share memory.

    The version is None for tensors of inference mode, which do not count changes; the copy is used for them.
    """

    value: Any
    position: int
    thread: int
    version: int | None = None
    copy: torch.Tensor | None = None
    shared: bool = False

    def unchanged(self) -> Any:
        if self.copy is None:
            return self.value
        unchanged = self.version is not None and self.version == version_of(self.value) and self._is_same()
        return self.value if unchanged else self.copy

    def _is_same(self) -> bool:
        """Whether it was not changed through ``data`` either, which does not change the version."""
        if not self.shared or self.copy is None:
            return True
        here, there = (memory_address(tensor) for tensor in (self.value, self.copy))
        return (here is not None and here == there) or torch.equal(self.value, self.copy)


class Record:
    """Collects the values of one call, from any number of threads.

    Args:
        keys: The keys.
        selections: Which values of a key to keep.
        traced: Whether the whole call is traced; None checks each value, which takes longer.
    """

    def __init__(
        self, keys: Iterable[str], selections: Mapping[str, Selection] | None = None, traced: bool | None = None
    ) -> None:
        self._traced = traced
        self._entries: dict[str, list[_Entry]] = {key: [] for key in keys}
        self._selections = selections or {}
        self._without_value: dict[str, list[str]] = {}

    def is_empty(self, key: str) -> bool:
        """Returns whether the key has no value yet."""
        return not self._entries[key]

    def add(self, match: Match, value: Any) -> None:
        """Adds a value; None is ignored."""
        key = match.target.key
        if value is None:
            self._without_value.setdefault(key, []).append(match.path)
            return
        entries = self._entries[key]
        entries.append(_entry(value, match.position, self._traced))
        if key in self._selections:
            dropped = self._selections[key].dropped(len(entries))
            if dropped is not None:
                entries[dropped] = _entry(None, match.position)

    def is_blank(self) -> bool:
        """Returns whether no module was called at all."""
        return not any(self._entries.values()) and not self._without_value

    def finish(self) -> None:
        """Releases the copies that were not needed."""
        for entries in self._entries.values():
            for entry in entries:
                entry.value, entry.copy = entry.unchanged(), None

    def values(self) -> dict[str, tuple[Any, ...]]:
        """Returns the values collected so far.

        Raises:
            CaptureError: if modules were called, and none of them returned a value.
        """
        self.require_values()
        return {key: self._of(key) for key in self._entries}

    def require_values(self) -> None:
        """Raises for a call whose modules returned no values.

        Raises:
            CaptureError: naming the modules.
        """
        for key, paths in self._without_value.items():
            if not self._entries[key]:
                raise CaptureError(
                    f"Nothing to capture as {key!r}: the modules return None there.",
                    where=", ".join(paths[:3]),
                    hint="only eager attention returns weights: load the model with "
                    'attn_implementation="eager", or choose another index with OutputRecorder.',
                )

    def _of(self, key: str) -> tuple[Any, ...]:
        entries = _in_order(list(self._entries[key]))
        selected = self._selections.get(key)
        return tuple(
            entry.unchanged() if selected is None or selected(i, len(entries)) else None
            for i, entry in enumerate(entries)
        )


def pick(output: Any, match: Match) -> Any:
    """Returns the part of a module's output to record.

    Raises:
        CaptureError: if the output has no such part.
    """
    index = match.target.recorder.index
    if isinstance(output, torch.Tensor):
        return output
    if type(output) is tuple and type(index) is int and 0 <= index < len(output):  # the usual case
        return output[index]
    by_name = _parts(output)
    if by_name is None:
        return output
    if isinstance(index, str) and index in by_name:
        return by_name[index]
    parts = list(by_name.values())
    if isinstance(index, int) and -len(parts) <= index < len(parts):
        return parts[index]
    raise CaptureError(
        f"A module has no output {index!r} to capture as {match.target.key!r}.",
        where=match.path or type(match.module).__name__,
        got=f"{type(output).__name__} with {len(parts)}: {', '.join(map(str, by_name))}",
        hint=f"say which one: OutputRecorder({type(match.module).__name__}, index=0).",
    )


def first_input(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Returns the first tensor that a module is called with: by position, as ``hidden_states``, or with any name."""
    candidates = [*args, kwargs.get("hidden_states"), *kwargs.values()]
    for value in candidates:
        if isinstance(value, torch.Tensor):
            return value
    return None


def _parts(output: Any) -> Mapping[Any, Any] | None:
    """The outputs by name or position, or None for a single output."""
    if isinstance(output, Mapping):
        return output
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return dict(zip(output._fields, output, strict=True))
    if isinstance(output, list | tuple):
        return dict(enumerate(output))
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
    return None


def _entry(value: Any, position: int, traced: bool | None = None) -> _Entry:
    if torch.compiler.is_dynamo_compiling():  # it supports neither versions nor threads
        return _Entry(value.clone() if isinstance(value, torch.Tensor) else value, position, 0)
    thread = threading.get_ident()
    if not isinstance(value, torch.Tensor):
        return _Entry(value, position, thread)
    if traced is None or is_transformed():
        traced = is_tracing()
    copy = None if traced else copies_on_write([value])[0]
    return _Entry(value, position, thread, version_of(value), value.clone() if copy is None else copy, copy is not None)


def _in_order(entries: list[_Entry]) -> list[_Entry]:
    """Entries in the order of computation; if modules ran once each in several threads, in the order of the model."""
    positions = {entry.position for entry in entries}
    if len({entry.thread for entry in entries}) > 1 and len(positions) == len(entries):
        return sorted(entries, key=lambda entry: entry.position)
    return entries
