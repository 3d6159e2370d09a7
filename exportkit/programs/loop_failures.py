"""Explains why a loop of the model was unrolled, which fixes the length that it runs over."""

from __future__ import annotations

import ast
import functools
import traceback
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from exportkit import rewrites
from exportkit._torch_compat.loop_operators import lines_compiled, why_no_operator
from exportkit._torch_compat.traced_values import is_data_dependent
from exportkit.rewrites import loop_runs
from exportkit.rewrites.loop_bodies import Obstacle, appended, obstacle
from exportkit.rewrites.loop_forms import plain_loop, unbounded_loops
from exportkit.rewrites.loop_growth import without_returns
from exportkit.rewrites.loop_syntax import holds
from exportkit.rewrites.model_code import Line, ModelLine, is_model_code, parsed

_REWRITES = Path(rewrites.__file__).parent
_HINTS = {
    "branches on": "compute both sides and choose with torch.where(condition, a, b).",
    "changes the": "create the tensor with its final shape and dtype before the loop.",
    "several slices": "keep all rows and columns, and use a mask in place of the slices.",
    "of a slice": "keep all rows, and use a mask in place of the slice.",
    "a slice may end": "pad the tensor to a multiple of the step before the loop.",
    "attribute": "keep the value in a local variable, and pass it to the method.",
    "the branches of": "let both assign tensors of the same shapes and dtypes, with a mask for what one leaves out.",
    "": "rewrite this line so that every iteration does the same to tensors of the same shapes and dtypes.",
}  # by a part of the reason
_WHOLE = "use operations on the whole tensor, or torch.scan."
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


class Unrolled(NamedTuple):
    """Why a loop was unrolled.

    Attributes:
        text: What its body does, and in which line.
        hint: What to do about it.
    """

    text: str
    hint: str


def why_unrolled(file: str, line: int, error: BaseException | None) -> Unrolled | None:
    """Returns why a loop was unrolled; None if that is not known.

    Args:
        file: The file of the line that fixed a length.
        line: Its number.
        error: What was raised when loops over a length were to become operators.
    """
    reason = _reason_at(file, line)
    if reason is not None:
        return Unrolled(_at(reason.text, file, reason.line), reason.hint)
    found = _raised(error) if error is not None else None
    if found is None:
        return None
    return Unrolled(_at(*found), next(hint for part, hint in _HINTS.items() if part in found[0]))


def deciding_line(error: BaseException | None, known: Collection[Line]) -> Line | None:
    """Returns the line that decides by values, and keeps a loop from becoming an operator; None for other errors.

    Args:
        error: What was raised when loops over a length were to become operators.
        known: Lines that were returned before.
    """
    if error is None:
        return None
    text, _ = why_no_operator(error) or ("", [])
    frames = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    is_by_values = is_data_dependent(error)
    is_in_first_iteration = is_by_values and any(file == loop_runs.__file__ for file, _ in frames)
    own = [place for place in (*frames, *lines_compiled(error)) if is_model_code(place[0])]
    inner = own[-1:] if is_in_first_iteration or "branches on the value" in text else []
    without_limit = [place for place in own if is_by_values and _is_in_unbounded_loop(*place)]
    return next((place for place in (*inner, *reversed(without_limit)) if place not in known), None)


def _is_in_unbounded_loop(file: str, line: int) -> bool:
    return any(holds(loop, line) for loop in unbounded_loops(_loops_of(file)))


@functools.lru_cache(maxsize=64)
def _loops_of(file: str) -> ast.Module:
    """The syntax tree of a file, in which functions return after their loops."""
    tree = parsed(file)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.body = without_returns(node.body)
    return tree


def _at(text: str, file: str, line: int) -> str:
    return f"the loop is unrolled: {text}, in {ModelLine(file, line)}"


def _raised(error: BaseException) -> tuple[str, str, int] | None:
    """Why a loop could not become an operator, with a line of the model."""
    frames = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    found = why_no_operator(error)
    if found is None and not Path(frames[-1][0]).is_relative_to(_REWRITES):
        return None
    text, inside = found or (str(error), [])
    own = [place for place in (*frames, *inside) if is_model_code(place[0])]
    return (text, *own[-1]) if own else None


def _reason_at(file: str, line: int) -> Obstacle | None:
    """What keeps the loop from becoming an operator, judging by its source; None if that is not known.

    The line is the first one of the loop, or a statement in its body.
    """
    tree = _loops_of(file)
    around = [node for node in ast.walk(tree) if isinstance(node, _Function) and holds(node, line)]
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For | ast.While) and _begins(node, line)]
    inner = [node for node in ast.walk(tree) if isinstance(node, _Comprehension) and holds(node, line)]
    if not loops and not inner:
        return _reason_in_loop(tree, line)
    outer = [node for node in around[:-1] if not any(_is_class_at(part, line) for part in ast.walk(node))]
    if not around or isinstance(around[-1], ast.Lambda | ast.AsyncFunctionDef) or outer:
        return Obstacle(line, "it is in a nested function", "move this function out of the enclosing one.")
    return _reason(loops[0]) if loops else _reason_of_comprehension(inner[0])


def _is_class_at(node: ast.AST, line: int) -> bool:
    return isinstance(node, ast.ClassDef) and holds(node, line)


def _begins(node: ast.For | ast.While, line: int) -> bool:
    return node.lineno <= line < node.body[0].lineno or node.lineno == line


def _reason(loop: ast.For | ast.While) -> Obstacle | None:
    plain = plain_loop(loop, 0)
    if plain is None:
        text = "it goes on while something holds, and does not count up to a size"
        return Obstacle(loop.lineno, text, "write `for i in range(n)`, where n is a size of a tensor.")
    return obstacle(plain.loop, appended(plain.loop))


def _reason_in_loop(tree: ast.Module, line: int) -> Obstacle | None:
    """What keeps the loop around a statement from becoming an operator, if it is in this statement."""
    around = [node for node in ast.walk(tree) if isinstance(node, ast.For | ast.While) and holds(node, line)]
    found = _reason(around[-1]) if around else None
    here = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and node.lineno == line]
    return found if found is not None and any(holds(node, found.line) for node in here) else None


def _reason_of_comprehension(node: _Comprehension) -> Obstacle | None:
    if isinstance(node, ast.SetComp | ast.DictComp):
        return Obstacle(node.lineno, "it makes a set or dict, whose length would be fixed", _WHOLE)
    if len(node.generators) > 1:
        return Obstacle(node.lineno, "it has several loops in one expression", "write nested loops.")
    if node.generators[0].ifs:
        return Obstacle(node.lineno, "it filters elements by a condition", _WHOLE)
    return None
