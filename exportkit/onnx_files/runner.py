"""An exported model in ONNX: one or several graphs with the parts that feed them, called like the model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import torch

from exportkit.calls.call import Call, shapes_in, shapes_of, shapes_text
from exportkit.calls.parts import Edge
from exportkit.errors import ArgumentError
from exportkit.onnx_files.contract import Contract
from exportkit.onnx_files.graph import Given, OnnxGraph
from exportkit.plan.solved_sizes import solve_sizes
from exportkit.probing.effects import require_apart, write_back
from exportkit.probing.simplify import value_at, with_value_at
from exportkit.programs.domain import Domain
from exportkit.programs.exported import ExportedModel, require_own
from exportkit.programs.kept_state import RESULT, STATE
from exportkit.programs.kinds import Split, given_constants
from exportkit.programs.strategies import Attempt
from exportkit.running.placement import Placement, Provider, placed
from exportkit.running.runner import Returned
from exportkit.running.session import GraphSession, Session
from exportkit.trees import flatten

_Runner = TypeVar("_Runner", bound="OnnxRunner")


@dataclass(frozen=True)
class ApplicationRun:
    """How an application ran on graphs, compared with its run on the model.

    Attributes:
        equal: Whether it did the same.
        text: What was compared, and what differs.
        eager_seconds: How long all calls of the model took.
        onnx_seconds: How long the same calls took on the graphs.
    """

    equal: bool
    text: str
    eager_seconds: float
    onnx_seconds: float


class OnnxRunner:
    """Graphs and parts with the calling convention of the model; parts alone for several modules.

    With several graphs, each call goes to the graph that it fits. A graph of a model that keeps a state on its modules
    remembers it from call to call, as the model does: a call with an empty cache starts over, and so does one with a
    batch size that differs from the call before.

    Args:
        graphs: The graphs by the name of their program; the name of a single one is empty. There is none for several
            modules.
        parts: The graphs of what feeds the model, by name: they run when their own inputs are given. Or the graphs of
            several modules.
        edges: Which outputs of each part are inputs of the model.
        split: Why there are several graphs, and which calls each serves.
        attempts: What was tried to export the model, in order.
        exported: The export that the graphs come from; None if they were loaded from a folder.
        check_files: Checks the files of the folder that the graphs were loaded from, and returns what a proof should
            mention; None if they were not loaded from a folder.
        compared: The latest run of an application on the graphs; None if there was none.

    Attributes:
        module_state: The state that the last call left, or None before the first one.
    """

    def __init__(
        self,
        graphs: Mapping[str, OnnxGraph],
        parts: Mapping[str, OnnxRunner] | None = None,
        edges: Mapping[str, tuple[Edge, ...]] | None = None,
        *,
        split: Split | None = None,
        attempts: tuple[Attempt, ...] = (),
        exported: ExportedModel | None = None,
        check_files: Callable[[], tuple[str, ...]] | None = None,
        compared: ApplicationRun | None = None,
    ) -> None:
        self.graphs, self.parts, self.edges = dict(graphs), dict(parts or {}), dict(edges or {})
        self.split, self.attempts, self.exported, self.check_files = split, attempts, exported, check_files
        self.compared = compared
        self.module_state: Any = None

    def __repr__(self) -> str:
        if not self.graphs:
            return f"{type(self).__name__}({', '.join(f'{name}: {part!r}' for name, part in self.parts.items())})"
        if self.split is not None:
            files = ", ".join(f"{name}: {graph.path.name}" for name, graph in self.graphs.items())
            return f"{type(self).__name__}({files})"
        return f"{type(self).__name__}({str(self.path)!r}, inputs={list(self.inputs)}, outputs={list(self.outputs)})"

    @property
    def graph(self) -> OnnxGraph:
        """The graph; the first of several.

        Raises:
            InvalidRequestError: if there is none, but parts for several modules.
        """
        require_own(self.graphs, self.parts)
        return next(iter(self.graphs.values()))

    def all_graphs(self) -> Iterator[OnnxGraph]:
        """Yields the graphs, then those of the parts."""
        yield from self.graphs.values()
        for part in self.parts.values():
            yield from part.all_graphs()

    @property
    def path(self) -> Path:
        """The ONNX file; of several graphs or modules, the folder with their files."""
        if not self.graphs:
            return next(self.all_graphs()).path.parent
        return self.graph.path if self.split is None else self.graph.path.parent

    @property
    def size(self) -> int:
        """Bytes on disk, weights included; those of several modules together."""
        return sum(item.size for item in (self.graphs or self.parts).values())

    @property
    def contract(self) -> Contract:
        """How the graph is called; the first one of several."""
        return self.graph.contract

    @property
    def file(self) -> Contract:
        """The contract, which describes the ONNX file with its path, inputs, outputs and their axes."""
        return self.contract

    @property
    def domain(self) -> Domain:
        """Where the graph may be used; the first one of several."""
        return self.contract.domain

    @property
    def inputs(self) -> Mapping[str, str]:
        """Path of the leaf by name of the graph's input, in order; of several graphs, those of the first."""
        return self.contract.inputs

    @property
    def outputs(self) -> Mapping[str, str]:
        """Path of the leaf by name of the graph's output, in order; of several graphs, those of the first."""
        return self.contract.outputs

    @property
    def program(self) -> torch.export.ExportedProgram | None:
        """The ExportedProgram that the graph was translated from; None if it was loaded from a folder."""
        return None if self.graph.traced is None else self.graph.traced.program

    @property
    def session(self) -> GraphSession:
        """The onnxruntime session, which is opened on first use; the first one if there are several graphs."""
        return self.graph.session

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Returns what the model returns, computed by onnxruntime.

        Arguments are given as to the model: nested values, caches, by position or by name. Optional inputs may be left
        out if recorded calls left them out. Python constants must have the values that the graph was exported with;
        arguments that are left out have the defaults of the model's method. If the model returns a list with a tensor
        for each image, of different sizes, the list returned here holds one tensor, their concatenation.

        Raises:
            ArgumentError: if the arguments do not fit the graph, or any of several graphs.
            RuntimeFailure: if onnxruntime refuses them.
        """
        contract = self.contract
        contract.signature.require_numbers(args, kwargs)
        if contract.stateful and STATE not in kwargs and self._goes_on(args, kwargs):
            kwargs[STATE] = self.module_state
        returned = self.run(args, kwargs)
        if contract.stateful:
            self.module_state = returned[STATE]
        returned = self._written_back(args, kwargs, returned)
        return returned[RESULT] if contract.wraps else returned

    def _written_back(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], returned: Any) -> Any:
        """Copies results into arguments that the model modifies in place, and returns those arguments."""
        written = self.contract.written
        values = self.contract.signature.bind_unchanged(args, kwargs) if written else {}
        made = {name: value_at(returned, item.place or "") for name, item in written.items()}
        require_apart(values, made)
        for name, item in written.items():
            if values.get(name) is not None and made[name] is not None:
                write_back(values[name], made[name], item)
                returned = with_value_at(returned, item.place or "", values[name])
        return returned

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], seed: int | None = None) -> Any:
        """Returns what the graph returns; a state that the model keeps on its modules is an argument and a result.

        Args:
            args: Positional arguments of the model.
            kwargs: Named arguments of the model.
            seed: Of fixed numbers, if these take the place of random ones.

        Raises:
            ArgumentError: if the arguments do not fit the graph, or any of several graphs.
            RuntimeFailure: if onnxruntime refuses them.
        """
        self._require_fit(args, kwargs)
        own, made = self._fed_by_parts(args, kwargs, seed)
        if self.split is None:
            return self.graph.call(args, kwargs, self.graph.given(args, own, made), seed)
        shapes, likely_first = self._likely_first(self.split, args, own, made)
        reasons = []
        for name, graph in likely_first:
            try:
                return graph.call(args, kwargs, graph.given(args, own, made), seed)
            except ArgumentError as error:
                lines = [line.strip() for line in str(error).splitlines()]
                text = " ".join(line for line in lines if not line.startswith("hint: "))
                reasons.append(f"{name}: {text[:200]}")
        raise ArgumentError(
            "No program fits this call.",
            where=shapes_text(shapes),
            expected="a call like those that were recorded",
            got=f"\n{' ' * 7}".join(reasons),
            hint="observe a call like this one too, then export again.",
        )

    def _likely_first(
        self, split: Split, args: tuple[Any, ...], own: Mapping[str, Any], made: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, tuple[int, ...]], list[tuple[str, OnnxGraph]]]:
        """The shapes of a call, and several graphs by name, those for its kind first."""
        trees = {name: flatten(value) for name, value in self.contract.signature.bind(args, own).items()}
        shapes = shapes_in(trees) | shapes_of(made)
        kind = split.classifier.kind(shapes, given_constants(trees, self.contract.signature))
        return shapes, sorted(self.graphs.items(), key=lambda item: split.kinds[item[0]] != kind)

    def graph_for(self, call: Call) -> OnnxGraph:
        """Returns the graph that a call goes to; of several, the likeliest one if it fits none."""
        if self.split is None:
            return self.graph
        args, kwargs = call.args_kwargs_as_given()
        own, made = self._fed_by_parts(args, kwargs, call.seed)
        graphs = [graph for _, graph in self._likely_first(self.split, args, own, made)[1]]
        for graph in graphs:
            with contextlib.suppress(ArgumentError):
                graph.given(args, own, made)
                return graph
        return graphs[0]

    def _require_fit(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raises ArgumentError for arguments that the model could not be called with, and for arrays of numpy."""
        signature = self.contract.signature
        signature.require_fit(args, kwargs)
        for name, value in signature.bind(args, kwargs).items():
            is_input = any(name in graph.contract.plan.by_path for graph in self.graphs.values())
            if is_input and isinstance(value, np.ndarray):
                raise ArgumentError(
                    "An input is a NumPy array.",
                    where=name,
                    expected="a torch.Tensor",
                    got=f"numpy.ndarray {value.dtype} {value.shape}",
                    hint=f"torch.from_numpy({name}).",
                )

    def run_call(self, call: Call, /) -> Returned:
        """Returns the output tensors by path for copies of the tensors of a call.

        Where the model changes an argument in place, the output is what the call leaves in that argument.

        Raises:
            ArgumentError: if the call does not fit the graph, or any of several graphs.
            RuntimeFailure: if onnxruntime refuses it.
        """
        args, kwargs = call.args_kwargs_as_given()
        return Returned.of(self._written_back(args, kwargs, self.run(args, kwargs, call.seed)))

    def move(self, folder: Path) -> None:
        """Notes that the files of all graphs were moved to a folder."""
        for graph in self.all_graphs():
            graph.contract = replace(graph.contract, path=folder / graph.path.name)

    def open(self) -> None:
        """Opens the sessions of all graphs, which are opened by the first call otherwise."""
        for graph in self.all_graphs():
            _ = graph.session

    def to(
        self,
        device: str | torch.device = "cpu",
        *,
        providers: str | Sequence[Provider] | None = None,
        session_options: Any = None,
    ) -> Self:
        """Moves the computation to a device, and returns this model; its outputs are on that device, too.

        Tensors that are on the device already are neither copied nor moved, so a cache stays there from call to call.
        ``verify`` proves the graphs where they are.

        Args:
            device: "cpu", or "cuda" with or without an index.
            providers: An execution provider of onnxruntime by its name, or several, the preferred one first, each a
                name or a name with its options; by default those of the device, with the CPU for what they do not
                compute. If ``device`` is the CPU, they take and return tensors on the CPU.
            session_options: An ``onnxruntime.SessionOptions``; configuration entries may be added to it.

        Raises:
            InvalidRequestError: if the device does not exist.
            InvalidTypeError: if the options are something else.
            MissingPackageError: if the installed onnxruntime does not have a provider.

        Example:
            >>> import tempfile, torch, exportkit, onnxruntime
            >>> model, observer = torch.nn.Linear(4, 2), exportkit.InputObserver()
            >>> with observer(model):
            ...     expected = model(torch.ones(3, 4))
            >>> folder = tempfile.TemporaryDirectory()
            >>> onnx_model = exportkit.export(model, observer).to_onnx(f"{folder.name}/model.onnx")
            >>> options = onnxruntime.SessionOptions()
            >>> options.intra_op_num_threads = 1
            >>> torch.allclose(onnx_model.to("cpu", session_options=options)(torch.ones(3, 4)), expected, atol=1e-5)
            True
        """
        self._place(placed(device, providers, session_options))
        return self

    def _place(self, placement: Placement) -> None:
        self.graphs = {name: graph.opened_by(Session, placement=placement) for name, graph in self.graphs.items()}
        for part in self.parts.values():
            part._place(placement)

    def opened_by(self, session_class: type[GraphSession]) -> OnnxRunner:
        """Returns the graphs and parts in another runtime. Measurements made in that runtime do not affect this object.

        Args:
            session_class: Opens a file in the runtime.
        """
        graphs = {name: graph.opened_by(session_class) for name, graph in self.graphs.items()}
        parts = {name: part.opened_by(session_class) for name, part in self.parts.items()}
        found = self.copied(OnnxRunner, graphs, parts)
        found.compared = None  # that run was not in this runtime
        return found

    def copied(self, cls: type[_Runner], graphs: Mapping[str, OnnxGraph], parts: Mapping[str, OnnxRunner]) -> _Runner:
        """Returns other graphs and parts with everything else that this runner has.

        Args:
            cls: The class of what is returned.
            graphs: The graphs, by name.
            parts: The parts, by name.
        """
        return cls(
            graphs,
            parts,
            self.edges,
            split=self.split,
            attempts=self.attempts,
            exported=self.exported,
            check_files=self.check_files,
            compared=self.compared,
        )

    def reopen_changed(self) -> None:
        """Closes the sessions whose files were written or replaced since they were opened, so that they open again."""
        for graph in self.all_graphs():
            graph.close_if_changed()

    def explain(self, *args: Any, **kwargs: Any) -> str:
        """Returns why a call is inside or outside of the domain, condition by condition; of each of several graphs.

        Raises:
            ArgumentError: if the model has no such inputs.
        """
        own, made = self._fed_by_parts(args, kwargs)
        texts = {name: graph.explain(args, own, made) for name, graph in self.graphs.items()}
        return "\n".join(f"{name}: {text}" if name else text for name, text in texts.items())

    def feeds(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        """Returns the tensors that the graph gets for these arguments, by name of its input."""
        return self.graph.feeds(self._given(args, kwargs))

    def program_feeds(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        """Returns the tensors that the traced program gets for these arguments, by name of the node for its input."""
        return self.graph.program_feeds(self._given(args, kwargs))

    def _given(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Given:
        own, made = self._fed_by_parts(args, kwargs)
        return self.graph.given(args, own, made)

    def _fed_by_parts(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], seed: int | None = None
    ) -> tuple[Mapping[str, Any], dict[str, torch.Tensor]]:
        """The arguments without those that only parts take, and what the parts make of theirs, by path of the input."""
        own, made = dict(kwargs), dict[str, torch.Tensor]()
        if not self.parts:
            return own, made
        positional = dict(zip(self.contract.signature.plain(), args, strict=False))
        taken = {leaf.argument for graph in self.graphs.values() for leaf in graph.contract.plan.leaves}
        for name, part in self.parts.items():
            if not self.edges.get(name):  # a method of its own
                continue
            wanted = {leaf.argument for leaf in part.contract.plan.leaves}
            given = {key: value for key, value in {**positional, **kwargs}.items() if key in wanted}
            if any(value is not None for key, value in given.items() if key not in taken):
                outputs = flatten(part(**given) if seed is None else part.run((), given, seed)).tensors()
                for edge in self.edges[name]:
                    made |= {to: outputs[path] for path in outputs if (to := edge.renamed(path)) is not None}
            own = {key: value for key, value in own.items() if key in taken or key not in wanted}
        return own, made

    def _goes_on(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call goes on from the state that the last call left."""
        plans = [graph.contract.plan for graph in self.graphs.values()]
        plan = next((plan for plan in plans if any(leaf.argument == STATE for leaf in plan.leaves)), None)
        if self.module_state is None or plan is None:
            return False

        def sizes_of(values: Mapping[str, Any]) -> dict[str, int]:
            return solve_sizes(plan, shapes_in({name: flatten(value) for name, value in values.items()}))

        past, batch = plan.with_role("past"), plan.with_role("batch")
        sizes, state = sizes_of(self.contract.signature.bind(args, kwargs)), sizes_of({STATE: self.module_state})
        has_batch = batch is not None and any(
            batch.name in leaf.variables() for leaf in plan.leaves if leaf.argument == STATE
        )
        fits = batch is None or not has_batch or sizes[batch.name] == state[batch.name]
        return fits and (past is None or sizes[past.name] > 0)
