"""``manifest.json``: the contracts of the graphs in a folder as JSON, and back.

The recorded calls and those at unseen sizes are observations of their own, in folders beside it. Nothing is pickled:
classes are looked up by name.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file

from exportkit.calls.call import Call
from exportkit.calls.observation import Observation, WrittenArgument
from exportkit.calls.parts import Edge
from exportkit.folder.checked import CheckedFiles, inside
from exportkit.json_data import InvalidDataError, Positive, Size, as_json_data
from exportkit.onnx_files.contract import Contract, Runtime
from exportkit.onnx_files.graph import MeasuredCall, OnnxGraph
from exportkit.onnx_files.quantised import Quantised
from exportkit.plan.leaves import Finding
from exportkit.plan.plan import Plan
from exportkit.probing.missing import Fill, MissingDefaults, dependent_outputs, filled
from exportkit.programs.domain import Domain
from exportkit.running.compare import Tensors
from exportkit.trees import flatten
from exportkit.trees.json_form import dump_tree, load_value
from exportkit.trees.tree import dtype_name

_CALLS, _UNSEEN, _PLAN, _MEASURED = "calls", "unseen", "plan.json", "measured.safetensors"
_MOST_BYTES = 2**28  # of the calls at unseen sizes that are kept
# What a contract and the manifest have under the same names.
_SHARED = (
    "opset", "method", "target", "joined_outputs", "member_rows", "stateful", "wraps", "half_dtypes", "written",
    "rules", "sizes", "seconds", "runtime", "quantised",
)  # fmt: skip
_BELOW = ("parts", "edges")  # other graphs, which the folder adds
_TOO_LARGE = "its tensors are too large to keep"


@dataclass(frozen=True)
class _Input:
    name: str
    path: str
    dtype: str
    axes: tuple[str, ...]


@dataclass(frozen=True)
class _Output:
    name: str
    path: str
    dtype: str | None
    axes: tuple[Size | str, ...]


@dataclass(frozen=True)
class _Structure:
    layout: Any
    paths: tuple[str, ...]


@dataclass(frozen=True)
class _Unseen:
    label: str
    sizes: Mapping[str, Size]
    call: Size | None
    error: str


@dataclass(frozen=True)
class _Measured:
    ties: Mapping[str, str]
    leeway: Mapping[str, str]


@dataclass(frozen=True)
class GraphData:
    """What the manifest says about a graph: its schema, from which it is read."""

    file: str
    opset: Positive
    model: str
    method: str
    target: str
    home: str
    inputs: tuple[_Input, ...]
    outputs: tuple[_Output, ...]
    structure: _Structure
    fills: Mapping[str, Fill]
    unproven: tuple[Size, ...]
    rules: tuple[str, ...]
    findings: tuple[str, ...]
    unseen: tuple[_Unseen, ...]
    measured: Mapping[str, _Measured]
    joined_outputs: tuple[str, ...]
    member_rows: Mapping[str, Size]
    stateful: bool
    wraps: bool
    written: Mapping[str, WrittenArgument]
    sizes: Mapping[str, Size]
    seconds: Mapping[str, float]
    domain: Mapping[str, Any]
    parts: Mapping[str, Any] = field(default_factory=dict)
    edges: Mapping[str, tuple[Edge, ...]] = field(default_factory=dict)
    half_dtypes: tuple[Literal["float16", "bfloat16"], ...] = ()
    runtime: Runtime | None = None
    quantised: Quantised | None = None


def dump_graph(graph: OnnxGraph, folder: Path, values: bool, home: str) -> dict[str, Any]:
    """Writes the plan and the calls of a graph, and returns its contract as JSON data.

    Args:
        graph: The graph.
        folder: The folder.
        values: Also write the values of the calls.
        home: Where in the folder the plan and the calls go.
    """
    contract, place = graph.contract, folder / home
    place.mkdir(parents=True, exist_ok=True)
    (place / _PLAN).write_text(contract.plan.to_json() + "\n", "utf-8")
    graph.observation.save(place / _CALLS, values=values)
    leaves = contract.plan.by_path
    returned = {path: dtype_name(tensor.dtype) for path, tensor in contract.structure.tensors().items()}
    data = GraphData(
        file=contract.path.name,
        model=contract.model_name,
        home=home,
        inputs=tuple(
            _Input(name, path, leaves[path].dtype, tuple(map(str, leaves[path].sizes)))
            for name, path in contract.inputs.items()
        ),
        outputs=tuple(
            _Output(name, path, returned.get(path), tuple(contract.output_axes[path]))
            for name, path in contract.outputs.items()
        ),
        structure=_Structure(dump_tree(contract.structure), tuple(returned)),
        fills=contract.defaults.values,
        unproven=contract.defaults.unproven,
        findings=tuple(finding.text for finding in contract.plan.findings),
        unseen=_dump_unseen(graph, place / _UNSEEN) if values else (),
        measured=_dump_measured(graph.measured, place / _MEASURED) if values else {},
        domain=contract.domain.to_json(),
        **{name: getattr(contract, name) for name in _SHARED},
    )
    return {name: value for name, value in as_json_data(data).items() if name not in _BELOW}


def load_graph(folder: Path, graph: GraphData, files: CheckedFiles) -> OnnxGraph:
    """Returns the graph that `dump_graph` described.

    Args:
        folder: The folder.
        graph: What the manifest says about it.
        files: The files of the folder, checked.
    """
    place, file = inside(folder, graph.home), inside(folder, graph.file)
    files.require(file, place / _PLAN, place / _CALLS / "observation.json")
    observation = Observation.load(place / _CALLS)
    plan = Plan.from_json((place / _PLAN).read_text("utf-8"))
    if not observation.has_values:
        text = "the folder was saved without the values of the recorded calls, so there is nothing to compare with."
        plan = plan.with_findings([Finding("no values", "", text)])
    dtypes = {item.path: item.dtype for item in graph.outputs if item.dtype is not None}
    returned = {path: torch.empty(0, dtype=_dtype_of(dtype)) for path, dtype in dtypes.items()}
    structure = graph.structure
    contract = Contract(
        path=file,
        inputs={item.name: item.path for item in graph.inputs},
        outputs={item.name: item.path for item in graph.outputs},
        output_axes={item.path: item.axes for item in graph.outputs},
        model_name=graph.model,
        signature=observation.signature,
        plan=plan,
        domain=Domain.from_json(graph.domain),
        defaults=MissingDefaults(graph.fills, graph.unproven),
        structure=flatten(load_value(structure.layout, [returned[path] for path in structure.paths])),
        dependent=dependent_outputs(observation, list(returned), graph.joined_outputs),
        **{name: getattr(graph, name) for name in _SHARED},
    )
    _require_consistent(contract)
    unseen = _load_unseen(graph.unseen, place / _UNSEEN, contract)
    return OnnxGraph(
        contract,
        observation,
        unseen=unseen,
        require_unchanged=functools.partial(files.recheck, file),
        measured=_load_measured(graph.measured, place / _MEASURED),
    )


def _require_consistent(contract: Contract) -> None:
    """Raises InvalidDataError where a contract contradicts its plan."""
    plan, domain = contract.plan, contract.domain
    for leaf in plan.leaves:
        _dtype_of(leaf.dtype)
    paths = {*contract.inputs.values(), *contract.defaults.values, *(item.path for item in domain.inputs)}
    unknown = sorted(paths - plan.by_path.keys())
    unknown += sorted(
        {name for item in domain.inputs for size in item.sizes for name in size.variables()} - domain.ranges.keys()
    )
    if unknown:
        raise InvalidDataError("inputs and variables of the plan", ", ".join(unknown))
    for path, value in contract.defaults.values.items():
        dtype = plan.by_path[path].dtype
        try:
            filled(torch.empty((1,), dtype=_dtype_of(dtype)), value, 0)
        except RuntimeError as error:
            raise InvalidDataError(f"a number that {dtype} can hold", value, path) from error
    constants = contract.structure.constants()
    for path in (*contract.numbers, *domain.returned):
        if not isinstance(constants.get(path), bool | int | float):
            raise InvalidDataError("a number among the outputs", constants.get(path), path)


def _dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise InvalidDataError("a dtype", name)
    return dtype


def _dump_unseen(graph: OnnxGraph, place: Path) -> tuple[_Unseen, ...]:
    """Writes the calls at unseen sizes as an observation, and returns what belongs to each."""
    described: list[_Unseen] = []
    calls: list[Call] = []
    room = _MOST_BYTES
    for call in graph.unseen or ():
        kept, error = call.is_made, call.error
        if kept:
            tensors = (*call.tensors().values(), *call.outputs.tensors().values())
            size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            kept, error = (True, error) if size <= room else (False, _TOO_LARGE)
            room -= size if kept else 0
        number = len(calls) if kept else None
        described.append(_Unseen(call.label, call.sizes, number, error))
        if kept:
            trees = {name: flatten(value) for name, value in call.values().items()}  # with the counters of caches
            calls.append(replace(call, arguments=trees, named=frozenset(trees), index=number))
    replace(graph.observation, calls=tuple(calls), further=(), failures=()).save(place)
    return tuple(described)


def _load_unseen(described: Sequence[_Unseen], place: Path, contract: Contract) -> tuple[Call, ...]:
    if not described:
        return ()
    calls = Observation.load(place).calls
    return tuple(
        replace(
            Call({}, contract.signature) if item.call is None else calls[item.call],
            label=item.label,
            sizes=item.sizes,
            error=item.error,
        )
        for item in described
    )


def _dump_measured(measured: Mapping[str, MeasuredCall], file: Path) -> dict[str, _Measured]:
    """Writes what a proof measured with the model, and returns where each tensor is, by call, field and path."""
    tensors: dict[str, torch.Tensor] = {}

    def keys(by_path: Tensors) -> dict[str, str]:
        named = {path: str(number) for number, path in enumerate(by_path, len(tensors))}
        tensors.update({key: by_path[path].detach().cpu().contiguous() for path, key in named.items()})
        return named

    described = {call: _Measured(keys(found.ties), keys(found.leeway)) for call, found in measured.items()}
    if tensors:
        save_file(tensors, file)
    return described


def _load_measured(described: Mapping[str, _Measured], file: Path) -> dict[str, MeasuredCall]:
    names = {key for item in described.values() for keys in (item.ties, item.leeway) for key in keys.values()}
    tensors = load_file(file) if names else {}
    if names - tensors.keys():
        raise InvalidDataError(f"the tensors of {file.name}", ", ".join(sorted(names - tensors.keys())))

    def by_path(keys: Mapping[str, str]) -> dict[str, torch.Tensor]:
        return {path: tensors[key] for path, key in keys.items()}

    return {call: MeasuredCall(by_path(item.ties), by_path(item.leeway)) for call, item in described.items()}
