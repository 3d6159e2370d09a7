"""Lines of the model's code: where an error, or a node of a traced graph, comes from.

The line is the innermost one that belongs neither to torch, nor to exportkit, nor to Python itself. The submodule is
the one whose method was running there.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from exportkit.rewrites.model_code import is_model_code

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
