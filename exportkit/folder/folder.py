"""A folder that runs elsewhere: ONNX files, how they are called, the calls that prove them, and the proof.

From ``manifest.json``, another process on another machine, without the model, calls the graphs like the model and
proves them again. Clients find the files and inputs under the names that they expect. An encoder-decoder model whose
encoder was exported, too, gets the names of optimum's ORTModelForSeq2SeqLM: https://huggingface.co/docs/optimum-onnx.
There, a decoder without an input ``use_cache_branch`` is one graph for the first call, with caches of length 0, and for
later ones.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from exportkit.calls.json_file import read_json_file, versions
from exportkit.calls.parts import Edge
from exportkit.errors import DestinationError, ExportkitError
from exportkit.files import check_file, check_folder
from exportkit.folder.clients import Runtime, for_runtime, write_client_files
from exportkit.folder.manifest import damaged, dump_graph, inside, load_graph
from exportkit.onnx_files.graph import Contract, OnnxGraph
from exportkit.onnx_files.runner import OnnxRunner, write_graphs
from exportkit.onnx_files.translate import input_names
from exportkit.programs.exported import ExportedModel
from exportkit.programs.kinds import Split
from exportkit.programs.strategies import Attempt
from exportkit.proof.calls import unseen_calls
from exportkit.proof.prove import prove
from exportkit.running.session import require_onnxruntime

MANIFEST, REPORT_TEXT, REPORT_JSON = "manifest.json", "report.txt", "report.json"
PAGE = "report.html"  # made later; belongs to the proof that it shows
_FORMAT, _VERSION = "exportkit-folder", 2
_TEMPORARY = ".saving-"
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
    values: bool = True,
    verify: bool = True,
) -> OnnxRunner:
    """Writes a folder, and returns its graphs as something to call; see `Exported.save`."""
    target = check_destination(Path(directory))
    if verify:
        require_onnxruntime()
    exported = for_runtime(exported, runtime)
    with _filled(target) as folder:
        runner = _write_graphs(exported, folder, opset)
        finding = write_client_files(exported, runner.contract, folder)
        if finding is not None:
            contract = runner.contract
            runner.graph.contract = replace(contract, plan=contract.plan.with_findings([finding]))
        saved = _without_model(runner, with_unseen=verify or values)
        if verify:
            started = time.perf_counter()
            report = prove(saved)
            exported.traced.seconds["verify"] = time.perf_counter() - started
            (folder / REPORT_TEXT).write_text(f"{report}\n", "utf-8")
            (folder / REPORT_JSON).write_text(report.to_json() + "\n", "utf-8")
            if not report.ok:
                warnings.warn(f"{target} was saved, and is {report.verdict()}", RuntimeWarning, stacklevel=3)
        text = json.dumps(_manifest(saved, folder, values), indent=1, allow_nan=False)
        (folder / MANIFEST).write_text(text + "\n", "utf-8")
    _move_graphs(runner, target)
    return runner


def load_folder(directory: str | os.PathLike[str]) -> OnnxRunner:
    """Returns the graphs of a folder that `save_folder` wrote; see `exportkit.load`."""
    folder = Path(directory)
    data = read_manifest(folder)
    try:
        digests = {inside(folder, name): str(item["sha256"]) for name, item in data["files"].items()}
        for file in digests:
            _check_present(file, data["files"][file.relative_to(folder).as_posix()]["bytes"])
        return _load_graphs(folder, data, digests)
    except ExportkitError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, OSError) as error:
        raise damaged(folder / MANIFEST, f"{type(error).__name__}: {error}") from error


def _write_graphs(exported: ExportedModel, folder: Path, opset: int | None) -> OnnxRunner:
    """Writes the graphs under the names of files and inputs that the clients of this kind of model know."""
    main, files, renamed = "model.onnx", {name: f"{name}.onnx" for name in exported.parts}, {}
    encoders = [name for name, edges in exported.edges.items() if len(edges) == 1]
    names = input_names(exported.traced.input_paths)
    has_cross_cache = any((match := _CACHE.search(name)) and match["half"] == "encoder" for name in names)
    if exported.split is None and len(encoders) == 1 and has_cross_cache:
        main, files[encoders[0]] = "decoder_model_merged.onnx", "encoder_model.onnx"
        renamed = {**_DECODER, exported.edges[encoders[0]][0].target: "encoder_hidden_states"}

    def file_of(program: str, part: str) -> Path:
        return folder / (files[part] if part else f"model.{program}.onnx" if program else main)

    runner = write_graphs(exported, file_of, opset)
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
    """The graphs as `load_folder` finds them again."""
    graphs = {}
    for name, graph in runner.graphs.items():
        unseen = tuple(unseen_calls(graph.traced)) if with_unseen and graph.traced is not None else ()
        graphs[name] = OnnxGraph(graph.contract, graph.observation, unseen=unseen)
    parts = {name: _without_model(part, with_unseen) for name, part in runner.parts.items()}
    return OnnxRunner(graphs, parts, runner.edges, split=runner.split, attempts=runner.attempts)


def _move_graphs(runner: OnnxRunner, target: Path) -> None:
    """Notes that the files of the graphs were moved."""
    for graph in runner.graphs.values():
        graph.contract = replace(graph.contract, path=target / graph.path.name)
    for part in runner.parts.values():
        _move_graphs(part, target)


def _manifest(runner: OnnxRunner, folder: Path, values: bool) -> dict[str, Any]:
    if runner.split is None:
        described = {"program": _dump_graphs(runner, folder, values, "")}
    else:
        described = {"split": runner.split.to_json(), **_dump_graphs(runner, folder, values, "")}
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        "format": _FORMAT,
        "version": _VERSION,
        "written_by": versions("exportkit", "torch", "transformers", "onnx", "onnxscript", "onnxruntime"),
        "peak_bytes": _peak_bytes(),
        "files": {path.relative_to(folder).as_posix(): _described(path) for path in files},
        "attempts": [dict(vars(attempt)) for attempt in runner.attempts],
        **described,
    }


def _dump_graphs(runner: OnnxRunner, folder: Path, values: bool, home: str) -> dict[str, Any]:
    """What the manifest says about the graphs: the data of a single one, or those of several by name."""
    if runner.split is None:
        data = dump_graph(runner.graph, folder, values, home)
    else:
        graphs = runner.graphs.items()
        data = {"programs": {name: dump_graph(graph, folder, values, f"{name}/") for name, graph in graphs}}
    data["parts"] = {
        name: _dump_graphs(part, folder, values, f"{home}parts/{name}/") for name, part in runner.parts.items()
    }
    data["edges"] = {name: [dict(vars(edge)) for edge in edges] for name, edges in runner.edges.items()}
    return data


def _load_graphs(folder: Path, data: Mapping[str, Any], digests: Mapping[Path, str]) -> OnnxRunner:
    """The graphs of a manifest."""
    split = Split.from_json(data["split"]) if "programs" in data else None
    single = data if "file" in data or split is not None else data["program"]
    described = {"": single} if split is None else data["programs"]
    return OnnxRunner(
        {name: load_graph(folder, graph) for name, graph in described.items()},
        {name: _load_graphs(folder, part, {}) for name, part in single.get("parts", {}).items()},
        {name: tuple(Edge(**edge) for edge in edges) for name, edges in single.get("edges", {}).items()},
        split=split,
        attempts=tuple(Attempt(**attempt) for attempt in data.get("attempts", ())),
        digests=digests,
    )


def _peak_bytes() -> int | None:
    """The most memory that this process has used so far; None if the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _described(path: Path) -> dict[str, Any]:
    with path.open("rb") as content:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(content, "sha256").hexdigest()}


def check_destination(target: Path) -> Path:
    """Returns the path if an exported model may be written there: to an empty folder, or over an exported model.

    Raises:
        DestinationError: if the folder holds something else, or cannot be written.
    """
    check_file(target / MANIFEST)
    return check_folder(target, "an exported model", _is_ours)


def _is_ours(folder: Path) -> bool:
    try:
        return bool(read_manifest(folder))
    except DestinationError:
        return False


@contextlib.contextmanager
def _filled(target: Path) -> Iterator[Path]:
    """Yields an empty folder beside the old files, and moves its content to their place once all of it was written.

    Files that do not belong to the old export, such as those of a tokenizer, stay.
    """
    is_new = not target.exists()
    try:
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=_TEMPORARY, dir=target) as temporary:
            yield Path(temporary)
            _remove_old(target)
            _move(Path(temporary), target)
    except BaseException as error:
        if is_new:
            shutil.rmtree(target, ignore_errors=True)
        if isinstance(error, OSError) and not isinstance(error, ExportkitError):
            raise DestinationError("The folder cannot be written.", where=str(target), got=error) from error
        raise


def _move(source: Path, target: Path) -> None:
    """Moves all files, the manifest last, so that a folder that is cut short is not taken for an export."""
    files = sorted((path for path in source.rglob("*") if path.is_file()), key=lambda path: path.name == MANIFEST)
    for path in files:
        place = target / path.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, place)


def _remove_old(target: Path) -> None:
    if not (target / MANIFEST).exists():
        return
    old = [inside(target, name) for name in read_manifest(target)["files"]]
    for path in (target / MANIFEST, target / PAGE, *old):
        path.unlink(missing_ok=True)
    for folder in sorted({path.parent for path in old} - {target}, reverse=True):
        with contextlib.suppress(OSError):  # it holds something else, or is gone
            os.removedirs(folder)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Returns the content of the ``manifest.json`` of a folder.

    Raises:
        DestinationError: if the folder does not hold an exported model.
    """
    return read_json_file(
        folder / MANIFEST,
        (_FORMAT, _VERSION),
        noun="an exported model",
        written=f"a folder with {MANIFEST}, as exported.save(folder) writes it",
        damaged=damaged,
    )


def _check_present(file: Path, size: int) -> None:
    if not file.exists():
        raise DestinationError(
            "A file of an exported model is missing.",
            where=str(file),
            expected=f"{size} bytes",
            hint="copy the whole folder, or save again.",
        )
