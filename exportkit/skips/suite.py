"""Takes the functions of a suite and says what their decorators make of them, and which of them may skip at all.

Out comes a `Suite`, which has everything that is known of the modules, classes and functions.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from exportkit.skips.classes import Classes
from exportkit.skips.layout import Layout
from exportkit.skips.modules import Module
from exportkit.skips.values import Class, External, Frame, Function, Imported, NamedMark, Skipped

_DIRECT = re.compile(r"\b(?:skip|skipTest|SkipTest|importorskip)\b")
_CALLED = re.compile(r"\b(\w++)\s*+\(")
_DEFINED = re.compile(r"^\s*(?:async\s+)?def\s+(\w+)", re.MULTILINE)
_NO_ARGUMENTS = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])


class Suite(Classes):
    """The functions of a suite, on top of its classes and modules."""

    def __init__(self, root: Path, layout: Layout) -> None:
        super().__init__(root, layout)
        self.skipping_names: set[str] = set()
        self._decorated: dict[int, Function] = {}
        self._relevant: dict[int, bool] = {}

    def decorated(self, function: Function) -> Function:
        """Returns a function as its decorators leave it: with their marks, or the wrapper in its place."""
        if function.decorated or isinstance(function.node, ast.Lambda) or not function.node.decorator_list:
            return function
        key = id(function.node)
        if key not in self._decorated or function.frame.kind == "function" or function.marks:
            result = function
            for decorator in reversed(function.node.decorator_list):
                result = self._decorated_by(decorator, result, function.frame)
            self._decorated[key] = Function(result.node, result.frame, result.marks, decorated=True)
        return self._decorated[key]

    def marks_of_class(self, cls: Class) -> tuple[Any, ...]:
        """Returns the marks that the decorators of a class put on it, innermost first."""
        if cls.cached_marks is None:
            stand_in = Function(ast.Lambda(_NO_ARGUMENTS, ast.Constant(None)), cls.frame)
            for decorator in reversed(cls.node.decorator_list):
                stand_in = self._decorated_by(decorator, stand_in, cls.frame)
            cls.cached_marks = stand_in.marks
        return cls.cached_marks

    def _decorated_by(self, node: ast.expr, function: Function, frame: Frame) -> Function:
        name = ast.unparse(node.func if isinstance(node, ast.Call) else node).rpartition(".")[2]
        key = self.layout.named_mark(name)
        if key is None:
            try:
                result = self.decorate(self.evaluate(node, frame), function)
            except Skipped:  # pytest.importorskip in a decorator: the module is skipped, which is noted there
                return function
            if result is not function:
                return result
            key = self.layout.pattern_mark(name)
        if key is None:
            return function
        reason = self.layout.marks[key]
        if reason == "":
            return function
        return function.with_mark(NamedMark(name, reason, node, frame.file))

    def decorate(self, decorator: Any, function: Function) -> Function:
        """Returns a function with what a decorator adds to it, or the wrapper that it puts in its place."""
        result = super().decorate(decorator, function)
        # A wrapper has decorators of its own: functools.wraps hands on the marks of what it wraps.
        return self.decorated(result) if result.node is not function.node else result

    def find_skipping_names(self) -> None:
        """Works out the names of all functions read so far whose body may skip, by itself or through a call."""
        called: dict[str, set[str]] = {}
        for module in filter(None, list(self.modules.values())):
            for name, text in _bodies(module):
                calls = set(_CALLED.findall(text))
                if _DIRECT.search(text) or any(alias in calls for alias in self._skip_aliases(module)):
                    self.skipping_names.add(name)
                called.setdefault(name, set()).update(calls)
        size = -1
        while size != len(self.skipping_names):
            size = len(self.skipping_names)
            self.skipping_names |= {name for name, calls in called.items() if calls & self.skipping_names}
        self._relevant.clear()

    def _skip_aliases(self, module: Module) -> set[str]:
        if module.aliases is not None:
            return module.aliases
        aliases = module.aliases = set()
        for name, value in module.frame.names.items():
            target = f"{value.module}.{value.name}" if isinstance(value, Imported) else getattr(value, "name", "")
            if isinstance(value, Imported | External) and _DIRECT.search(str(target)):
                aliases.add(name)
        return aliases

    def may_skip(self, function: Function) -> bool:
        """Whether a function is worth following: its body names a skip, or calls what does."""
        key = id(function.node)
        if key not in self._relevant:
            text = self.text(function.node, function.frame)
            inner = function.frame.kind == "function" or isinstance(function.node, ast.Lambda)
            names = self.skipping_names | self._skip_aliases(self.by_file[function.frame.file])
            body = text.partition(":")[2]
            self._relevant[key] = inner or bool(_DIRECT.search(body)) or bool(set(_CALLED.findall(body)) & names)
        return self._relevant[key]


def _bodies(module: Module) -> Iterable[tuple[str, str]]:
    """Yields the name and the text of each function, up to the next one; what is nested counts on its own."""
    found = list(_DEFINED.finditer(module.source))
    for this, following in zip(found, [*found[1:], None], strict=False):
        yield this[1], module.source[this.end() : following.start() if following else None]
