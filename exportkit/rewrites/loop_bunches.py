"""Lists to which a turn of a loop adds several elements, as in ``boxes += [x, y, width, height]``."""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from exportkit.rewrites.lengths import SymbolicList
from exportkit.rewrites.loop_bodies import walk
from exportkit.rewrites.loop_indices import plain
from exportkit.rewrites.loop_lists import Stacked

HELPERS = "_exportkit_loops"  # the name under which the source finds `loop_turns.Helpers`


@dataclass
class Bunched:
    """A list to which every turn adds several elements.

    Attributes:
        name: Its name.
        elements: The name of the list of what each turn adds.
    """

    name: str
    elements: str


def bunched_lists(loop: ast.For, number: int) -> list[Bunched]:
    """Returns the lists to which a loop's body adds more than one element, or not in a statement of its own.

    The body changes: it collects the elements in a list that each turn makes, and adds them as one tensor.

    Args:
        loop: The loop.
        number: Makes the new names unique.
    """
    body, added, found = loop.body, dict[str, list[ast.stmt]](), list[Bunched]()
    uses = Counter(node.id for node in walk(body) if isinstance(node, ast.Name))
    for node in walk(body):
        match node:
            case ast.Expr(ast.Call(ast.Attribute(ast.Name(name), "append"), [_], [])) | ast.AugAssign(
                ast.Name(name), ast.Add(), ast.List()
            ):
                added.setdefault(name, []).append(node)
    for name, statements in added.items():
        is_one = len(statements) == 1 and isinstance(statements[0], ast.Expr) and statements[0] in body
        if uses[name] != len(statements) or is_one:
            continue
        own, elements = (f"_exportkit_{kind}_{number}_{len(found)}" for kind in ("bunch", "bunches"))
        for node in walk(statements):
            if isinstance(node, ast.Name) and node.id == name:
                node.id = own
        made = ast.Assign([ast.Name(own, ast.Store())], ast.List([], ast.Load()))
        bunch = ast.Attribute(ast.Name(HELPERS, ast.Load()), "bunch", ast.Load())
        whole = ast.Call(bunch, [ast.Name(own, ast.Load())], [])
        add = ast.Call(ast.Attribute(ast.Name(elements, ast.Load()), "append", ast.Load()), [whole], [])
        first, last = body[0], body[-1]
        body.insert(0, ast.copy_location(made, first))
        body.append(ast.copy_location(ast.Expr(add), last))
        found.append(Bunched(name, elements))
    return found


def bunch(items: Any) -> torch.Tensor:
    """Returns what a turn adds to a list as one tensor."""
    if isinstance(items, SymbolicList):
        return items.whole()
    return torch.stack([torch.as_tensor(plain(each)) for each in items])


def extended(items: Any, bunches: Stacked) -> Stacked:
    """Returns a list to which every turn adds several elements."""
    before = items.parts if isinstance(items, Stacked) else [torch.as_tensor(each)[None] for each in items]
    return Stacked([*before, *[part.flatten(0, 1) for part in bunches.parts]])
