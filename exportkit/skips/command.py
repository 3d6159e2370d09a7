"""Takes the options of ``exportkit scan-skips``, scans a suite, and prints what came of it.

The result goes to stdout and to files, progress and errors to stderr; the exit code is 0, or 2 for bad input.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from exportkit.commands.shared import BAD_INPUT, AsJson, exit_on_error, print_json, stderr, stdout
from exportkit.errors import InvalidRequestError
from exportkit.skips.layout import LAYOUTS, Layout, layout_of
from exportkit.skips.result import SkipScan
from exportkit.skips.scan import scan_skipped_tests
from exportkit.skips.table import table


def scan_skips(
    root: Annotated[Path, typer.Argument(help="Root of the suite, where its imports start.", metavar="ROOT")] = Path(
        "."
    ),
    *,
    output_dir: Annotated[Path, typer.Option("--output_dir", "--output-dir", help="Folder for the files.")] = Path("."),
    test: Annotated[
        str | None, typer.Option("--test_method_name", "--test-method-name", metavar="NAME", help="Only this test.")
    ] = None,
    layout: Annotated[
        str | None, typer.Option(help="transformers or pytest; told by the files.", show_default=False)
    ] = None,
    folder: Annotated[str | None, typer.Option(help="Where the test files are, below ROOT.")] = None,
    pattern: Annotated[list[str] | None, typer.Option(help="Names of test files; repeatable.")] = None,
    base: Annotated[
        list[str] | None, typer.Option(metavar="FILE=ORIGIN", help="Base file and its origin; repeatable.")
    ] = None,
    group: Annotated[str | None, typer.Option(help="file or folder: what counts as a model.")] = None,
    mark: Annotated[
        list[str] | None, typer.Option(metavar="NAME=REASON", help="Decorator that skips; repeatable.")
    ] = None,
    truth: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Output of pytest -v -rs, or JUnit XML; repeatable.")
    ] = None,
    html: Annotated[bool, typer.Option("--html", help="Write skip_scan.html as well.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say which tests of a suite are skipped, and why.

    Nothing is run: it reads the source of any pytest or unittest suite with shared base classes, by default that of
    transformers. Writes all_tests_scan_result.json, or scan_NAME.json for one test.

    Exits with 0, or 2 for wrong use.
    """
    with exit_on_error(BAD_INPUT):
        chosen = _layout(root, layout, folder, pattern, base, group)
        with _progress() as progress:
            scan = scan_skipped_tests(root, chosen, marks=_marks(mark), truth=truth or (), progress=progress)
        paths = scan.save(output_dir, test, html)
    if as_json:
        print_json(_content(scan, test))
        return
    if test is None:
        stdout.print(table(scan))
    else:
        typer.echo(str(scan.row(test)))
    typer.echo(f"written: {', '.join(map(str, paths))}")


def _content(scan: SkipScan, test: str | None) -> Mapping[str, Any]:
    return scan.to_json() if test is None else scan.row(test).to_json()


def _layout(
    root: Path,
    name: str | None,
    folder: str | None,
    patterns: list[str] | None,
    bases: list[str] | None,
    group: str | None,
) -> Layout | str | None:
    changes: dict[str, Any] = {"folder": folder, "patterns": tuple(patterns or ()), "group": group}
    changes["bases"] = dict(_pair(base, "FILE=ORIGIN") for base in bases or ())
    changes = {key: value for key, value in changes.items() if value}
    if not changes or (name is not None and name not in LAYOUTS):
        return name
    return replace(LAYOUTS[name] if name is not None else layout_of(root), **changes)


def _marks(marks: list[str] | None) -> dict[str, str | None]:
    """The marks of the options: with a reason they skip, with an empty one never, without one under a condition."""
    return {mark.partition("=")[0]: mark.partition("=")[2] if "=" in mark else None for mark in marks or ()}


def _pair(text: str, form: str) -> tuple[str, str]:
    first, separator, second = text.partition("=")
    if not (first and separator and second):
        raise InvalidRequestError("The option has another form.", expected=form, got=text)
    return first, second


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
