"""``exportkit verify``: a folder that was saved is proven again, without the model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import exportkit
from exportkit.commands.shared import BAD_INPUT, NOT_PROVEN, AsJson, Debug, exit_on_error, progress, quiet_libraries
from exportkit.running.session import require_onnxruntime


def verify(
    folder: Annotated[Path, typer.Argument(help="Folder that exported.save(folder) wrote.", metavar="DIR")],
    as_json: AsJson = False,
    locate: Annotated[bool, typer.Option("--locate", help="Name the module where a difference begins.")] = False,
    model_dir: Annotated[
        Path | None, typer.Option("--model", help="The checkpoint, for --locate to run.", metavar="MODEL_DIR")
    ] = None,
    debug: Debug = False,
) -> None:
    """Prove an exported folder again, without the model.

    The recorded calls and those at unseen sizes are replayed in onnxruntime, and compared with what the model returned
    when the folder was saved. The files must be those that were saved.

    Exits with 0 if the result is proven, 1 if it is not, 2 for wrong use, such as a missing or changed file.
    """
    from exportkit.examples.checkpoint import load_case

    with quiet_libraries(), exit_on_error(BAD_INPUT, debug):
        require_onnxruntime()
        with progress(f"verifying {folder}"):
            report = exportkit.load(folder).verify()
        located = None
        if locate and not report.ok:
            with progress("locating the difference"):
                located = report.locate(load_case(model_dir).model if model_dir is not None else None)
    if located is not None:
        typer.echo(f"{located}\n", err=as_json)
    typer.echo(report.to_json() if as_json else report)
    raise typer.Exit(0 if report.ok else NOT_PROVEN)
