"""The state of the current thread: tracing, CUDA capture, backward passes, modes; and what a trace logs."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any, TypeVar

import torch

from exportkit._torch_compat import require
from exportkit._torch_compat.pytree import tree_leaves
from exportkit._torch_compat.symbolic_shapes import traced_expression

Function = TypeVar("Function", bound=Callable[..., Any])
_AUTOCAST_DEVICES = ("cpu", "cuda")


def is_tracing() -> bool:
    """Returns whether the current thread runs inside torch.export, torch.compile, a fake mode or torch.func.

    Seen in torch 2.13.
    """
    if torch.compiler.is_compiling() or torch.compiler.is_exporting():
        return True
    transform, count_modes, context, fake_mode = _tracing_questions()
    if transform() is not None:
        return True
    if not count_modes() and context() is None:  # the usual case; detecting a fake mode is slow
        return False
    return fake_mode() is not None


def is_transformed() -> bool:
    """Returns whether the current thread runs inside torch.func. Seen in torch 2.13."""
    return _tracing_questions()[0]() is not None


@functools.cache
def _tracing_questions() -> tuple[Callable[[], Any], ...]:
    return (
        require(torch._C._functorch, "peek_interpreter_stack"),
        require(torch._C, "_len_torch_dispatch_stack"),
        require(torch._guards, "TracingContext").try_get,
        require(torch._guards, "detect_fake_mode"),
    )


def is_capturing() -> bool:
    """Returns whether the current CUDA stream is being captured into a graph: copies made then have no values yet."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


_watching = threading.RLock()  # one at a time: the level of a logger is global to the process


@contextlib.contextmanager
def watched_symbols(seen: Callable[[str, tuple[Any, ...]], None]) -> Iterator[None]:
    """Calls ``seen(message, arguments)`` whenever a trace in this thread gives a size a symbol or a value.

    It is called while the trace runs, so that the stack shows the line of the model, also under ``logging.disable``.
    Seen in torch 2.13, where ShapeEnv logs ``create_symbol %s = %s for %s`` and ``set_replacement %s = %s``.
    """
    import logging

    logger = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    thread = threading.get_ident()
    with _watching:
        level, shown = logger.level, max(logger.getEffectiveLevel(), logger.manager.disable + 1)

        def watch(record: logging.LogRecord) -> bool:
            if record.thread == thread and isinstance(record.args, tuple):
                seen(str(record.msg), record.args)
            return record.levelno >= shown  # what is watched only is not printed

        logger.addFilter(watch)
        logger.manager = copy.copy(logger.manager)  # of this logger alone
        logger.manager.disable = logging.NOTSET
        logger.setLevel(min(shown, logging.INFO))
        try:
            yield
        finally:
            logger.removeFilter(watch)
            del logger.manager
            logger.setLevel(level)


def traced_tensor_classes() -> tuple[type, ...]:
    """Returns the tensor classes with a ``tolist`` of their own that a trace uses. Seen in torch 2.13."""
    from torch._subclasses import fake_tensor, functional_tensor

    classes = (
        require(fake_tensor, "FakeTensor"),
        require(functional_tensor, "FunctionalTensor"),
    )
    return tuple(cls for cls in classes if "tolist" in vars(cls))


def distribution_checks() -> tuple[type, str]:
    """Returns the attribute by which distributions check the values of their arguments. Seen in torch 2.13."""
    from torch.distributions import Distribution

    name = "_validate_args"
    require(Distribution, name)
    return Distribution, name


def in_backward() -> bool:
    """Returns whether the thread runs a backward pass, in which checkpointed layers run again. Seen in torch 2.13."""
    return bool(_current_graph_task()() != -1)


@functools.cache
def _current_graph_task() -> Callable[[], int]:
    found: Callable[[], int] = require(torch._C, "_current_graph_task_id")
    return found


@contextlib.contextmanager
def apart_from_modes() -> Iterator[None]:
    """Hides tensor operations from the modes of the caller: autograd, autocast, device and dispatch modes.

    Seen in torch 2.13.
    """
    from torch.utils import _python_dispatch

    without_dispatch = require(_python_dispatch, "_disable_current_modes")
    without_function = require(torch._C, "DisableTorchFunction")
    with without_dispatch(), without_function(), torch.no_grad(), torch.autocast("cpu", enabled=False):
        yield


def dispatch_restored() -> contextlib.AbstractContextManager[None]:
    """Restores how torch dispatches operators, which some errors in C++ leave changed: nothing could be traced then.

    Seen in torch 2.13.
    """
    guard: Callable[[], contextlib.AbstractContextManager[None]]
    guard = require(torch._C, "_PreserveDispatchKeyGuard")
    return guard()


def autocast_dtypes() -> tuple[tuple[str, str], ...]:
    """Returns the types of devices for which ``torch.autocast`` is on, each with its dtype. Seen in torch 2.13."""
    return tuple(
        (device, str(torch.get_autocast_dtype(device)).removeprefix("torch."))
        for device in _AUTOCAST_DEVICES
        if torch.is_autocast_enabled(device)
    )


def autocast_off() -> tuple[type, dict[str, Any]]:
    """Returns a class and a replacement of its method, with which no ``torch.autocast`` is on. Seen in torch 2.13."""
    enter = torch.autocast.__enter__

    def without(self: Any) -> Any:
        enabled, self._enabled = require(self, "_enabled"), False
        try:
            return enter(self)  # type: ignore[no-untyped-call]
        finally:
            self._enabled = enabled

    return torch.autocast, {"__enter__": without}


def run_backward() -> tuple[Any, str]:
    """Returns the function that all gradients are computed with, as its owner and its name. Seen in torch 2.13."""
    require(torch.autograd, "_engine_run_backward")
    return torch.autograd, "_engine_run_backward"


def constant_in_trace(function: Function) -> Function:
    """Returns the function, marked as one that dynamo calls while it traces instead of following it.

    ``torch.compiler.assume_constant_result`` sets the same mark, and imports all of ``torch._dynamo`` for it (2 s).
    Seen in torch 2.13.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def operators_of(run: Callable[[], Any]) -> tuple[Any, list[tuple[Any, ...]]]:
    """Returns what a function returns, and the operators that ran, each with its arguments.

    Of tensors, the shape and the dtype are noted. Seen in torch 2.13.
    """
    log: list[tuple[Any, ...]] = []

    class Log:
        def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            leaves = tree_leaves((args, kwargs))
            noted = [(x.shape, x.dtype) if isinstance(x, torch.Tensor) else repr(x) for x in leaves]
            log.append((str(func), *noted))
            return func(*args, **(kwargs or {}))

    with dispatch_mode(Log):
        return run(), log


def random_states() -> list[bytes]:
    """Returns the states of torch's own generators of random numbers, which change with every draw."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    states = [torch.default_generator.get_state(), *(torch.cuda.get_rng_state(device) for device in devices)]
    return [state.numpy().tobytes() for state in states]


def list_device_constructors() -> None:
    """Lets torch list the functions that ``torch.device`` has an effect on, while they are its own: it keeps the list.

    Seen in torch 2.13.
    """
    from torch.utils import _device

    require(_device, "_device_constructors")()


def dispatch_mode(handler: type, **attributes: Any) -> contextlib.AbstractContextManager[Any]:
    """Returns a context manager in which a class handles all operators of torch. Seen in torch 2.13.

    torch's base class of such modes is imported here, and not where the module of the handler is.

    Args:
        handler: Its method ``__torch_dispatch__`` returns what an operator returns.
        attributes: Attributes of its object.
    """
    from torch.utils import _python_dispatch

    base = require(_python_dispatch, "TorchDispatchMode")
    mode: contextlib.AbstractContextManager[Any] = type(handler.__name__.strip("_"), (handler, base), attributes)()
    return mode


def module_calls(around: Callable[..., Any] | None) -> tuple[type, dict[str, Any]]:
    """Returns a class and a replacement of its method that runs the modules of a model in a trace.

    torch stays in a module that raises, also where the model catches the error; the replacement leaves it.
    Seen in torch 2.13.

    Args:
        around: Runs a module, if given: takes the tracer, the module, its path, its arguments, and what runs it.
    """
    from torch.fx import Tracer

    enter = Tracer.call_module

    def call_module(self: Any, module: Any, forward: Any, args: Any, kwargs: Any) -> Any:
        depth = len(self.module_stack)

        def inside(*args: Any, **kwargs: Any) -> Any:
            return around(self, module, self.path_of_module(module), args, kwargs, forward)  # type: ignore[misc]

        try:
            return enter(self, module, forward if around is None else inside, args, kwargs)
        finally:
            while len(self.module_stack) > depth:
                self.module_stack.popitem()

    return Tracer, {"call_module": call_module}


def node_of(value: Any, tracer: Any) -> torch.fx.Node | None:
    """Returns the node that computes a tensor in a trace; None for other values. Seen in torch 2.13."""
    if not isinstance(value, torch.Tensor):
        return None
    found = require(_proxies(), "get_proxy_slot")(value, tracer, None)
    return None if found is None else found.proxy.node


def tensor_of(node: torch.fx.Node, tracer: Any) -> torch.Tensor:
    """Returns a tensor that a trace takes for the result of a node. Seen in torch 2.13."""
    like = node.meta["val"]
    with apart_from_modes(), like.fake_mode:
        made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
    track = require(_proxies(), "track_tensor_tree")
    track(made, tracer.proxy(node), constant=None, tracer=tracer)
    return made


def in_module(node: torch.fx.Node, before: str, path: str) -> None:
    """Moves a copied node from the module of the original to a different module. Seen in torch 2.13."""

    def named(name: str) -> str:
        return path + name[len(before) :] if name.startswith(before) else name

    stack = node.meta.get("nn_module_stack", {})
    node.meta["nn_module_stack"] = {named(key): (named(inside), cls) for key, (inside, cls) in stack.items()}


def _proxies() -> Any:
    from torch.fx.experimental import proxy_tensor

    return proxy_tensor


def modes_that_change() -> tuple[type, dict[str, Any]]:
    """Returns a class and a replacement of its method that notes in a trace whether gradients are recorded from here.

    torch splits a graph wherever that is set, and puts the parts together again if nothing changed: it takes a fifth of
    the trace of a deep model. So nothing is noted that changes nothing. Seen in torch 2.13.
    """
    owner = require(_proxies(), "PreDispatchTorchFunctionMode")
    note, enable = owner.__torch_function__, require(torch._C, "_set_grad_enabled")

    def torch_function(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is enable and args == (torch.is_grad_enabled(),):
            return None
        return note(self, func, types, args, kwargs)

    return owner, {"__torch_function__": torch_function}


def limits_of_floats() -> tuple[ModuleType, dict[str, Any]]:
    """Returns the Python module of the function that takes note of a ``torch._check``, and a replacement of it.

    torch makes a range of a limit for one number, and checks no range of floats. Seen in torch 2.13.
    """
    from torch.fx.experimental import symbolic_shapes

    note = require(symbolic_shapes, "expect_true")

    def expect_true(condition: Any, skip: int = 0) -> bool:
        holds: bool = note(condition, skip + 1)
        if any(str(symbol).startswith("zuf") for symbol in getattr(traced_expression(condition), "free_symbols", ())):
            torch.ops.aten._assert_scalar.default(condition, "a check of a number")
        return holds

    return symbolic_shapes, {"expect_true": expect_true}


def lines_without(files: Iterable[str]) -> tuple[ModuleType, dict[str, Any]]:
    """Returns the Python module of the function that lists files of tracing code, and a replacement of it.

    torch says of each condition on sizes which line asked for it: the innermost one outside of these files. Seen in
    torch 2.13.

    Args:
        files: Files that call torch in place of the model's code, and are not to be named.
    """
    from torch.fx.experimental import symbolic_shapes

    known = require(symbolic_shapes, "uninteresting_files")() | {__file__, *files}
    return symbolic_shapes, {"uninteresting_files": lambda: known}


def constraints_that_solve() -> tuple[type, dict[str, Any]]:
    """Returns a class and a replacement of its method that simplifies constraints on sizes for messages.

    What torch has found is complete before; it raises for a relation that sympy reduces to true. Seen in torch 2.13.
    """
    from torch.fx.experimental import symbolic_shapes

    owner = require(symbolic_shapes, "DimConstraints")
    simplify = owner.solve

    def solve(self: Any) -> None:
        try:
            simplify(self)
        except ValueError as error:
            if "unpack" not in str(error):  # constraints that contradict each other
                raise

    return owner, {"solve": solve}
