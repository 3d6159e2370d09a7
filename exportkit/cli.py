"""The ``exportkit`` command: it registers the functions of ``exportkit.commands``. Ctrl-C exits with 130."""

from __future__ import annotations

from typing import Annotated

import typer

import exportkit
from exportkit.commands.export import demo, export
from exportkit.commands.inspect import compare, report, scan_skips, trace, verify
from exportkit.commands.run import run

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"exportkit {exportkit.__version__}")
        raise typer.Exit


@app.callback(
    epilog="Exit codes: 0 success, 1 not proven, 2 invalid usage. Start with: exportkit demo. "
    "Each command has an example: exportkit COMMAND --help"
)
def _common(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Record the calls of a PyTorch model, export it to ONNX, and prove the result in onnxruntime."""


app.command(epilog="Example:  exportkit demo --out demo_models")(demo)
app.command(epilog="Example:  exportkit export ./checkpoint --out ./checkpoint-onnx")(export)
app.command(
    epilog="Example:  exportkit run script.py --steps 4 --observe pipe --out out",
    context_settings={"ignore_unknown_options": True},  # those of the script
)(run)
app.command(epilog="Example:  exportkit verify ./folder")(verify)
app.command(epilog="Example:  exportkit report ./folder")(report)
app.command(epilog="Example:  exportkit trace ./checkpoint --out trace --values all")(trace)
app.command(epilog="Example:  exportkit compare trace_a trace_b --html difference.html")(compare)
app.command("scan-skips", epilog="Example:  exportkit scan-skips ./transformers --output_dir scan")(scan_skips)
