"""``exportkit export`` and ``exportkit demo``: they take a model from a run to a proven ONNX file."""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

import exportkit
from exportkit.commands.shared import (
    BAD_INPUT,
    NOT_PROVEN,
    AsJson,
    Debug,
    ModelDir,
    Opset,
    exit_on_error,
    make_folder,
    print_json,
    progress,
    quiet_libraries,
    stderr,
    stdout,
)
from exportkit.errors import ExportkitError

if TYPE_CHECKING:
    from rich.table import Table

    from exportkit.examples.run import ExampleRun


Runtime = Literal["onnxruntime", "genai"]
Weights = Literal["int4", "int8"]
Dtype = Literal["float16"]
Activations = Literal["dynamic", "static"]


class Pipeline:
    """An example on its way from the run to the proof, with the duration of each stage.

    Attributes:
        example: The model and its run.
        seconds: How long each stage took.
        observer: The observer that recorded the run.
        exported: The exported model.
        onnx_model: The ONNX model.
        report: The proof; None before `verify`.
        error: Why the example failed; None if it did not.
    """

    def __init__(self, example: ExampleRun) -> None:
        self.example = example
        self.seconds: dict[str, float] = {}
        self.observer: exportkit.InputObserver
        self.exported: exportkit.Exported
        self.onnx_model: exportkit.OnnxModel
        self.report: exportkit.Report | None = None
        self.error: ExportkitError | None = None

    def observe(self) -> None:
        """Runs the model and records its calls."""
        with self._stage("observe"):
            self.observer = self.example.observe()
        for problem in self.observer.observation.problems:
            stderr.print(f"warning: a call could not be recorded: {problem}", style="yellow", markup=False)

    def export(self) -> None:
        """Exports the model."""
        with self._stage("export"):
            self.exported = exportkit.export(self.example.model, self.observer)

    def write(self, path: Path, opset: int | None = None, **options: Any) -> None:
        """Writes an ONNX file; the options are those of `exportkit.Exported.to_onnx`."""
        with self._stage("ONNX"):
            self.onnx_model = self.exported.to_onnx(path, opset, **options)

    def verify(self) -> None:
        """Proves the ONNX file."""
        with self._stage("verify"):
            self.report = self.onnx_model.verify()

    def save(self, folder: Path, opset: int | None, verify: bool, **options: Any) -> None:
        """Writes a folder that can be loaded without the model, with its proof; see `exportkit.Exported.save`."""
        with self._stage("save"):
            self.onnx_model = self.exported.save(folder, opset=opset, verify=verify, **options)

    def problem(self) -> str:
        """Returns why the example is not proven; empty if it is."""
        if self.error is not None:
            return str(self.error).splitlines()[0]
        return "; ".join(self.report.problems()) if self.report is not None else "not verified"

    def to_json(self) -> dict[str, Any]:
        """Returns the result as JSON data."""
        return {
            "model": self.example.name,
            "observed": self.example.description,
            "ok": not self.problem(),
            "error": None if self.error is None else str(self.error),
            "seconds": self.seconds,
            "report": None if self.report is None else json.loads(self.report.to_json()),
        }

    @contextlib.contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        with progress(f"{self.example.name}: {name}"):
            yield
        self.seconds[name] = time.perf_counter() - started


def export(
    model_dir: ModelDir,
    out: Annotated[
        Path,
        typer.Option(help="A new or empty folder, or a file that ends in .onnx.", metavar="OUT", show_default=False),
    ],
    opset: Opset = None,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Export without a proof.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
    *,
    runtime: Annotated[
        Runtime | None, typer.Option(help="Runtime to fuse operators for; with genai, caches also hold every token.")
    ] = None,
    weights: Annotated[Weights | None, typer.Option(help="Store weights in fewer bits, for onnxruntime.")] = None,
    activations: Annotated[
        Activations | None,
        typer.Option(
            help="With --weights int8, quantise activations too: dynamic (ranges from each call) or static (fixed "
            "ranges)."
        ),
    ] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Compute in float16, except for parts that overflow.")] = None,
    accuracy: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, help="With --weights or --dtype: minimum top-1 agreement; layers keep more bits to reach it."
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            help="A transformers task, such as feature-extraction; the default is the model class that was saved.",
            metavar="TASK",
            show_default=False,
        ),
    ] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(
            help="Data to run the model on: .txt (a text in each line), an image, audio, .jsonl (arguments of the "
            "processor), .safetensors (tensors of a call). May be given several times.",
            metavar="FILE",
            show_default=False,
        ),
    ] = None,
    outputs: Annotated[
        str | None,
        typer.Option(help="Additional outputs: hidden_states, attentions.", metavar="NAMES", show_default=False),
    ] = None,
    parts: Annotated[
        str | None,
        typer.Option(
            help="Submodules that become graphs of their own, such as encoder; auto finds those that feed the model.",
            metavar="NAMES",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Export a local transformers checkpoint to ONNX, and prove it.

    First, the model runs to show what varies: on --data if given, otherwise in the way that is usual for its task.
    A text model generates or reads padded batches, an image or audio model gets noise. Weights are loaded as float32.
    Nothing is downloaded.

    If OUT is a folder, it holds everything that `exportkit verify` and `exportkit report` need. If OUT ends in .onnx,
    only the graph and its weights are written.

    With --weights or --dtype, the graph is proven before it is quantised or converted. The result is not proven but
    measured: the report says how far its outputs are from the model's.

    Exits with 0 if the result is proven, or measured and within --accuracy; with 1 if not; with 2 for invalid usage.
    """
    from exportkit.examples.checkpoint import load_checkpoint
    from exportkit.files import check_file
    from exportkit.folder.folder import check_destination
    from exportkit.running.placement import require_onnxruntime

    to_file = out.suffix == ".onnx"
    options = {"runtime": runtime, "dtype": dtype, **_quantised(weights, activations, dtype, accuracy)}
    if to_file and runtime == "genai":
        raise typer.BadParameter("onnxruntime-genai needs a folder: --out may not end in .onnx.")
    if to_file and parts is not None:
        raise typer.BadParameter("--parts makes several graphs, which need a folder: --out may not end in .onnx.")
    with quiet_libraries():
        with exit_on_error(BAD_INPUT, debug):
            if not no_verify:
                require_onnxruntime()
            check_file(out) if to_file else check_destination(out)
            with progress(f"loading {model_dir}"):
                example = load_checkpoint(model_dir, task, data or (), _names(outputs))
                pipeline = Pipeline(replace(example, parts=parts if parts == "auto" else _names(parts) or None))
            pipeline.observe()
            make_folder(out.parent if to_file else out)
        with exit_on_error(NOT_PROVEN, debug, as_json):
            pipeline.export()
            text, report = (_write_file if to_file else _save_folder)(pipeline, out, opset, not no_verify, options)
    ok = no_verify or report["ok"]
    if as_json:
        plan = json.loads(pipeline.exported.plan.to_json())
        print_json({**pipeline.to_json(), "ok": ok, "out": str(out), "plan": plan, "report": report})
    else:
        _print_export(pipeline, None if to_file else out, text)
    raise typer.Exit(0 if ok else NOT_PROVEN)


def _print_export(pipeline: Pipeline, folder: Path | None, proof: str) -> None:
    """Prints what was exported: to a folder, or to a file for each graph."""
    typer.echo(f"{pipeline.example.name}, {pipeline.example.description}\n\n{pipeline.exported.plan}\n")
    graphs = pipeline.onnx_model.graphs.values()
    files = ", ".join(str(graph.path) for graph in graphs) if folder is None else str(folder)
    durations = ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in pipeline.seconds.items())
    typer.echo(f"{files}: {pipeline.onnx_model.size / 1e6:.1f} MB; {durations}\n")
    typer.echo(proof)  # its last line is the verdict


def _quantised(
    weights: Weights | None, activations: Activations | None, dtype: Dtype | None, accuracy: float | None
) -> dict[str, Any]:
    """How a graph is quantised, and how accurate it has to be; BadParameter for what does not go together."""
    if activations is not None and weights != "int8":
        raise typer.BadParameter("--activations requires --weights int8.")
    if accuracy is not None and weights is None and dtype is None:
        raise typer.BadParameter("--accuracy requires a graph that is measured: add --weights or --dtype.")
    stored = weights if activations is None else exportkit.Quantisation("int8", activations=activations)
    return {"weights": stored, "accuracy": accuracy}


def _names(text: str | None) -> list[str]:
    """The names in an option that takes several of them, with commas between."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def _write_file(
    pipeline: Pipeline, file: Path, opset: int | None, verify: bool, options: Mapping[str, Any]
) -> tuple[str, Any]:
    """Writes only the graph; returns its proof as text and as data."""
    pipeline.write(file, opset, **options)
    if not verify:
        return "not verified", None
    pipeline.verify()
    return str(pipeline.report), pipeline.to_json()["report"]


def _save_folder(
    pipeline: Pipeline, folder: Path, opset: int | None, verify: bool, options: Mapping[str, Any]
) -> tuple[str, Any]:
    """Writes the folder; returns the proof that it holds, as text and as data."""
    from exportkit.folder.folder import REPORT_JSON, REPORT_TEXT

    pipeline.save(folder, opset, verify, **options)
    if not verify:
        return "not verified", None
    return (folder / REPORT_TEXT).read_text("utf-8").rstrip(), json.loads((folder / REPORT_JSON).read_text("utf-8"))


def demo(
    out: Annotated[
        Path | None, typer.Option(help="Keep the ONNX files in this folder.", metavar="DIR", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Take three tiny models from a few calls to proven ONNX files.

    The models are a decoder, an encoder, and a module with nested inputs. Their weights are random, so nothing is
    downloaded. The demo takes about half a minute.

    Exits with 0 if all models are proven, 1 if one is not, 2 for invalid usage.
    """
    from exportkit.examples.demo import demo_runs
    from exportkit.running.placement import require_onnxruntime

    with quiet_libraries(), tempfile.TemporaryDirectory() as temporary:
        with exit_on_error(BAD_INPUT):
            require_onnxruntime()
            folder = Path(temporary) if out is None else make_folder(out)
        pipelines = [Pipeline(example) for example in demo_runs()]
        for pipeline in pipelines:
            try:
                pipeline.observe()
                pipeline.export()
                pipeline.write(folder / f"{pipeline.example.name.replace(' ', '_')}.onnx")
                pipeline.verify()
            except ExportkitError as error:
                pipeline.error = error  # the other models still run
    unproven = [pipeline.example.name for pipeline in pipelines if pipeline.problem()]
    if as_json:
        print_json({"ok": not unproven, "models": [pipeline.to_json() for pipeline in pipelines]})
    else:
        _print_demo(pipelines, out, unproven)
    raise typer.Exit(NOT_PROVEN if unproven else 0)


def _print_demo(pipelines: Sequence[Pipeline], out: Path | None, unproven: Sequence[str]) -> None:
    first, *_ = pipelines
    if first.error is None:
        typer.echo(f"What exportkit found out about the {first.example.name}:\n\n{first.exported.plan}\n")
    stdout.print(_demo_table(pipelines), "")
    for pipeline in pipelines:
        typer.echo(f"{pipeline.example.name} ({pipeline.example.description}): {pipeline.problem() or 'proven'}")
    if out is not None:
        typer.echo(f"the ONNX files are in {out}")
    typer.echo(f"not proven: {', '.join(unproven)}" if unproven else "all proven")


def _demo_table(pipelines: Sequence[Pipeline]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, show_lines=True, padding=0)
    table.add_column("model", max_width=6)  # two words on two lines: the table fits into 80 columns
    for title in ("observed calls", "graph inputs", "variables", "recorded proven", "unseen proven", "max difference"):
        table.add_column(title.replace(" ", "\n"), no_wrap=True)
    table.add_column("seconds", no_wrap=True)
    for pipeline in pipelines:
        seconds = "\n".join(f"{stage:7} {duration:.1f}" for stage, duration in pipeline.seconds.items())
        table.add_row(pipeline.example.name, *_demo_cells(pipeline), seconds)
    return table


def _demo_cells(pipeline: Pipeline) -> tuple[str, ...]:
    report = pipeline.report
    if report is None:
        return ("-",) * 6
    return (
        str(pipeline.observer.num_obs()),
        str(len(pipeline.onnx_model.inputs)),
        "\n".join(pipeline.exported.plan.names),
        _proven_rows(report, "recorded"),
        _proven_rows(report, "unseen"),
        f"{max((row.absolute for row in report.rows if row.absolute >= 0), default=0.0):.0e}",
    )


def _proven_rows(report: exportkit.Report, kind: Literal["recorded", "unseen"]) -> str:
    """How many calls are proven out of those that the model itself accepts, such as "3 of 4"."""
    rows = [row for row in report.rows if row.kind == kind and row.status != "no call"]
    return f"{sum(row.status == 'proven' for row in rows)} of {len(rows)}"
