"""What a folder says of an exported model: all that it takes to call it and to prove it, but for the model itself.

In comes an `Exported`, with the model at hand; out goes a `Saved` value whose unseen cases were run in eager mode, so
that they can be checked again where there is no model.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from exportkit.arguments.build import build_call, with_integers_below
from exportkit.calls.call import Call
from exportkit.calls.observation import Observation
from exportkit.calls.parts import Edge
from exportkit.errors import DestinationError
from exportkit.plan.plan import Plan
from exportkit.plan.sizes import UnseenSizes, unseen_sizes
from exportkit.probing.missing import MissingDefaults, run_leniently
from exportkit.programs.audit import Guard, guards_of
from exportkit.trees import Tree, flatten, join

if TYPE_CHECKING:
    from exportkit.programs.exported import Exported

# What clients and people read, and may change.
_EDITABLE = {"config.json", "generation_config.json", "genai_config.json", "report.txt", "report.json"}


@dataclass(frozen=True)
class Case:
    """A call at sizes that nobody had run, and what the model returned.

    Attributes:
        label: What the sizes stand for.
        sizes: Sizes of the variables.
        arguments: The call; None where there is none.
        outputs: What the model returned; None where there is no call.
        seconds: Duration of the model.
        error: Why there is no call.
    """

    label: str
    sizes: Mapping[str, int]
    arguments: Call | None = None
    outputs: Tree | None = None
    seconds: float = float("nan")
    error: str = ""


@dataclass(frozen=True, repr=False)
class Saved:
    """An exported model without the model: what `Exported` says of it that outlives the process.

    Attributes:
        plan: What varies.
        observation: The recorded calls.
        fills: What stands for missing inputs.
        outputs: Structure of what the model returns; the values mean nothing.
        method: The exported method.
        cases: Calls at unseen sizes.
        rules: Names of the rewrites that were in force while it was traced.
        parts: What runs before the model and feeds it, by name.
        edges: Which outputs of each part are inputs of this one.
        joined_outputs: Paths of lists that the graph returns as one tensor.
        member_rows: Rows of each tensor of such a list, by its path, where they are always as many.
        stateful: Whether the model keeps a state on its modules, so that its graph does from call to call.
        digests: SHA-256 of each file by path, where this was read from a folder.
        sizes: Sizes of the variables that the export used.
        seconds: Duration of each stage.
        guards: What the trace took for granted about sizes.
    """

    plan: Plan
    observation: Observation
    fills: MissingDefaults
    outputs: Tree
    method: str
    cases: tuple[Case, ...]
    rules: tuple[str, ...] = ()
    parts: Mapping[str, Saved] = field(default_factory=dict)
    edges: Mapping[str, tuple[Edge, ...]] = field(default_factory=dict)
    joined_outputs: tuple[str, ...] = ()
    member_rows: Mapping[str, int] = field(default_factory=dict)
    stateful: bool = False
    digests: Mapping[Path, str] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict, compare=False)
    guards: tuple[Guard, ...] = ()

    @classmethod
    def of(cls, exported: Exported, with_cases: bool) -> Saved:
        """Returns what is to be saved of an export.

        Args:
            exported: The export.
            with_cases: Run the model at unseen sizes.
        """
        return cls(
            plan=exported.plan,
            observation=exported.observation,
            fills=exported.fills,
            outputs=exported.outputs,
            method=exported.method,
            cases=tuple(unseen_cases(exported)) if with_cases else (),
            rules=exported.captured.rules,
            parts={name: cls.of(part, with_cases) for name, part in exported.parts.items()},
            edges=exported.edges,
            joined_outputs=exported.joined_outputs,
            member_rows=exported.member_rows,
            stateful=exported.stateful,
            sizes=exported.sizes,
            seconds=exported.seconds,
            guards=guards_of(exported),
        )

    def __repr__(self) -> str:
        return f"Saved({self.observation.model_name}.{self.method}, {len(self.observation.calls)} calls)"

    def baked_constants(self) -> dict[str, Any]:
        """Returns the Python values that are part of the graph, by path."""
        return {constant.path: constant.value for constant in self.plan.constants}


def check_files(digests: Mapping[Path, str]) -> tuple[str, ...]:
    """Returns a sentence for each file that was edited since, of those that a proof does not depend on.

    Args:
        digests: SHA-256 of each file by path, as they were saved.

    Raises:
        DestinationError: if any other file is not the one that was saved.
    """
    edited = []
    for path, digest in digests.items():
        with path.open("rb") as content:
            found = hashlib.file_digest(content, "sha256").hexdigest()
        if found == digest:
            continue
        if path.name not in _EDITABLE:
            raise DestinationError(
                "A file of an exported model is not the one that was saved.",
                where=str(path),
                expected=f"SHA-256 {digest}",
                got=found,
                hint="copy the folder again; what is changed on purpose has to be saved and proven anew.",
            )
        edited.append(f"{path.name} was edited since the folder was saved.")
    return tuple(edited)


def unseen_cases(exported: Exported | Saved) -> Iterator[Case]:
    """Yields a case for each combination of sizes that was neither recorded nor exported with.

    Args:
        exported: An export, whose model is run in eager mode; or what was saved of one, with its cases.
    """
    if isinstance(exported, Saved):
        yield from exported.cases
        return
    for item in unseen_sizes(exported.plan, exported.sizes):
        yield _case(exported, item)


def _case(exported: Exported, item: UnseenSizes) -> Case:
    """The case of these sizes. If the model refuses the recorded values, integers get smaller: they may be indices."""
    try:
        built = build_call(exported.plan, exported.observation, item.sizes)
        arguments = _without_stored(exported, built, item.sizes)
    except Exception as error:
        return _refused(item, error)
    limits = [] if exported.plan.placeholders else sorted(set(item.sizes.values()), reverse=True)
    errors = []
    for limit in (None, *limits):
        try:
            return _run(exported, item, arguments if limit is None else with_integers_below(arguments, limit))
        except Exception as error:
            errors.append(error)
    return _refused(item, errors[0])


def _refused(item: UnseenSizes, error: Exception) -> Case:
    reason = " ".join(str(error).split())[:240]
    return Case(item.label, item.sizes, error=f"the model itself raises {type(error).__name__}: {reason}")


def _run(exported: Exported, item: UnseenSizes, arguments: Call) -> Case:
    started = time.perf_counter()
    returned, arguments = run_leniently(exported.plan, exported.model, exported.method, arguments)
    return Case(item.label, item.sizes, arguments, flatten(returned), time.perf_counter() - started)


def _without_stored(exported: Exported, arguments: Call, sizes: Mapping[str, int]) -> Call:
    """The arguments with states of no tokens, where the cache is empty: those that were absent from such calls."""
    past = exported.plan.with_role("past")
    if past is None or sizes[past.name]:
        return arguments
    first = [index for index, size in enumerate(past.seen) if size == 0]
    absent = {leaf.path for leaf in exported.plan.leaves if first and all(leaf.shapes[i] is None for i in first)}
    trees = {}
    for name, tree in arguments.arguments.items():
        found = {path: tensor for path, tensor in tree.tensors().items() if join(name, path) in absent}
        fills = exported.fills.values
        trees[name] = tree.with_leaves(
            {path: torch.full_like(tensor, fills.get(join(name, path), 0)) for path, tensor in found.items()}
        )
    return arguments.with_arguments(trees)
