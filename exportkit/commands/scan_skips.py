"""``exportkit scan-skips``: which tests of a suite are skipped, and why."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from exportkit.commands.shared import BAD_INPUT, AsJson, exit_on_error, print_json, stderr
from exportkit.errors import InvalidRequestError
from exportkit.skipscan import LAYOUTS, Layout, scan_skipped_tests
from exportkit.skipscan.layout import layout_of


def scan_skips(
    root: Annotated[
        Path, typer.Argument(help="Root of the suite, where its absolute imports start.", metavar="ROOT")
    ] = Path("."),
    *,
    output_dir: Annotated[Path, typer.Option("--output_dir", "--output-dir", help="Folder for the files.")] = Path("."),
    test: Annotated[
        str | None, typer.Option("--test_method_name", "--test-method-name", metavar="NAME", help="Only this test.")
    ] = None,
    layout: Annotated[
        str | None, typer.Option(help="transformers or pytest; detected by default.", show_default=False)
    ] = None,
    folder: Annotated[str | None, typer.Option(help="Folder with the test files, below ROOT.")] = None,
    pattern: Annotated[list[str] | None, typer.Option(help="File names of tests; repeatable.")] = None,
    base: Annotated[
        list[str] | None, typer.Option(metavar="FILE=ORIGIN", help="Base file and its origin; repeatable.")
    ] = None,
    group: Annotated[str | None, typer.Option(help="file or folder: what tests are grouped by.")] = None,
    mark: Annotated[
        list[str] | None, typer.Option(metavar="NAME=REASON", help="Decorator that skips; repeatable.")
    ] = None,
    truth: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Output of pytest -v -rs, or JUnit XML; repeatable.")
    ] = None,
    html: Annotated[bool, typer.Option("--html", help="Also write skip_scan.html.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say which tests of a suite are skipped, and why.

    The source files are parsed; nothing runs. Any pytest or unittest suite can be scanned, in particular suites with
    shared base classes such as the tests of transformers. Writes all_tests_scan_result.json, or scan_NAME.json for one
    test.

    Exits with 0, or with 2 for invalid usage.
    """
    with exit_on_error(BAD_INPUT):
        changes: dict[str, Any] = {"folder": folder, "patterns": tuple(pattern or ()), "group": group}
        changes["bases"] = dict(_file_and_origin(text) for text in base or ())
        chosen = _layout(root, layout, {name: value for name, value in changes.items() if value})
        # A mark without "=" skips under a condition, one with an empty reason never skips.
        marks = {text.partition("=")[0]: text.partition("=")[2] if "=" in text else None for text in mark or ()}
        with _progress() as progress:
            scan = scan_skipped_tests(root, chosen, marks=marks, truth=truth or (), progress=progress)
        paths = scan.save(output_dir, test, html)
    if as_json:
        print_json(scan.to_json() if test is None else scan.row(test).to_json())
        return
    typer.echo(str(scan if test is None else scan.row(test)))
    typer.echo(f"written: {', '.join(map(str, paths))}")


def _layout(root: Path, name: str | None, changes: dict[str, Any]) -> Layout | str | None:
    if not changes or (name is not None and name not in LAYOUTS):
        return name
    return replace(LAYOUTS[name] if name is not None else layout_of(root), **changes)


def _file_and_origin(text: str) -> tuple[str, str]:
    file, _, origin = text.partition("=")
    if not (file and origin):
        raise InvalidRequestError("Malformed option --base.", expected="FILE=ORIGIN", got=text)
    return file, origin


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int], None] | None]:
    """Shows a bar on a terminal, and nothing elsewhere."""
    if not stderr.is_terminal:
        yield None
        return
    columns = (TextColumn("scanning"), BarColumn(), MofNCompleteColumn(), TextColumn("files"))
    with Progress(*columns, console=stderr, transient=True) as bar:
        task = bar.add_task("scanning", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
