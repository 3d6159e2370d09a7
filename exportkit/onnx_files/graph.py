"""One ONNX graph that is called like the model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, MutableMapping
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

import torch

from exportkit.calls.call import Call, shapes_of, tensors_in
from exportkit.calls.observation import Observation
from exportkit.errors import ArgumentError, RuntimeFailure
from exportkit.files import Stamp, stamp_of
from exportkit.onnx_files.contract import Contract, weights_beside
from exportkit.plan.conditions import evaluate
from exportkit.plan.solved_sizes import solve_sizes
from exportkit.probing.cached_tokens import check_counted, hidden_past, zeros_of_unfilled
from exportkit.probing.missing import fill_missing
from exportkit.probing.simplify import as_simplified, value_at, with_split_lists
from exportkit.programs.program import TracedProgram
from exportkit.running.bounds import HALF
from exportkit.running.compare import Tensors
from exportkit.running.eager import EagerRunner
from exportkit.running.kernels import without_weights
from exportkit.running.placement import Placement
from exportkit.running.random_numbers import SEED, with_fixed_numbers
from exportkit.running.session import GraphSession, Session, SessionRunner
from exportkit.trees import check_opened, first_name, flatten, join, set_stored_length, stored_length


@dataclass(frozen=True)
class MeasuredCall:
    """What is known of a call whose outputs are sensitive to rounding, or arbitrary in parts; see `proof.leeway`.

    Attributes:
        ties: Outputs of the model, by path, that differ if it chooses among equal values as ONNX does.
        leeway: How far each element of an output may be off, by path.
    """

    ties: Tensors = field(default_factory=dict)
    leeway: Tensors = field(default_factory=dict)

    def of(self, paths: Collection[str]) -> MeasuredCall:
        """Returns what is known of some outputs."""
        ties = {path: tensor for path, tensor in self.ties.items() if path in paths}
        return MeasuredCall(ties, {path: tensor for path, tensor in self.leeway.items() if path in paths})

    def updated(self, other: MeasuredCall) -> MeasuredCall:
        """Returns what is known together, where the other one counts for outputs that both know."""
        return MeasuredCall({**self.ties, **other.ties}, {**self.leeway, **other.leeway})


@dataclass(frozen=True)
class Given:
    """What a call gives to a graph.

    Attributes:
        tensors: The tensors by path.
        past: Number of cached tokens, if it is needed and the tensors do not show it.
        counted: Number of cached tokens that the caches have counted; 0 without a counter.
    """

    tensors: Tensors
    past: int | None = None
    counted: int = 0


class OnnxGraph:
    """A graph that takes the arguments of the model and returns what the model returns.

    Args:
        contract: How the graph is called.
        observation: The recorded calls that it serves.
        traced: The program that it was translated from; None if the graph was loaded from a folder.
        unseen: Calls at sizes that were never run, with what the model returned; None to run the model for them.
        require_unchanged: Raises an error if the files are not those that were checked when they were loaded.
        eager: The model, if it is at hand for measurements; by default that of the program.
        measured: What was measured for calls whose outputs are sensitive to rounding, by the name of the call.
        session_class: Opens the file in a runtime.
        settings: What else is given to it.
    """

    def __init__(
        self,
        contract: Contract,
        observation: Observation,
        traced: TracedProgram | None = None,
        *,
        unseen: tuple[Call, ...] | None = None,
        require_unchanged: Callable[[], None] | None = None,
        eager: EagerRunner | None = None,
        measured: dict[str, MeasuredCall] | None = None,
        session_class: type[GraphSession] = Session,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.contract, self.observation, self.traced, self.unseen = contract, observation, traced, unseen
        self.eager = traced.eager if eager is None and traced is not None else eager
        self.measured: dict[str, MeasuredCall] = {} if measured is None else measured
        self._require_unchanged = require_unchanged
        self._session_class, self._settings = session_class, settings or {}
        self._session: GraphSession | None = None
        self._fixed: GraphSession | None = None
        self._opened: tuple[Stamp, ...] = ()

    @functools.cached_property
    def half_dtypes(self) -> list[torch.dtype]:
        """The dtypes in half precision in which the model at hand computes, the coarsest one last."""
        if self.eager is None:
            return []
        found = {getattr(torch, name) for name in self.contract.half_dtypes}
        found |= {tensor.dtype for tensor in (*self.eager.model.parameters(), *self.eager.model.buffers())}
        return sorted(found.intersection(HALF), key=lambda dtype: torch.finfo(dtype).eps)

    @functools.cached_property
    def eager_in_float32(self) -> EagerRunner | None:
        """The model in float32, if it is at hand, computes in half precision, and is not too large to be copied."""
        return self.eager.in_float32() if self.eager is not None and self.half_dtypes else None

    def forget_float32(self) -> None:
        """Lets go of the copy in float32: a proof makes it, and the model may change afterwards."""
        vars(self).pop("eager_in_float32", None)

    @property
    def path(self) -> Path:
        """The ONNX file."""
        return self.contract.path

    @property
    def runtime(self) -> str:
        """What runs the graph, by the name that messages use."""
        return self._session_class.runtime

    @property
    def placement(self) -> Placement | None:
        """What computes the graph in onnxruntime; None for the CPU, or in another runtime."""
        return self._settings.get("placement")

    @property
    def size(self) -> int:
        """Bytes on disk, weights included."""
        return sum(file.stat().st_size for file in self._files())

    def _files(self) -> list[Path]:
        return [file for file in (self.path, weights_beside(self.path)) if file.exists()]

    def _stamps(self) -> tuple[Stamp, ...]:
        return tuple(map(stamp_of, self._files()))

    @property
    def session(self) -> GraphSession:
        """The session of onnxruntime or another runtime, made when it is first used.

        Raises:
            DestinationError: if the files were loaded from a folder, and are not those that were checked then.
        """
        if self._session is None:
            self._opened = self._stamps()
            session = self._session_class(self.path, **self._settings)
            if self._require_unchanged is not None:  # asked afterwards, so that a change meanwhile shows, too
                self._require_unchanged()
            names = {*self.contract.inputs}, {*self.contract.outputs}
            if not {*session.inputs} <= names[0] or {*session.outputs} != names[1]:
                raise RuntimeFailure(
                    "The graph has inputs or outputs that differ from those in its description.",
                    where=str(self.path),
                    expected=f"{', '.join(self.contract.inputs)} -> {', '.join(self.contract.outputs)}",
                    got=f"{', '.join(session.inputs)} -> {', '.join(session.outputs)}",
                )
            self._session = session
        return self._session

    @property
    def session_with_fixed_numbers(self) -> GraphSession:
        """The session in which operators that draw random numbers return fixed ones; it takes their seed.

        Raises:
            RuntimeFailure: if the runtime is not onnxruntime.
        """
        if self._fixed is None:
            source = without_weights(str(self.path))
            model = with_fixed_numbers(source)
            if model is source:
                self._fixed = self.session
            elif not issubclass(self._session_class, Session):
                raise RuntimeFailure(
                    f"{self.runtime} draws random numbers of its own, so there is nothing to compare.",
                    where=str(self.path),
                    hint="verify the graph in onnxruntime.",
                )
            else:
                folder = self.path.absolute().parent
                self._fixed = self._session_class(model.SerializeToString(), folder, **self._settings)
        return self._fixed

    def opened_by(self, session_class: type[GraphSession], **settings: Any) -> OnnxGraph:
        """Returns the graph in another runtime. Measurements made in that runtime do not affect this object.

        Args:
            session_class: Opens the file in the runtime.
            settings: What else is given to it.
        """
        return OnnxGraph(
            self.contract,
            self.observation,
            self.traced,
            unseen=self.unseen,
            require_unchanged=self._require_unchanged,
            eager=self.eager,
            measured={**self.measured},
            session_class=session_class,
            settings=settings,
        )

    def close_if_changed(self) -> None:
        """Closes the session if its files were written or replaced since it was opened; it opens again when used."""
        if self._session is not None and self._stamps() != self._opened:
            self._session = self._fixed = None

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], given: Given, seed: int | None = None) -> Any:
        """Returns what the model returns, computed by the runtime.

        Args:
            args: Positional arguments of the model.
            kwargs: Named arguments of the model.
            given: What the call gives, as `given` returns it.
            seed: Of fixed numbers, if these take the place of random ones.

        Raises:
            RuntimeFailure: if the runtime refuses the call.
        """
        contract, plan = self.contract, self.contract.plan
        complete = self._complete(given)
        session, inputs = self.session, contract.inputs
        if seed is not None:
            session, inputs = self.session_with_fixed_numbers, {**inputs, SEED: SEED}
            complete = {**complete, SEED: torch.tensor(seed)}
        runner = SessionRunner(session, inputs, contract.outputs, contract.pairs)
        returned: dict[str, torch.Tensor | None] = {**runner.run(complete)}
        for path, source in contract.dependent.items():
            if source not in given.tensors and path in returned:
                returned[path] = None
        sizes = solve_sizes(plan, shapes_of(complete))
        numbers = {path: evaluate(text, sizes) for path, text in contract.domain.returned.items()}
        outputs = self.structured({**returned, **self._numbers(returned, numbers)})
        held = {first_name(path) for path, tensor in returned.items() if tensor is not None}
        absent = {first_name(path) for path, tensor in returned.items() if tensor is None} - held
        if plan.passed_through and isinstance(outputs, MutableMapping):  # as they were given, or as a part made them
            known = {*contract.signature.plain()}
            arguments = contract.signature.bind(args, {k: v for k, v in kwargs.items() if k in known})
            for name, path in plan.passed_through.items():
                value = value_at(arguments, path)
                if value is not None:
                    outputs[name] = value
                elif not any(leaf.startswith(path) for leaf in given.tensors):
                    absent.add(name)
        if absent and isinstance(outputs, MutableMapping):
            outputs = _without(outputs, absent)
        past, new = plan.with_role("past"), plan.new_tokens
        before = max(given.counted, 0 if past is None else sizes[past.name])
        added = stored_length(outputs) if new is None else sizes[new.name]
        set_stored_length(outputs, before + added)  # the counters of caches
        return outputs

    def given(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], made: Tensors | None = None) -> Given:
        """Returns what a call gives to the graph.

        Args:
            args: Positional arguments of the model.
            kwargs: Named arguments of the model.
            made: What parts made of their own arguments, by path of the input.

        Raises:
            ArgumentError: if the arguments do not fit the graph.
        """
        values, given, known = self._unpacked(args, kwargs, made)
        self._require_tensors(values, given)
        self.contract.domain.require(given.tensors, known)
        self.contract.domain.values.require(values, {first_name(path) for path in made or ()})
        return given

    def _require_tensors(self, values: Mapping[str, Any], given: Given) -> None:
        """Raises ArgumentError if a required input is given, but not as a tensor."""
        for item in self.contract.domain.inputs:
            if item.optional or item.path in given.tensors:
                continue
            value = value_at(values, item.path)
            if value is not None and not isinstance(value, torch.Tensor):
                raise ArgumentError(
                    "An input is not a tensor.", where=item.path, expected="a tensor", got=type(value).__name__
                )

    def explain(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], made: Tensors | None = None) -> str:
        """Returns why a call is inside or outside of the domain, condition by condition.

        Args:
            args: Positional arguments of the model.
            kwargs: Named arguments of the model.
            made: What parts made of their own arguments, by path of the input.

        Raises:
            ArgumentError: if the model has no such inputs.
        """
        _, given, known = self._unpacked(args, kwargs, made)
        return self.contract.domain.explain(given.tensors, known)

    def _unpacked(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], made: Tensors | None
    ) -> tuple[Mapping[str, Any], Given, dict[str, int]]:
        """The arguments by name, what they give to the graph, and the sizes that tensors do not show."""
        signature, plan = self.contract.signature, self.contract.plan
        accepted = {*signature.plain()} | ({*kwargs} if signature.var_keyword else set())
        unknown = next((name for name in kwargs if name not in accepted), None)
        if unknown is not None:
            raise ArgumentError(
                f"The model has no input {unknown!r}.", expected=", ".join(signature.names), got=unknown
            )
        values = signature.bind(args, kwargs)
        trees = {name: flatten(value) for name, value in values.items()}
        for name, tree in trees.items():
            check_opened(name, tree)
        given = as_simplified({**tensors_in(trees), **(made or {})}, plan.joined, plan.unused)
        unknown_empty = {path for path, tensor in given.items() if path not in plan.by_path and not tensor.numel()}
        if unknown_empty:  # an empty cache means no cache; for other tensors without elements, nothing is known
            of_caches = {join(name, path) for name, tree in trees.items() for path in tree.growing}
            given = {path: tensor for path, tensor in given.items() if path not in unknown_empty & of_caches}
        given |= zeros_of_unfilled(plan, given, values)
        counted = stored_length(values)
        check_counted(plan, given, counted)
        past, role = hidden_past(plan, given, counted), plan.with_role("past")
        known = {} if past is None or role is None else {role.name: past}
        return values, Given(given, past, counted), known

    def feeds(self, given: Given) -> dict[str, torch.Tensor]:
        """Returns the tensors that the graph gets for a call, by name of its input."""
        complete = self._complete(given)
        return {name: complete[path] for name, path in self.contract.inputs.items()}

    def program_feeds(self, given: Given) -> dict[str, torch.Tensor]:
        """Returns the tensors that the traced program gets for a call, by name of the node for its input."""
        if self.traced is None:
            return {}
        complete = self._complete(given)
        return {name: complete[path] for name, path in self.traced.paths_by_node.items()}

    def _complete(self, given: Given) -> Tensors:
        """The tensors of a call with defaults for missing inputs, by path."""
        plan, defaults = self.contract.plan, self.contract.defaults.values
        return {**given.tensors, **fill_missing(plan, given.tensors, defaults, given.past)}

    def _numbers(self, returned: Mapping[str, torch.Tensor | None], numbers: Mapping[str, Any]) -> dict[str, Any]:
        """The outputs that are Python numbers in the model, by path: those that the graph returns, and further ones."""
        found = {path: returned.get(path) for path in self.contract.numbers}
        wrong = next((path for path, tensor in found.items() if tensor is not None and tensor.numel() != 1), None)
        if wrong is not None:
            raise RuntimeFailure("The graph returns a tensor where the model returns a number.", where=wrong)
        given = {path: tensor.item() for path, tensor in found.items() if tensor is not None}
        kinds = self.contract.structure.constants()
        return {path: type(kinds[path])(value) for path, value in {**given, **numbers}.items()}

    def structured(self, tensors: Mapping[str, Any]) -> Any:
        """Returns outputs by path as the nested value that the model returns; None stands for one that is absent."""
        return with_split_lists(self.contract.structure.with_leaves(tensors), self.contract.member_rows).build()


def _without(outputs: Any, names: Collection[str]) -> Any:
    """The outputs without those of some names; a class that holds its items as fields has no keys for absent ones."""
    cls, fields = type(outputs), {name: value for name, value in outputs.items() if name not in names}
    if is_dataclass(outputs):
        return cls(**fields)
    outputs.update(dict.fromkeys(names))
    return outputs
