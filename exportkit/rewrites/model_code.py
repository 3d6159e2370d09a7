"""What the code of a model is, and what its lines do: checks, branches that change no value, errors that are caught.

Also finds the line that an error, or a node of a traced graph, comes from.
"""

from __future__ import annotations

import ast
import builtins
import functools
import linecache
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

Place = tuple[str, int, int]  # file, line, and the number of the instruction in it
Line = tuple[str, int]  # file and line
TORCH, EXPORTKIT = Path(torch.__file__).parent, Path(__file__).parents[1]
_PYTHON = Path(sysconfig.get_paths()["stdlib"])
# Code without a file: a prompt, a notebook, a doctest. Other names of this form belong to Python and torch.
_TYPED = ("<stdin>", "<ipython-input", "<python-input", "<doctest ")
_LOGGING = re.compile(
    r"print|warn|(\w+\.)*(_*log(ger|ging)?(\.getLogger\(.*\))?|warnings)"
    r"\.(debug|info|warn|error|exception|critical|log)\w*",
    re.IGNORECASE,
)
# Functions and methods that do nothing but return a value.
_HARMLESS = frozenset({
    "abs", "all", "any", "bool", "cpu", "detach", "dict", "dim", "float", "format", "get", "int", "item", "join", "len",
    "list", "max", "mean", "min", "numel", "repr", "round", "size", "sorted", "str", "sum", "tolist", "tuple", "type",
})  # fmt: skip


def line_text(place: Place) -> str:
    """Returns the file and the line of a place as text."""
    return f"{place[0]}:{place[1]}"


def is_model_code(file: str) -> bool:
    """Returns whether a file can hold the code of a model: it belongs neither to torch, exportkit nor Python."""
    if file.startswith("<"):
        return file.startswith(_TYPED)
    path = Path(file)
    if not file or path.parts[:1] == ("torch",) or any(path.is_relative_to(each) for each in (TORCH, EXPORTKIT)):
        return False
    return not path.is_relative_to(_PYTHON) or "site-packages" in file or "dist-packages" in file


def is_check(place: Place) -> bool:
    """Returns whether a place belongs to the condition of a check: a line one side of which does nothing but raise."""
    file, line, _ = place
    return any(line in _lines_of(check.statement.test) for check in _source(file).checks)


def is_idle(line: Line) -> bool:
    """Returns whether a line is the condition of a statement that changes no value: it writes to a log, for example."""
    return any(line[1] in _lines_of(statement.test) for statement in _source(line[0]).idle)


def is_fitting(line: Line) -> bool:
    """Returns whether a line is the condition under which tensors are cut or padded to sizes that they may have."""
    return any(line[1] in _lines_of(statement.test) for statement in _source(line[0]).fitting)


def value_to_pass(frame: FrameType | None) -> bool | None:
    """Returns what the condition that a frame tests has to be for a check to pass.

    None if the frame is not at a check, or if the error may be caught.
    """
    if frame is None or not is_model_code(frame.f_code.co_filename):
        return None
    code = frame.f_code
    first, last, start, end = list(code.co_positions())[frame.f_lasti // 2]
    for check in _source(code.co_filename).checks:
        conditions = list(_conditions(check.statement.test, check.passing))
        found = {_place_of(condition): passing for condition, passing in conditions}
        others = [passing for condition, passing in conditions if not isinstance(condition, ast.Compare)]
        if len(others) == 1:  # before Python 3.12, these have the place of the statement
            found[_place_of(check.statement)] = others[0]
        if (first, start, last, end) in found:
            return None if may_be_caught(frame) else found[first, start, last, end]
    return None


def _place_of(node: ast.expr | ast.stmt) -> tuple[int | None, ...]:
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


def _conditions(test: ast.expr, passing: bool | None) -> Iterator[tuple[ast.expr, bool | None]]:
    """The conditions in a test, each with what it has to be for the test to be ``passing``; None if it may be either.

    For ``a and b`` to be false, ``b`` has to be false where it is reached; ``a`` may be either.
    """
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _conditions(test.operand, None if passing is None else not passing)
    elif isinstance(test, ast.BoolOp):
        are_all = passing is not None and isinstance(test.op, ast.And) == passing
        for value in test.values:
            yield from _conditions(value, passing if are_all or value is test.values[-1] else None)
    else:
        is_chain = isinstance(test, ast.Compare) and len(test.ops) > 1  # a < b < c is like a < b and b < c
        yield test, None if is_chain and not passing else passing


def may_be_caught(frame: FrameType | None) -> bool:
    """Returns whether an error that is raised in a frame may be caught before it leaves the model."""
    while frame is not None:
        file = frame.f_code.co_filename
        if Path(file).is_relative_to(TORCH / "export"):  # which called the model
            return False
        if is_model_code(file) and any(frame.f_lineno in lines for lines in _source(file).catching):
            return True
        frame = frame.f_back
    return False


class _Check(NamedTuple):
    """A statement one side of which does nothing but raise, and what its test has to be for the other side."""

    statement: ast.Assert | ast.If
    passing: bool


class _Source(NamedTuple):
    """What a file says: its checks, the lines in which errors are caught, and conditions that may change no value."""

    checks: tuple[_Check, ...]
    catching: tuple[range, ...]
    idle: tuple[ast.If, ...]
    fitting: tuple[ast.If, ...]


def parsed(file: str) -> ast.Module:
    """Returns the syntax tree of a source file, which is empty if the file is missing or is not Python."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ast.Module([], [])


@functools.lru_cache(maxsize=64)
def _source(file: str) -> _Source:
    checks, catching, idle, fitting = list[_Check](), list[range](), list[ast.If](), list[ast.If]()
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Assert) or (isinstance(node, ast.If) and only_raises(node.orelse)):
            checks.append(_Check(node, True))
        elif isinstance(node, ast.If) and only_raises(node.body):
            checks.append(_Check(node, False))
        elif isinstance(node, ast.If) and all(map(_changes_no_value, [*node.body, *node.orelse])):
            keeps_result = any(isinstance(part, ast.NamedExpr) for part in ast.walk(node.test))
            idle += [] if keeps_result else [node]
        elif isinstance(node, ast.If) and not node.orelse and all(map(_fits_tensor, node.body)):
            fitting.append(node)
        elif isinstance(node, ast.Try) and node.handlers:
            catching += map(_lines_of, node.body)
        elif isinstance(node, ast.With) and any("suppress" in ast.dump(item.context_expr) for item in node.items):
            catching.append(_lines_of(node))
    return _Source(tuple(checks), tuple(catching), tuple(idle), tuple(fitting))


def _lines_of(node: ast.expr | ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def only_raises(statements: Sequence[ast.stmt]) -> bool:
    """Returns whether statements do nothing but raise an error."""
    simple = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr)
    is_raised = bool(statements) and isinstance(statements[-1], ast.Raise)
    return is_raised and all(isinstance(statement, simple) for statement in statements[:-1])


def _changes_no_value(statement: ast.stmt) -> bool:
    match statement:
        case ast.Pass():
            return True
        case ast.Expr(ast.Call(function, arguments, keywords)):
            parts = [part for given in (*arguments, *keywords) for part in ast.walk(given)]
            return _LOGGING.fullmatch(ast.unparse(function)) is not None and not any(map(_may_act, parts))
        case ast.Assign([ast.Name(name)], ast.Call(ast.Attribute(ast.Name(held), "contiguous"), [], [])):
            return name == held
    return False


def _may_act(part: ast.AST) -> bool:
    """Whether a part of an expression may do more than return a value."""
    match part:
        case ast.Call(ast.Name(name)) | ast.Call(ast.Attribute(_, name)):
            return name not in _HARMLESS
    return isinstance(part, ast.Call | ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom)


def _fits_tensor(statement: ast.stmt) -> bool:
    """Whether a statement cuts or pads a tensor, as ``x = x[..., :size]`` and ``x = F.pad(x, (0, size))`` do."""
    match statement:
        case ast.Assign([target], value):
            while isinstance(value, ast.Call) and ast.unparse(value.func).endswith(".contiguous"):
                value = value.func.value  # type: ignore[attr-defined]
            match value:
                case ast.Subscript(tensor, index):
                    parts = index.elts if isinstance(index, ast.Tuple) else [index]
                    return ast.unparse(tensor) == ast.unparse(target) and all(map(_is_start, parts))
                case ast.Call(function, [tensor, *_]):
                    is_pad = ast.unparse(function).rpartition(".")[2] == "pad"
                    return is_pad and ast.unparse(tensor) == ast.unparse(target)
    return False


def _is_start(part: ast.expr) -> bool:
    """Whether a part of an index takes an axis from its start on."""
    match part:
        case ast.Slice(lower=None | ast.Constant(0), step=None) | ast.Constant(builtins.Ellipsis):
            return True
    return False


# Lines where an error, or a node of a traced graph, comes from
#
# The line is the innermost one that belongs neither to torch, nor to exportkit, nor to Python itself. The submodule is
# the one whose method was running there.


_STACK_LINE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
_LONGEST_LINE = 120  # longer lines of code are cut


@dataclass(frozen=True)
class ModelLine:
    """A line of the model's code.

    Attributes:
        file: Its file.
        line: Its number.
        module: Path of the submodule that was running, such as ``layers.1``; empty for the model itself.
        cls: Class of that submodule; empty if unknown.
    """

    file: str
    line: int
    module: str = ""
    cls: str = ""

    @property
    def code(self) -> str:
        """The line itself."""
        return linecache.getline(self.file, self.line).strip()[:_LONGEST_LINE]

    @property
    def owner(self) -> str:
        """The submodule, in words."""
        return f"{self.module or 'the model itself'} ({self.cls})" if self.cls else ""

    def __str__(self) -> str:
        where = ", ".join(part for part in (self.owner, f"{self.file}:{self.line}") if part)
        return f"{where}\n         {self.code}" if self.code else where


def line_of_frames(frames: Iterable[tuple[FrameType, int]], model: torch.nn.Module) -> ModelLine | None:
    """Returns the innermost line of the model among stack frames, or None.

    Args:
        frames: Frames with the line that each is at, outermost first.
        model: The model.
    """
    names = {id(module): name for name, module in model.named_modules()}
    owner: torch.nn.Module | None = None
    found: ModelLine | None = None
    inside_torch: ModelLine | None = None
    for frame, line in frames:
        owner_here = frame.f_locals.get("self")
        if isinstance(owner_here, torch.nn.Module) and id(owner_here) in names:
            owner = owner_here
        if owner is None:
            continue
        place = ModelLine(frame.f_code.co_filename, line, names[id(owner)], type(owner).__name__)
        if is_model_code(place.file):
            found = place
        elif owner_here is owner and frame.f_code.co_name == "forward":  # a module of torch.nn
            inside_torch = place
    return found or inside_torch


def line_of_node(node: torch.fx.Node) -> ModelLine | None:
    """Returns where in the model a node of a traced graph comes from, or None if unknown."""
    lines = _STACK_LINE.findall(node.meta.get("stack_trace") or "")
    own = [(file, int(line)) for file, line in lines if is_model_code(file)]
    if not own:
        return None
    modules = [*(node.meta.get("nn_module_stack") or {}).values()]
    path, cls = modules[-1] if modules else ("", "")
    return ModelLine(*own[-1], path, short_name(cls))


def short_name(cls: Any) -> str:
    """Returns the name of a class, which torch notes as the class or as text with its module."""
    return cls.__name__ if isinstance(cls, type) else str(cls).rpartition(".")[2]
