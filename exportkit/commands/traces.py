"""Takes the options of ``exportkit trace`` and ``exportkit compare``, records or compares, and prints what came of it.

The result goes to stdout and to files, errors to stderr; the exit code is 0 if nothing differs, 1 if something does,
and 2 for bad input.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from exportkit.commands.shared import BAD_INPUT, NOT_PROVEN, AsJson, exit_on_error, quiet_libraries, stdout
from exportkit.errors import DestinationError, InvalidRequestError
from exportkit.examples.checkpoint import load_case
from exportkit.module_traces.record import trace_model
from exportkit.module_traces.trace import Trace
from exportkit.report.comparison import comparison_page


def trace(
    model_dir: Annotated[Path, typer.Argument(help="Folder with config.json and *.safetensors.", metavar="MODEL_DIR")],
    out: Annotated[Path, typer.Option(help="Folder for the trace; a trace that is there is replaced.", metavar="DIR")],
    values: Annotated[
        list[str] | None,
        typer.Option(help="Modules whose values to store: all, ends, or a path with *; repeatable.", metavar="PATHS"),
    ] = None,
    every: Annotated[int, typer.Option(min=1, help="Store the values of every so many-eth call of a module.")] = 1,
    dtype: Annotated[str, typer.Option(help="Element type to run in, such as bfloat16.")] = "float32",
) -> None:
    """Record every module call of a local transformers checkpoint.

    It runs the way its task runs it. Of each tensor there are statistics and a hash, and its values on request. Compare
    two such folders with `exportkit compare`. Without a tokenizer the tokens are random, and the same in every run.
    """
    with quiet_libraries(), exit_on_error(BAD_INPUT):
        chosen = getattr(torch, dtype, None)
        if not isinstance(chosen, torch.dtype) or not chosen.is_floating_point:
            raise InvalidRequestError("This is no element type to run in.", expected="float32 or bfloat16", got=dtype)
        torch.manual_seed(0)
        case = load_case(model_dir)
        case.model.to(chosen)
        wanted = (values[0] if len(values) == 1 else values) if values else None
        with torch.no_grad(), trace_model(case.model, out, values=wanted, every=every) as recorded:
            case.run()
    typer.echo(f"{case.name}, {case.observed}: {len(recorded.calls)} module calls in {out}")
    if not recorded.complete:
        typer.echo(f"incomplete: {'; '.join(recorded.problems)}")


def compare(
    first: Annotated[Path, typer.Argument(help="Folder of the trace that is taken for right.", metavar="A")],
    second: Annotated[Path, typer.Argument(help="Folder of the other trace.", metavar="B")],
    names: Annotated[
        list[str] | None,
        typer.Option(help="What parts of paths of B are in A, as a regular expression; repeatable.", metavar="RE=TEXT"),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with a plot to this file.", metavar="FILE")] = None,
    as_json: AsJson = False,
) -> None:
    """Name the module where two traces begin to differ.

    A table shows what each module adds to the error. Traces are what `exportkit trace` and `exportkit.trace_model`
    write. Rounding is no difference, and element types, devices and code may be others.

    Exits with 0 if nothing differs, 1 if something does, 2 for bad input.
    """
    with quiet_libraries(), exit_on_error(BAD_INPUT):
        found = Trace.load(first).compare(Trace.load(second), _pairs(names))
        if html is not None:
            _write(html, comparison_page(found, f"{first} and {second}"))
    if as_json:
        typer.echo(found.as_json())
    else:
        stdout.print(found)
        if html is not None:
            typer.echo(f"written: {html}")
    raise typer.Exit(0 if found.ok else NOT_PROVEN)


def _pairs(names: list[str] | None) -> dict[str, str]:
    for name in names or ():
        if "=" not in name:
            raise InvalidRequestError("The option has another form.", expected="RE=TEXT", got=name)
    return {name.partition("=")[0]: name.partition("=")[2] for name in names or ()}


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DestinationError("The page cannot be written.", where=str(path), got=error.strerror) from error
