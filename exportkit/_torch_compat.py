"""Every private API of torch and transformers that exportkit uses, one function each.

Nothing else in the package imports a private name. Each function says in which versions the API was seen, and raises
CompatibilityError when it is gone, so that an upgrade fails with a sentence and not with an AttributeError.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple, cast

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


def is_transformed() -> bool:
    """Returns whether the current thread runs inside torch.func. Seen in torch 2.13."""
    return _tracing_questions()[0]() is not None


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


def copies_on_write(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Returns copies that share memory until either is written, None where torch has none. Seen in torch 2.13.

    The one that is written, or asked for its address, moves to memory of its own: tests/calls/test_snapshot.py shows
    what that means for those who hold the memory by other ways.
    """
    clone = getattr(torch, "_lazy_clone", None)
    if clone is None:
        return [None] * len(tensors)
    with _copy_on_write_lock:
        try:
            return list(map(clone, tensors))
        except RuntimeError:  # of one of them at least
            return [_copy_on_write(clone, tensor) for tensor in tensors]


def copy_on_write(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns what `copies_on_write` does, for one tensor. Seen in torch 2.13."""
    clone = getattr(torch, "_lazy_clone", None)
    try:
        with _copy_on_write_lock:
            return None if clone is None else clone(tensor)
    except RuntimeError:  # as in `_copy_on_write`
        return None


def _copy_on_write(clone: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor | None:
    try:
        return clone(tensor)
    except RuntimeError:  # memory that torch did not allocate itself: of numpy, of a file, shared, pinned
        return None


def are_copy_on_write(tensors: Iterable[torch.Tensor]) -> list[bool]:
    """Returns whether each tensor shares its memory by copy-on-write, so was not written since. Seen in torch 2.13."""
    return list(map(getattr(torch._C, "_is_cow_tensor", lambda _: False), tensors))


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


def no_op_constants() -> list[Any]:
    """Returns what the optimiser of torch.onnx takes for zero or one, to leave out ``x + 0`` or ``x * 1``.

    It takes everything up to 1e-8 for zero, an epsilon too, and has its tolerances in attributes. Seen in onnxscript
    0.7; an empty list where it does so no more.
    """
    try:
        from onnxscript.rewriter.rules.common import _no_op

        nodes = [node for rule in _no_op.rules.rules for node in rule._target_pattern]
        values = [value for node in nodes for value in node.inputs]
    except (ImportError, AttributeError):
        return []
    return [value for value in values if {"_abs_tol", "_rel_tol"} <= vars(value).keys()]


def decomposition_attributes(kernels: Mapping[Any, Callable[..., Any]]) -> list[tuple[Any, dict[str, Any]]]:
    """Returns the attributes to replace, each with its owner, so that a trace takes operators apart in other ways.

    What torch computes with values is not affected. Seen in torch 2.13.

    Args:
        kernels: By operator that is made of others, such as ``torch.ops.aten.max_pool1d.default``, a function that
            computes it.
    """
    import torch._decomp

    key = torch._C.DispatchKey.CompositeImplicitAutograd
    table = {**_require(torch._decomp, "decomposition_table", "torch 2.13"), **kernels}
    found: list[tuple[Any, dict[str, Any]]] = [(torch._decomp, {"decomposition_table": table})]
    for operator, kernel in kernels.items():
        known = _require(operator, "py_kernels", "torch 2.13")
        found.append((operator, {"py_kernels": {**known, key: kernel}, "_dispatch_cache": {}}))
    return found


def causal_mask_detection() -> tuple[ModuleType, str]:
    """Returns the module and the name of the function by which torch's Transformer knows a causal mask.

    Seen in torch 2.13.
    """
    import torch.nn.modules.transformer as owner

    name = "_detect_is_causal_mask"
    _require(owner, name, "torch 2.13")
    return owner, name


def recurrent_loops() -> dict[Any, Callable[..., Any]]:
    """Returns by operator how torch takes recurrent layers apart with a loop operator. Seen in torch 2.13."""
    import torch.export._patches as patches

    aten = torch.ops.aten
    return {
        aten.lstm.input: _require(patches, "lstm_while_loop_impl", "torch 2.13"),
        aten.gru.input: _require(patches, "gru_while_loop_impl", "torch 2.13"),
    }


def with_graph_module(
    program: torch.export.ExportedProgram, module: torch.fx.GraphModule
) -> torch.export.ExportedProgram:
    """Returns the program with another graph for the same inputs and outputs, sharing weights. Seen in torch 2.13."""
    return torch.export.ExportedProgram(
        root=module,
        graph=module.graph,
        graph_signature=program.graph_signature,
        state_dict=program.state_dict,
        range_constraints=program.range_constraints,
        module_call_graph=program.module_call_graph,
        example_inputs=program.example_inputs,
        constants=program.constants,
        verifiers=_require(program, "verifiers", "torch 2.13"),
    )


_watching = threading.RLock()  # one at a time: the level of a logger belongs to the whole process


@contextlib.contextmanager
def watched_symbols(seen: Callable[[str, tuple[Any, ...]], None]) -> Iterator[None]:
    """Calls ``seen(message, arguments)`` while this thread traces, each time that a size gets a symbol or a value.

    It is called from within, so that the stack shows which line of a model is at work. Seen in torch 2.13: ShapeEnv
    says so to a logger, as ``create_symbol %s = %s for %s`` and ``set_replacement %s = %s``.
    """
    import logging

    logger = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    thread = threading.get_ident()
    with _watching:
        level, shown = logger.level, logger.getEffectiveLevel()

        def watch(record: logging.LogRecord) -> bool:
            if record.thread == thread and isinstance(record.args, tuple):
                seen(str(record.msg), record.args)
            return record.levelno >= shown  # what nobody asked for is not printed

        logger.addFilter(watch)
        logger.setLevel(min(shown, logging.INFO))
        try:
            yield
        finally:
            logger.removeFilter(watch)
            logger.setLevel(level)


def source_names(values: Any) -> list[str]:
    """Returns what torch.export's messages call the leaves of its ``kwargs``, in torch's order. Seen in torch 2.13."""
    import torch._export.non_strict_utils as module
    import torch.utils._pytree as pytree

    name_of = _require(module, "key_path_to_source", "torch 2.13")
    leaves = _require(pytree, "tree_leaves_with_path", "torch 2.13")
    names = {key: [str(name_of(path).name) for path, _ in leaves(value)] for key, value in values.items()}
    return [name.replace("L['args']", f"L[{key!r}]", 1) for key, found in names.items() for name in found]


def input_axes(program: torch.export.ExportedProgram) -> dict[str, tuple[Any, ...]]:
    """Returns the traced sizes of each input by node name: ints, and sympy expressions. Seen in torch 2.13."""
    sizes = {}
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and isinstance(value, torch.Tensor):
            sizes[node.name] = tuple(size if isinstance(size, int) else size.node.expr for size in value.shape)
    return sizes


class ShapeGuard(NamedTuple):
    """What a trace took for granted about sizes: sympy relations, and the line that asked for it.

    Attributes:
        asked: The relation as it was asked for.
        left: What is left of it, given the sizes that torch replaced by others.
        file: File of the innermost line outside of torch's tracing code; empty if unknown.
        line: Its number.
    """

    asked: Any
    left: Any
    file: str
    line: int


def shape_guards(program: torch.export.ExportedProgram) -> list[ShapeGuard]:
    """Returns what the trace of a program took for granted about sizes. Seen in torch 2.13."""
    values = (node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder")
    symbols = (s for value in values if isinstance(value, torch.Tensor) for s in value.shape if not isinstance(s, int))
    symbol = next(symbols, None)
    if symbol is None:
        return []
    environment = symbol.node.shape_env
    found = []
    for guard in _require(environment, "guards", "torch 2.13"):
        place = guard.sloc.framework_loc
        file, line = (place.filename, place.lineno) if hasattr(place, "filename") else ("", 0)
        found.append(ShapeGuard(guard.expr, guard.expr.xreplace(environment.replacements), file, line))
    return found


def scan(step: Callable[[Any, Any], tuple[Any, Any]], state: Any, inputs: Any) -> tuple[Any, Any]:
    """Returns the last state and the stacked outputs of a loop over the first axis. Seen in torch 2.13.

    torch.onnx.export turns it into the ONNX operator Scan.

    Args:
        step: From the state and one slice of the inputs to the next state and one slice of the outputs.
        state: The first state, a nested value of tensors of the shapes and types that the step returns.
        inputs: A nested value of tensors that are as long as the loop.
    """
    import torch._higher_order_ops as operators

    return _require(operators, "scan", "torch 2.13")(step, state, inputs)  # type: ignore[no-any-return]


class ContextWriter(NamedTuple):
    """How the context of a registered class is written and read."""

    dump: Callable[[Any], Any]
    load: Callable[[Any], Any]


def context_writer(cls: type) -> ContextWriter | None:
    """Returns the functions that ``cls`` was registered with for its context, or None. Seen in torch 2.13.

    None for Python's own classes too: to read a defaultdict, torch imports any module that is named in the data.
    """
    definition = _require(torch.utils._pytree, "SUPPORTED_SERIALIZED_TYPES", "torch 2.13").get(cls)
    dump, load = getattr(definition, "to_dumpable_context", None), getattr(definition, "from_dumpable_context", None)
    if dump is None or load is None or cls.__module__ in ("builtins", "collections"):
        return None
    return ContextWriter(dump, load)


def traced_tensor_classes() -> tuple[type, ...]:
    """Returns the classes of tensors that have a ``tolist`` of their own while torch traces. Seen in torch 2.13."""
    from torch._subclasses import fake_tensor, functional_tensor

    classes = (
        _require(fake_tensor, "FakeTensor", "torch 2.13"),
        _require(functional_tensor, "FunctionalTensor", "torch 2.13"),
    )
    return tuple(cls for cls in classes if "tolist" in vars(cls))


VISION_MODULES = ("transformers.vision_utils", "transformers.utils.generic")


def vision_functions() -> dict[str, Callable[..., Any]]:
    """Returns transformers' functions of grids of patches, by name; none before they are imported.

    Seen in transformers 5.23; earlier versions compute the same inside the encoders.
    """
    modules = [sys.modules[name] for name in VISION_MODULES if name in sys.modules]
    return {
        name: value
        for module in modules
        for name, value in vars(module).items()
        if (name.startswith("get_vision_") or name == "get_max_seqlen") and callable(value)
    }


def interpolation_taps() -> Callable[..., Any]:
    """Returns transformers' kernel of a resampled table: entries and weights along one axis. Seen in 5.23."""
    module = sys.modules.get("transformers.vision_utils")
    return _require(module, "_interpolation_axis_taps_weights", "transformers 5.23")  # type: ignore[no-any-return]


@contextlib.contextmanager
def own_attention(configs: Iterable[Any], name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Lets models with these configs attend with a function of our own, for a while. Seen in transformers 5.23."""
    modeling = sys.modules["transformers.modeling_utils"]
    interface = _require(modeling, "ALL_ATTENTION_FUNCTIONS", "transformers 5.23")
    attribute = "_attn_implementation_internal"
    before = [(config, _require(config, attribute, "transformers 5.23")) for config in configs]
    interface[name] = function
    try:
        for config, _ in before:
            setattr(config, attribute, name)
        yield
    finally:
        for config, implementation in before:
            setattr(config, attribute, implementation)
        del interface[name]


def as_encoder_forward(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a forward that records hidden states and takes defaults as those of transformers. Seen in 5.23."""
    generic, capturing = sys.modules["transformers.utils.generic"], sys.modules["transformers.utils.output_capturing"]
    with_outputs = _require(capturing, "capture_outputs", "transformers 5.23")(function)
    return _require(generic, "merge_with_config_defaults", "transformers 5.23")(with_outputs)  # type: ignore[no-any-return]


def exporter_patches(backend: str) -> list[tuple[Any, str, Callable[..., Any]]]:
    """Returns transformers' export patches: object, attribute, and what makes the patch of the original. Seen in 5.23.

    The list is read rather than ``apply_patches`` called, so that they are taken back without a trace.
    """
    utils = _exporter_module("utils")
    if utils is None or _exporter_module("exporter_onnx") is None:  # importing it registers them
        return []
    found = _require(utils, "_PATCHES", "transformers 5.23").get(backend, [])
    resolve = _require(utils, "import_dotted_path", "transformers 5.23")
    targets = [(resolve(path, missing_ok=True), name, make) for path, name, make in found]
    return [(target, name, make) for target, name, make in targets if target is not None]


def exporter_translations() -> tuple[dict[Any, Any], Callable[[Any], None], Callable[[Any], None]] | None:
    """Returns transformers' ONNX functions by operator, and its fixes of nodes and of programs. Seen in 5.23."""
    utils, onnx = _exporter_module("utils"), _exporter_module("exporter_onnx")
    if utils is None or onnx is None:
        return None
    fix_nodes = _require(utils, "apply_fx_node_fixes", "transformers 5.23")
    return (
        dict(_require(onnx, "_ONNX_TRANSLATION_TABLE", "transformers 5.23")),
        functools.partial(fix_nodes, "onnx"),
        _require(onnx, "apply_onnx_ir_fixes", "transformers 5.23"),
    )


def _exporter_module(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(f"transformers.exporters.{name}")
    except ImportError:
        return None


def in_backward() -> bool:
    """Returns whether the thread runs a backward pass, where checkpointed layers run again. Seen in torch 2.13."""
    return bool(_current_graph_task()() != -1)


@functools.cache
def _current_graph_task() -> Callable[[], int]:
    found: Callable[[], int] = _require(torch._C, "_current_graph_task_id", "torch 2.13")
    return found


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


def trace_module() -> Any:
    """Returns the module of torch.export that prints the graph of a failed trace to stderr. Seen in torch 2.13.

    Its own name ``print`` is free: what is put there is called instead of Python's.
    """
    import torch.export._trace

    return torch.export._trace


def compute_buffers(model: torch.nn.Module, path: str) -> None:
    """Lets a model of transformers compute the buffers of one of its modules. Seen in transformers 5.23.

    Models of other libraries are left alone. Parameters of the module get new values too, if they have any.

    Args:
        model: The model, or one around it.
        path: Path of the module.
    """
    parents = [model.get_submodule(".".join(path.split(".")[:depth])) for depth in range(path.count(".") + 1, -1, -1)]
    compute = next((parent._init_weights for parent in parents if hasattr(parent, "_init_weights")), None)
    if callable(compute):
        with torch.no_grad():
            compute(model.get_submodule(path))


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a contiguous tensor on the CPU, for reading; they are valid as long as the tensor is.

    Unlike ``numpy()`` it leaves no mark on the storage, which could not be resized any more, and unlike ``data_ptr()``
    it ends no copy-on-write. Seen in torch 2.13.
    """
    size = tensor.nbytes
    if not size:
        return memoryview(b"")
    start = memory_address(tensor)
    address = tensor.data_ptr() if start is None else start + tensor.storage_offset() * tensor.itemsize
    view: memoryview = _view_of_memory()(address, size, _READ_ONLY)
    return view


_READ_ONLY = 0x100  # PyBUF_READ


@functools.cache
def _view_of_memory() -> Callable[[int, int, int], memoryview]:
    import ctypes

    made = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
    return cast(Callable[[int, int, int], memoryview], made(("PyMemoryView_FromMemory", ctypes.pythonapi)))


class StorageRef:
    """Remembers the memory of a tensor without holding it, so that one at the same place later is told apart.

    Seen in torch 2.13.
    """

    __slots__ = ("_ref",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self._ref = _weak_storage()(tensor.untyped_storage())

    def is_gone(self) -> bool:
        """Returns whether the memory was freed."""
        return bool(self._ref.expired())


@functools.cache
def _weak_storage() -> Any:
    from torch.multiprocessing import reductions

    return _require(reductions, "StorageWeakRef", "torch 2.13")


def memory_state(tensor: torch.Tensor) -> tuple[int, int | None]:
    """Returns which memory a tensor has, and how often it was changed in place. Seen in torch 2.13.

    No other memory has the same number while this one, or a `StorageRef` to it, exists. In inference mode changes are
    not counted, and the second number is None.
    """
    return tensor.untyped_storage()._cdata, None if tensor.is_inference() else tensor._version


@contextlib.contextmanager
def apart_from_modes() -> Iterator[None]:
    """Runs plain tensor operations that no mode of the caller sees: no autograd, autocast, device or dispatch mode.

    Seen in torch 2.13.
    """
    from torch.utils import _python_dispatch

    without_dispatch = _require(_python_dispatch, "_disable_current_modes", "torch 2.13")
    without_function = _require(torch._C, "DisableTorchFunction", "torch 2.13")
    with without_dispatch(), without_function(), torch.no_grad(), torch.autocast("cpu", enabled=False):
        yield


def make_quantized(values: torch.Tensor, scale: Any, zero_point: Any, axis: int | None) -> torch.Tensor:
    """Returns the quantised tensor of whole numbers; scales are tensors if there is an axis. Seen in torch 2.13."""
    if axis is None:
        return _require(torch, "_make_per_tensor_quantized_tensor", "torch 2.13")(values, scale, zero_point)  # type: ignore[no-any-return]
    return _require(torch, "_make_per_channel_quantized_tensor", "torch 2.13")(values, scale, zero_point, axis)  # type: ignore[no-any-return]


_printing = threading.Lock()


def scientific_text(tensor: torch.Tensor) -> str:
    """Returns the repr of a tensor in scientific notation, 120 columns wide. Seen in torch 2.13.

    The options are those of the process; they are as they were afterwards.
    """
    import torch._tensor_str

    with _printing, _require(torch._tensor_str, "printoptions", "torch 2.13")(sci_mode=True, linewidth=120):
        return repr(tensor)


def paths_of_modules(model: torch.nn.Module) -> dict[torch.nn.Module, list[str]]:
    """Returns all paths to each module inside a model, in the order of ``named_modules``. Seen in torch 2.13.

    ``named_modules`` passes each module up through a generator for each level, which takes three times as long.
    """
    paths = {model: [""]}

    def walk(module: torch.nn.Module, prefix: str) -> None:
        for name, child in module._modules.items():
            if child is not None:
                paths.setdefault(child, []).append(prefix + name)
                if child._modules:
                    walk(child, f"{prefix}{name}.")

    walk(model, "")
    return paths


def depends_on_values(condition: Any) -> bool:
    """Returns whether a traced condition is about values of tensors, and not about sizes alone. Seen in torch 2.13."""
    from torch.fx.experimental import symbolic_shapes

    if not isinstance(condition, torch.SymBool):
        return isinstance(condition, torch.Tensor)
    return bool(_require(symbolic_shapes, "has_free_unbacked_symbols", "torch 2.13")(condition))
