"""Registers cache classes with torch's pytree and with optree, and takes back exactly what it registered.

In comes nothing but the classes that are loaded; what goes out is a context in which ``torch.export`` can take caches
as inputs and outputs. Registrations made by others are left alone: a class that is registered already stays as it is.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from exportkit import _torch_compat
from exportkit.trees.objects import Part, dump_part, is_cache_class, load_part, put_together, take_apart

_lock = threading.RLock()
_holders: dict[type, int] = {}  # class -> how many open contexts hold our registration of it


@contextlib.contextmanager
def register_flattening_functions(patch_transformers: bool = False) -> Iterator[None]:
    """Makes caches known to torch's pytree and to optree for the time of a ``with`` block.

    Registered are the cache classes of transformers (DynamicCache, StaticCache, EncoderDecoderCache, ... and those that
    a loaded model defines for itself). A registered cache flattens to its tensors in the order of its layers, without
    copies: for a plain DynamicCache ``keys, values`` of layer 0, then of layer 1, and so on. Contexts can be nested,
    left in any order, and entered from several threads; each undoes its own registrations only.

    Args:
        patch_transformers: Also import transformers first, so that its classes are registered even when nothing has
            loaded it yet. Without it, only classes of modules that are loaded already are registered.

    Example:
        >>> import torch
        >>> from exportkit import make_dynamic_cache, register_flattening_functions
        >>> cache = make_dynamic_cache([(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4))])
        >>> with register_flattening_functions():
        ...     len(torch.utils._pytree.tree_leaves(cache))
        2
    """
    if patch_transformers:
        importlib.import_module("transformers.cache_utils")
    held = [cls for cls in known_cache_classes() if _hold(cls)]
    try:
        yield
    finally:
        for cls in held:
            _release(cls)


def known_cache_classes() -> list[type]:
    """Returns the cache classes that are loaded: those of transformers, and ``...Cache`` classes of its models."""
    found: dict[type, None] = {}
    bases = _torch_compat.cache_bases()
    if bases:
        for cls in _with_subclasses(bases[0]):
            found[cls] = None
    for name, module in list(sys.modules.items()):
        if module is not None and name.startswith("transformers.models.") and ".modeling_" in name:
            for cls in vars(module).values():
                if isinstance(cls, type) and cls.__module__ == name and is_cache_class(cls):
                    found[cls] = None
    return list(found)


def _with_subclasses(cls: Any) -> Iterator[type]:
    yield cls
    for subclass in cls.__subclasses__():
        yield from _with_subclasses(subclass)


def _hold(cls: type) -> bool:
    """Registers ``cls``, or counts one more holder; False where somebody else registered it."""
    with _lock:
        if cls in _holders:
            _holders[cls] += 1
            return True
        if _torch_compat.registered_node(cls) is not None:
            return False
        _torch_compat.register_node(cls, _flatten, _unflatten, _keys, dump_part, load_part)
        _holders[cls] = 1
        return True


def _release(cls: type) -> None:
    with _lock:
        _holders[cls] -= 1
        if _holders[cls]:
            return
        del _holders[cls]
        node = _torch_compat.registered_node(cls)
        if node is not None and node.flatten is _flatten:
            _torch_compat.deregister_node(cls)


def _flatten(cache: Any) -> tuple[list[Any], Part]:
    tensors, _, part = take_apart(cache)
    return list(tensors), part


def _unflatten(tensors: Iterable[Any], part: Part) -> Any:
    return put_together(list(tensors), part)


def _keys(cache: Any) -> list[str]:
    return [str(path) for path in take_apart(cache)[1]]
