"""``exportkit export``: a local transformers checkpoint becomes a folder that runs elsewhere, or one ONNX file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from exportkit.commands.run import Run
from exportkit.commands.shared import (
    BAD_INPUT,
    NOT_PROVEN,
    AsJson,
    Debug,
    exit_on_error,
    made_folder,
    print_json,
    progress,
    quiet_libraries,
)
from exportkit.folder.folder import REPORT_JSON, REPORT_TEXT, check_folder
from exportkit.onnx_files.onnx_model import OnnxModel
from exportkit.onnx_files.onnx_programs import OnnxPrograms
from exportkit.onnx_files.translate import check_destination
from exportkit.running.session import require_onnxruntime


def export(
    model_dir: Annotated[Path, typer.Argument(help="Folder with config.json and *.safetensors.", metavar="MODEL_DIR")],
    out: Annotated[
        Path,
        typer.Option(help="A new or empty folder; or a file that ends in .onnx.", metavar="OUT", show_default=False),
    ],
    opset: Annotated[int | None, typer.Option(min=18, help="ONNX opset; torch's choice if not given.")] = None,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Export without a proof.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Export a local transformers checkpoint to ONNX, and prove it.

    The model first runs the way its task runs it, which shows what varies: a text model generates, or reads padded
    batches; an image or audio model gets noise. Weights are loaded as float32, and nothing is downloaded.

    A folder has all that `exportkit verify` and `exportkit report` read; a file that ends in .onnx is the graph alone.

    Exits with 0 if the result is proven, 1 if it is not, 2 for wrong use.
    """
    from exportkit.examples.checkpoint import load_case

    to_file = out.suffix == ".onnx"
    with quiet_libraries():
        with exit_on_error(BAD_INPUT, debug):
            if not no_verify:
                require_onnxruntime()
            check_destination(out) if to_file else check_folder(out)
            with progress(f"loading {model_dir}"):
                run = Run(load_case(model_dir))
            run.observe()
            made_folder(out.parent if to_file else out)
        with exit_on_error(NOT_PROVEN, debug, as_json):
            run.export()
            text, report = (_write_file if to_file else _save_folder)(run, out, opset, not no_verify)
    if as_json:
        plan = json.loads(run.exported.plan.to_json())
        print_json({**run.to_json(), "ok": no_verify or report["ok"], "out": str(out), "plan": plan, "report": report})
    else:
        typer.echo(f"{run.case.name}, {run.case.observed}\n\n{run.exported.plan}\n")
        files = _files(run.onnx_model) if to_file else str(out)
        typer.echo(f"{files}: {run.onnx_model.size / 1e6:.1f} MB; {run.durations()}\n")
        typer.echo(text)  # its last line is the verdict
    raise typer.Exit(0 if no_verify or report["ok"] else NOT_PROVEN)


def _files(onnx_model: OnnxModel | OnnxPrograms) -> str:
    graphs = onnx_model.programs.values() if isinstance(onnx_model, OnnxPrograms) else [onnx_model]
    return ", ".join(str(graph.path) for graph in graphs)


def _write_file(run: Run, file: Path, opset: int | None, verify: bool) -> tuple[str, Any]:
    """Writes the graph alone; returns its proof as text and as data."""
    run.write(file, opset)
    if not verify:
        return "not verified", None
    run.verify()
    return str(run.report), run.to_json()["report"]


def _save_folder(run: Run, folder: Path, opset: int | None, verify: bool) -> tuple[str, Any]:
    """Writes the folder; returns the proof that is in it, as text and as data."""
    run.save(folder, opset, verify)
    if not verify:
        return "not verified", None
    return (folder / REPORT_TEXT).read_text("utf-8").rstrip(), json.loads((folder / REPORT_JSON).read_text("utf-8"))
