"""Applications: several modules that run together, such as a pipeline, and which of their methods a run calls.

An application is an object that holds modules, or a dict of modules by name. Each method that is recorded becomes a
part with an observation of its own. A path leads from the application to a module: names of attributes, keys of dicts
and positions in lists, joined by dots.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch

from exportkit._torch_compat.tracing import is_tracing
from exportkit.calls.method_wrapper import CalledInstead, attach, methods_of
from exportkit.calls.parts import DEPTH, Part, part_name
from exportkit.calls.recorder import Recorder
from exportkit.calls.signature import Signature
from exportkit.errors import InvalidRequestError, InvalidTypeError, NoCallsError, UnknownMethodError
from exportkit.trees import join

_REACH = 4  # steps from an application to a module: `pipe.stages["decoder"].model` takes three
_MOST_ITEMS = 1000  # of a list or a dict that are looked at: longer ones are vocabularies, not modules
_MOST_OBJECTS = 20_000  # that are looked at: a pipeline holds some dozens, and some tokenizers thousands
_CLOSED = (type, ModuleType, FunctionType, MethodType, torch.Tensor, torch.dtype, torch.device, str, bytes, int, float)
_NAME = re.compile(r"[A-Za-z0-9][\w-]*")  # a name is also the name of a file


class ObservedMethod(NamedTuple):
    """A method of a module in an application.

    Attributes:
        path: Where the module is.
        method: The name of the method.
    """

    path: str
    method: str

    def __str__(self) -> str:
        return join(self.path, self.method)


def modules_in(application: Any) -> dict[str, torch.nn.Module]:
    """Returns the modules that an object holds, by path, without modules inside of modules; none of them twice."""
    found: dict[str, torch.nn.Module] = {}
    seen: set[int] = set()

    def look(value: Any, path: str, reach: int) -> None:
        if isinstance(value, _CLOSED) or id(value) in seen or len(seen) > _MOST_OBJECTS:
            return
        seen.add(id(value))
        if isinstance(value, torch.nn.Module):
            found[path] = value
        elif reach:
            for key, inner in _items(value):
                look(inner, f"{path}.{key}".lstrip("."), reach - 1)

    look(application, "", _REACH)
    return found


def _items(value: Any) -> list[tuple[str, Any]]:
    """What a container or an object holds, by the step that leads to it; no code of the object runs for that."""
    if isinstance(value, dict | list | tuple):
        steps = value.items() if isinstance(value, dict) else enumerate(value)
        named = [(str(step), inner) for step, inner in steps] if len(value) <= _MOST_ITEMS else []
        return [(step, inner) for step, inner in named if "." not in step]
    try:
        own = dict(object.__getattribute__(value, "__dict__"))
    except AttributeError:
        own = {}
    slots = [name for cls in type(value).__mro__ for name in _slots(cls)]
    return [*own.items(), *((n, getattr(value, n)) for n in slots if hasattr(value, n))]


def _slots(cls: type) -> tuple[str, ...]:
    slots = vars(cls).get("__slots__", ())
    return tuple(n for n in ((slots,) if isinstance(slots, str) else slots) if n not in ("__dict__", "__weakref__"))


def part_of_application(application: Any, path: str) -> Any:
    """Returns what a path leads to; None if it leads nowhere."""
    value = application
    try:
        for step in path.split(".") if path else ():
            if isinstance(value, list | tuple):
                value = value[int(step)]
            else:
                value = value[step] if isinstance(value, Mapping) and step in value else getattr(value, step)
    except (AttributeError, LookupError, ValueError, TypeError):
        return None
    return value


def module_at(application: Any, path: str, method: str, model_name: str) -> torch.nn.Module:
    """Returns a module of an application, or of a module.

    Args:
        application: The object, the dict or the module.
        path: Where the module was when it was recorded; empty for the module itself.
        method: A method that it has to have.
        model_name: The class of the recorded module; the only module of this class serves where the path leads nowhere.

    Raises:
        UnknownMethodError: if there is no such module, or it does not have the method.
    """
    value = part_of_application(application, path)
    if isinstance(value, tuple) and value and isinstance(value[0], torch.nn.Module):  # of a dict: module and method
        value = value[0]
    if isinstance(value, torch.nn.Module) and callable(getattr(value, method, None)):
        return value
    modules = {"": application} if isinstance(application, torch.nn.Module) else modules_in(application)
    named = {id(m): m for m in modules.values() if type(m).__name__ == model_name}
    fitting = [module for module in named.values() if callable(getattr(module, method, None))]
    if len(fitting) == 1:
        return fitting[0]
    raise UnknownMethodError(
        f"{type(application).__name__} does not have the method that was exported.",
        where=join(path, method),
        expected=f"a model like {model_name}" if not path else f"an object or dict with {path}, like {model_name}",
        got=type(application).__name__,
    )


def require_distinct(found: Iterable[tuple[str, torch.nn.Module]]) -> None:
    """Raises UnknownMethodError if one method of a module serves as two that were recorded.

    Args:
        found: The recorded methods, by their paths, with the modules that were found for them.
    """
    targets: dict[tuple[int, str], str] = {}
    for target, module in found:
        first = targets.setdefault((id(module), target.rpartition(".")[2]), target)
        if first != target:
            raise UnknownMethodError(
                f"{first} and {target} are methods of different modules, but one module was given for both.",
                where=target,
                expected="each module under the name that it was recorded with",
                got=f"one {type(module).__name__}",
            )


def require_parameters(module: torch.nn.Module, method: str, names: Iterable[str], model_name: str) -> None:
    """Raises InvalidRequestError if a method cannot take arguments that calls of the observed model gave.

    Args:
        module: The module that is given as the observed one.
        method: Its method.
        names: Names of the arguments.
        model_name: The class of the observed module.
    """
    signature = Signature.of(getattr(module, method))
    if signature.var_positional is not None or signature.var_keyword is not None:
        return
    lacking = [name for name in names if name not in signature.names]
    if lacking:
        raise InvalidRequestError(
            f"This is not the model that was observed: its {method} does not take {', '.join(lacking)}.",
            where=f"{type(module).__name__}.{method}({', '.join(signature.names)})",
            expected=f"a model like {model_name}",
            got=type(module).__name__,
        )


class _Frames(threading.local):
    """The methods inside of which this thread is; None inside a ``forward``, where nothing more is recorded."""

    open: tuple[ObservedMethod, ...] | None = ()


class _Heard:
    """Records the calls of a method, and inside which other methods they were made."""

    def __init__(self, target: ObservedMethod, recorder: Recorder, frames: _Frames) -> None:
        self.target, self.recorder, self._frames = target, recorder, frames
        self.around: set[tuple[ObservedMethod, ...]] = set()

    def call(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        frames = self._frames.open
        if frames is None or self.target in frames or is_tracing():
            return method(*args, **kwargs)
        self.around.add(frames)
        self._frames.open = None if self.target.method == "forward" else (*frames, self.target)
        try:
            return self.recorder.call(method, args, kwargs)
        finally:
            self._frames.open = frames


class ApplicationRecorder:
    """Records the calls of an application's modules, in any number of runs.

    With a dict, these are the methods that it names. With any other object, they are found: ``forward`` of each module
    that runs, unless another one calls it, and any other method of a module that is called instead of its ``forward``,
    such as ``decode``.

    Args:
        application: The object or the dict.
    """

    def __init__(self, application: Any) -> None:
        self.name = type(application).__name__
        self.is_named = isinstance(application, Mapping)
        self._frames = _Frames()
        self._heard: dict[ObservedMethod, _Heard] = {}
        self._instead: dict[str, CalledInstead] = {}
        self._leaves: set[str] = set()  # paths of modules without modules inside
        self._modules: list[str] = []

    @contextlib.contextmanager
    def recording(self, application: Any, store_n_calls: int, **limits: Any) -> Iterator[None]:
        """Records for the time of a ``with`` block.

        Args:
            application: The object or the dict.
            store_n_calls: How many calls of each method to store.
            **limits: Further arguments of `Recorder.allow`.

        Raises:
            InvalidRequestError: if a method differs from the one that was recorded under its name.
        """
        targets = named_targets(application) if self.is_named else self._found_targets(application)
        for target, module in targets.items():
            signature = Signature.of(getattr(module, target.method))
            if target not in self._heard:
                recorder = Recorder(signature, target.method, type(module).__name__)
                self._heard[target] = _Heard(target, recorder, self._frames)
            elif self._heard[target].recorder.signature.names != signature.names:
                raise InvalidRequestError(
                    "This observer has already recorded a different module.",
                    where=str(target),
                    got=f"{type(module).__name__}.{target.method} with inputs {', '.join(signature.names)}",
                    hint="use one InputObserver for each application.",
                )
        with contextlib.ExitStack() as stack:
            for target, module in targets.items():
                heard = self._heard[target]
                heard.recorder.allow(store_n_calls, **limits)
                stack.callback(attach(module, target.method, (heard.recorder if self.is_named else heard).call).leave)
                if self.is_named:
                    instead = CalledInstead(module, target.method, heard.recorder.num_calls)
                    self._instead[target.path] = instead
                    stack.callback(instead.leave)
            yield

    def _found_targets(self, application: Any) -> dict[ObservedMethod, torch.nn.Module]:
        targets: dict[ObservedMethod, torch.nn.Module] = {}
        seen: set[int] = set()
        for root, whole in modules_in(application).items():
            self._modules.append(root)
            for inner, module in whole.named_modules():
                if inner.count(".") >= DEPTH or id(module) in seen or isinstance(module, torch.jit.ScriptModule):
                    continue
                seen.add(id(module))
                path = f"{root}.{inner}".rstrip(".")
                if next(module.children(), None) is None:
                    self._leaves.add(path)
                if not inner or type(module).forward is not torch.nn.Module.forward:
                    targets[ObservedMethod(path, "forward")] = module
                targets |= {ObservedMethod(path, name): module for name in methods_of(module)}
        return targets

    def recorders(self) -> dict[str, Recorder]:
        """Returns the recorders of the methods that make up the application, by method."""
        return {str(target): self._heard[target].recorder for target in self._targets()}

    def problems(self) -> tuple[str, ...]:
        """Returns what could not be recorded, and which limits were reached."""
        every = {str(target): heard.recorder for target, heard in self._heard.items()}
        failed = {name: recorder for name, recorder in every.items() if not recorder.num_calls() and recorder.problems}
        recorders = {**failed, **self.recorders()}
        return tuple(f"{name}: {text}" for name, r in recorders.items() for text in (*r.problems, *r.limits))

    def parts(self) -> dict[str, Part]:
        """Returns the methods that make up the application, by name.

        Raises:
            NoCallsError: if none was called, or one that was named was not.
        """
        found: dict[str, Part] = {}
        for target in self._targets():
            observation = self._heard[target].recorder.observation()
            if self.is_named:
                self._instead[target.path].in_observation(observation).require_calls()
            name = target.path if self.is_named else part_name(target.path, target.method, found, with_module=True)
            found[name] = Part(name, target.path, observation, ())
        if not found:
            raise NoCallsError(
                f"No module of {self.name} was called.",
                expected=f"a call of {', '.join(self._modules)}",
                hint="run the application inside `with observer(application):`; to choose the methods, pass a dict "
                'such as {"unet": pipe.unet, "decoder": (pipe.vae, "decode")}.',
            )
        return found

    def _targets(self) -> list[ObservedMethod]:
        """The methods that make up the application, in the order in which the modules were found."""
        if self.is_named:
            return list(self._heard)
        called = {target: heard for target, heard in self._heard.items() if heard.recorder.num_calls()}

        def computes(target: ObservedMethod) -> bool:
            if target.method == "forward":
                return True
            own = self._heard.get(ObservedMethod(target.path, "forward"))
            if own is not None and any(target in around for around in own.around):
                return False  # it only organises calls of the model
            inside = f"{target.path}."
            runs_modules = any(
                target in around
                for other, heard in called.items()
                if other.method == "forward" and other.path.startswith(inside)
                for around in heard.around
            )
            first = called[target].recorder.observation().calls[:1]
            has_tensors = any(call.tensors() and call.outputs.tensors() for call in first)
            return (runs_modules or target.path in self._leaves) and has_tensors

        def is_taken(target: ObservedMethod) -> bool:
            if target not in taken:
                around = self._heard[target].around
                taken[target] = (
                    target in called
                    and computes(target)
                    and any(not any(is_taken(other) for other in others) for others in around)
                )
            return taken[target]

        taken: dict[ObservedMethod, bool] = {}
        return [target for target in called if is_taken(target)]


def named_targets(application: Mapping[Any, Any]) -> dict[ObservedMethod, torch.nn.Module]:
    """Returns the methods that a dict names: ``{"unet": pipe.unet, "decoder": (pipe.vae, "decode")}``.

    Raises:
        InvalidTypeError: if a value is neither a module nor a module with the name of a method.
        InvalidRequestError: if there is none, or a name cannot be the name of a file.
    """
    if not application:
        raise InvalidRequestError("There is no module to observe.", expected="a dict of modules", got="an empty dict")
    targets: dict[ObservedMethod, torch.nn.Module] = {}
    for name, value in application.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InvalidRequestError(
                "Module names consist of letters and digits, as each graph is named after its module.",
                where="observer(...)",
                expected="a name such as 'unet'",
                got=repr(name),
            )
        module, method = value if isinstance(value, tuple) and len(value) == 2 else (value, "forward")
        if not isinstance(module, torch.nn.Module) or not isinstance(method, str):
            raise InvalidTypeError(
                "Only a torch.nn.Module can be observed.",
                where=name,
                expected="a module, or a module with the name of a method: (vae, 'decode')",
                got=type(value).__name__,
            )
        targets[ObservedMethod(name, method)] = module
    return targets
