"""``exportkit demo``: three tiny models, from observed calls to proven ONNX files."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich import box
from rich.table import Table

import exportkit
from exportkit.commands.run import Run
from exportkit.commands.shared import (
    BAD_INPUT,
    NOT_PROVEN,
    AsJson,
    exit_on_error,
    made_folder,
    print_json,
    quiet_libraries,
    stdout,
)
from exportkit.errors import ExportkitError
from exportkit.running.session import require_onnxruntime


def demo(
    out: Annotated[
        Path | None, typer.Option(help="Keep the ONNX files in this folder.", metavar="DIR", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Take three tiny models from a few calls to proven ONNX files.

    A decoder, an encoder, and a module with nested inputs. Their weights are random: nothing is downloaded. It takes
    about half a minute.

    Exits with 0 if all are proven, 1 if one is not, 2 for wrong use.
    """
    from exportkit.examples.demo import demo_cases

    with quiet_libraries(), tempfile.TemporaryDirectory() as unkept:
        with exit_on_error(BAD_INPUT):
            require_onnxruntime()
            folder = Path(unkept) if out is None else made_folder(out)
        runs = [Run(case) for case in demo_cases()]
        for run in runs:
            _demonstrate(run, folder / f"{run.case.name.replace(' ', '_')}.onnx")
    unproven = [run.case.name for run in runs if run.problem()]
    if as_json:
        print_json({"ok": not unproven, "models": [run.to_json() for run in runs]})
    else:
        _print(runs, out, unproven)
    raise typer.Exit(NOT_PROVEN if unproven else 0)


def _demonstrate(run: Run, path: Path) -> None:
    """Takes one model through all stages; an error is kept, so that the other models still get their turn."""
    try:
        run.observe()
        run.export()
        run.write(path)
        run.verify()
    except ExportkitError as error:
        run.error = error


def _print(runs: Sequence[Run], out: Path | None, unproven: Sequence[str]) -> None:
    for run in runs[:1]:
        if run.error is None:
            typer.echo(f"What exportkit found out about the {run.case.name}:\n\n{run.exported.plan}\n")
    stdout.print(_table(runs), "")
    for run in runs:
        typer.echo(f"{run.case.name} ({run.case.observed}): {run.problem() or 'proven'}")
    if out is not None:
        typer.echo(f"the ONNX files are in {out}")
    typer.echo(f"not proven: {', '.join(unproven)}" if unproven else "all proven")


def _table(runs: Sequence[Run]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, show_lines=True, padding=0)
    table.add_column("model", max_width=6)  # two words on two lines: the table fits into 80 columns
    for title in ("observed calls", "graph inputs", "variables", "recorded proven", "unseen proven", "max difference"):
        table.add_column(title.replace(" ", "\n"), no_wrap=True)
    table.add_column("seconds", no_wrap=True)
    for run in runs:
        seconds = "\n".join(f"{stage:7} {duration:.1f}" for stage, duration in run.seconds.items())
        table.add_row(run.case.name, *_cells(run), seconds)
    return table


def _cells(run: Run) -> tuple[str, ...]:
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
