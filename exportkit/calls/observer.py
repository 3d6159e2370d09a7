"""Records a model's calls for the time of a ``with`` block, together with the calls of the parts that feed it.

Several modules that run together, such as those of a pipeline, are recorded at once.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, Self

import torch

from exportkit.calls.application import ApplicationRecorder, modules_in, named_targets
from exportkit.calls.method_wrapper import CalledInstead, attach
from exportkit.calls.observation import Observation
from exportkit.calls.parts import Part, PartRecorder, Wanted
from exportkit.calls.recorder import Recorder
from exportkit.calls.signature import Signature
from exportkit.errors import (
    InvalidRequestError,
    InvalidTypeError,
    NoCallsError,
    ObservationError,
    UnknownInputError,
    UnknownMethodError,
)


class Observer:
    """Records calls of a model; `exportkit.InputObserver` adds the methods that infer something from them.

    Args:
        value_if_missing: Values for arguments that some calls lack, by name or position.
    """

    def __init__(self, value_if_missing: Mapping[str | int, Any] | None = None) -> None:
        if not isinstance(value_if_missing, Mapping | None):
            raise InvalidTypeError(
                "value_if_missing must be a dict with a value for each argument that some calls lack.",
                expected="a dict of values by name or position",
                got=repr(value_if_missing),
            )
        self.value_if_missing = dict(value_if_missing or {})
        self._recorder: Recorder | None = None
        self._removed: set[str] = set()
        self._model: weakref.ref[torch.nn.Module] | None = None
        self._method_name = "forward"
        self._parts: PartRecorder | None = None
        self._application: ApplicationRecorder | None = None
        self._instead: CalledInstead | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.num_obs()} calls)"

    @contextlib.contextmanager
    def __call__(
        self,
        model: torch.nn.Module | object,
        store_n_calls: int = 3,
        method_name: str = "forward",
        shapes: Literal["all", "stored"] = "all",
        max_bytes: int | None = None,
        parts: Wanted | None = None,
    ) -> Iterator[Self]:
        """Records calls of ``model`` for the time of a ``with`` block.

        Args:
            model: The model to observe. It behaves as usual, and is left unchanged. To observe several modules at once,
                pass an object that holds them, such as a pipeline, whose methods are found when they run, or a dict
                that names them: ``{"unet": pipe.unet, "decoder": (pipe.vae, "decode")}``.
            store_n_calls: How many calls to store with their values, in this block, of each module.
            method_name: Method to observe.
            shapes: "all" counts the shapes of further calls (``observation.seen``); "stored" removes the observer from
                the model as soon as the calls are stored, so that further ones cost nothing.
            max_bytes: Limit on the memory for the values of all calls. Starting with the call that would exceed it,
                only shapes are kept. Memory that is shared with the model's own tensors counts.
            parts: Submodules or methods to record as well, such as ``["encoder"]`` or ``["encode", "decode"]``. Each
                becomes a graph of its own. "auto" finds those that run before the model and feed it.

        Raises:
            InvalidTypeError: if ``model`` is not a ``torch.nn.Module`` and holds none, or ``value_if_missing`` has a
                key that is neither a name nor a position.
            UnknownMethodError: if the model has no such method.
            InvalidRequestError: if the method is a module inside the model, a method that Python looks up on the class
                (``__call__``), or not the method that was recorded before; if ``shapes`` is neither "all" nor "stored";
                if ``store_n_calls`` or ``max_bytes`` is negative; or if an option that only works for a single model is
                given for several.
            UnknownInputError: if ``value_if_missing`` names an input that the method does not have.
        """
        if shapes not in ("all", "stored"):
            raise InvalidRequestError(
                "Unsupported value of `shapes`.",
                where="shapes",
                expected="'all' or 'stored'",
                got=repr(shapes),
            )
        _require_count(store_n_calls, "store_n_calls")
        if max_bytes is not None:
            _require_count(max_bytes, "max_bytes")
        if not isinstance(model, torch.nn.Module):
            application = self._application_of(model, method_name, parts)
            before = application.problems()
            try:
                with application.recording(model, store_n_calls, counts_shapes=shapes == "all", max_bytes=max_bytes):
                    self._application = application
                    yield self
            finally:
                _report((), tuple([text for text in application.problems() if text not in before]))
            return
        recorder = self._recorder_of(model, method_name)
        self._model, self._method_name = weakref.ref(model), method_name
        part_recorder = self._parts = PartRecorder(model, method_name, parts) if parts is not None else None
        recorder.allow(store_n_calls, counts_shapes=shapes == "all", max_bytes=max_bytes)
        known = len(recorder.problems), len(recorder.limits)
        try:
            with contextlib.ExitStack() as stack:
                is_spent = recorder.is_spent if shapes == "stored" else None
                stack.callback(attach(model, method_name, recorder.call, is_spent).leave)
                self._instead = CalledInstead(model, method_name, recorder.num_calls)
                stack.callback(self._instead.leave)
                if part_recorder is not None:
                    stack.enter_context(part_recorder.recording(store_n_calls, max_bytes))
                yield self
        finally:
            problems, limits = recorder.problems[known[0] :], recorder.limits[known[1] :]
            if part_recorder is not None:
                problems += part_recorder.problems
                limits += part_recorder.limits
            _report(problems, limits)

    def _recorder_of(self, model: torch.nn.Module, method_name: str) -> Recorder:
        """The recorder of a method, new or of an earlier run."""
        signature = self._check(model, method_name)
        if self._application is not None:
            raise InvalidRequestError(
                "This observer has already recorded an application.",
                got=type(model).__name__,
                hint="use one InputObserver for each.",
            )
        if self._recorder is None:
            self._recorder = Recorder(signature, method_name, type(model).__name__)
        elif self._recorder.signature.names != signature.names:
            raise InvalidRequestError(
                "This observer has already recorded a different method.",
                expected=f"a method with inputs {', '.join(self._recorder.signature.names)}",
                got=f"{type(model).__name__}.{method_name} with inputs {', '.join(signature.names)}",
                hint="use one InputObserver for each method.",
            )
        return self._recorder

    def _application_of(self, application: Any, method_name: str, parts: Wanted | None) -> ApplicationRecorder:
        """The recorder of an application, new or of an earlier run."""
        if isinstance(application, Mapping):
            for target, module in named_targets(application).items():
                self._check(module, target.method)
        elif not modules_in(application):
            raise InvalidTypeError(
                "Only a torch.nn.Module can be observed.",
                expected="a torch.nn.Module, an object that holds some, such as a pipeline, or a dict of them",
                got=type(application).__name__,
            )
        options = {"method_name": method_name != "forward", "parts": parts, "value_if_missing": self.value_if_missing}
        for name, is_given in options.items():
            if is_given:
                raise InvalidRequestError(
                    f"{name} is only supported for a single model.",
                    where=name,
                    got=type(application).__name__,
                    hint='name the methods: {"unet": pipe.unet, "decoder": (pipe.vae, "decode")}.',
                )
        known = self._application
        if self._recorder is not None or (known is not None and known.is_named != isinstance(application, Mapping)):
            raise InvalidRequestError(
                "This observer has already recorded something else.",
                got=type(application).__name__,
                hint="use one InputObserver for each.",
            )
        return ApplicationRecorder(application) if known is None else known

    def _check(self, model: torch.nn.Module, method_name: str) -> Signature:
        if isinstance(model, torch.jit.ScriptModule):
            raise InvalidTypeError(
                "torch.export cannot trace a scripted module.",
                got=type(model).__name__,
                hint="observe and export the module that was scripted.",
            )
        if not isinstance(method_name, str):
            raise InvalidTypeError("The name of a method must be a string.", where="method_name", got=repr(method_name))
        if method_name.startswith("__"):
            raise InvalidRequestError(
                f"{method_name} cannot be observed: Python looks it up on the class, not on the model.",
                where="method_name",
                got=repr(method_name),
                hint="observe forward, which a call of the model runs: method_name='forward'.",
            )
        method = getattr(model, method_name, None)
        if isinstance(method, torch.nn.Module):
            raise InvalidRequestError(
                f"{method_name!r} is not a method of {type(model).__name__}, but a module inside it.",
                hint=f"observe that module itself: `with observer(model.{method_name}):`.",
            )
        if not callable(method):
            raise UnknownMethodError(
                f"Model type {type(model).__name__} does not have a method {method_name!r}.",
                hint="name one of its methods, such as method_name='forward'.",
            )
        signature = Signature.of(method)
        for key in self.value_if_missing:
            if not isinstance(key, str | int) or isinstance(key, bool):
                raise InvalidTypeError(
                    f"Unexpected type {type(key).__name__} for a key of value_if_missing.",
                    expected="the name (str) or position (int) of an input",
                    got=repr(key),
                )
            if signature.var_keyword is None or isinstance(key, int):
                signature.name_of(key)
        return signature

    @property
    def observation(self) -> Observation:
        """The recorded calls, with ``value_if_missing`` for missing arguments, and without removed ones.

        Raises:
            NoCallsError: if nothing was ever observed.
            InvalidRequestError: if several modules were observed, each of which has an observation of its own.
        """
        if self._application is not None:
            name, part = next(iter(self.parts.items()))
            raise InvalidRequestError(
                f"Several modules were observed: {', '.join(self.parts)}.",
                where=self._application.name,
                hint=f"each has an observation of its own: observer.parts[{name!r}].observation, for {part.module}.",
            )
        if self._recorder is None:
            raise NoCallsError(
                "No inputs were captured.", hint="run the model inside `with observer(model):` before asking."
            )
        found = self._recorder.observation().completed(self.value_if_missing).without(self._removed)
        return found if found.calls or self._instead is None else self._instead.in_observation(found)

    @property
    def parts(self) -> dict[str, Part]:
        """The parts that were recorded with the model (``parts=``) and ran, or the modules of an application, by name.

        Raises:
            NoCallsError: if no module of an application was called, or one that was named was not.
        """
        if self._application is not None:
            return self._application.parts()
        return {} if self._parts is None else self._parts.parts(self.observation)

    @property
    def has_only_parts(self) -> bool:
        """Whether what was observed is an application, or a model of which only parts ran."""
        if self._application is not None:
            return True
        named = self._parts is not None and not self._parts.is_auto
        return named and not self.observation.calls and bool(self.parts)

    @property
    def seconds(self) -> float:
        """How long all observed calls took together, stored or not."""
        return sum(recorder.seconds for recorder in self._recorders())

    @property
    def first_seconds(self) -> float:
        """How long the first call of each observed method took; they are often slower than those that follow."""
        return sum(recorder.first_seconds for recorder in self._recorders())

    def num_obs(self) -> int:
        """Returns how many calls are stored; of an application, those of all modules."""
        return sum(recorder.num_calls() for recorder in self._recorders())

    def _recorders(self) -> list[Recorder]:
        if self._application is not None:
            return [*self._application.recorders().values()]
        return [] if self._recorder is None else [self._recorder]

    def is_empty(self) -> bool:
        """Returns whether no call is stored."""
        return self.num_obs() == 0

    def remove_inputs(self, names_or_positions: Iterable[str | int]) -> int:
        """Removes inputs from the observation, and so from everything that is inferred from it.

        Inputs need not be given in any call. A name or position that the method does not have causes a warning.

        Returns:
            The number of these inputs that occurred in the calls.

        Raises:
            ObservationError: if nothing was observed yet.
            InvalidRequestError: for ``*args`` and ``**kwargs``.
        """
        if self._application is not None:
            _ = self.observation  # raises: each module has inputs of its own
        if self._recorder is None or self.is_empty():
            raise ObservationError("No input was captured, so there is nothing to remove.")
        signature = self._recorder.signature
        if not isinstance(names_or_positions, Iterable) or isinstance(names_or_positions, str):
            raise InvalidTypeError(
                "The inputs to remove must be a list of names or positions.", got=repr(names_or_positions)
            )
        names, unknown = set[str](), list[UnknownInputError]()
        for key in names_or_positions:
            may_be_caught = signature.var_keyword is not None and isinstance(key, str)
            try:
                names.add(str(key) if may_be_caught else signature.name_of(key))
            except UnknownInputError as error:
                unknown.append(error)
        variadic = names & {signature.var_positional, signature.var_keyword}
        if variadic:
            raise InvalidRequestError(
                f"Cannot remove variadic input {', '.join(sorted(map(str, variadic)))}.",
                hint="remove inputs that the signature names one by one.",
            )
        for problem in unknown:
            warnings.warn(f"exportkit: nothing to remove. {problem}", RuntimeWarning, stacklevel=2)
        before = {name for call in self.observation.calls for name in call.names()}
        self._removed |= names
        return len(before & names)


def _require_count(value: object, name: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InvalidRequestError(
            "Not a number of calls or bytes.", where=name, expected="an integer, 0 or more", got=repr(value)
        )


def _report(problems: tuple[str, ...], limits: tuple[str, ...]) -> None:
    """Warns at the place where the user's ``with`` block ends."""
    texts = [f"exportkit: {limit}" for limit in limits]
    if problems:
        texts.append(
            f"exportkit could not record {len(problems)} of the observed calls; the model was not affected. "
            f"First problem: {problems[0]}"
        )
    for text in texts:
        warnings.warn(text, RuntimeWarning, stacklevel=4)
