"""The public `InputObserver`: records calls, then says what varied and what to export with."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from exportkit.calls.observer import Observer
from exportkit.errors import InvalidRequestError
from exportkit.probing.planning import BoundPlan, plan_calls

if TYPE_CHECKING:
    from exportkit.peers.check import ObservedInfo


class InputObserver(Observer):
    """Records calls of a model, and infers from them what ``torch.export`` and ``torch.onnx.export`` need.

    Args:
        value_if_missing: Values for arguments that some calls lack, by name or position. They count as observed: an
            empty tensor shows which axis is 0 if the argument is absent.

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

    @property
    def info(self) -> ObservedInfo | None:
        """The recorded calls the way ``torch.onnx.InputObserver`` shows them; None before the first observation."""
        from exportkit.peers.check import ObservedInfo

        return None if self._recorder is None else ObservedInfo(self.observation)

    def plan(self, probe: bool = True) -> BoundPlan:
        """Returns the `Plan`: what varies, what depends on what, and why. It is bound to the recorded calls.

        Args:
            probe: Run the model again, without gradients, to confirm what the recorded sizes suggest: which axes are
                the batch, and which equal sizes belong together. Without it, or once the model has been deleted, the
                plan is based on the recorded sizes alone.
        """
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
            dim_names: Names instead of ``Dim.DYNAMIC``, for ``torch.onnx.export``. With True, axes that are equal in
                the plan have one name: ``batch_size``, ``sequence_length``, ``past_sequence_length`` and
                ``total_sequence_length`` for the axes of decoders, and the name in the plan for others. A dict gives
                names by input and axis; axes that it leaves out get unique names.

        Returns:
            A tuple if all calls gave all inputs by position, else a dict in signature order. Constants are None; a
            cache or another registered class is the list of its leaves.

        Raises:
            NoCallsError: before any call.
            PlanError: if the calls contradict each other.
        """
        from exportkit.peers.dynamic_shapes import recorded_dynamic_shapes

        return recorded_dynamic_shapes(self.observation, set_batch_dimension_for, dim_names)

    def infer_arguments(
        self,
        index_or_args_or_kwargs: int | tuple[Any, ...] | dict[str, Any] | None = None,
        flat: bool = False,
        as_args_kwargs: bool = False,
        exportable: bool = False,
    ) -> Any:
        """Returns the arguments of a call, completed with the inputs that only other calls have.

        Args:
            index_or_args_or_kwargs: Number of a recorded call, or arguments of your own; by default the first call
                with the most inputs. A missing input becomes an empty tensor (size 0 along its last dynamic axis), or
                zeros.
            flat: Return the list of tensors.
            as_args_kwargs: Return ``(args, kwargs)`` in any case.
            exportable: Return arguments of the same structure made for ``torch.export.export``: all sizes that can
                vary are distinct and greater than 1, so that no axis is specialised.

        Returns:
            A tuple if all calls gave all inputs by position, else a dict in signature order. Booleans and None in
            ``**kwargs`` are left out, because torch.export does not accept them; a RuntimeWarning says so if they
            affect the result.

        Raises:
            NoCallsError: before any call.
            InvalidRequestError: if the first argument is neither None, an index, a tuple nor a dict.
            PlanError: if positional ``*args`` and named inputs are mixed, unless ``as_args_kwargs`` is set.
        """
        from exportkit.peers.arguments import exportable_arguments, flags_that_matter, recorded_arguments

        model = None if self._model is None or self.is_empty() else self._model()
        flags = {} if model is None else flags_that_matter(self.observation, model)
        if flags:
            left_out = ", ".join(f"{name}={value}" for name, value in flags.items())
            text = f"exportkit: {left_out} is left out, since torch.export accepts no Python value in **kwargs; without"
            text += " it, the model returns a different result. exportkit.export makes it part of the graph."
            warnings.warn(text, RuntimeWarning, stacklevel=2)
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
        """Returns one row for each recorded call: how far the outputs of an ONNX model are from the recorded outputs.

        Args:
            onnx_model: Path of an ONNX file, its content, a ModelProto, a ``torch.onnx.ONNXProgram`` or an `OnnxModel`.
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
