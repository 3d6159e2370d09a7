"""A folder that runs elsewhere: ONNX files, how they are called, the calls that prove them, and the proof.

From ``manifest.json``, another process on another machine, without the model, calls the graphs like the model and
proves them again. Clients find the files and inputs under the names that they expect. An encoder-decoder model whose
encoder was exported, too, gets the names of optimum's ORTModelForSeq2SeqLM: https://huggingface.co/docs/optimum-onnx.
There, a decoder without an input ``use_cache_branch`` is one graph for the first call, with caches of length 0, and for
later ones.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from exportkit.calls.call import Call
from exportkit.calls.parts import Edge
from exportkit.files import (
    abandoned_folders,
    as_path,
    check_file,
    check_folder,
    digest_of,
    read_json_file,
    reading,
    replacing,
    versions,
    write_json_file,
)
from exportkit.folder.checked import CheckedFiles, SavedFile, damaged, inside
from exportkit.folder.clients import for_runtime, write_client_files
from exportkit.folder.manifest import GraphData, dump_graph, load_graph
from exportkit.json_data import InvalidDataError, parse_json, read
from exportkit.onnx_files.contract import WEIGHTS, Contract, Runtime, input_names
from exportkit.onnx_files.graph import OnnxGraph
from exportkit.onnx_files.runner import ApplicationRun, OnnxRunner
from exportkit.onnx_files.translate import write_domain
from exportkit.onnx_files.write import write_graphs
from exportkit.programs.exported import ExportedModel
from exportkit.programs.kinds import Split
from exportkit.programs.strategies import Attempt
from exportkit.proof.calls import unseen_calls
from exportkit.proof.leeway import measure
from exportkit.proof.prove import prove
from exportkit.proof.quantise import Lossy, lossy_runner
from exportkit.running.placement import require_onnxruntime

MANIFEST, REPORT_TEXT, REPORT_JSON = "manifest.json", "report.txt", "report.json"
PAGE = "report.html"  # made later; belongs to the proof that it shows
_FORM = ("exportkit-folder", 3)
_NOUN = "an exported model"
# The inputs of a decoder as transformers names them, and as optimum does.
_DECODER = {
    "decoder_input_ids": "input_ids",
    "decoder_attention_mask": "attention_mask",
    "attention_mask": "encoder_attention_mask",
}
_CACHE = re.compile(r"\.(?P<layer>\d+)\.(?P<half>decoder|encoder)\.(?P<state>key|value)$")


def save_folder(
    exported: ExportedModel,
    directory: str | os.PathLike[str],
    *,
    runtime: Runtime | None = None,
    opset: int | None = None,
    lossy: Lossy | None = None,
    given: Sequence[Call] = (),
    values: bool,
    verify: bool = True,
    compared: ApplicationRun | None = None,
) -> OnnxRunner:
    """Writes a folder, and returns its graphs as something to call; see `Exported.save`."""
    target = check_destination(directory)
    if verify:
        require_onnxruntime()
    exported = for_runtime(exported, runtime)
    with replacing(target, _NOUN, last=MANIFEST, clear=lambda: _remove_old(target)) as folder:
        runner = _write_graphs(exported, folder, opset, runtime, lossy is None)
        if lossy is not None:
            runner = lossy_runner(runner, lossy, verify)
        runner.compared = compared
        finding = write_client_files(exported, runner.contract, folder) if runner.graphs else None
        if finding is not None:
            contract = runner.contract
            runner.graph.contract = replace(contract, plan=contract.plan.with_findings([finding]))
        saved = _without_model(runner, with_unseen=verify or values)
        if verify:
            started = time.perf_counter()
            report = prove(saved, given=given)
            _take_domains(runner, saved)
            if exported.programs:
                exported.traced.seconds["verify"] = time.perf_counter() - started
            (folder / REPORT_TEXT).write_text(f"{report}\n", "utf-8")
            (folder / REPORT_JSON).write_text(report.to_json() + "\n", "utf-8")
            if not report.ok:
                warnings.warn(f"{target} was saved, and is {report.verdict()}", RuntimeWarning, stacklevel=3)
        elif values:
            for graph in saved.all_graphs():  # what a later proof without the model may need
                if graph.observation.has_values:
                    measure(graph)
        write_json_file(folder / MANIFEST, _FORM, _manifest(saved, folder, values))
    runner.move(target)
    return runner


def load_folder(directory: str | os.PathLike[str], check_weights: bool) -> OnnxRunner:
    """Returns the graphs of a folder that `save_folder` wrote; see `exportkit.load`."""
    folder = as_path(directory)
    data = read_manifest(folder)
    with reading(folder / MANIFEST, damaged):
        files = CheckedFiles(folder, read(Mapping[str, SavedFile], data["files"]))
        for note in files.check(None if check_weights else lambda path: path.suffix != WEIGHTS):
            warnings.warn(note, RuntimeWarning, stacklevel=3)
        return _load_graphs(folder, data, files)


def _write_graphs(
    exported: ExportedModel, folder: Path, opset: int | None, runtime: Runtime | None, branches: bool
) -> OnnxRunner:
    """Writes the graphs under the names of files and inputs that the clients of this kind of model know."""
    main, files, renamed = "model.onnx", {name: f"{name}.onnx" for name in exported.parts}, {}
    encoders = [name for name, edges in exported.edges.items() if len(edges) == 1]
    names = input_names(exported.traced.input_paths) if exported.programs else {}
    has_cross_cache = any((match := _CACHE.search(name)) and match["half"] == "encoder" for name in names)
    if exported.split is None and len(encoders) == 1 and has_cross_cache:
        main, files[encoders[0]] = "decoder_model_merged.onnx", "encoder_model.onnx"
        renamed = {**_DECODER, exported.edges[encoders[0]][0].target: "encoder_hidden_states"}

    def file_of(program: str, part: str) -> Path:
        if part:
            return folder / (f"{part}.{program}.onnx" if program else files[part])
        return folder / (f"model.{program}.onnx" if program else main)

    runner = write_graphs(exported, file_of, opset, runtime, branches)
    if renamed:
        runner.graph.contract = rename_inputs(runner.contract, renamed)
    return runner


def rename_inputs(contract: Contract, renamed: Mapping[str, str]) -> Contract:
    """Gives inputs of an ONNX file other names, and sorts caches by layer, as optimum fills them by position.

    Args:
        contract: The graph; its file is written again, without touching the weights.
        renamed: New names by path.
    """
    if not any(path in renamed for path in contract.inputs.values()):
        return contract
    import onnx_ir

    def position(name: str) -> tuple[int, str, str]:
        match = _CACHE.search(name)
        return (-1, "", "") if match is None else (int(match["layer"]), match["half"], match["state"])

    names = {name: renamed.get(path, name) for name, path in contract.inputs.items()}
    model = onnx_ir.load(contract.path)
    values = list(model.graph.inputs)
    for value in values:
        value.name = names[value.name or ""]
    order = sorted(names.values(), key=position)
    by_name = {value.name: value for value in values}
    model.graph.inputs.clear()
    model.graph.inputs.extend(by_name[name] for name in order)
    onnx_ir.save(model, contract.path)
    paths = {names[name]: path for name, path in contract.inputs.items()}
    return replace(contract, inputs={name: paths[name] for name in order})


def _without_model(runner: OnnxRunner, with_unseen: bool) -> OnnxRunner:
    """The graphs as `load_folder` finds them again, apart from the model that the proof may measure."""
    graphs = {}
    for name, graph in runner.graphs.items():
        unseen = tuple(unseen_calls(graph.traced)) if with_unseen and graph.traced is not None else ()
        graphs[name] = OnnxGraph(graph.contract, graph.observation, unseen=unseen, eager=graph.eager)
    parts = {name: _without_model(part, with_unseen) for name, part in runner.parts.items()}
    return OnnxRunner(
        graphs, parts, runner.edges, split=runner.split, attempts=runner.attempts, compared=runner.compared
    )


def _take_domains(runner: OnnxRunner, proven: OnnxRunner) -> None:
    """Gives graphs the domains with which they were proven, and the findings on what these leave out."""
    for name, graph in runner.graphs.items():
        contract = proven.graphs[name].contract
        if contract.domain != graph.contract.domain:
            graph.contract = replace(graph.contract, domain=contract.domain, plan=contract.plan)
            write_domain(contract)
    for name, part in runner.parts.items():
        _take_domains(part, proven.parts[name])


def _manifest(runner: OnnxRunner, folder: Path, values: bool) -> dict[str, Any]:
    described = _dump_graphs(runner, folder, values, "")
    if runner.split is None and runner.graphs:
        described = {"program": described}
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        "written_by": versions("exportkit", "torch", "transformers", "onnx", "onnxscript", "onnxruntime"),
        "peak_bytes": _peak_bytes(),
        "files": {
            path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "xxh3_128": digest_of(path)}
            for path in files
        },
        "attempts": [dict(vars(attempt)) for attempt in runner.attempts],
        **({} if runner.compared is None else {"compared": dict(vars(runner.compared))}),
        **described,
    }


def _dump_graphs(runner: OnnxRunner, folder: Path, values: bool, home: str) -> dict[str, Any]:
    """What the manifest says about the graphs: the data of a single one, or those of several by name."""
    if not runner.graphs:
        data = {}
    elif runner.split is None:
        data = dump_graph(runner.graph, folder, values, home)
    else:
        graphs = {name: dump_graph(graph, folder, values, f"{home}{name}/") for name, graph in runner.graphs.items()}
        data = {"split": runner.split.to_json(), "programs": graphs}
    data["parts"] = {
        name: _dump_graphs(part, folder, values, f"{home}parts/{name}/") for name, part in runner.parts.items()
    }
    data["edges"] = {name: [dict(vars(edge)) for edge in edges] for name, edges in runner.edges.items()}
    return data


def _load_graphs(folder: Path, data: Mapping[str, Any], files: CheckedFiles) -> OnnxRunner:
    """The graphs of a manifest, with their parts."""
    attempts = read(tuple[Attempt, ...], data["attempts"])
    has_own = "program" in data or "split" in data  # several modules have parts only
    if not has_own and not data["parts"]:
        raise InvalidDataError("a graph", "none")
    described = data.get("program", data)
    compared = read(ApplicationRun | None, data.get("compared"))
    return _load_runner(
        folder, described, files, has_own, attempts=attempts, check_files=files.check, compared=compared
    )


def _load_runner(
    folder: Path, data: Mapping[str, Any], files: CheckedFiles, has_own: bool = True, **about: Any
) -> OnnxRunner:
    split = Split.from_json(data["split"]) if "split" in data else None
    own = {"": data} if has_own else {}
    graphs = read(Mapping[str, GraphData], own if split is None else data["programs"])
    if split is not None and graphs.keys() != split.kinds.keys():
        raise InvalidDataError(f"the programs {', '.join(split.kinds)}", ", ".join(graphs))
    return OnnxRunner(
        {name: load_graph(folder, graph, files) for name, graph in graphs.items()},
        {name: _load_runner(folder, part, files) for name, part in read(Mapping[str, Any], data["parts"]).items()},
        read(Mapping[str, tuple[Edge, ...]], data["edges"]),
        split=split,
        **about,
    )


def _peak_bytes() -> int | None:
    """The most memory that this process has used so far; None if unknown."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def check_destination(directory: str | os.PathLike[str]) -> Path:
    """Returns the path if an exported model may be written there: to an empty folder, or over an exported model.

    Raises:
        DestinationError: if the folder holds something else, or cannot be written.
    """
    target = as_path(directory)
    check_file(target / MANIFEST)
    return check_folder(target, _NOUN, lambda folder: _listed(folder) is not None)


def _remove_old(target: Path) -> None:
    """Removes an old export, or what a process that was killed had moved of one. Files of others stay.

    The manifests go last, so that it can be done again if it is interrupted.
    """
    manifests = [folder for folder in (target, *abandoned_folders(target)) if _listed(folder) is not None]
    old = [inside(target, name) for folder in manifests for name in _listed(folder) or ()]
    for path in (target / PAGE, *old, target / MANIFEST) if manifests else ():
        path.unlink(missing_ok=True)
    for folder in sorted({path.parent for path in old} - {target}, reverse=True):
        with contextlib.suppress(OSError):  # it holds something else, or is gone
            os.removedirs(folder)


def _listed(folder: Path) -> list[str] | None:
    """The files that a manifest lists, of any version; None if there is no manifest."""
    try:
        data = parse_json((folder / MANIFEST).read_bytes())
        return list(read(Mapping[str, Any], data["files"])) if data["format"] == _FORM[0] else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def read_manifest(folder: Path) -> dict[str, Any]:
    """Returns the content of the ``manifest.json`` of a folder.

    Raises:
        DestinationError: if the folder does not hold an exported model.
    """
    return read_json_file(
        folder / MANIFEST,
        _FORM,
        noun=_NOUN,
        written=f"a folder with {MANIFEST}, as exported.save(folder) writes it",
        damaged=damaged,
    )
