"""Registers cache classes with torch's pytree and with optree, and undoes exactly what it registered.

Inside its contexts ``torch.export`` can take caches as inputs and outputs. Registrations made by others are left alone:
a class that is registered already stays as it is.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from exportkit._torch_compat.pytree import (
    deregister_node,
    node_of,
    nodes,
    register_node,
    registered_node,
    tree_leaves,
)
from exportkit._torch_compat.transformers import cache_bases
from exportkit.overrides import Item, replaced
from exportkit.trees.caches import is_cache_class
from exportkit.trees.flatten import flatten, flattened_cache
from exportkit.trees.json_form import dump_rest, dump_structure, load_rest, load_structure
from exportkit.trees.objects import flatten_tensors, opened_classes, tensor_names, unflatten_tensors
from exportkit.trees.structure import Leaves, Object, build


@contextlib.contextmanager
def register_flattening_functions(patch_transformers: bool = False) -> Iterator[None]:
    """Registers cache classes with torch's pytree and with optree for the duration of a ``with`` block.

    These are the cache classes of transformers (DynamicCache, StaticCache, EncoderDecoderCache, ...), their subclasses
    in models that are loaded, and the classes of other objects in recorded calls. A registered cache
    flattens to its tensors in the order of its layers, without copies: for a plain DynamicCache ``keys, values`` of
    layer 0, then of layer 1, and so on. Contexts can be nested, left in any order, and entered from several threads;
    each undoes its own registrations only. Inside the context ``torch.export.load`` can also read programs that take
    caches: it accepts the cache classes in their example inputs.

    Args:
        patch_transformers: Raise an ImportError if transformers is not installed. By default its classes are
            registered if it is.

    Example:
        >>> import optree, torch
        >>> from exportkit import make_dynamic_cache, register_flattening_functions
        >>> cache = make_dynamic_cache([(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4))])
        >>> with register_flattening_functions():
        ...     len(optree.tree_leaves(cache, namespace="torch"))
        2
    """
    try:
        importlib.import_module("transformers.cache_utils")
    except ImportError:
        if patch_transformers:
            raise
    with registered_caches():
        yield


@contextlib.contextmanager
def registered_caches() -> Iterator[None]:
    """Registers the cache classes that are loaded, as `register_flattening_functions` does; imports nothing.

    With them, the classes of other objects are registered that were opened by their attributes.
    """
    bases = cache_bases()
    caches = _with_subclasses(bases[:1])
    with _nodes.held(caches | dict.fromkeys(opened_classes)), _loadable.held(caches | _with_subclasses(bases[1:])):
        yield


@contextlib.contextmanager
def caches_opened(values: Iterable[Any]) -> Iterator[None]:
    """Registers the cache classes that are loaded, so that torch opens these values into the leaves of a `Tree`.

    Registrations by other code are used if they do that. The one of transformers' exporters does not: it also flattens
    constants of sliding windows.
    """
    with registered_caches():
        foreign = []
        if not all(map(_opens_into_tree, values)):
            foreign = [cls for cls in _with_subclasses(cache_bases()[:1]) if not opens_in_order(cls)]
        with replaced([(Item(nodes(), cls), node_of(cls, flattened_cache, _unflatten, _keys)) for cls in foreign]):
            yield


def _opens_into_tree(value: Any) -> bool:
    found = {id(leaf) for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)}
    return found == {id(tensor) for tensor in flatten(value).tensors().values()}


def _with_subclasses(bases: Iterable[type]) -> dict[type, None]:
    found = dict.fromkeys(bases)
    waiting = list(found)
    while waiting:
        subclasses: list[type] = waiting.pop().__subclasses__()
        waiting += subclasses
        found |= dict.fromkeys(subclasses)
    return found


def opens_in_order(cls: type) -> bool:
    """Returns whether ``cls`` is a cache that torch's pytree opens, if at all, into the leaves of a `Tree`."""
    if not is_cache_class(cls):
        return False
    node = registered_node(cls)
    return node is None or node.flatten is flattened_cache


class _Shared:
    """A context for each class, which is entered once for all its holders, and left with the last of them.

    Args:
        context: Returns the context of a class, or None where other code did the same already.
    """

    def __init__(self, context: Callable[[type], contextlib.AbstractContextManager[None] | None]) -> None:
        self._context = context
        self._lock = threading.RLock()
        self._holders: dict[type, int] = {}
        self._open: dict[type, contextlib.AbstractContextManager[None]] = {}

    @contextlib.contextmanager
    def held(self, classes: Iterable[type]) -> Iterator[None]:
        """Holds the contexts of these classes."""
        with contextlib.ExitStack() as stack:
            for cls in classes:
                if self._take(cls):
                    stack.callback(self._give, cls)
            yield

    def _take(self, cls: type) -> bool:
        with self._lock:
            if cls not in self._open:
                context = self._context(cls)
                if context is None:
                    return False
                context.__enter__()
                self._open[cls] = context
            self._holders[cls] = self._holders.get(cls, 0) + 1
            return True

    def _give(self, cls: type) -> None:
        with self._lock:
            self._holders[cls] -= 1
            if not self._holders[cls]:
                del self._holders[cls]
                self._open.pop(cls).__exit__(None, None, None)


def _node(cls: type) -> contextlib.AbstractContextManager[None] | None:
    return _registered(cls) if registered_node(cls) is None else None


@contextlib.contextmanager
def _registered(cls: type) -> Iterator[None]:
    if is_cache_class(cls):
        register_node(cls, flattened_cache, _unflatten, _keys, dump_structure, load_structure)
    else:
        register_node(cls, flatten_tensors, unflatten_tensors, tensor_names, dump_rest, load_rest)
    yield
    node = registered_node(cls)
    if node is not None and node.flatten in (
        flattened_cache,
        flatten_tensors,
    ):  # unless other code replaced it meanwhile
        deregister_node(cls)


def _safe_global(cls: type) -> contextlib.AbstractContextManager[None] | None:
    serialization: Any = torch.serialization  # its annotations ask for functions, but it takes classes
    return None if cls in serialization.get_safe_globals() else serialization.safe_globals([cls])


_nodes = _Shared(_node)
_loadable = _Shared(_safe_global)


def _unflatten(tensors: Iterable[Any], structure: Object) -> Any:
    return build(structure, iter(tensors))


def _keys(cache: Any) -> list[str]:
    return Leaves().add(flattened_cache(cache)[1]).paths
