"""The registry of replacement classes, and what makes a class one: the same ``forward``, or a ``from_module``.

A key that is a name (``LlamaMLP``) stands for all classes of that name. A key with dots, which begins with the Python
module (``torch.nn.modules.linear.Linear``), stands for one class. Any other key is a regular expression, which is
searched for in the name, or in the name with its module if the expression has an escaped dot.
"""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from exportkit.errors import InvalidRequestError, InvalidTypeError, PatchError, nearest, nearest_text
from exportkit.rewrites.table import BUILT_IN, Rewrite

Key = str | re.Pattern[str]

_lock = threading.Lock()
_entries: dict[Key, Entry] = {}


@dataclass(frozen=True)
class Entry:
    """A registered replacement; ``pattern`` is None for a key that is a name."""

    key: Key
    replacement: type[torch.nn.Module]
    pattern: re.Pattern[str] | None

    @property
    def text(self) -> str:
        """The key as text."""
        return self.key if isinstance(self.key, str) else self.key.pattern

    def means(self, name: str, qualified: str) -> bool:
        """Returns whether it stands for a class with this name, which is ``qualified`` with its module."""
        if self.pattern is None:
            return self.key in (name, qualified)
        return self.pattern.search(qualified if r"\." in self.pattern.pattern else name) is not None


def register_patch_mapping(mapping: Mapping[Key, type[torch.nn.Module]], overwrite: bool = False) -> None:
    """Registers replacements of module classes, all of them or none; `apply_patches` puts them in force.

    Args:
        mapping: Replacement by key: the name of a class, its name with its module, or a regular expression. Names take
            precedence over expressions, and among expressions the one that was registered first.
        overwrite: Whether a key that is already registered gets a new replacement.

    Raises:
        InvalidTypeError: if a replacement is not a subclass of ``torch.nn.Module``.
        InvalidRequestError: if a key is already registered, or does not compile.

    Example:
        >>> class QuietLinear(torch.nn.Linear):
        ...     pass
        >>> register_patch_mapping({"^Linear$": QuietLinear})
        >>> unregister_patch_mapping(["^Linear$"])
    """
    if not isinstance(mapping, Mapping):
        raise InvalidTypeError(
            "Replacements must be given as a mapping.", expected="a dict of classes by key", got=type(mapping).__name__
        )
    entries = {key: _entry(key, replacement) for key, replacement in mapping.items()}
    with _lock:
        taken = [entry.text for key, entry in entries.items() if key in _entries]
        if taken and not overwrite:
            raise InvalidRequestError(
                f"A replacement is already registered for {', '.join(map(repr, taken))}.",
                hint="pass overwrite=True to replace it.",
            )
        _entries.update(entries)


def unregister_patch_mapping(keys: Iterable[Key]) -> None:
    """Removes replacements from the registry, all of them or none.

    Args:
        keys: Keys as they were registered.

    Raises:
        InvalidRequestError: if a key is not registered.
    """
    keys = [keys] if isinstance(keys, str | re.Pattern) else list(keys)
    with _lock:
        for key in keys:
            if key not in _entries:
                names = [entry.text for entry in _entries.values()]
                raise InvalidRequestError(
                    f"Cannot unregister {key!r}: not found in monkey patch mapping cache.",
                    hint=f"nearest: {nearest_text(str(key), names)}.",
                )
        for key in keys:
            _entries.pop(key, None)


def get_patch_mapping(built_in: bool = False) -> dict[Key, Any]:
    """Returns a copy of the registry: replacement by key.

    Args:
        built_in: Whether to add exportkit's own rewrites by their names. They are not classes: `exportkit.export`
            chooses among them, and `apply_patches` takes their names.

    Example:
        >>> "experts as batched matrix products" in get_patch_mapping(built_in=True)
        True
    """
    with _lock:
        registered = {key: entry.replacement for key, entry in _entries.items()}
    return registered | (dict[Key, Any](BUILT_IN) if built_in else {})


def built_in_rewrites(names: Iterable[str]) -> list[Rewrite]:
    """Returns exportkit's own rewrites with these names, if they work outside of an export.

    Raises:
        InvalidRequestError: if a name is unknown, or its rewrite needs the call that an export traces.
    """
    names = [names] if isinstance(names, str) else list(names)
    for name in names:
        if name not in BUILT_IN:
            near = nearest_text(name, BUILT_IN, "; ")
            raise InvalidRequestError(
                f"There is no built-in rewrite {name!r}.",
                hint=f"nearest: {near}. get_patch_mapping(built_in=True) lists all.",
            )
        if BUILT_IN[name].adapt is not None:
            raise InvalidRequestError(
                f"The rewrite {name!r} changes the arguments of a trace, so it only works inside export()."
            )
    return [BUILT_IN[name] for name in names]


def clear_patch_mapping() -> None:
    """Removes all replacements from the registry."""
    with _lock:
        _entries.clear()


def entries() -> list[Entry]:
    """Returns the registered replacements, names before expressions."""
    with _lock:
        return sorted(_entries.values(), key=lambda entry: entry.pattern is not None)


def entry_for(entries: Sequence[Entry], cls: type, name: str | None = None) -> Entry | None:
    """Returns the first entry that stands for a class, or for the name that it has somewhere, or None.

    A class that is itself a replacement is never replaced, whatever its name.
    """
    if any(entry.replacement is cls for entry in entries):
        return None
    names = {cls.__name__, name or cls.__name__}
    qualified = qualified_name(cls)
    return next((entry for entry in entries if any(entry.means(one, qualified) for one in names)), None)


def qualified_name(cls: type) -> str:
    """Returns the name of a class with its module."""
    return f"{cls.__module__}.{cls.__qualname__}"


def _entry(key: Any, replacement: Any) -> Entry:
    text = key.pattern if isinstance(key, re.Pattern) else key
    if not isinstance(text, str) or not text:
        raise InvalidTypeError("A key of the patch mapping must be a name.", expected="str", got=repr(key))
    if not isinstance(replacement, type) or not issubclass(replacement, torch.nn.Module):
        raise InvalidTypeError(
            f"The replacement of {text!r} must be a subclass of nn.Module.",
            got=repr(replacement),
            hint="to build replacements with a function, give the class a classmethod `from_module(original)`.",
        )
    if isinstance(key, re.Pattern):
        return Entry(key, replacement, key)
    if all(part.isidentifier() or part == "<locals>" for part in key.split(".")):
        return Entry(key, replacement, None)
    return Entry(key, replacement, _compiled(key))


def _compiled(key: str) -> re.Pattern[str]:
    try:
        return re.compile(key)
    except re.error as error:
        names = nearest_text(re.sub(r"\W", "", key), _names_of_modules())
        raise InvalidRequestError(
            f"The key {key!r} is neither the name of a class nor a regular expression: {error}.",
            hint=f"nearest classes: {names}.",
        ) from error


def _names_of_modules() -> set[str]:
    """The names of all module classes that are loaded."""
    names, classes = set(), [torch.nn.Module]
    while classes:
        cls = classes.pop()
        names.add(cls.__name__)
        classes += cls.__subclasses__()
    return names


FACTORY = "from_module"
_NAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_BY_POSITION = _NAMED[:2]


def require_same_forward(
    original: type[torch.nn.Module], replacement: type[torch.nn.Module], abstract: bool = False
) -> None:
    """Requires that the forward of a replacement can be called like the original's.

    Args:
        original: The class to replace.
        replacement: The class in its place.
        abstract: Whether classes without a forward are accepted.

    Raises:
        PatchError: if it cannot; names the parameters, and similar ones of the replacement.
    """
    without = [cls for cls in (original, replacement) if cls.forward is torch.nn.Module.forward]
    if without and abstract:
        return
    theirs, ours = inspect.signature(original.forward), inspect.signature(replacement.forward)
    reasons = [f"{replacement.__name__} has no forward"] if replacement in without else _differences(theirs, ours)
    if reasons:
        raise PatchError(
            f"{original.__name__} cannot be replaced by {replacement.__name__}: its forward has a different signature.",
            where="; ".join(reasons),
            expected=f"forward{theirs}",
            got=f"forward{ours}",
        )


def _differences(theirs: inspect.Signature, ours: inspect.Signature) -> list[str]:
    have = list(ours.parameters.values())[1:]
    want = list(theirs.parameters.values())[1:]
    kinds = {parameter.kind for parameter in have}
    any_position, any_name = (
        kind in kinds for kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    )
    names = [parameter.name for parameter in have if parameter.kind in _NAMED]
    positions = [parameter.name for parameter in have if parameter.kind in _BY_POSITION]
    reasons = []
    for position, parameter in enumerate(want):
        if parameter.kind in _NAMED and parameter.name not in names and not any_name:
            reasons.append(f"no parameter {parameter.name!r}{_nearest(parameter.name, names)}")
        elif parameter.kind in _BY_POSITION and not (position < len(positions) or any_position):
            reasons.append(f"{parameter.name!r} cannot be given by position")
        elif (
            parameter.kind in _BY_POSITION
            and position < len(positions)
            and positions[position] != parameter.name
            and parameter.name in names
        ):
            reasons.append(f"parameter {position} is {positions[position]!r} instead of {parameter.name!r}")
    given = {parameter.name for parameter in want if parameter.default is inspect.Parameter.empty}
    for parameter in have:
        if parameter.kind in _NAMED and parameter.default is inspect.Parameter.empty and parameter.name not in given:
            reasons.append(f"parameter {parameter.name!r} has no default")
    return reasons


def _nearest(name: str, names: Sequence[str]) -> str:
    found = nearest(name, names)
    return f" (nearest: {found[0]!r})" if found else ""


def is_rebuilt(replacement: type) -> bool:
    """Returns whether instances of a class are built from the module that they replace."""
    return hasattr(replacement, FACTORY)


def rebuilt(module: torch.nn.Module, replacement: type[torch.nn.Module]) -> torch.nn.Module:
    """Returns the module that the class builds from a module, with the same tensors where name and shape are equal.

    Raises:
        PatchError: if the class builds something else.
    """
    new = getattr(replacement, FACTORY)(module)
    if not isinstance(new, torch.nn.Module):
        raise PatchError(f"{replacement.__qualname__}.{FACTORY} did not return a module.", got=type(new).__name__)
    own = {**dict(new.named_parameters()), **dict(new.named_buffers())}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if name in own and own[name] is not tensor and own[name].shape == tensor.shape:
            path, _, attribute = name.rpartition(".")
            setattr(new.get_submodule(path), attribute, tensor)
    return new.train(module.training)
