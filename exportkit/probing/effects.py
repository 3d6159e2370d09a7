"""What a call does besides returning a result: arguments that it changes, and attributes of modules.

A graph only returns. So arguments that a model changes are results of the graph too, and code that runs the graph in
place of the model writes them back into what the caller gave.
"""

from __future__ import annotations

import functools
import operator
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from exportkit._torch_compat.memory import version_of
from exportkit.calls.call import Call
from exportkit.calls.observation import Observation, WrittenArgument
from exportkit.errors import ArgumentError
from exportkit.probing.simplify import value_at
from exportkit.running.compare import same_value
from exportkit.running.eager import Around, run_eager, sampled_answer
from exportkit.running.module_state import ModuleState
from exportkit.trees import Tree, cloned, flatten, is_cache_class
from exportkit.trees.object_parts import Unread, build_object
from exportkit.trees.objects import open_object
from exportkit.trees.structure import path_of


def written_arguments(observation: Observation, model: torch.nn.Module, method: str) -> dict[str, WrittenArgument]:
    """Returns the arguments that the recorded calls change in place, by name.

    Args:
        observation: The calls.
        model: The model, which is run for each of them.
        method: The observed method.
    """
    places: dict[str, set[str | None]] = defaultdict(set)
    in_place: dict[str, set[str]] = defaultdict(set)

    def noted(values: dict[str, Any], run: Callable[[Mapping[str, Any]], Any]) -> None:
        before = {name: flatten(value) for name, value in values.items()}
        copies = {name: tree.map(cloned) for name, tree in before.items()}
        versions = {name: {path: version_of(t) for path, t in tree.tensors().items()} for name, tree in before.items()}
        result = run(values)
        for name, tree in before.items():
            after, held = flatten(values[name]), tree.tensors()
            made = after.tensors()
            kept = {path for path, tensor in held.items() if made.get(path) is tensor}
            written = {path for path in kept if version_of(held[path]) != versions[name][path]}  # perhaps as they were
            if written or _differ(copies[name], after):
                places[name].add(_place(result, values[name]))
                in_place[name] |= written | (kept & _changed(copies[name], after))

    for call in observation.calls:
        _runs(model, method, call, noted)
    found = {}
    for name, where in places.items():
        place = where.pop() if len(where) == 1 else None
        found[name] = WrittenArgument(place, tuple(sorted(in_place[name])))
    return found


def changed_state(model: torch.nn.Module, method: str, *calls: Call, or_written: bool = False) -> list[str]:
    """Returns the names of buffers and attributes of modules that a call changes: the first that does not raise.

    Args:
        model: The model.
        method: The method.
        calls: The calls.
        or_written: Also return what is replaced by equal objects, and tensors and numbers written with the same values.
    """
    changed: list[str] = []

    def noted(values: dict[str, Any], run: Callable[[Mapping[str, Any]], Any], marks_numbers: bool) -> None:
        state = ModuleState(model)
        if marks_numbers:
            state.mark_numbers()
        run(values)
        changed.extend(state.changed(or_written))

    for call in calls:
        for marks_numbers in (True, False) if or_written else (False,):  # code may ask for the type of a number
            if _runs(model, method, call, functools.partial(noted, marks_numbers=marks_numbers)):
                return changed
    return changed


def _runs(model: torch.nn.Module, method: str, call: Call, noted: Around) -> bool:
    """Runs a call for what it does besides returning a result; False if the model raises, so that nothing is learnt."""

    def runs() -> bool:
        try:
            run_eager(model, method, call, noted)
        except Exception:
            return False
        return True

    return sampled_answer(model, runs, is_sure=bool)


def write_back(given: Any, made: Any, written: WrittenArgument, path: str = "") -> Any:
    """Returns an argument that was given, changed to what a graph made of it.

    A tensor in it that gets another shape is replaced.

    Args:
        given: The argument, changed in place.
        made: The value that it has after the call.
        written: Which of its tensors are changed themselves; other leaves are replaced.
        path: Path of the value in the argument.
    """
    if isinstance(given, torch.Tensor) and isinstance(made, torch.Tensor):
        if path not in written.in_place or (path and given.shape != made.shape):
            return given if same_value(given, made) else made
        if given.shape != made.shape:  # the argument itself
            given.data = made
        else:
            with torch.no_grad():
                given.copy_(made)
    elif type(given) in (bool, int, float) and isinstance(made, torch.Tensor):  # a number is a tensor in the graph
        return type(given)(made.item() if made.numel() else made.shape[-1])
    elif type(given) is not type(made) or isinstance(given, bool | int | float | complex | str | bytes):
        return made
    elif isinstance(given, dict):
        values = {
            key: write_back(given[key], value, written, path_of((key,), path)) if key in given else value
            for key, value in made.items()
        }
        for key in [key for key in given if key not in values]:
            del given[key]
        for key, value in values.items():
            given[key] = value
    elif isinstance(given, list | tuple | deque):
        pairs = enumerate(zip(given, made, strict=False))
        items = [write_back(*pair, written, path_of((index,), path)) for index, pair in pairs]
        items += [*made][len(items) :]
        if isinstance(given, list):
            given[:] = items
        elif isinstance(given, deque):
            given.clear()
            given.extend(items)
        elif len(given) != len(items) or any(map(operator.is_not, given, items)):
            return made
    elif is_cache_class(type(given)):
        vars(given).clear()
        vars(given).update(vars(made))
    elif (after := open_object(made)) is not None:
        before = open_object(given)
        known = {} if before is None else dict(zip(before.paths, before.leaves, strict=True))
        leaves = [
            known[step]
            if type(known.get(step)) is Unread
            else write_back(known.get(step), leaf, written, path_of((step,), path))
            for step, leaf in zip(after.paths, after.leaves, strict=True)
        ]
        return build_object(leaves, after.skeleton, given)
    return given


def require_apart(given: Mapping[str, Any], made: Mapping[str, Any]) -> None:
    """Raises ArgumentError if an object that a call changes is given in two places: a graph changes two copies of it.

    Args:
        given: The arguments by name.
        made: What becomes of those that the call changes, by name.
    """
    places: dict[int, str] = {}
    for name, value in given.items():
        for path, item in _mutable(value, name, set()):
            if places.setdefault(id(item), path) == path:
                continue
            for place in (places[id(item)], path):
                after = value_at(made, place)
                if after is not None and _differ(flatten(item), flatten(after)):
                    raise ArgumentError(
                        "An object that the model changes is given in two places.",
                        where=f"{places[id(item)]}, {path}",
                        expected="an object of its own in each place",
                        got=f"the same {type(item).__name__}",
                        hint="in the graph the two are independent; pass a copy in one place if that is intended.",
                    )


def _mutable(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yields path and value of what can be changed in a value, apart from tensors; what is met again is not entered."""
    steps: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        steps = value.items()
    elif isinstance(value, list | tuple | deque):
        steps = enumerate(value)
    elif not is_cache_class(type(value)):
        opened = open_object(value)
        if opened is None:
            return
        steps = zip(opened.paths, opened.leaves, strict=True)
    if not isinstance(value, tuple):
        yield path, value
    if id(value) not in seen:
        seen.add(id(value))
        for step, item in steps:
            yield from _mutable(item, path_of((step,), path), seen)


def _place(result: Any, value: Any) -> str | None:
    """The path of a value in a result that holds the very same object; None if there is none, or it is deeper."""
    if result is value:
        return ""
    if isinstance(result, Mapping):
        return next((path_of((key,)) for key, item in result.items() if item is value), None)
    if isinstance(result, list | tuple):
        return next((path_of((index,)) for index, item in enumerate(result) if item is value), None)
    return None


def _changed(before: Tree, after: Tree) -> set[str]:
    """Paths of tensors that both have, with other values."""
    earlier = before.tensors()
    return {
        path for path, tensor in after.tensors().items() if path in earlier and not same_value(earlier[path], tensor)
    }


def _differ(before: Tree, after: Tree) -> bool:
    """Whether two values have other leaves, or leaves of other values."""
    return bool(_changed(before, after)) or after.paths != before.paths or _constants_differ(before, after)


def _constants_differ(before: Tree, after: Tree) -> bool:
    return {path: repr(value) for path, value in before.constants().items()} != {
        path: repr(value) for path, value in after.constants().items()
    }
