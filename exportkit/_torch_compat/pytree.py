"""torch's pytree: registered classes, their contexts, keys and leaves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from exportkit._torch_compat import require


class Registration(NamedTuple):
    """How torch flattens objects of a registered class."""

    flatten: Callable[[Any], tuple[Iterable[Any], Any]]
    unflatten: Callable[[Iterable[Any], Any], Any]
    flatten_with_keys: Callable[[Any], tuple[list[tuple[Any, Any]], Any]] | None


def nodes() -> dict[type, Any]:
    """Returns torch's registrations by class. Seen in torch 2.13."""
    found: dict[type, Any] = require(torch.utils._pytree, "SUPPORTED_NODES")
    return found


def registered_node(cls: type) -> Registration | None:
    """Returns torch's pytree registration of ``cls``, or None. Seen in torch 2.13."""
    definition = nodes().get(cls)
    if definition is None:
        return None
    return Registration(definition.flatten_fn, definition.unflatten_fn, definition.flatten_with_keys_fn)


def register_node(
    cls: type,
    flatten: Callable[[Any], tuple[list[Any], Any]],
    unflatten: Callable[[Iterable[Any], Any], Any],
    keys: Callable[[Any], list[str]],
    dump: Callable[[Any], Any],
    load: Callable[[Any], Any],
) -> None:
    """Registers ``cls`` with torch's pytree, and with optree's namespace "torch". Seen in torch 2.13.

    Importing ``torch.utils._cxx_pytree`` is what makes torch pass registrations on to optree.
    """
    import torch.utils._cxx_pytree

    unique = f" {id(cls)}" if "<locals>" in cls.__qualname__ else ""  # torch takes each name once
    require(torch.utils._pytree, "register_pytree_node")(
        cls,
        flatten,
        unflatten,
        serialized_type_name=f"exportkit:{cls.__module__}.{cls.__qualname__}{unique}",
        to_dumpable_context=dump,
        from_dumpable_context=load,
        flatten_with_keys_fn=_with_keys(flatten, keys),
    )


def _with_keys(
    flatten: Callable[[Any], tuple[list[Any], Any]], keys: Callable[[Any], list[str]]
) -> Callable[[Any], tuple[list[tuple[Any, Any]], Any]]:
    mapping_key = require(torch.utils._pytree, "MappingKey")

    def flatten_with_keys(value: Any) -> tuple[list[tuple[Any, Any]], Any]:
        leaves, context = flatten(value)
        return [(mapping_key(key), leaf) for key, leaf in zip(keys(value), leaves, strict=True)], context

    return flatten_with_keys


def node_of(
    cls: type,
    flatten: Callable[[Any], tuple[list[Any], Any]],
    unflatten: Callable[[Iterable[Any], Any], Any],
    keys: Callable[[Any], list[str]],
) -> Any:
    """Returns a registration of ``cls`` for `nodes`. Seen in torch 2.13."""
    made = require(torch.utils._pytree, "NodeDef")
    return made(cls, flatten, unflatten, _with_keys(flatten, keys))


def deregister_node(cls: type) -> None:
    """Undoes `register_node`, in torch and in optree's namespace "torch". Seen in torch 2.13, optree 0.20."""
    import optree

    require(torch.utils._pytree, "_deregister_pytree_node")(cls)
    with contextlib.suppress(ValueError):  # already removed by other code
        optree.unregister_pytree_node(cls, namespace="torch")


def key_name(key: Any) -> str | int:
    """Returns the name or index that a torch pytree key stands for. Seen in torch 2.13."""
    for attribute in ("name", "key", "idx"):
        if hasattr(key, attribute):
            value = getattr(key, attribute)
            return value if isinstance(value, int | str) else repr(value)
    return str(key)


def tree_leaves(value: Any) -> list[Any]:
    """Returns the leaves of ``value`` in torch's order, with the current registrations. Seen in torch 2.13."""
    return list(require(torch.utils._pytree, "tree_leaves")(value))


def tree_flatten(value: Any) -> tuple[list[Any], Any]:
    """Returns the leaves of ``value`` in torch's order, and its form. Seen in torch 2.13."""
    leaves, form = torch.utils._pytree.tree_flatten(value)
    return list(leaves), form


def tree_unflatten(leaves: Iterable[Any], form: Any) -> Any:
    """Returns the value of a form with these leaves. Seen in torch 2.13."""
    return torch.utils._pytree.tree_unflatten(leaves, form)


def tree_map(change: Callable[..., Any], value: Any, *others: Any) -> Any:
    """Returns ``value`` with each leaf changed, given the leaves at its place in other values of the same structure.

    Seen in torch 2.13.
    """
    return torch.utils._pytree.tree_map(change, value, *others)


class ContextWriter(NamedTuple):
    """How the context of a registered class is saved and loaded."""

    dump: Callable[[Any], Any]
    load: Callable[[Any], Any]


def context_writer(cls: type) -> ContextWriter | None:
    """Returns how ``cls`` was registered to save and load its context, or None. Seen in torch 2.13.

    None for Python's own classes too: loading a defaultdict, torch imports any module that is named in the data.
    """
    definition = require(torch.utils._pytree, "SUPPORTED_SERIALIZED_TYPES").get(cls)
    dump, load = getattr(definition, "to_dumpable_context", None), getattr(definition, "from_dumpable_context", None)
    if dump is None or load is None or cls.__module__ in ("builtins", "collections"):
        return None
    return ContextWriter(dump, load)
