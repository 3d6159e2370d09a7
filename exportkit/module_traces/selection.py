"""Which calls of which modules have their values stored. In comes what the user asked for; out come answers by call."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from typing import Any

import torch

from exportkit.errors import InvalidRequestError, InvalidTypeError

ALL, ENDS = "all", "ends"


class Selection:
    """Says whether the values of a call are stored.

    Args:
        model: The model.
        values: See `exportkit.trace_model`.
        every: Of each module, the values of every so many-eth call.

    Raises:
        InvalidRequestError: if a pattern matches no module, or ``every`` is no positive number.
        InvalidTypeError: if ``values`` is something else.
    """

    def __init__(self, model: torch.nn.Module, values: Any, every: int = 1) -> None:
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise InvalidRequestError(
                "Values are stored of every so many-eth call.", where="every", expected="1 or more", got=repr(every)
            )
        self._every = every
        self._stores_all = isinstance(values, str) and values == ALL
        self._paths = frozenset() if self._stores_all else frozenset(_selected(model, values))
        self.text = values if values is None or isinstance(values, str) else repr(values)

    def __call__(self, path: str, number: int) -> bool:
        """Returns whether the values of that call of the module are stored."""
        return (self._stores_all or path in self._paths) and number % self._every == 0


def _selected(model: torch.nn.Module, values: Any) -> Iterable[str]:
    """Paths of the modules that are meant."""
    if values is None:
        return ()
    paths = [path for path, _ in model.named_modules()]
    if isinstance(values, str) and values == ENDS:
        middle = _middle_blocks(model)
        return [path for path in paths if not any(path == block or path.startswith(f"{block}.") for block in middle)]
    patterns = list(values) if isinstance(values, list | tuple | set | frozenset) else [values]
    return {path for pattern in patterns for path in _matching(pattern, paths)}


def _matching(pattern: Any, paths: list[str]) -> list[str]:
    if isinstance(pattern, re.Pattern):
        found = [path for path in paths if pattern.search(path)]
    elif isinstance(pattern, str):
        found = [path for path in paths if fnmatch.fnmatchcase(path, pattern)]
    else:
        raise InvalidTypeError(
            "This does not say which values are to be stored.",
            where="values",
            expected='None, "all", "ends", a module path (also with * and ?), a compiled regular expression, or a list',
            got=repr(pattern),
        )
    if not found:
        text = pattern if isinstance(pattern, str) else pattern.pattern
        raise InvalidRequestError(
            "No module has such a path, so none of its values could be stored.",
            where="values",
            got=repr(text),
            hint=f"paths are such as {', '.join(map(repr, paths[-3:]))}; * stands for anything in them.",
        )
    return found


def _middle_blocks(model: torch.nn.Module) -> list[str]:
    """Paths of the blocks in lists of modules that are neither the first nor the last there."""
    blocks: list[str] = []
    for path, module in model.named_modules():
        numbered = [name for name, child in module.named_children() if name.isdigit() and any(child.children())]
        blocks += [f"{path}.{name}".strip(".") for name in numbered[1:-1]]
    return blocks
