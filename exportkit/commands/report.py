"""``exportkit report``: one HTML page of what a folder holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import typer

from exportkit.commands.shared import BAD_INPUT, AsJson, Debug, exit_on_error, print_json
from exportkit.errors import DestinationError
from exportkit.folder.folder import MANIFEST, PAGE
from exportkit.module_traces.files import INDEX
from exportkit.report import write_page
from exportkit.report.export import export_page
from exportkit.report.trace import trace_page
from exportkit.skips.page import folder_page
from exportkit.skips.result import ALL_TESTS_FILE

# The file that tells what a folder holds, and what makes the page of such a folder.
_PAGES: Mapping[str, Callable[[Path], str]] = {MANIFEST: export_page, INDEX: trace_page, ALL_TESTS_FILE: folder_page}


def report(
    folder: Annotated[
        Path, typer.Argument(help="Folder of exportkit export, exported.save, trace or scan-skips.", metavar="DIR")
    ],
    out: Annotated[
        Path | None, typer.Option(help="The page; DIR/report.html if not given.", metavar="FILE", show_default=False)
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Write one HTML page of an exported folder, a trace or a skip scan.

    The page needs no other file and no network. Nothing is run or proven anew: it shows what the folder says.

    Exits with 0, or 2 for wrong use.
    """
    with exit_on_error(BAD_INPUT, debug):
        page = write_page(folder / PAGE if out is None else out, _page_of(folder))
    if as_json:
        print_json({"page": str(page)})
    else:
        typer.echo(page)


def _page_of(folder: Path) -> str:
    for name, page in _PAGES.items():
        if (folder / name).is_file():
            return page(folder)
    raise DestinationError(
        "There is nothing here that a page can be made of.",
        where=str(folder),
        expected=f"a folder with {' or '.join(_PAGES)}",
        got=_listing(folder),
        hint="exportkit export, exported.save(folder), exportkit trace and exportkit scan-skips write such folders.",
    )


def _listing(folder: Path) -> str:
    if not folder.is_dir():
        return "a file" if folder.exists() else "nothing"
    names = sorted(item.name for item in folder.iterdir())
    return ", ".join(names[:5] + ["..."] * (len(names) > 5)) or "an empty folder"
