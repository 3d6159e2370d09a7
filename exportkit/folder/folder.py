"""A folder that runs elsewhere: ONNX files, how they are called, the calls that prove them, and the proof.

In comes an export; out goes a folder with ``manifest.json``, from which another process, on another machine and
without the model, calls the graphs like the model and proves them again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exportkit.calls.json_file import read_json_file
from exportkit.calls.storage import versions
from exportkit.errors import DestinationError, ExportkitError, InvalidRequestError
from exportkit.folder.clients import Runtime, for_runtime, write_client_files, write_configs
from exportkit.folder.layout import Layout, layout_of, layout_of_program, rename_inputs
from exportkit.folder.manifest import damaged, dump_program, inside, load_program
from exportkit.folder.saved import Saved
from exportkit.onnx_files.onnx_model import OnnxModel
from exportkit.onnx_files.onnx_programs import OnnxPrograms
from exportkit.onnx_files.translate import check_destination
from exportkit.programs.exported import Exported
from exportkit.programs.programs import ExportedPrograms, Split
from exportkit.programs.stateful import onnx_model_of
from exportkit.running.session import require_onnxruntime

if TYPE_CHECKING:
    from exportkit.proof.report import Report

MANIFEST, REPORT_TEXT, REPORT_JSON = "manifest.json", "report.txt", "report.json"
PAGE = "report.html"  # made later; goes with the proof that it shows
_FORMAT, _VERSION = "exportkit-folder", 2
_TEMPORARY = ".saving-"


def save_folder(
    exported: Exported,
    directory: str | os.PathLike[str],
    *,
    runtime: Runtime | None = None,
    opset: int | None = None,
    values: bool = True,
    verify: bool = True,
) -> OnnxModel:
    """Writes a folder, and returns its graphs as something to call; see `Exported.save`."""
    target = check_folder(Path(directory))
    if verify:
        require_onnxruntime()
    exported = for_runtime(exported, runtime)
    with _filled(target) as folder:
        onnx_model = _write_graphs(exported, layout_of(exported), folder, opset)
        exported = write_client_files(onnx_model.exported, onnx_model.file, folder)
        onnx_model = onnx_model_of(onnx_model.file, exported, onnx_model.parts)
        saved = Saved.of(exported, with_cases=verify or values)
        if verify:
            _write_report(exported.seconds, _proven_by(onnx_model, saved), folder, target)
        _write_manifest(folder, {"program": dump_program(onnx_model, saved, folder, values)})
    return _moved(onnx_model, target)


def save_programs(
    exported: ExportedPrograms,
    directory: str | os.PathLike[str],
    *,
    runtime: Runtime | None = None,
    opset: int | None = None,
    values: bool = True,
    verify: bool = True,
) -> OnnxPrograms:
    """Writes a folder with several programs of one model; see `ExportedPrograms.save`."""
    if runtime is not None:
        raise InvalidRequestError("A runtime takes one graph.", where=repr(exported), got=exported.split.text)
    target = check_folder(Path(directory))
    if verify:
        require_onnxruntime()
    with _filled(target) as folder:
        write_configs(exported.model, folder)
        graphs, saved, described = {}, {}, {}
        for name, program in exported.programs.items():
            graphs[name] = _write_graphs(program, layout_of_program(program, name), folder, opset)
            saved[name] = Saved.of(graphs[name].exported, with_cases=verify or values)
        if verify:
            proven = {name: _proven_by(graph, saved[name]) for name, graph in graphs.items()}
            first = next(iter(exported.programs.values()))
            _write_report(first.seconds, OnnxPrograms(proven, exported.split), folder, target)
        for name, graph in graphs.items():
            described[name] = dump_program(graph, saved[name], folder, values, f"{name}/")
        _write_manifest(folder, {"split": exported.split.data(), "programs": described})
    return OnnxPrograms({name: _moved(graph, target) for name, graph in graphs.items()}, exported.split)


def load_folder(directory: str | os.PathLike[str]) -> OnnxModel | OnnxPrograms:
    """Returns the exported model of a folder that `Exported.save` wrote, to be called like the model.

    The model itself is not needed. ``verify()`` replays the recorded calls and those at unseen sizes, and compares with
    what the model returned when the folder was saved.

    Args:
        directory: The folder.

    Raises:
        DestinationError: if this is no such folder, or a file of it is missing or damaged.
        TreeError: if a class that the model takes or returns is not there.

    Example:
        >>> import tempfile, torch, exportkit
        >>> model, observer = torch.nn.Linear(4, 2), exportkit.InputObserver()
        >>> with observer(model):
        ...     expected = model(torch.ones(3, 4))
        >>> folder = tempfile.TemporaryDirectory()
        >>> _ = exportkit.export(model, observer).save(folder.name)
        >>> loaded = exportkit.load(folder.name)
        >>> torch.allclose(loaded(torch.ones(3, 4)), expected, atol=1e-5), loaded.verify().ok
        (True, True)
    """
    folder = Path(directory)
    data = read_manifest(folder)
    try:
        digests = {inside(folder, name): str(item["sha256"]) for name, item in data["files"].items()}
        for file in digests:
            _check_present(file, data["files"][file.relative_to(folder).as_posix()]["bytes"])
        if "programs" not in data:
            return load_program(folder, data["program"], digests)
        programs = {name: load_program(folder, program, {}) for name, program in data["programs"].items()}
        return OnnxPrograms(programs, Split.of(data["split"]), digests)
    except ExportkitError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, OSError) as error:
        raise damaged(folder / MANIFEST, f"{type(error).__name__}: {error}") from error


def _write_graphs(exported: Exported, layout: Layout, folder: Path, opset: int | None) -> OnnxModel:
    translated, file = exported.translated(folder / layout.file, opset)
    parts = {}
    for name, part in exported.parts.items():
        translated_part, part_file = part.translated(folder / layout.parts[name], opset)
        parts[name] = onnx_model_of(part_file, translated_part)
    return onnx_model_of(rename_inputs(file, layout.renamed), translated, parts)


def _write_report(seconds: dict[str, float], proven: OnnxModel | OnnxPrograms, folder: Path, target: Path) -> None:
    """Proves what was written, as `load_folder` finds it again, and adds how long that took."""
    started = time.perf_counter()
    report: Report = proven.verify()
    seconds["verify"] = time.perf_counter() - started
    (folder / REPORT_TEXT).write_text(f"{report}\n", "utf-8")
    (folder / REPORT_JSON).write_text(report.to_json() + "\n", "utf-8")
    if not report.ok:
        warnings.warn(f"{target} was saved, and is {report.verdict()}", RuntimeWarning, stacklevel=4)


def _proven_by(onnx_model: OnnxModel, saved: Saved) -> OnnxModel:
    parts = {name: _proven_by(part, saved.parts[name]) for name, part in onnx_model.parts.items()}
    return OnnxModel(onnx_model.file, saved, parts)


def _moved(onnx_model: OnnxModel, target: Path) -> OnnxModel:
    """The graphs at the place that their files were moved to."""
    file = replace(onnx_model.file, path=target / onnx_model.path.name)
    parts = {name: _moved(part, target) for name, part in onnx_model.parts.items()}
    return onnx_model_of(file, onnx_model.exported, parts)


def _write_manifest(folder: Path, programs: Mapping[str, Any]) -> None:
    text = json.dumps(_manifest(programs, folder), indent=1, allow_nan=False)
    (folder / MANIFEST).write_text(text + "\n", "utf-8")


def _manifest(programs: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        "format": _FORMAT,
        "version": _VERSION,
        "written_by": versions("exportkit", "torch", "transformers", "onnx", "onnxscript", "onnxruntime"),
        "peak_bytes": _peak_bytes(),
        "files": {path.relative_to(folder).as_posix(): _described(path) for path in files},
        **programs,
    }


def _peak_bytes() -> int | None:
    """The most memory that this process has had so far; None where the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _described(path: Path) -> dict[str, Any]:
    with path.open("rb") as content:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(content, "sha256").hexdigest()}


def check_folder(target: Path) -> Path:
    """Returns the path if a folder may be written there: over nothing, or over one of ours.

    Raises:
        DestinationError: if it holds something else, or cannot be written.
    """
    check_destination(target / MANIFEST)
    found = sorted(item.name for item in target.iterdir()) if target.exists() else []
    if not found or _is_ours(target):
        return target
    raise DestinationError(
        "An exported model is not written over other files.",
        where=str(target),
        expected="a new or empty directory, or one that an exported model was saved to",
        got=", ".join(found[:5]),
        hint="name another directory, or empty this one.",
    )


def _is_ours(folder: Path) -> bool:
    try:
        return bool(read_manifest(folder))
    except DestinationError:
        return False


@contextlib.contextmanager
def _filled(target: Path) -> Iterator[Path]:
    """Gives an empty folder beside the old files, and puts what is in it in their place once all of it was written.

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
    """Moves all files, the manifest last: what is cut short is no export."""
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
    """Returns what ``manifest.json`` of a folder says.

    Raises:
        DestinationError: if this is no folder of an exported model.
    """
    return read_json_file(
        folder / MANIFEST,
        (_FORMAT, _VERSION),
        noun="exported model",
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
