"""OnnxModel: an exported ONNX graph that is called like the model it came from, and returns what the model returns."""

from __future__ import annotations

import functools
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from exportkit.calls.signature import Signature
from exportkit.errors import ArgumentError, UnregisteredClassError
from exportkit.onnx_files.translate import OnnxFile
from exportkit.plan.plan import Plan
from exportkit.plan.sizes import solve_sizes
from exportkit.probing.missing import dependent_outputs, fill_missing
from exportkit.probing.simplify import as_simplified, value_at, with_split_lists
from exportkit.running.program import tensor_placeholders
from exportkit.running.session import Session
from exportkit.trees import Tree, flatten, join, set_stored_length

if TYPE_CHECKING:
    from exportkit.folder.saved import Saved
    from exportkit.programs.exported import Exported
    from exportkit.proof.report import Report


class OnnxModel:
    """An ONNX graph with the calling convention of the model.

    Args:
        file: The ONNX file and the paths behind its inputs and outputs.
        exported: The export that it comes from, or what a folder says of it.
        parts: The graphs of what feeds the model, by name: they run when their own inputs are given.
    """

    def __init__(
        self, file: OnnxFile, exported: Exported | Saved, parts: Mapping[str, OnnxModel] | None = None
    ) -> None:
        self.file, self.exported, self.parts = file, exported, dict(parts or {})
        self._session: Session | None = None

    def __repr__(self) -> str:
        return f"OnnxModel({str(self.path)!r}, inputs={list(self.file.inputs)}, outputs={list(self.file.outputs)})"

    @property
    def path(self) -> Path:
        """The ONNX file."""
        return self.file.path

    @property
    def size(self) -> int:
        """Bytes on disk, weights included."""
        data = self.path.with_name(self.path.name + ".data")
        return self.path.stat().st_size + (data.stat().st_size if data.exists() else 0)

    @property
    def session(self) -> Session:
        """The onnxruntime session, made at the first use."""
        if self._session is None:
            self._session = Session(self.path)
        return self._session

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the model returns, computed by onnxruntime.

        Arguments are given as to the model: nested values, caches, by position or by name. Optional inputs may be left
        out where recorded calls left them out. Python constants that the graph was exported with may be left out too;
        another value for one of them is an error. Where the model returns a list with a tensor for each image, of
        different sizes, the list returned here holds one tensor, their concatenation: ``exported.joined_outputs`` names
        such lists.

        Raises:
            ArgumentError: if the arguments do not fit the graph.
            RuntimeFailure: if onnxruntime refuses them.
        """
        given = self._given(args, kwargs)
        feeds = self._completed(given)
        results = self.session.run(feeds)
        returned: dict[str, torch.Tensor | None] = {self.file.outputs[name]: t for name, t in results.items()}
        absent = [path for path, source in self._dependent.items() if source not in given and path in returned]
        outputs = self._with_echoes(self.structured({**returned, **dict.fromkeys(absent)}), args, kwargs, given)
        return self._counted(outputs, {self.file.inputs[name]: tensor for name, tensor in feeds.items()})

    def _with_echoes(
        self, outputs: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], given: Mapping[str, torch.Tensor]
    ) -> Any:
        """The outputs with the inputs that the model hands back, as they were given or as a part made them."""
        if self.exported.plan.passed_through and isinstance(outputs, MutableMapping):
            known = {*self.exported.observation.signature.plain()}
            arguments = self.exported.observation.signature.bind(args, {k: v for k, v in kwargs.items() if k in known})
            for name, path in self.exported.plan.passed_through.items():
                value = value_at(arguments, path)
                if value is not None or not any(leaf.startswith(path) for leaf in given):
                    outputs[name] = value
        return outputs

    def feeds(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        """Returns the tensors that the graph gets for these arguments, by name of its input."""
        return self._completed(self._given(args, kwargs))

    def program_feeds(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        """Returns the tensors that the exported program gets for these arguments, by name of the node for its input."""
        given = self._given(args, kwargs)
        complete = {**given, **fill_missing(self.exported.plan, given, self.exported.fills.values)}
        captured = self.exported.captured
        names = zip(tensor_placeholders(captured.program), captured.input_paths, strict=True)
        return {name: complete[path] for name, path in names}

    def _given(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        plan = self.exported.plan
        own, made = self._from_parts(args, kwargs)
        found = _given_tensors(self.exported.observation.signature, args, own, self.exported.baked_constants())
        given = as_simplified({**found, **made}, plan.joined, plan.unused)
        given = {path: t for path, t in given.items() if path in plan.by_path or t.numel()}  # an empty cache is none
        _check(plan, given)
        return given

    def _from_parts(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], dict[str, torch.Tensor]]:
        """The arguments that are not those of parts alone, and what the parts make of theirs, by path of the input."""
        positional = dict(zip(self.exported.observation.signature.plain(), args, strict=False))
        own, made = dict(kwargs), dict[str, torch.Tensor]()
        taken = _arguments(self.exported.plan)
        for name, part in self.parts.items():
            wanted = _arguments(part.exported.plan)
            given = {key: value for key, value in {**positional, **kwargs}.items() if key in wanted}
            if any(value is not None for key, value in given.items() if key not in taken):
                outputs = flatten(part(**given)).tensors()
                for edge in self.exported.edges[name]:
                    made |= {to: outputs[path] for path in outputs if (to := edge.renamed(path)) is not None}
            own = {key: value for key, value in own.items() if key in taken or key not in wanted}
        return own, made

    def _completed(self, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        complete = {**given, **fill_missing(self.exported.plan, given, self.exported.fills.values)}
        return {name: complete[path] for name, path in self.file.inputs.items()}

    @functools.cached_property
    def _dependent(self) -> Mapping[str, str]:
        return dependent_outputs(self.exported.observation, self.exported.joined_outputs)

    def _counted(self, outputs: Any, given: Mapping[str, torch.Tensor]) -> Any:
        """The outputs with the counters of their caches at what is stored now: the past and the new tokens."""
        plan = self.exported.plan
        past, new = plan.with_role("past"), plan.with_role("sequence")
        if past is not None and new is not None:
            sizes = solve_sizes(plan, {path: tuple(tensor.shape) for path, tensor in given.items()})
            values = outputs.values() if isinstance(outputs, Mapping) else [outputs]
            for value in values:
                set_stored_length(value, sizes[past.name] + sizes[new.name])
        return outputs

    def structured(self, tensors: Mapping[str, torch.Tensor | None]) -> Any:
        """Returns tensors by path as the nested value that the model returns; None stands for one that is absent."""
        tree = self.exported.outputs.with_leaves(tensors)
        return with_split_lists(tree, self.exported.member_rows).build()

    def stateless(self) -> OnnxModel:
        """Returns the graph as it is: what a model keeps on its modules is an input and an output of it."""
        return self

    def verify(self, unseen: bool = True) -> Report:
        """Returns the proof: a row for each recorded call, and for calls at sizes that nobody has run.

        Args:
            unseen: Also try sizes that were not recorded. The model runs them in eager mode as the truth; one that
                was loaded from a folder has what the model returned when it was saved.

        Raises:
            DestinationError: if a file of the folder that this was loaded from is another one than was saved.
        """
        from exportkit.proof.prove import verify

        return verify(self, unseen=unseen)


def _given_tensors(
    signature: Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any], baked: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    accepted = {*signature.plain()} | ({*kwargs} if signature.var_keyword else set())
    unknown = [name for name in kwargs if name not in accepted]
    if unknown:
        names = ", ".join(signature.names)
        raise ArgumentError(f"The model has no input {unknown[0]!r}.", expected=names, got=unknown[0])
    for name, value in signature.bind(args, kwargs).items():
        tree: Tree = flatten(value)
        for path, leaf in zip(tree.paths, tree.leaves, strict=True):
            full = join(name, path)
            if isinstance(leaf, torch.Tensor):
                found[full] = leaf
            elif leaf is not None:
                _check_constant(full, leaf, baked)
    return found


def _arguments(plan: Plan) -> set[str]:
    return {leaf.argument for leaf in plan.leaves}


def _check_constant(path: str, value: Any, baked: Mapping[str, Any]) -> None:
    if not isinstance(value, bool | int | float | str):
        if hasattr(value, "__dict__") and any(isinstance(item, torch.Tensor) for item in vars(value).values()):
            raise UnregisteredClassError(
                f"An object of class {type(value).__name__} holds tensors that cannot be reached.", where=path
            )
        return
    if path in baked and baked[path] != value:
        raise ArgumentError(
            "The graph was exported with another value of this constant.",
            where=path,
            expected=repr(baked[path]),
            got=repr(value),
            hint="a constant is part of the graph: observe the model with this value, and export again.",
        )


def _check(plan: Plan, given: Mapping[str, torch.Tensor]) -> None:
    """Raises ArgumentError if a tensor is unknown or has the wrong type or size, or a required one is missing."""
    for path, tensor in given.items():
        if path not in plan.by_path:
            raise ArgumentError(
                "The graph has no input for this tensor.",
                where=path,
                expected=", ".join(plan.by_path),
                got=tuple(tensor.shape),
                hint="observe a call that gives it, then export again.",
            )
        leaf = plan.by_path[path]
        dtype = str(tensor.dtype).removeprefix("torch.")
        fits = len(leaf.sizes) == tensor.ndim and all(
            not size.is_static or size.constant == have for size, have in zip(leaf.sizes, tensor.shape, strict=False)
        )
        if dtype != leaf.dtype or not fits:
            raise ArgumentError(
                "An input does not fit the graph.",
                where=path,
                expected=f"{leaf.dtype} ({', '.join(map(str, leaf.sizes))})",
                got=f"{dtype} {tuple(tensor.shape)}",
            )
    missing = [leaf.path for leaf in plan.leaves if leaf.path not in given and not leaf.is_optional]
    if missing:
        raise ArgumentError(
            "A required input is missing.", where=missing[0], got=", ".join(given) or "no tensor",
            hint="every recorded call gave it; an input is optional where a recorded call left it out.",
        )  # fmt: skip
