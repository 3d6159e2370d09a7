"""Runs the model without side effects: no gradients, no recording, random state and modules as they were."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from exportkit._torch_compat.cuda import as_on_cpu, uses_tf32
from exportkit._torch_compat.flexible_attention import flexible_attention_attributes
from exportkit._torch_compat.modules import inference_kernels
from exportkit._torch_compat.random_numbers import fixed_numbers
from exportkit._torch_compat.sampled_products import sampled_products
from exportkit._torch_compat.tracing import apart_from_modes, autocast_dtypes, autocast_off, run_backward
from exportkit.calls.call import Call
from exportkit.calls.observation import Observation
from exportkit.calls.recorder import recording_paused
from exportkit.overrides import attribute_slots, original_attribute, replaced, replaced_attributes
from exportkit.running.bounds import HALF, fixed_bound
from exportkit.running.compare import compare_outputs
from exportkit.running.module_state import modules_kept
from exportkit.trees import flatten

_NO_GRADIENT = "does not require grad"  # of torch, where a model computes a gradient and none is recorded
IN_TF32 = fixed_bound(0.05, 0.05)  # what a run that rounds to TF32 may be off
_MOST_COPIED = 10**9  # weights of a model that is copied to see what it does in float32
# A run may take so many times as long as the longest run of the model before, for as many elements, but at least so
# many seconds, a quarter of that after each run that was stopped: a model that iterates until values no longer change
# may never return for made-up values.
_MOST_TIMES, _LEAST_SECONDS = 100, 10.0

Answer = TypeVar("Answer")
Around = Callable[[dict[str, Any], Callable[[Mapping[str, Any]], Any]], Any]


@dataclass(frozen=True)
class EagerRunner:
    """A model in eager mode.

    Attributes:
        model: The model.
        method: The method that is called.
        autocasts: Whether ``torch.autocast`` has an effect, in the model and around it.
    """

    model: torch.nn.Module
    method: str
    autocasts: bool = True

    def __call__(self, call: Call, /) -> dict[str, torch.Tensor]:
        """Returns the outputs for copies of the tensors of a call, by path.

        Raises:
            Exception: whatever the model raises.
        """
        with contextlib.nullcontext() if self.autocasts else replaced_attributes(*autocast_off()):
            return flatten(run_eager(self.model, self.method, call)).tensors()

    def in_float32(self) -> EagerRunner | None:
        """Returns the model in float32, without autocast; None if its weights are too large to be copied for that."""
        weights = [*self.model.parameters(), *self.model.buffers()]
        if not any(weight.dtype in HALF for weight in weights):
            return replace(self, autocasts=False)
        if sum(weight.numel() for weight in weights) > _MOST_COPIED:
            return None
        with contextlib.suppress(Exception):  # not every module can be copied
            return replace(self, model=copy.deepcopy(self.model).to(torch.float32), autocasts=False)
        return None


def run_eager(model: torch.nn.Module, method: str, call: Call, around: Around | None = None) -> Any:
    """Returns what ``model.<method>`` returns for copies of the tensors of a call.

    A model that draws random numbers gets the same ones each time, see `fixed_numbers`.

    Args:
        model: The model.
        method: The method.
        call: The call.
        around: Is given the arguments by name, and a function that calls the method with arguments by name; what it
            returns is returned.

    Raises:
        Exception: whatever the model raises, or `TimeoutError` if it does not return.
    """
    target = method_of(model, method)

    def run(values: Mapping[str, Any]) -> Any:
        args, kwargs = call.signature.unbind(values)
        return target(*args, **kwargs)

    def made(records: bool) -> Any:
        values = call.copies()
        with (
            torch.set_grad_enabled(records),
            kernels_of(call),
            nothing_compiled(),
            autocast(call.autocast),
            recording_paused(),
            _random_states_kept(call),
            modules_kept(model),
            _gradients_kept(model),
            as_on_cpu((*call.tensors().values(), *model.parameters(), *model.buffers())),
            fixed_numbers(call.seed, call.generators()),
            _limited_time(model, call),
        ):
            return run(values) if around is None else around(values, run)

    try:
        return made(records=False)
    except RuntimeError as error:
        if _NO_GRADIENT not in str(error):
            raise
    return flatten(made(records=True)).map(detached).build()


def detached(leaf: Any) -> Any:
    """Returns a result as a tensor of its own, since a model may return an argument that it changes."""
    return leaf.detach().as_subclass(torch.Tensor).clone() if isinstance(leaf, torch.Tensor) else leaf


class _TimeUp(TimeoutError):
    """What is raised in the thread of a model that does not return."""


@dataclass
class _Runs:
    """What is known of the runs of a model.

    Attributes:
        longest: The seconds that the longest run took; None before the first one.
        elements: The elements of the tensors that it got.
        stopped: How many runs did not return.
    """

    longest: float | None = None
    elements: int = 1
    stopped: int = 0

    def limit(self, elements: int) -> contextlib.AbstractContextManager[None]:
        """Returns a context manager that raises `TimeoutError` in a run that takes far longer than others."""
        if self.longest is None:
            return contextlib.nullcontext()
        ratio = max(1.0, elements / self.elements) ** 2  # attention takes a square of the length
        return _limited(max(_LEAST_SECONDS / 4**self.stopped, _MOST_TIMES * ratio * self.longest))


@contextlib.contextmanager
def _limited_time(model: torch.nn.Module, call: Call) -> Iterator[None]:
    """Raises an error in a run that takes far longer than other runs of the model. The first run may take any time."""
    runs, started = _runs().setdefault(model, _Runs()), time.perf_counter()
    with apart_from_modes():  # a mode around the run may note the sizes that are read
        elements = sum(tensor.numel() for tensor in call.tensors().values()) or 1
    try:
        with runs.limit(elements):
            yield
    except TimeoutError:
        runs.stopped += 1
        raise
    seconds = time.perf_counter() - started
    if runs.longest is None or seconds > runs.longest:
        runs.longest, runs.elements = seconds, elements


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raises `TimeoutError` in code that takes longer. Another thread does that, as an interrupt would."""
    lock, thread, is_running, is_late = threading.Lock(), threading.get_ident(), True, False

    def stop() -> None:
        nonlocal is_late
        with lock:
            if is_running:
                is_late = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_TimeUp))

    timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), stop)
    timer.daemon = True
    timer.start()
    try:
        try:
            yield
        finally:
            timer.cancel()
            with lock:
                is_running = False
            if is_late:
                time.sleep(0)  # where the error is raised at the latest
    except _TimeUp:
        raise TimeoutError(
            f"the model did not return within {seconds:.0f} s; does it have a loop that does not end?"
        ) from None


@functools.cache
def _runs() -> MutableMapping[torch.nn.Module, _Runs]:
    """The runs of each model, as long as it lives."""
    from torch.utils.weak import WeakIdKeyDictionary

    return WeakIdKeyDictionary()


@contextlib.contextmanager
def _gradients_kept(model: torch.nn.Module) -> Iterator[None]:
    """Restores the gradients of parameters, which a model adds to if it calls ``backward``."""
    kept = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in kept:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient


def needs_gradients(model: torch.nn.Module, method: str, call: Call) -> bool:
    """Returns whether a model that computes gradients leaves it to its caller to let torch record them.

    Raises:
        Exception: whatever the model raises.
    """

    def are_recorded(values: dict[str, Any], run: Callable[[Mapping[str, Any]], Any]) -> bool:
        run(values)
        return torch.is_grad_enabled()

    return bool(run_eager(model, method, call, are_recorded))


@contextlib.contextmanager
def gradients_noted() -> Iterator[list[bool]]:
    """Gives a list that is empty until something computes a gradient."""
    owner, name = run_backward()
    engine, found = original_attribute(owner, name), list[bool]()

    def noted(*args: Any, **kwargs: Any) -> Any:
        found.append(True)
        return engine(*args, **kwargs)

    with replaced_attributes(owner, {name: noted}):
        yield found


def answered(model: torch.nn.Module, method: str, call: Call) -> Call:
    """Returns a call with what the model returns for it; an error of the model is raised."""
    return replace(call, outputs=flatten(run_eager(model, method, call)))


def method_of(model: torch.nn.Module, name: str) -> Callable[..., Any]:
    """Returns what calls a method of a model: the model itself, which runs its hooks, if that is ``forward``."""
    return model if name == "forward" else getattr(model, name)


def kernels_of(call: Call) -> contextlib.AbstractContextManager[None]:
    """Lets torch take the kernels that it took in recorded calls.

    If nothing needs a gradient, Transformer layers have kernels of their own, and leave out what is masked as padding.
    """
    owner, name = inference_kernels()
    return replaced_attributes(owner, {name: original_attribute(owner, name) and not call.gradients})


def nothing_compiled() -> contextlib.AbstractContextManager[None]:
    """Runs ``flex_attention``, where code has imported it, without compiling it for each size."""
    return replaced(attribute_slots(flexible_attention_attributes()))


@contextlib.contextmanager
def autocast(dtypes: Sequence[tuple[str, str]]) -> Iterator[None]:
    """Turns ``torch.autocast`` on for these types of devices, each with its dtype, and off for others."""
    wanted = dict(dtypes)
    with contextlib.ExitStack() as stack:
        for device in {**dict(autocast_dtypes()), **wanted}:
            dtype = getattr(torch, wanted[device]) if device in wanted else None
            stack.enter_context(torch.autocast(device, dtype, enabled=device in wanted, cache_enabled=False))
        yield


@contextlib.contextmanager
def _random_states_kept(call: Call) -> Iterator[None]:
    """Restores the states of torch's own generators, and of those among the arguments of a call."""
    devices = {t.device.index or 0 for t in call.tensors().values() if t.device.type == "cuda"}
    states = [(generator, generator.get_state()) for generator in call.generators()]
    try:
        with torch.random.fork_rng(devices=sorted(devices)):
            yield
    finally:
        for generator, state in states:
            generator.set_state(state)


def sampled_answer(
    model: torch.nn.Module,
    question: Callable[[], Answer],
    is_sure: Callable[[Answer], bool] = lambda _: True,
    otherwise: Callable[[], Answer] | None = None,
    shortcut: Callable[[], contextlib.AbstractContextManager[None]] | None = None,
) -> Answer:
    """Returns the answer to a question that is not about the weights of a model, and that runs the model.

    Products with large weights are sampled in these runs. With 368 million parameters, a run of few tokens takes a
    third of the time.

    Args:
        model: The model.
        question: What runs the model, and compares nothing with the results of whole products.
        is_sure: Whether such an answer counts; otherwise the question is asked again, with whole products.
        otherwise: Answers the question with whole products, if that is done in another way.
        shortcut: What else makes such runs take less time, if anything.
    """
    sampled = sampled_products(model.parameters())
    if sampled is not None or shortcut is not None:
        with sampled or contextlib.nullcontext(), shortcut() if shortcut else contextlib.nullcontext():
            answer = question()
        if is_sure(answer):
            return answer
    return (otherwise or question)()


def replayed(observation: Observation, model: torch.nn.Module, method: str) -> Observation:
    """Returns the calls with outputs that belong to their inputs, and that float32 on CUDA did not round to TF32.

    Where only shapes were saved, the values of inputs and outputs are made up, so the model runs again. Calls for
    which it raises are left as they are, and so are those of a model that returns something else than before. If the
    model draws random numbers, the outputs become those for fixed ones.
    """
    rounded = uses_tf32() and any(t.is_cuda for call in observation.calls for t in call.outputs.tensors().values())
    draws = any(call.seed is not None for call in observation.calls)
    if observation.has_values and not rounded and not draws:
        return observation
    calls = []
    for call in (replace(call, seed=number if draws else None) for number, call in enumerate(observation.calls)):
        try:
            again = answered(model, method, call)
        except Exception:
            again = call
        known = call.outputs.tensors() if observation.has_values and not draws else {}
        same = all(item.reason is None for item in compare_outputs(known, again.outputs.tensors(), bound=IN_TF32))
        calls.append(again if same else call)
    return replace(observation, calls=tuple(calls), has_values=True)


def replaced_buffer(model: torch.nn.Module, method: str, call: Call) -> str | None:
    """Returns the name of a buffer that the model replaces during a call; None if it replaces none.

    An example is a table of positions that is made longer when it is needed. A graph has the one that it was traced
    with.

    Raises:
        Exception: whatever the model raises.
    """
    before = {name: id(buffer) for name, buffer in model.named_buffers()}
    found: list[str] = []

    def around(values: dict[str, Any], run: Callable[[Mapping[str, Any]], Any]) -> None:
        run(values)
        found.extend(name for name, buffer in model.named_buffers() if before.get(name, id(buffer)) != id(buffer))

    run_eager(model, method, call, around)
    return next(iter(found), None)
