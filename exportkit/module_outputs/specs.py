"""Finds the modules of a model that specs select, and how to record them.

A spec is a class, the end of a module's path, a regular expression for paths, an `OutputRecorder`, or a list of these.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from exportkit._torch_compat.modules import paths_of_modules
from exportkit.errors import InvalidRequestError, InvalidTypeError

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
class Target:
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
    target: Target


def targets_of(specs: Mapping[str, Any]) -> list[Target]:
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


def keys_of(targets: Iterable[Target]) -> list[str]:
    """Returns the different keys, in order."""
    return list(dict.fromkeys(target.key for target in targets))


def matches_of(model: torch.nn.Module, targets: Iterable[Target]) -> list[Match]:
    """Returns the modules that the targets select, each once per key even if several paths lead to it."""
    found = []
    for position, (module, names) in enumerate(paths_of_modules(model).items()):
        keys: list[str] = []
        for target in targets:
            if _means(target, module, names) and target.key not in keys:
                keys.append(target.key)
                found.append(Match(module, names[0], position, target))
    return found


def require_matches(model: torch.nn.Module, targets: Iterable[Target], matches: Iterable[Match]) -> None:
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
                hint=f"nearest: {', '.join(nearest(_text(target), _names(model))) or 'nothing similar'}.",
            )


def nearest(text: str, candidates: Iterable[str], count: int = 3) -> list[str]:
    """Returns the candidates that are most similar to a text, best first."""
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    found = difflib.get_close_matches(text.lower(), by_lower, n=count, cutoff=0.4)
    return [by_lower[name] for name in found]


def _target(key: str, spec: Any) -> Target:
    if isinstance(spec, OutputRecorder) or _is_foreign_recorder(spec):
        return Target(key, _own(spec, key), spec)
    index = 0 if "hidden_states" in key else 1
    if isinstance(spec, type) and issubclass(spec, torch.nn.Module):
        return Target(key, OutputRecorder(spec, index), spec)
    if isinstance(spec, str) and spec:
        return Target(key, OutputRecorder(None, index, class_name=spec), spec)
    if isinstance(spec, re.Pattern):
        return Target(key, OutputRecorder(None, index), spec, spec)
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


def _means(target: Target, module: torch.nn.Module, paths: list[str]) -> bool:
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


def _text(target: Target) -> str:
    if target.pattern is not None:
        return re.sub(r"\\[a-zA-Z]|[^\w.]", "", target.pattern.pattern)
    recorder = target.recorder
    return recorder.class_name or str(getattr(recorder.target_class, "__name__", ""))


def _described(target: Target) -> str:
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
