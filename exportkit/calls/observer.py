"""InputObserver: watch a model while it is used as always, then ask what varied and what to export with.

In comes a model that somebody runs; out come an `Observation`, and from it dynamic shapes, arguments and a plan. The
methods below are doors to the later stages; each imports its stage when it is opened.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch

from exportkit.calls.observation import Observation
from exportkit.calls.parts import Part, PartWatch, Wanted
from exportkit.calls.recorder import Recorder
from exportkit.calls.signature import Signature
from exportkit.calls.standin import attach
from exportkit.errors import InvalidRequestError, InvalidTypeError, NoCallsError, ObservationError, UnknownMethodError
from exportkit.peers.view import ObservedInfo

if TYPE_CHECKING:
    from exportkit.plan.plan import Plan


class InputObserver:
    """Records calls of a model, and infers from them what ``torch.export`` and ``torch.onnx.export`` need.

    Args:
        value_if_missing: Values that stand in for arguments which some calls lack, by name or position. They count as
            observed shapes: an empty tensor says which axis is 0 when the argument is absent.

    Example:
        >>> import torch
        >>> from exportkit import InputObserver
        >>> class Add(torch.nn.Module):
        ...     def forward(self, x, y):
        ...         return x + y
        >>> model, observer = Add(), InputObserver()
        >>> with observer(model):
        ...     for n in (2, 3):
        ...         _ = model(torch.ones(n, 6), torch.ones(1, 6))
        >>> observer.num_obs()
        2
        >>> observer.infer_dynamic_shapes()
        ({0: DimHint(DYNAMIC)}, {})
    """

    def __init__(self, value_if_missing: Mapping[str | int, Any] | None = None) -> None:
        self.value_if_missing = dict(value_if_missing or {})
        self._recorder: Recorder | None = None
        self._removed: set[str] = set()
        self._model: weakref.ref[torch.nn.Module] | None = None
        self._method_name = "forward"
        self._watch: PartWatch | None = None

    def __repr__(self) -> str:
        return f"InputObserver({self.num_obs()} calls)"

    @contextlib.contextmanager
    def __call__(
        self,
        model: torch.nn.Module,
        store_n_calls: int = 3,
        method_name: str = "forward",
        shapes: Literal["all", "stored"] = "all",
        max_bytes: int | None = None,
        parts: Wanted | None = None,
    ) -> Iterator[InputObserver]:
        """Records calls of ``model`` for the time of a ``with`` block.

        Args:
            model: The model to observe. It behaves as always, and nothing stays on it afterwards.
            store_n_calls: How many calls to store with their values, in this block.
            method_name: Method to observe.
            shapes: "all" counts the shapes of further calls (``observation.seen``); "stored" takes the observer off
                the model as soon as the calls are stored, so that further ones cost nothing.
            max_bytes: Most memory for the values of all calls; of the call that would pass it, and of those after it,
                only the shapes are kept. Memory that is shared with the model's own tensors counts.
            parts: Submodules or methods to record too, such as ``["encoder"]`` or ``["get_image_features"]``: those
                that run before the model and feed it. "auto" finds them.

        Raises:
            InvalidTypeError: if ``model`` is no ``torch.nn.Module``, or ``value_if_missing`` has a key that is neither
                a name nor a position.
            UnknownMethodError: if the model has no such method.
            InvalidRequestError: if that is a module inside the model, or not the method that was recorded before, or if
                ``shapes`` is neither "all" nor "stored".
            UnknownInputError: if ``value_if_missing`` names an input that the method does not have.
        """
        if shapes not in ("all", "stored"):
            raise InvalidRequestError(
                "An observer keeps shapes of all calls or of the stored ones.",
                where="shapes",
                expected="'all' or 'stored'",
                got=repr(shapes),
            )
        signature = self._check(model, method_name)
        if self._recorder is None:
            self._recorder = Recorder(signature, method_name, type(model).__name__)
        elif self._recorder.signature.names != signature.names:
            raise InvalidRequestError(
                "An observer records one method; this one recorded another before.",
                expected=f"a method with inputs {', '.join(self._recorder.signature.names)}",
                got=f"{type(model).__name__}.{method_name} with inputs {', '.join(signature.names)}",
                hint="use one InputObserver for each method.",
            )
        self._model, self._method_name = weakref.ref(model), method_name
        self._watch = PartWatch(model, method_name, parts) if parts is not None else None
        recorder = self._recorder
        recorder.allow(store_n_calls, counts_shapes=shapes == "all", max_bytes=max_bytes)
        known = len(recorder.problems), len(recorder.limits)
        place = attach(model, method_name, recorder, leaves_when_spent=shapes == "stored")
        watch = self._watch
        try:
            if watch is not None:
                watch.enter(store_n_calls, max_bytes)
            yield self
        finally:
            place.leave()
            if watch is not None:
                watch.leave()
            _report(recorder.problems[known[0] :], recorder.limits[known[1] :])

    def _check(self, model: torch.nn.Module, method_name: str) -> Signature:
        if not isinstance(model, torch.nn.Module):
            raise InvalidTypeError(
                "An observer watches a torch.nn.Module.",
                expected="torch.nn.Module",
                got=type(model).__name__,
                hint="of a pipeline, observe its model: `with observer(pipe.model):`.",
            )
        method = getattr(model, method_name, None)
        if isinstance(method, torch.nn.Module):
            raise InvalidRequestError(
                f"{method_name!r} is no method of {type(model).__name__}, but a module inside it.",
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
        """The calls as they were seen, with missing arguments stood in for, and removed ones left out.

        Raises:
            NoCallsError: if nothing was ever observed.
        """
        if self._recorder is None:
            raise NoCallsError(
                "No inputs were captured.", hint="run the model inside `with observer(model):` before asking."
            )
        return self._recorder.observation().completed(self.value_if_missing).without(self._removed)

    @property
    def parts(self) -> dict[str, Part]:
        """The parts that were recorded with the model (``parts=``) and ran, by name."""
        return {} if self._watch is None else self._watch.parts(self.observation)

    @property
    def info(self) -> ObservedInfo | None:
        """The recorded calls the way ``torch.onnx.InputObserver`` shows them; None before the first observation."""
        return None if self._recorder is None else ObservedInfo(self.observation)

    def num_obs(self) -> int:
        """Returns how many calls are stored."""
        return 0 if self._recorder is None else self._recorder.num_calls()

    def is_empty(self) -> bool:
        """Returns whether no call is stored."""
        return self.num_obs() == 0

    def remove_inputs(self, names_or_positions: Iterable[str | int]) -> None:
        """Leaves inputs out of everything that is inferred from now on.

        Raises:
            ObservationError: if nothing was observed yet.
            InvalidRequestError: for ``*args`` and ``**kwargs``, and for names that the method does not have.
        """
        if self._recorder is None or self.is_empty():
            raise ObservationError("No input was captured, so there is none to remove.")
        signature = self._recorder.signature
        names = {signature.name_of(key) for key in names_or_positions}
        variadic = names & {signature.var_positional, signature.var_keyword}
        if variadic:
            raise InvalidRequestError(
                f"Cannot remove variadic input {', '.join(sorted(map(str, variadic)))}.",
                hint="remove inputs that the signature names one by one.",
            )
        self._removed |= names

    def plan(self, probe: bool = True) -> Plan:
        """Returns the `Plan`: what varies, what depends on what, and why.

        Args:
            probe: Run the model again, without gradients, to confirm what the recorded sizes suggest: which axes are
                the batch, which equal sizes belong together. Without it, or once the model is gone, the plan rests
                on the recorded sizes alone.
        """
        from exportkit.probing.planning import plan_calls

        model = self._model() if probe and self._model is not None else None
        return plan_calls(self.observation, model, self._method_name)

    def infer_dynamic_shapes(
        self,
        set_batch_dimension_for: set[int | str] | bool | None = None,
        dim_names: bool | Mapping[str | int, Mapping[int, str]] | None = None,
    ) -> tuple[Any, ...] | dict[str, Any]:
        """Returns dynamic shapes for ``torch.export.export``, from the sizes that varied between the calls.

        Args:
            set_batch_dimension_for: Inputs, by name or position, whose batch axis is dynamic although it never
                varied; True for all.
            dim_names: Names instead of ``Dim.DYNAMIC``, for ``torch.onnx.export``: True for the names of the plan, or
                names by input and axis, where axes left out get a name of their own.

        Returns:
            A tuple if all calls gave all inputs by position, else a dict in signature order. Constants are None; a
            cache or another registered class is the list of its leaves.

        Raises:
            NoCallsError: before any call.
            PlanError: if the calls contradict each other.
        """
        from exportkit.peers.recorded import recorded_dynamic_shapes

        return recorded_dynamic_shapes(self.observation, set_batch_dimension_for, dim_names)

    def infer_arguments(
        self,
        index_or_args_or_kwargs: int | tuple[Any, ...] | dict[str, Any] | None = None,
        flat: bool = False,
        as_args_kwargs: bool = False,
        exportable: bool = False,
    ) -> Any:
        """Returns the arguments of a call, completed with what other calls had and this one lacks.

        Args:
            index_or_args_or_kwargs: Number of a recorded call, or arguments of your own; by default the first call
                with the most inputs. What is missing becomes an empty tensor, 0 on its last dynamic axis, or zeros.
            flat: Return the list of tensors.
            as_args_kwargs: Return ``(args, kwargs)`` in any case.
            exportable: Return arguments of the same structure made for ``torch.export.export``: all sizes that can
                vary are distinct and greater than 1, so that no axis is specialised.

        Returns:
            A tuple if all calls gave all inputs by position, else a dict in signature order.

        Raises:
            NoCallsError: before any call.
            InvalidRequestError: if the first argument is neither None, an index, a tuple nor a dict.
            PlanError: if positional ``*args`` and named inputs are mixed, unless ``as_args_kwargs`` is set.
        """
        from exportkit.peers.recorded import exportable_arguments, recorded_arguments

        if not exportable:
            return recorded_arguments(self.observation, index_or_args_or_kwargs, flat, as_args_kwargs)
        if index_or_args_or_kwargs is not None:
            raise InvalidRequestError(
                "Exportable arguments are built from all calls together, not from one.",
                hint="leave out the first argument, or leave out exportable=True.",
            )
        return exportable_arguments(self.plan(), self.observation, flat, as_args_kwargs)

    def check_discrepancies(
        self,
        onnx_model: Any,
        atol: float = 1e-4,
        rtol: float = 0.1,
        progress_bar: bool = False,
        skip_none: bool = True,
        include_io: bool = False,
    ) -> list[dict[str, Any]]:
        """Returns one row for each recorded call: how far an ONNX model is from what the model returned then.

        Args:
            onnx_model: Path of an ONNX file, a ModelProto, a ``torch.onnx.ONNXProgram`` or an `OnnxModel`.
            atol: Largest absolute difference.
            rtol: Largest relative difference, ``|a - b| / (|a| + rtol)``.
            progress_bar: Show progress on the terminal.
            skip_none: Do not compare outputs that are None on either side.
            include_io: Add the feeds and both outputs to each row.

        Returns:
            Rows with SUCCESS, abs, rel, error, index, duration_torch, ort_duration, n_inputs, n_none, n_empty.
        """
        from exportkit.peers.check import Tolerance, check_recorded_calls

        tolerance = Tolerance(atol, rtol, skip_none)
        return check_recorded_calls(self.observation, onnx_model, tolerance, progress_bar, include_io)


def _report(problems: tuple[str, ...], limits: tuple[str, ...]) -> None:
    """Warns where the ``with`` block of the user ends."""
    texts = [f"exportkit: {limit}" for limit in limits]
    if problems:
        texts.append(
            f"exportkit could not record {len(problems)} of the observed calls; the model was not affected. "
            f"First problem: {problems[0]}"
        )
    for text in texts:
        warnings.warn(text, RuntimeWarning, stacklevel=4)
