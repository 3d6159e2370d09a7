"""``exportkit run``: it runs a script, exports the models that the script calls, and runs it again on the graphs."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

import typer

import exportkit
from exportkit.commands.shared import (
    BAD_INPUT,
    NOT_PROVEN,
    Debug,
    Opset,
    exit_on_error,
    progress,
    quiet_libraries,
    stderr,
)
from exportkit.errors import NoCallsError
from exportkit.plan.tables import count

if TYPE_CHECKING:
    from exportkit.api.script_runs import ObservedScript, RunOnGraphs


def run(
    script: Annotated[
        list[str],
        typer.Argument(
            help="A Python script, or a module with -m, and its arguments. All arguments after -- go to the script.",
            metavar="SCRIPT",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(help="A new or empty folder, for the graphs and their proof.", metavar="DIR", show_default=False),
    ],
    observe: Annotated[
        str | None,
        typer.Option(
            help="A variable of the script that holds the model, the pipeline or the dict of models, such as pipe, "
            "app.model or vae.decode. By default, all modules with weights that the script itself calls.",
            metavar="NAME",
            show_default=False,
        ),
    ] = None,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is the name of a module, as for python -m.")] = False,
    opset: Opset = None,
    debug: Debug = False,
) -> None:
    """Run a script, export the models that it calls, prove them, and run it again on the graphs.

    The script needs no changes. Afterwards, its models are exported to DIR and proven there. Then the script runs once
    more, with the same random seeds and with the graphs in place of its models; its output is compared with that of the
    first run, and not shown.

    Exits with 0 if the models are proven and the script runs on them, with 1 if not, with 2 for invalid usage. If the
    script itself fails, nothing is exported, and the exit code is the script's.
    """
    from exportkit.api.script import ProcessState, Script
    from exportkit.api.script_runs import observe_script, run_on_graphs
    from exportkit.folder.folder import REPORT_JSON, REPORT_TEXT, check_destination
    from exportkit.running.placement import require_onnxruntime

    out = out.absolute()  # the script may change the working directory
    asked = Script(script[0], tuple(script[1:]), module, observe)
    with exit_on_error(BAD_INPUT, debug):
        require_onnxruntime()
        asked.require()
        check_destination(out)
    state = ProcessState.now()
    try:
        first = observe_script(asked)
        if first.run.exit_code:
            first.run.print_error()
            stderr.print("exportkit: the script failed, so nothing was exported.", style="red", markup=False)
            raise typer.Exit(first.run.exit_code)
        for problem in first.run.problems:
            stderr.print(f"warning: {problem}", style="yellow", markup=False, soft_wrap=True)
        with exit_on_error(NOT_PROVEN, debug), _as_main(first.run.main):
            _require_found(first)
            with quiet_libraries(), progress(asked.name):
                onnx_model = exportkit.export(first.application, first.observer).save(out, opset=opset)
            report = json.loads((out / REPORT_JSON).read_text("utf-8"))
            typer.echo(f"\n{(out / REPORT_TEXT).read_text('utf-8')}\n{out}: {onnx_model.size / 1e6:.1f} MB\n")
            state.restore()
            second = run_on_graphs(first, onnx_model)
    finally:
        state.restore()
    second.run.print_error()
    typer.echo(f"{asked.name} on the graphs prints {_compared(first.run.printed, second.run.printed)}")
    reasons = [*([] if report["ok"] else [report["verdict"].partition(": ")[2]]), *second.problems]
    typer.echo(f"{_verdict(reasons)}; {count(second.calls, 'call')}: {_durations(first, second)}")
    raise typer.Exit(NOT_PROVEN if reasons else 0)


def _verdict(reasons: Sequence[str]) -> str:
    """Returns the verdict as text, given the reasons why nothing is proven."""
    problems = [" ".join(reason.split()) for reason in reasons]
    return f"NOT PROVEN: {'; '.join(problems)}" if problems else "proven"


def _require_found(first: ObservedScript) -> None:
    """Raises NoCallsError if the script called nothing that could be observed."""
    if first.run.found:
        return
    name, problem = first.script.observed, next(iter(first.run.problems), None)
    raise NoCallsError(
        "The script calls no module with weights."
        if name is None
        else "No variable with this name holds a model when the script calls one.",
        where=first.script.name if name is None else f"--observe {name}",
        expected="a call of a torch.nn.Module"
        if name is None
        else "a variable of the script, or an attribute of one, that holds a model before it is called",
        got=problem,
        hint="leave out --observe to find models that only exist inside a function." if name is not None else None,
    )


def _durations(first: ObservedScript, second: RunOnGraphs) -> str:
    """Returns the durations of both runs as text, leaving out first calls (warm-up) where there are later ones."""
    totals = first.observer.seconds, second.seconds
    later = totals[0] - first.observer.first_seconds, totals[1] - second.first_seconds
    eager, onnx = later if all(later) else totals
    said = f"{eager:.3g} s with the model, {onnx:.3g} s on the graphs"
    return f"{said}, first calls left out" if all(later) else said


def _as_main(module: ModuleType | None) -> contextlib.AbstractContextManager[None]:
    """Lets the classes of a script be found by their names, as they are while it runs."""
    from exportkit.overrides import Item, replaced

    return contextlib.nullcontext() if module is None else replaced([(Item(sys.modules, "__main__"), module)])


def _compared(before: str, after: str) -> str:
    """Whether a script prints the same again; if not, the first line that differs, which may be a time or a date."""
    if before == after:
        return "the same"
    pairs = enumerate(itertools.zip_longest(before.splitlines(), after.splitlines(), fillvalue="nothing"), 1)
    number, (first, second) = next((n, pair) for n, pair in pairs if pair[0] != pair[1])
    return f"something else: line {number} differs: {first[:80]!r} became {second[:80]!r}"
