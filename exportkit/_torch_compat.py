"""Every private API of torch and transformers that exportkit uses, one function each.

Nothing else in the package imports a private name. Each function says in which versions the API was seen, and raises
CompatibilityError when it is gone, so that an upgrade fails with a sentence and not with an AttributeError.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from exportkit.errors import CompatibilityError


class Registered(NamedTuple):
    """How torch takes objects of a registered class apart."""

    flatten: Callable[[Any], tuple[Iterable[Any], Any]]
    unflatten: Callable[[Iterable[Any], Any], Any]
    flatten_with_keys: Callable[[Any], tuple[list[tuple[Any, Any]], Any]] | None


def _require(module: Any, name: str, seen: str) -> Any:
    """Returns ``module.name``, or raises CompatibilityError naming the versions it was seen in."""
    try:
        return getattr(module, name)
    except AttributeError:
        raise CompatibilityError(
            f"{module.__name__}.{name} is gone from this version of torch.",
            expected=f"present, as in {seen}",
            got=f"torch {torch.__version__}",
            hint="install a torch version that exportkit was tested with, or report this.",
        ) from None


def registered_node(cls: type) -> Registered | None:
    """Returns torch's pytree registration of ``cls``, or None. Seen in torch 2.13."""
    definition = _require(torch.utils._pytree, "SUPPORTED_NODES", "torch 2.13").get(cls)
    if definition is None:
        return None
    return Registered(definition.flatten_fn, definition.unflatten_fn, definition.flatten_with_keys_fn)


def register_node(
    cls: type,
    flatten: Callable[[Any], tuple[list[Any], Any]],
    unflatten: Callable[[Iterable[Any], Any], Any],
    keys: Callable[[Any], list[str]],
    dump: Callable[[Any], Any],
    load: Callable[[Any], Any],
) -> None:
    """Registers ``cls`` with torch's pytree, and with optree's namespace "torch". Seen in torch 2.13.

    optree learns of torch's registrations once ``torch.utils._cxx_pytree`` is imported, hence the import.
    """
    import torch.utils._cxx_pytree

    mapping_key = _require(torch.utils._pytree, "MappingKey", "torch 2.13")

    def flatten_with_keys(value: Any) -> tuple[list[tuple[Any, Any]], Any]:
        leaves, context = flatten(value)
        return [(mapping_key(key), leaf) for key, leaf in zip(keys(value), leaves, strict=True)], context

    _require(torch.utils._pytree, "register_pytree_node", "torch 2.13")(
        cls,
        flatten,
        unflatten,
        serialized_type_name=f"exportkit:{cls.__module__}.{cls.__qualname__}",
        to_dumpable_context=dump,
        from_dumpable_context=load,
        flatten_with_keys_fn=flatten_with_keys,
    )


def deregister_node(cls: type) -> None:
    """Undoes `register_node`, in torch and in optree's namespace "torch". Seen in torch 2.13, optree 0.20."""
    import optree

    _require(torch.utils._pytree, "_deregister_pytree_node", "torch 2.13")(cls)
    with contextlib.suppress(ValueError):  # somebody else took it out already
        optree.unregister_pytree_node(cls, namespace="torch")


def key_name(key: Any) -> str | int:
    """Returns the name or index that a torch pytree key stands for. Seen in torch 2.13."""
    for attribute in ("name", "key", "idx"):
        if hasattr(key, attribute):
            value = getattr(key, attribute)
            return value if isinstance(value, int | str) else repr(value)
    return str(key)


def tree_leaves(value: Any) -> list[Any]:
    """Returns the leaves of ``value`` in torch's own order, with the registrations active now. Seen in torch 2.13."""
    return list(_require(torch.utils._pytree, "tree_leaves", "torch 2.13")(value))


def is_tracing() -> bool:
    """Returns whether the current thread runs inside torch.export, torch.compile, a fake mode or torch.func.

    Seen in torch 2.13.
    """
    if torch.compiler.is_compiling() or torch.compiler.is_exporting():
        return True
    transform, count_modes, context, fake_mode = _tracing_questions()
    if transform() is not None:
        return True
    if not count_modes() and context() is None:  # as nearly always; to search for a fake mode takes long
        return False
    return fake_mode() is not None


@functools.cache
def _tracing_questions() -> tuple[Callable[[], Any], ...]:
    return (
        _require(torch._C._functorch, "peek_interpreter_stack", "torch 2.13"),
        _require(torch._C, "_len_torch_dispatch_stack", "torch 2.13"),
        _require(torch._guards, "TracingContext", "torch 2.13").try_get,
        _require(torch._guards, "detect_fake_mode", "torch 2.13"),
    )


def is_capturing() -> bool:
    """Returns whether the current CUDA stream is being captured into a graph: what is copied then has no values yet."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


# To wrap the memory of a tensor for copy-on-write is not safe in two threads at once, and torch lets go of the GIL.
_copy_on_write_lock = threading.Lock()


def copy_on_write(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns a copy that shares memory until either is written, or None where torch has none. Seen in torch 2.13.

    The one that is written, or asked for its address, moves to memory of its own: tests/observe/test_snapshot.py shows
    what that means for those who hold the memory by other ways.
    """
    clone = getattr(torch, "_lazy_clone", None)
    if clone is None:
        return None
    try:
        with _copy_on_write_lock:
            copy = clone(tensor)
    except RuntimeError:  # memory that torch did not allocate itself: of numpy, of a file, shared, pinned
        return None
    return copy if isinstance(copy, torch.Tensor) else None


def is_copy_on_write(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor shares its memory by copy-on-write, so was not written since. Seen in torch 2.13."""
    return bool(getattr(torch._C, "_is_cow_tensor", lambda _: False)(tensor))


def is_only_holder(tensor: torch.Tensor) -> bool:
    """Returns whether nothing but this one tensor is known to hold its memory. Seen in torch 2.13.

    False for tensors that were seen through numpy or DLPack, for views and their bases, and where torch does not tell.
    """
    storages = getattr(torch._C, "_storage_Use_Count", None)
    if storages is None or not hasattr(tensor, "_use_count"):
        return False
    storage = tensor.untyped_storage()
    # x.numpy() forbids to resize the storage; DLPack holds the tensor; the storage is held by it and by Python
    return bool(storage.resizable() and tensor._use_count() == 1 and storages(storage._cdata) == 2)


def memory_address(tensor: torch.Tensor) -> int | None:
    """Returns where the memory of a tensor begins, without moving it, or None if unknown. Seen in torch 2.13."""
    address = getattr(torch._C, "_data_address", None)
    return None if address is None else int(address(tensor))


def symbol_name(size: Any) -> str | int:
    """Returns the expression of a traced size, such as "s27 + s65", or the int itself. Seen in torch 2.13."""
    return int(size) if isinstance(size, int) else str(size.node.expr)


def stored_sizes(program: torch.export.ExportedProgram) -> dict[str, tuple[str | int, ...]]:
    """Returns the traced shape of each graph value by node name. Seen in torch 2.13 (``node.meta["val"]``)."""
    shapes = {}
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            shapes[node.name] = tuple(symbol_name(size) for size in value.shape)
    return shapes


def cache_bases() -> tuple[type, ...]:
    """Returns the base classes of transformers' caches and cache layers, or () while it is not imported.

    Seen in transformers 5.23. Never imports transformers: an object of these classes exists only once it is loaded.
    """
    module = sys.modules.get("transformers.cache_utils")
    if module is None:
        return ()
    names = ("Cache", "CacheLayerMixin", "LinearAttentionCacheLayerMixin", "DummyLayer")
    return tuple(getattr(module, name) for name in names if hasattr(module, name))


@contextlib.contextmanager
def quiet_onnx_export() -> Iterator[None]:
    """Silences what torch's ONNX exporter and onnxscript say on the way. Seen in torch 2.13, onnxscript 0.7."""
    import logging
    import warnings

    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def in_backward() -> bool:
    """Returns whether the thread runs a backward pass, where checkpointed layers run again. Seen in torch 2.13."""
    return bool(_require(torch._C, "_current_graph_task_id", "torch 2.13")() != -1)


_HOOK_TABLES = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs")


def put_hooks_in_trace(
    module: torch.nn.Module, before: Callable[..., None], after: Callable[..., None]
) -> list[dict[int, Any]]:
    """Gives a module two hooks while dynamo traces; returns what `take_hooks_in_trace` wants back. Seen in torch 2.13.

    dynamo cannot trace the registration of hooks, and can trace other tables in place of those that a module has. Read
    through ``vars``, the old tables are the very objects when they are put back, and guarded.
    """
    tables = [vars(module)[name] for name in _HOOK_TABLES]
    ours = (before, True, after, True)
    for name, table, value in zip(_HOOK_TABLES, tables, ours, strict=True):
        setattr(module, name, {-1: value, **table} if name == "_forward_pre_hooks" else {**table, -1: value})
    return tables


def take_hooks_in_trace(module: torch.nn.Module, tables: list[dict[int, Any]]) -> None:
    """Puts the hooks back that a module had. Seen in torch 2.13."""
    for name, table in zip(_HOOK_TABLES, tables, strict=True):
        setattr(module, name, table)


def attention_implementation(config: Any) -> str | None:
    """Returns which attention the modules with this config compute, or None if it does not say.

    Seen in transformers 5.23 (``config._attn_implementation``).
    """
    value = getattr(config, "_attn_implementation", None)
    return value if isinstance(value, str) else None


def attention_property(config: Any) -> tuple[type, property] | None:
    """Returns the property that `attention_implementation` reads and its class, or None if it is a plain attribute.

    Seen in transformers 5.23.
    """
    for cls in type(config).__mro__:
        value = vars(cls).get("_attn_implementation")
        if value is not None:
            return (cls, value) if isinstance(value, property) else None
    return None


def set_attention_implementation(config: Any, value: str) -> None:
    """Sets what `attention_implementation` returns, for this config and not for those inside it.

    Seen in transformers 5.23.
    """
    if hasattr(config, "_attn_implementation_internal"):
        config._attn_implementation_internal = value
    else:
        config._attn_implementation = value
