"""Why a loop is unrolled: what its source says that cannot be a part of a loop operator."""

from __future__ import annotations

import ast
import linecache

from exportkit.rewrites.loop_bodies import Obstacle, appended, obstacle
from exportkit.rewrites.loop_forms import plain_loop

_WHOLE = "use operations on the whole tensor, or torch.scan."
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


def reason_at(file: str, line: int) -> Obstacle | None:
    """Returns what keeps a loop from becoming an operator, according to its source; None if there is no such loop.

    Args:
        file: A file.
        line: The number of a line with the head of a loop, or of the statement in its body.
    """
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return None
    around = [node for node in ast.walk(tree) if isinstance(node, _Function) and _holds(node, line)]
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For | ast.While) and _begins(node, line)]
    inner = [node for node in ast.walk(tree) if isinstance(node, _Comprehension) and _holds(node, line)]
    if not loops and not inner:
        return _reason_in_loop(tree, line)
    if not around or isinstance(around[-1], ast.Lambda | ast.AsyncFunctionDef) or len(around) > 1:
        return Obstacle(line, "it is in a function inside of another one", "move this function out of the other one.")
    return _reason(loops[0]) if loops else _reason_of_comprehension(inner[0])


def _holds(node: ast.expr | ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


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
    around = [node for node in ast.walk(tree) if isinstance(node, ast.For | ast.While) and _holds(node, line)]
    found = _reason(around[-1]) if around else None
    here = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and node.lineno == line]
    return found if found is not None and any(_holds(node, found.line) for node in here) else None


def _reason_of_comprehension(node: _Comprehension) -> Obstacle | None:
    if isinstance(node, ast.SetComp | ast.DictComp):
        return Obstacle(node.lineno, "it makes a set or dict, whose length would be fixed", _WHOLE)
    if len(node.generators) > 1:
        return Obstacle(node.lineno, "it has several loops in one expression", "write one loop in the other.")
    if node.generators[0].ifs:
        return Obstacle(node.lineno, "it picks elements by a condition", _WHOLE)
    return None
