"""Explains failed exports: finds the root cause of an exception of torch and the line of the model it comes from."""

from __future__ import annotations

import contextlib
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from exportkit._torch_compat.pytree import tree_leaves
from exportkit._torch_compat.symbolic_shapes import source_names
from exportkit._torch_compat.traced_values import is_data_dependent
from exportkit._torch_compat.tracing import watched_symbols
from exportkit.calls.call import Call
from exportkit.errors import ExportError, ExportkitError, described
from exportkit.plan.plan import Plan
from exportkit.programs.loop_failures import why_unrolled
from exportkit.programs.repro import TraceRequest
from exportkit.programs.traced_method import FlatSignature
from exportkit.rewrites.model_code import ModelLine, is_model_code, line_of_frames, line_of_node
from exportkit.trees import flatten, join, registered_caches

_DETAILS = "exportkit-details-"
_TRACE = "torch.export could not trace the model"
_TRANSLATION = "The program could not be translated to ONNX"
_FIXED = re.compile(
    r"You marked (?P<tensor>L\[.*?)\.size\(\)\[(?P<axis>\d+)\] as dynamic but your code "
    r"specialized it to be a constant \((?P<size>\d+)\)"
)
_UNBACKED = re.compile(r"\bz?u[f]?\d+\b")
_GRAPH_LINE = re.compile(r"# File: (?P<file>.+?):(?P<line>\d+) in ")
_ACCEPT = " Or accept it: "  # begins the last part of a hint
_LONGEST_GOT = 300


@dataclass(frozen=True)
class Cause:
    """Why an export failed.

    Attributes:
        what: One sentence.
        place: Line of the model, if it is known.
        expected: What would have been right.
        got: What came instead.
        hint: What to do about it.
    """

    what: str
    place: ModelLine | None = None
    expected: str | None = None
    got: str | None = None
    hint: str | None = None


@dataclass(frozen=True)
class _Fixed:
    """An axis that became static: its leaf, its place among such events, and the line of the model."""

    path: str
    axis: int
    size: int
    order: int
    place: ModelLine | None


def fixed_axes(error: BaseException | None) -> frozenset[tuple[str, str]]:
    """Returns the axes that torch says a trace has fixed, each with the name that torch has for its tensor."""
    return frozenset([(found["tensor"], found["axis"]) for found in _FIXED.finditer(str(error))])


def failure(error: Exception, request: TraceRequest) -> ExportError:
    """Returns the error for an exception that torch raised while tracing, without looking for its root cause.

    Args:
        error: The exception.
        request: What torch was asked to do.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    failed = ExportError(
        f"{_TRACE}.",
        where=f"variables {', '.join(request.plan.names) or 'none'}",
        got=f"{type(error).__name__}: {' '.join(lines[:3])[:500]}",
        hint="the full message of torch is the cause of this exception (__cause__).",
    )
    failed.request = request
    return failed


@contextlib.contextmanager
def explained(request: Callable[[], TraceRequest] | None = None) -> Iterator[None]:
    """Adds the root cause and a file with torch's full message to export errors of a block or decorated function.

    Only errors that reach the user are looked into, so exports that succeed pay nothing: finding the cause may trace
    the model a second time, to see which line of it fixed the size of an axis.

    Args:
        request: Returns what torch was asked to do, for errors that do not say so.
    """
    try:
        yield
    except ExportError as error:
        cause = error.__cause__
        if error.request is None and request is not None:
            error.request = request()
        if error.request is None or cause is None or error.details:
            raise
        details = "".join(traceback.format_exception(cause))
        found = _root_cause(cause, error.request) or Cause(str(error).partition("\n")[0], got=str(cause)[:500])
        found = _with_loop(found, error.loops)
        file = _written(details)
        better = ExportError(
            found.what,
            where=str(found.place or "outside of the model's code"),
            expected=found.expected,
            got=found.got,
            hint="\n        ".join(text for text in (found.hint, file and f"full message of torch: {file}") if text),
        )
        better.request, better.details = error.request, details
        raise better from cause


def _with_loop(cause: Cause, error: BaseException | None) -> Cause:
    """The cause with the reason why a loop was unrolled, if it is at the line of one."""
    if cause.place is None or (loop := why_unrolled(cause.place.file, cause.place.line, error)) is None:
        return cause
    _, accept, how = (cause.hint or "").partition(_ACCEPT)
    return replace(cause, got=f"{cause.got};\n       {loop.text}", hint=f"{loop.hint}{accept}{how}")


def in_one_line(error: ExportkitError) -> str:
    """Returns an error in one line; for a failed export, its root cause and where that is."""
    cause, request = error.__cause__, getattr(error, "request", None)
    found = _root_cause(cause, request) if cause is not None and request is not None else None
    if found is None:
        what, *lines = str(error).splitlines()
        got = next((line.removeprefix("  got: ") for line in lines if line.startswith("  got: ")), "")
        return f"{what} {got}".strip()[:300]
    place = str(found.place or "").partition("\n")[0]
    return f"{found.what} ({place})" if place else found.what


def _root_cause(error: BaseException, request: TraceRequest) -> Cause | None:
    """The cause; None if looking for it fails, because that must never hide the error itself."""
    with contextlib.suppress(Exception):
        if request.onnx:
            return _cause_of_translation(error)
        if is_data_dependent(error):
            return _data_dependent(error, request.model)
        if violations := list(_FIXED.finditer(str(error))):
            return _fixed_axis(violations, request)
        return _raised(error, request.model)
    return None


def _written(details: str) -> Path | None:
    """A temporary file with the details; None if it cannot be written."""
    with contextlib.suppress(OSError):
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", prefix=_DETAILS, suffix=".txt", delete=False) as file:
            file.write(details)
        return Path(file.name)
    return None


def _cause_of_translation(error: BaseException) -> Cause:
    """Why torch.onnx.export failed: the operator, and the line of the model that uses it."""
    node = next(reversed(list(_nodes_in(error))), None)
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    got = described(root, _LONGEST_GOT)
    if node is None or "No ONNX function found" not in got:
        return Cause(f"{_TRANSLATION}.", None if node is None else line_of_node(node), None, got, None)
    used = node.meta.get("original_aten", node.target)
    operator = str(node.target) if str(used) == str(node.target) else f"{node.target} (from {used})"
    return Cause(
        f"{_TRANSLATION}: there is no translation for an operator of the model.",
        line_of_node(node),
        None,
        operator,
        "write this line with operators that ONNX has, or observe and export the parts before and after it.",
    )


def _data_dependent(error: BaseException, model: torch.nn.Module) -> Cause:
    place = line_of_frames(traceback.walk_tb(error.__traceback__), model)
    condition = str(getattr(error, "cond", "")) or str(error).partition("\n")[0][:_LONGEST_GOT]
    unknown = set(_UNBACKED.findall(condition))
    origin = _origin(getattr(error, "partial_fx_graph", ""), unknown)
    code = "" if place is None else place.code
    got = f"whether {condition} is not known before the model runs (data-dependent)"
    names = ", ".join(sorted(unknown))
    if origin is not None and place is not None and (origin.file, origin.line) != (place.file, place.line):
        got += f";\n       {names} comes from {origin.file}:{origin.line}\n         {origin.code}"
    return Cause(f"{_TRACE}: it branches on the values of a tensor.", place, None, got, _hint_for_values(code, origin))


def _hint_for_values(code: str, origin: ModelLine | None) -> str:
    if re.search(r"\.item\(|\.tolist\(", f"{code} {origin.code if origin else ''}"):
        return "keep the tensor instead of .item() or .tolist(); decide with torch.where, or with torch.cond."
    if code.startswith("assert"):
        return "leave the check out while torch.compiler.is_exporting()."
    return "compute both sides and choose with torch.where(condition, a, b), or use torch.cond."


def _origin(graph: str, unknown: set[str]) -> ModelLine | None:
    """Line of the model that made an unknown value, according to the comments in torch's partial graph, or None."""
    place = None
    for line in graph.splitlines():
        if match := _GRAPH_LINE.search(line):
            place = ModelLine(match["file"], int(match["line"])) if is_model_code(match["file"]) else None
        elif unknown & set(_UNBACKED.findall(line.partition("=")[0])):
            return place
    return None


def _fixed_axis(violations: list[re.Match[str]], request: TraceRequest) -> Cause:
    plan, places = request.plan, _Specializations(request.model)
    with registered_caches():
        paths = _paths_by_source(request.call)
    with watched_symbols(places.seen), contextlib.suppress(ExportError):
        if request.trace is not None:
            request.trace()
    found = [places.fixed(paths[v["tensor"]], v["tensor"], int(v["axis"]), int(v["size"])) for v in violations]
    first = min(found, key=lambda item: item.order)
    size = plan.by_path[first.path].sizes[first.axis]
    seen = sorted({shape[first.axis] for shape in plan.by_path[first.path].shapes if shape is not None})
    axis = f"axis {first.axis} of {first.path}"
    more = f"; {len(found) - 1} more axes as well" if len(found) > 1 else ""
    return Cause(
        f"{_TRACE}: {axis} ({size}) became static.",
        first.place,
        f"any size; recorded: {', '.join(map(str, seen))}",
        f"only {first.size}, which is the size it was traced with{more}",
        _hint_for_size("" if first.place is None else first.place.code, str(size), plan),
    )


def _hint_for_size(code: str, variable: str, plan: Plan) -> str:
    if re.search(r"\b(list|tuple|enumerate|zip)\(|\.unbind\(|\.tolist\(", code):
        hint = "unpacking a tensor fixes its size: use operations on the whole tensor, such as cat, flatten, repeat."
    elif re.match(r"(for|while)\b", code) or re.search(r"\bfor\b.*\bin\b", code):
        hint = "a Python loop is traced once for each element: use operations on the whole tensor, or torch.scan."
    elif re.search(r"\.(view|reshape|expand|unflatten)\(", code):
        hint = "write -1, or a size read from a tensor, in place of a constant."
    elif "int(" in code:
        hint = "int() turns a size into a number: use x.shape[i] as it is."
    else:
        hint = "this line needs the size as a number: read it from a tensor (x.shape[i]) and compute with that."
    known = [v for v in plan.variables if v.name == variable]
    if known and len({size for size in known[0].seen if size is not None}) == 1:
        hint += f'{_ACCEPT}export(model, observer.plan().static("{variable}")).'
    return hint


def _raised(error: BaseException, model: torch.nn.Module) -> Cause:
    place = line_of_frames(traceback.walk_tb(error.__traceback__), model)
    lines = " ".join(line.strip() for line in str(error).splitlines()[:3] if line.strip())
    hint = "this works in eager mode; in a trace, tensors have no values and sizes are symbols: change this line."
    if ".numpy()" in str(error) or (place is not None and ".numpy()" in place.code):
        hint = "this use of NumPy cannot be traced: use torch's operations on tensors instead."
    elif "fake" in str(error).lower() and "impl" in str(error).lower():
        hint = "the operator does not declare the shape of its result: register it with torch.library.register_fake."
    return Cause(
        f"{_TRACE}: the trace raised {type(error).__name__}.",
        place,
        None,
        f"{type(error).__name__}: {lines}"[:_LONGEST_GOT],
        hint,
    )


def _paths_by_source(call: Call) -> dict[str, str]:
    """Path of a leaf by what torch calls it, ``L['data']['x']``."""
    flat = FlatSignature.of(call)
    values = {name: parameter.tree.build() for name, parameter in flat.parameters.items()}
    paths = {
        id(tensor): join(flat.parameters[name].path, path)
        for name, value in values.items()
        for path, tensor in flatten(value).tensors().items()
    }
    leaves = [leaf for value in values.values() for leaf in tree_leaves(value)]
    named: Mapping[str, Any] = dict(zip(source_names(values), leaves, strict=True))
    return {source: paths[id(leaf)] for source, leaf in named.items() if isinstance(leaf, torch.Tensor)}


class _Specializations:
    """Records during a trace on which line of the model each axis became static."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._symbols: dict[str, str] = {}
        self._replaced: dict[str, tuple[int, str, ModelLine | None]] = {}

    def seen(self, message: str, arguments: tuple[Any, ...]) -> None:
        """Takes a log message of torch while the stack still shows what caused it."""
        if message.startswith("create_symbol "):
            self._symbols[str(arguments[2])] = str(arguments[0])
        elif message.startswith("set_replacement ") and str(arguments[0]) not in self._replaced:
            place = line_of_frames([*traceback.walk_stack(sys._getframe())][::-1], self._model)
            self._replaced[str(arguments[0])] = (len(self._replaced), str(arguments[1]), place)

    def fixed(self, path: str, source: str, axis: int, size: int) -> _Fixed:
        """Returns where an axis became static; a symbol may be replaced by others before it becomes a number."""
        symbol = self._symbols.get(f"{source}.size()[{axis}]", "")
        order, place = sys.maxsize, None
        while symbol in self._replaced:
            order, symbol, place = self._replaced[symbol]
        return _Fixed(path, axis, size, order, place)


def _nodes_in(error: BaseException) -> Iterator[torch.fx.Node]:
    """Yields the graph nodes that were being worked on as an exception and its causes were raised, innermost last."""
    current: BaseException | None = error
    while current is not None:
        for frame, _ in traceback.walk_tb(current.__traceback__):
            node = frame.f_locals.get("node")
            if isinstance(node, torch.fx.Node):
                yield node
        current = current.__cause__ or current.__context__
