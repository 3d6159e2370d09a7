"""What the commands share: options, exit codes, and how results, progress and errors are printed."""

from __future__ import annotations

import contextlib
import json
import logging
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from exportkit.errors import DestinationError, ExportkitError
from exportkit.programs.stages import show_progress

NOT_PROVEN, BAD_INPUT = 1, 2

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
ModelDir = Annotated[Path, typer.Argument(help="Folder with config.json and *.safetensors.", metavar="MODEL_DIR")]
Opset = Annotated[int | None, typer.Option(min=18, help="ONNX opset; the default is torch's choice.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]

stdout, stderr = Console(highlight=False), Console(stderr=True, highlight=False)


def print_json(data: Any) -> None:
    """Prints one JSON document. Infinities and NaN, which JSON does not have, become strings."""
    finite = json.loads(json.dumps(data), parse_constant=str)
    typer.echo(json.dumps(finite, indent=1, ensure_ascii=False, allow_nan=False))


def make_folder(folder: Path) -> Path:
    """Creates a folder if it does not exist, and returns it.

    Raises:
        DestinationError: if it cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DestinationError("The output folder cannot be created.", where=str(folder), got=error.strerror) from error
    return folder


@contextlib.contextmanager
def exit_on_error(code: int, debug: bool = False, as_json: bool = False) -> Iterator[None]:
    """Prints an exportkit error as a message, without a traceback, and exits.

    Args:
        code: The exit code.
        debug: Whether to show the traceback as well.
        as_json: Whether a result that is not proven is printed as a JSON document.
    """
    try:
        yield
    except ExportkitError as error:
        text = traceback.format_exc() if debug else str(error)
        stderr.print(text, style="red", markup=False, soft_wrap=True)
        if code == NOT_PROVEN and as_json:
            print_json({"ok": False, "error": str(error)})
        elif code == NOT_PROVEN:
            typer.echo("NOT PROVEN: the export failed")
        raise typer.Exit(code) from None


def progress(text: str) -> contextlib.AbstractContextManager[None]:
    """Shows a text and the stages of an export on stderr while the block runs."""
    return show_progress(text, stderr)


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Silences warnings, log messages below errors, and the progress bars of transformers."""
    from transformers.utils import logging as transformers_logging

    bars, disabled = transformers_logging.is_progress_bar_enabled(), logging.root.manager.disable
    transformers_logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(disabled)
        if bars:
            transformers_logging.enable_progress_bar()
