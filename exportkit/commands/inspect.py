"""The commands that check and show: ``exportkit verify``, ``report``, ``trace``, ``compare`` and ``scan-skips``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from exportkit.commands.shared import (
    BAD_INPUT,
    NOT_PROVEN,
    AsJson,
    Debug,
    ModelDir,
    exit_on_error,
    print_json,
    progress,
    quiet_libraries,
    stderr,
    stdout,
)
from exportkit.errors import DestinationError, InvalidRequestError
from exportkit.skipscan import LAYOUTS, Layout, scan_skipped_tests
from exportkit.skipscan.layout import layout_of


def verify(
    folder: Annotated[Path, typer.Argument(help="Folder that exported.save(folder) wrote.", metavar="DIR")],
    *,
    as_json: AsJson = False,
    locate: Annotated[bool, typer.Option("--locate", help="Name the module where a difference begins.")] = False,
    model_dir: Annotated[
        Path | None, typer.Option("--model", help="The checkpoint of the model; --locate runs it.", metavar="MODEL_DIR")
    ] = None,
    runtime: Annotated[
        Literal["onnxruntime", "openvino"], typer.Option(help="Runtime that runs the calls.")
    ] = "onnxruntime",
    device: Annotated[str, typer.Option(help="Device on which onnxruntime runs, such as cuda.")] = "cpu",
    debug: Debug = False,
) -> None:
    """Prove an exported folder again, without the model.

    The recorded calls and the calls at unseen sizes run in onnxruntime, or in OpenVINO, and their results are compared
    with what the model returned when the folder was saved. The files must be unchanged since then.

    Exits with 0 if the result is proven, 1 if it is not, 2 for invalid usage, such as a missing or changed file.
    """
    import exportkit
    from exportkit.examples.checkpoint import load_checkpoint
    from exportkit.running.placement import require_onnxruntime

    with quiet_libraries(), exit_on_error(BAD_INPUT, debug):
        if runtime == "openvino" and device != "cpu":
            raise InvalidRequestError("OpenVINO only runs on the CPU.", where="--device", expected="cpu", got=device)
        if runtime == "onnxruntime":
            require_onnxruntime()
        elif locate:
            raise InvalidRequestError(
                "Differences can only be located in onnxruntime.",
                where="--locate",
                expected="--runtime onnxruntime",
                got=f"--runtime {runtime}",
            )
        with progress(f"verifying {folder}"):
            onnx_model = exportkit.load(folder)
            report = (onnx_model if runtime == "openvino" else onnx_model.to(device)).verify(runtime=runtime)
        located = None
        if locate and not report.ok:
            with progress("locating the difference"):
                located = report.locate(load_checkpoint(model_dir).model if model_dir is not None else None)
    if located is not None:
        typer.echo(f"{located}\n", err=as_json)
    typer.echo(report.to_json() if as_json else report)
    raise typer.Exit(0 if report.ok else NOT_PROVEN)


def report(
    folder: Annotated[
        Path,
        typer.Argument(
            help="Folder written by exportkit export, trace or scan-skips, or by exported.save.", metavar="DIR"
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="The page; DIR/report.html by default.", metavar="FILE", show_default=False),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Write an HTML page about an export, a trace or a skip scan.

    The page needs no other files and no network. No model runs and nothing is proven again: the page shows what the
    folder contains.

    Exits with 0, or with 2 for invalid usage.
    """
    from exportkit.files import write_text
    from exportkit.folder.folder import PAGE

    with exit_on_error(BAD_INPUT, debug):
        page = write_text(folder / PAGE if out is None else out, _page_of(folder), "The page")
    if as_json:
        print_json({"page": str(page)})
    else:
        typer.echo(page)


def _page_of(folder: Path) -> str:
    """The page of a folder; each kind of folder has a file by which it is recognised."""
    from exportkit.files import listing
    from exportkit.folder.folder import MANIFEST
    from exportkit.module_traces.files import INDEX
    from exportkit.report.export import export_page
    from exportkit.report.traces import trace_page
    from exportkit.skipscan.result import ALL_TESTS_FILE, read_scan

    pages: Mapping[str, Callable[[Path], str]] = {
        MANIFEST: export_page,
        INDEX: trace_page,
        ALL_TESTS_FILE: lambda folder: read_scan(folder / ALL_TESTS_FILE).to_html(),
    }
    for name, page in pages.items():
        if (folder / name).is_file():
            return page(folder)
    raise DestinationError(
        "The folder contains nothing to report on.",
        where=str(folder),
        expected=f"a folder with {' or '.join(pages)}",
        got=listing(folder),
        hint="exportkit export, exported.save(folder), exportkit trace and exportkit scan-skips write such folders.",
    )


def trace(
    model_dir: ModelDir,
    out: Annotated[Path, typer.Option(help="Folder for the trace; an existing trace is replaced.", metavar="DIR")],
    values: Annotated[
        list[str] | None,
        typer.Option(help="Modules whose values to store: all, ends, or a path with *; repeatable.", metavar="PATHS"),
    ] = None,
    every: Annotated[int, typer.Option(min=1, help="Store the values of every N-th call of a module.")] = 1,
    dtype: Annotated[str, typer.Option(help="Dtype to run in, such as bfloat16.")] = "float32",
) -> None:
    """Record every module call of a local transformers checkpoint.

    The model runs in the way that is usual for its task. Statistics and a hash of each tensor are stored, and on
    request its values. Compare two such folders with `exportkit compare`. Without a tokenizer the tokens are random,
    and the same in every run.
    """
    import torch

    from exportkit.examples.checkpoint import load_checkpoint
    from exportkit.module_traces.trace import trace_model

    with quiet_libraries(), exit_on_error(BAD_INPUT):
        chosen = getattr(torch, dtype, None)
        if not isinstance(chosen, torch.dtype) or not chosen.is_floating_point:
            raise InvalidRequestError("A model cannot run in this dtype.", expected="float32 or bfloat16", got=dtype)
        torch.manual_seed(0)
        example = load_checkpoint(model_dir)
        example.model.to(chosen)
        wanted = (values[0] if len(values) == 1 else values) if values else None
        with torch.no_grad(), trace_model(example.model, out, values=wanted, every=every) as recorded:
            example.run()
    typer.echo(f"{example.name}, {example.description}: {len(recorded.calls)} module calls in {out}")
    if not recorded.complete:
        typer.echo(f"incomplete: {'; '.join(recorded.problems)}")


def compare(
    first: Annotated[Path, typer.Argument(help="Folder of the reference trace.", metavar="A")],
    second: Annotated[Path, typer.Argument(help="Folder of the other trace.", metavar="B")],
    names: Annotated[
        list[str] | None,
        typer.Option(
            help="Regular expression for a part of a path in B, and its replacement in A; repeatable.",
            metavar="RE=TEXT",
        ),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with a plot to this file.", metavar="FILE")] = None,
    as_json: AsJson = False,
) -> None:
    """Name the module where two traces begin to differ.

    A table shows how much each module adds to the error. Traces are written by `exportkit trace` and
    `exportkit.trace_model`. Rounding does not count as a difference; dtypes, devices and code may differ.

    Exits with 0 if nothing differs, 1 if something does, 2 for invalid usage.
    """
    from exportkit.files import write_text
    from exportkit.module_traces.trace import Trace
    from exportkit.report.traces import comparison_page

    with quiet_libraries(), exit_on_error(BAD_INPUT):
        for name in names or ():
            if "=" not in name:
                raise InvalidRequestError("Malformed option --names.", expected="RE=TEXT", got=name)
        pairs = {name.partition("=")[0]: name.partition("=")[2] for name in names or ()}
        found = Trace.load(first).compare(Trace.load(second), pairs)
        if html is not None:
            write_text(html, comparison_page(found, f"{first} and {second}"), "The page")
    if as_json:
        typer.echo(found.as_json())
    else:
        stdout.print(found)
        if html is not None:
            typer.echo(f"written: {html}")
    raise typer.Exit(0 if found.ok else NOT_PROVEN)


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
    group: Annotated[str | None, typer.Option(help="How to group tests: file or folder.")] = None,
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
