"""The command line: parses, calls the stages, and prints what came of it.

Results go to stdout, progress and errors to stderr. The exit code is 0 if the result is proven, 1 if it is not, 2 for
bad input, and 130 after Ctrl-C, which typer sees to.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich import box
from rich.console import Console
from rich.table import Table

import exportkit
from exportkit.errors import DestinationError, ExportkitError
from exportkit.export import require_onnxruntime
from exportkit.export.translate import check_destination
from exportkit.scenarios import Case
from exportkit.scenarios.trace_commands import compare, trace
from exportkit.skips.command import scan_skips

_NOT_PROVEN, _BAD_INPUT = 1, 2

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
_stdout, _stderr = Console(highlight=False), Console(stderr=True, highlight=False)


def main() -> None:
    """Runs the ``exportkit`` command."""
    app()


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"exportkit {exportkit.__version__}")
        raise typer.Exit


@app.callback(epilog="Start with:  exportkit demo")
def _common(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Observe a PyTorch model while it runs, export it to ONNX, and prove the result in onnxruntime."""


@app.command(epilog="Example:  exportkit demo --out demo_models")
def demo(
    out: Annotated[
        Path | None, typer.Option(help="Keep the ONNX files in this folder.", metavar="DIR", show_default=False)
    ] = None,
) -> None:
    """Take three tiny models from observed calls to proven ONNX files.

    A decoder, an encoder, and a module with nested inputs. Their weights are random: nothing is downloaded. It takes
    about half a minute.
    """
    from exportkit.scenarios.demo import demo_cases

    with _quiet_libraries(), tempfile.TemporaryDirectory() as unkept:
        with _exit_on_error(_BAD_INPUT):
            require_onnxruntime()
            folder = Path(unkept) if out is None else _made_folder(out)
        runs = [_Run(case) for case in demo_cases()]
        for run in runs:
            _demonstrate(run, folder / f"{run.case.name.replace(' ', '_')}.onnx")
    _print_demo(runs)
    if out is not None:
        typer.echo(f"the ONNX files are in {out}")
    unproven = [run.case.name for run in runs if run.problem()]
    typer.echo(f"not proven: {', '.join(unproven)}" if unproven else "all proven")
    raise typer.Exit(_NOT_PROVEN if unproven else 0)


@app.command(epilog="Example:  exportkit export ./checkpoint --out ./checkpoint-onnx")
def export(
    model_dir: Annotated[Path, typer.Argument(help="Folder with config.json and *.safetensors.", metavar="MODEL_DIR")],
    out: Annotated[Path, typer.Option(help="Folder for model.onnx, its data and report.txt.", metavar="DIR")],
    opset: Annotated[int | None, typer.Option(min=18, help="ONNX opset; torch's choice if not given.")] = None,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Export without a proof.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Export a local transformers checkpoint to ONNX, and prove it.

    The model first runs the way its task runs it, which shows what varies: a text model generates, or reads padded
    batches; an image or audio model gets noise. Weights are loaded as float32, and nothing is downloaded.

    Exits with 0 if the result is proven, 1 if it is not, 2 for bad input.
    """
    from exportkit.scenarios.checkpoint import load_case

    model_file, report_file = out / "model.onnx", out / "report.txt"
    with _quiet_libraries():
        with _exit_on_error(_BAD_INPUT, debug):
            if not no_verify:
                require_onnxruntime()
            check_destination(model_file)
            with _progress(f"loading {model_dir}"):
                run = _Run(load_case(model_dir))
            run.observe()
            _made_folder(out)
        report_file.unlink(missing_ok=True)  # an old proof must not stand beside a new model
        typer.echo(f"{run.case.name}, {run.case.observed}\n")
        with _exit_on_error(_NOT_PROVEN, debug):
            run.export()
            typer.echo(f"{run.exported.plan}\n")
            run.write(model_file, opset)
            if not no_verify:
                run.verify()
    durations = ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in run.seconds.items())
    typer.echo(f"{model_file}: {run.onnx_model.size / 1e6:.1f} MB; {durations}\n")
    if run.report is None:
        typer.echo("not verified")
        return
    report_file.write_text(f"{run.report}\n", encoding="utf-8")
    typer.echo(run.report)  # its last line is the verdict
    raise typer.Exit(0 if run.report.ok else _NOT_PROVEN)


@app.command(epilog="Example:  exportkit verify ./folder")
def verify(
    folder: Annotated[Path, typer.Argument(help="Folder that exported.save(folder) wrote.", metavar="DIR")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    locate: Annotated[bool, typer.Option("--locate", help="Name the module where a difference begins.")] = False,
    model_dir: Annotated[
        Path | None, typer.Option("--model", help="The checkpoint, for --locate to run.", metavar="MODEL_DIR")
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Prove an exported folder again, without the model.

    The recorded calls and those at unseen sizes are replayed in onnxruntime, and compared with what the model returned
    when the folder was saved. The files must be those that were saved.

    Exits with 0 if the result is proven, 1 if it is not, 2 for bad input, such as a missing or changed file.
    """
    from exportkit.scenarios.checkpoint import load_case

    with _quiet_libraries(), _exit_on_error(_BAD_INPUT, debug):
        require_onnxruntime()
        with _progress(f"verifying {folder}"):
            report = exportkit.load(folder).verify()
        located = None
        if locate and not report.ok:
            with _progress("locating the difference"):
                located = report.locate(load_case(model_dir).model if model_dir is not None else None)
    if located is not None:
        typer.echo(f"{located}\n", err=as_json)
    typer.echo(report.to_json() if as_json else report)
    raise typer.Exit(0 if report.ok else _NOT_PROVEN)


app.command(epilog="Example:  exportkit trace ./checkpoint --out trace --values all")(trace)
app.command(epilog="Example:  exportkit compare trace_a trace_b --html difference.html")(compare)
app.command("scan-skips", epilog="Example:  exportkit scan-skips ./transformers --output_dir scan")(scan_skips)


class _Run:
    """A case on its way through the stages, as far as it came."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.seconds: dict[str, float] = {}
        self.observer: exportkit.InputObserver
        self.exported: exportkit.Exported
        self.onnx_model: exportkit.OnnxModel
        self.report: exportkit.Report | None = None
        self.error: ExportkitError | None = None

    def observe(self) -> None:
        with self._stage("observe"):
            self.observer = self.case.observe()
        for problem in self.observer.observation.problems:
            _stderr.print(f"warning: a call could not be recorded: {problem}", style="yellow", markup=False)

    def export(self) -> None:
        with self._stage("export"):
            self.exported = exportkit.export(self.case.model, self.observer)

    def write(self, path: Path, opset: int | None = None) -> None:
        with self._stage("ONNX"):
            self.onnx_model = self.exported.to_onnx(path, opset)

    def verify(self) -> None:
        with self._stage("verify"):
            self.report = self.onnx_model.verify()

    @contextlib.contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        with _progress(f"{self.case.name}: {name}"):
            yield
        self.seconds[name] = time.perf_counter() - started

    def problem(self) -> str:
        """Why the case is not proven, or nothing if it is."""
        if self.error is not None:
            return str(self.error).splitlines()[0]
        return "; ".join(self.report.problems()) if self.report is not None else "not verified"


def _demonstrate(run: _Run, path: Path) -> None:
    """Takes one model through all stages; an error is kept, so that the other models still get their turn."""
    try:
        run.observe()
        run.export()
        run.write(path)
        run.verify()
    except ExportkitError as error:
        run.error = error


def _print_demo(runs: Sequence[_Run]) -> None:
    for run in runs[:1]:
        if run.error is None:
            typer.echo(f"What exportkit found out about the {run.case.name}:\n\n{run.exported.plan}\n")
    _stdout.print(_demo_table(runs), "")
    for run in runs:
        typer.echo(f"{run.case.name} ({run.case.observed}): {run.problem() or 'proven'}")


def _demo_table(runs: Sequence[_Run]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, show_lines=True, padding=0)
    table.add_column("model", max_width=6)  # two words on two lines: the table fits into 80 columns
    for title in ("observed calls", "graph inputs", "variables", "recorded proven", "unseen proven", "max difference"):
        table.add_column(title.replace(" ", "\n"), no_wrap=True)
    table.add_column("seconds", no_wrap=True)
    for run in runs:
        seconds = "\n".join(f"{stage:7} {duration:.1f}" for stage, duration in run.seconds.items())
        table.add_row(run.case.name, *_demo_cells(run), seconds)
    return table


def _demo_cells(run: _Run) -> tuple[str, ...]:
    if run.report is None:
        return ("-",) * 6
    largest = max((row.absolute for row in run.report.rows if row.absolute >= 0), default=0.0)
    return (
        str(run.observer.num_obs()),
        str(len(run.onnx_model.file.inputs)),
        "\n".join(variable.name for variable in run.exported.plan.variables),
        _proven(run.report, "recorded"),
        _proven(run.report, "unseen"),
        f"{largest:.0e}",
    )


def _proven(report: exportkit.Report, kind: Literal["recorded", "unseen"]) -> str:
    """How many calls are proven, such as "3 of 4", of those that the model itself accepts."""
    rows = [row for row in report.rows if row.kind == kind and row.status != "no call"]
    return f"{sum(row.status == 'proven' for row in rows)} of {len(rows)}"


def _made_folder(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DestinationError("The output folder cannot be made.", where=str(folder), got=error.strerror) from error
    return folder


@contextlib.contextmanager
def _exit_on_error(code: int, debug: bool = False) -> Iterator[None]:
    """Prints an error of exportkit as a message, without a traceback, and exits."""
    try:
        yield
    except ExportkitError as error:
        text = traceback.format_exc() if debug else str(error)
        _stderr.print(text, style="red", markup=False, soft_wrap=True)
        if code == _NOT_PROVEN:
            typer.echo("NOT PROVEN: the export failed")
        raise typer.Exit(code) from None


@contextlib.contextmanager
def _progress(text: str) -> Iterator[None]:
    """Shows what goes on: a spinner on a terminal, else a line."""
    if _stderr.is_terminal:
        with _stderr.status(text):
            yield
    else:
        _stderr.print(text, markup=False, soft_wrap=True)
        yield


@contextlib.contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Silences warnings, log messages below errors, and the progress bars of transformers."""
    from transformers.utils import logging as transformers_logging

    bars, disabled = transformers_logging.is_progress_bar_enabled(), logging.root.manager.disable
    transformers_logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        if bars:
            transformers_logging.enable_progress_bar()
