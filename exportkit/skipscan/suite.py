"""Finds the modules, classes and functions of a suite, and what skips when one of its functions is called.

Modules are parsed on first use, never imported. Classes are resolved across files, in Python's order.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from exportkit.errors import described
from exportkit.skipscan.expressions import external_value
from exportkit.skipscan.interpreter import Interpreter
from exportkit.skipscan.layout import Layout
from exportkit.skipscan.values import (
    UNKNOWN,
    Bound,
    Class,
    External,
    Function,
    Imported,
    Instance,
    Scope,
    Skip,
    Skipped,
)

_SELF_ASSIGNED = re.compile(r"\b(?:self|cls)\.(\w+)\s*(?::[^=\n]+)?[-+*|&/]?=(?!=)")
_SKIPS = re.compile(r"\b(?:skip|skipTest|SkipTest|importorskip)\b")
_CALLED = re.compile(r"\b(\w++)\s*+\(")
_DEFINED = re.compile(r"^\s*(?:async\s+)?def\s+(\w+)", re.MULTILINE)
_DEEPEST_VALUE = 2  # calls within calls that are followed for their value alone
_NO_ARGUMENTS = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
_STAND_IN = ast.FunctionDef("", _NO_ARGUMENTS, body=[], decorator_list=[])


@dataclass(eq=False, repr=False)
class Module:
    """One file of the suite: its names, its source, and what its top-level code skips."""

    file: str
    source: str
    scope: Scope
    skips: list[Skip] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)


class Suite(Interpreter):
    """The modules, classes and functions of a suite."""

    def __init__(self, root: Path, layout: Layout) -> None:
        super().__init__()
        self.root, self.layout = root, layout
        self.modules: dict[Path, Module | None] = {}
        self.problems: list[str] = []
        self._inside = root.joinpath(*Path(layout.folder).parts[:1])
        self._found: dict[tuple[str, int, Path], Path | None] = {}
        self._looking_up: set[Any] = set()
        self._orders: dict[int, tuple[Any, ...]] = {}
        self._class_marks: dict[int, tuple[Any, ...]] = {}
        self._decorated: dict[int, Function] = {}
        self._self_assigned: dict[int, set[str]] = {}
        self._skipping_names: set[str] = set()
        self._may_skip: dict[int, bool] = {}

    # Modules

    def module(self, path: Path) -> Module | None:
        """Returns the module of a file, which is read once; None if it cannot be read or parsed."""
        if path not in self.modules:
            self.modules[path] = None
            file = path.relative_to(self.root).as_posix()
            try:
                source = path.read_text(encoding="utf-8")
                with warnings.catch_warnings(action="ignore", category=SyntaxWarning):
                    tree = ast.parse(source)
            except (OSError, SyntaxError, ValueError) as error:
                self.problems.append(f"{file}: {described(error)}")
                return None
            module = self.modules[path] = Module(file, source, Scope("module", file))
            module.lines = source.splitlines()
            for statement in tree.body:  # also after a skip: the rest of the file has the tests that are skipped
                module.skips += self._skips_in(file, statement.lineno, partial(self.execute, [statement], module.scope))
        return self.modules[path]

    def _skips_in(self, file: str, line: int, follow: Callable[[], object]) -> tuple[Skip, ...]:
        """Returns the skips on the way: the conditional ones, then the one that is certain and ends it, if any."""
        outside, self.conditional = self.conditional, []
        try:
            follow()
            return tuple(self.conditional)
        except Skipped as skipped:
            return (*self.conditional, skipped.skip)
        except RecursionError:
            self.problems.append(f"{file}, line {line}: too deeply nested")
            return tuple(self.conditional)
        finally:
            self.conditional = outside

    def find_module(self, name: str, level: int, file: str) -> Path | None:
        """Returns the file of a module of the suite, as an import statement in ``file`` finds it."""
        here = (self.root / file).parent
        key = (name, level, here)
        if key not in self._found:
            above = [here, *here.parents]
            folders = above[level - 1 : level] if level else [f for f in above if f.is_relative_to(self.root)]
            paths = [folder.joinpath(*name.split(".")) if name else folder for folder in folders]
            files = [file for path in paths for file in (path.parent / f"{path.name}.py", path / "__init__.py")]
            inside = [file for file in files if file.is_relative_to(self._inside) and file.is_file()]
            self._found[key] = inside[0] if inside else None
        return self._found[key]

    def is_importable(self, module: str) -> bool:
        """Returns whether a module is installed, or below the root."""
        top = module.partition(".")[0]
        names = (f"{folder}{top}{suffix}" for folder in ("", "src/") for suffix in ("", ".py"))
        return super().is_importable(module) or any((self.root / name).exists() for name in names)

    def look_up(self, imported: Imported) -> Any:
        """Returns what an import statement binds: a part of the suite, or the full name of something else."""
        return self._once(imported, partial(self._look_up, imported))

    def _once(self, key: Any, find: Callable[[], Any]) -> Any:
        """Returns what is found; UNKNOWN while it is being looked for, as modules may import from each other."""
        if key in self._looking_up:
            return UNKNOWN
        self._looking_up.add(key)
        try:
            return find()
        finally:
            self._looking_up.discard(key)

    def _look_up(self, imported: Imported) -> Any:
        path = self.find_module(imported.module, imported.level, imported.file)
        module = self.module(path) if path is not None else None
        if imported.name is None:
            return External(imported.module) if module is None else module.scope
        value = UNKNOWN if module is None else self.member_of(module.scope, imported.name)
        if value is not UNKNOWN:
            return value
        submodule = self.find_module(f"{imported.module}.{imported.name}".lstrip("."), imported.level, imported.file)
        if submodule is not None and submodule != path:
            module = self.module(submodule)
            return UNKNOWN if module is None else module.scope
        is_inside = path is not None or imported.level > 0
        return UNKNOWN if is_inside else external_value(f"{imported.module}.{imported.name}")

    def member_of(self, scope: Scope, name: str) -> Any:
        """Returns the value of a name in a module or class body, or UNKNOWN."""
        return self.name(name, scope) if name in scope.names else self.star_imported(name, scope)

    def star_imported(self, name: str, scope: Scope) -> Any:
        """Returns what a star import binds to a name, or UNKNOWN."""
        is_private = name.startswith("_")
        return UNKNOWN if is_private else self._once((name, scope.file), partial(self._star_imported, name, scope))

    def _star_imported(self, name: str, scope: Scope) -> Any:
        for star in scope.module.names.get("*", ()):
            path = self.find_module(star.module, star.level, star.file)
            module = self.module(path) if path is not None else None
            value = UNKNOWN if module is None else self.member_of(module.scope, name)
            if value is not UNKNOWN:
                return value
        return UNKNOWN

    # Classes

    def order(self, cls: Class) -> tuple[Any, ...]:
        """Returns the classes in the order in which Python looks for attributes (C3 linearisation)."""
        if id(cls) not in self._orders:
            orders = [list(self.order(base)) if isinstance(base, Class) else [base] for base in cls.bases]
            self._orders[id(cls)] = (cls, *_merge([*orders, list(cls.bases)]))
        return self._orders[id(cls)]

    def suite_classes(self, cls: Class) -> list[Class]:
        """Returns the class and its bases that the suite defines, in this order."""
        return [base for base in self.order(cls) if isinstance(base, Class)]

    def is_test_case(self, cls: Class) -> bool:
        """Returns whether a class is a ``unittest.TestCase``; external bases are known by their name."""
        return any(isinstance(base, External) and "TestCase" in base.name for base in self.order(cls))

    def member(self, cls: Class, name: str, after: Class | None = None) -> Any:
        """Returns an attribute of a class, or UNKNOWN; ``after`` skips the classes up to this one."""
        classes = self.suite_classes(cls)
        start = classes.index(after) + 1 if after in classes else 0
        found = next((base for base in classes[start:] if name in base.body.names), None)
        return UNKNOWN if found is None else self.member_of(found.body, name)

    def attribute(self, value: Any, name: str) -> Any:
        """Returns an attribute of a module, class or instance, or UNKNOWN."""
        if isinstance(value, Scope):
            return self.member_of(value, name)
        if not isinstance(value, Class | Instance):
            return UNKNOWN
        cls, after = (value, None) if isinstance(value, Class) else (value.cls, value.after)
        if name in ("__name__", "__class__"):
            return cls.name if name == "__name__" else cls
        if isinstance(value, Instance) and after is None and name in self._assigned_on_self(cls):
            return UNKNOWN
        found = self.member(cls, name, after)
        if not isinstance(found, Function):
            return found
        receiver = value if after is None else Instance(cls)
        if "property" in found.kinds:
            return self.run(found, (receiver,))
        of_class = "classmethod" in found.kinds
        if "staticmethod" in found.kinds or (isinstance(value, Class) and not of_class):
            return found
        return Bound(found, cls if of_class else receiver)

    def _assigned_on_self(self, cls: Class) -> set[str]:
        if id(cls) not in self._self_assigned:
            texts = (self._text(base.node, base.scope) for base in self.suite_classes(cls))
            self._self_assigned[id(cls)] = {name for text in texts for name in _SELF_ASSIGNED.findall(text)}
        return self._self_assigned[id(cls)]

    def _text(self, node: ast.expr | ast.stmt, scope: Scope) -> str:
        """Returns the source of a function or class without its decorators."""
        module = self.modules[self.root / scope.file]
        return "" if module is None else "\n".join(module.lines[node.lineno - 1 : node.end_lineno])

    # Decorators

    def decorated(self, function: Function) -> Function:
        """Returns a function as its decorators leave it: with their marks, or the wrapper in its place."""
        if function.decorated or not function.node.decorator_list:
            return function
        key = id(function.node)
        if key not in self._decorated or function.scope.kind == "function" or function.marks:
            result = self._with_decorators(function, function.node.decorator_list)
            self._decorated[key] = Function(result.node, result.scope, result.marks, decorated=True)
        return self._decorated[key]

    def marks_of(self, cls: Class) -> tuple[Any, ...]:
        """Returns the marks that the decorators of a class put on it, innermost first."""
        if id(cls) not in self._class_marks:
            stand_in = Function(_STAND_IN, cls.scope)
            self._class_marks[id(cls)] = self._with_decorators(stand_in, cls.node.decorator_list).marks
        return self._class_marks[id(cls)]

    def _with_decorators(self, function: Function, decorators: list[ast.expr]) -> Function:
        scope = function.scope
        for node in reversed(decorators):
            name = ast.unparse(node.func if isinstance(node, ast.Call) else node).rpartition(".")[2]
            key: str | None = name
            if name not in self.layout.marks:
                try:
                    result = self.decorate(self.evaluate(node, scope), function)
                except Skipped:  # pytest.importorskip in a decorator skips the module
                    continue
                key = self.layout.matching_pattern(name) if result is function else None
                function = result
            reason = self.layout.marks[key] if key is not None else ""
            if reason != "":
                condition = "" if reason else f"not available: {name}"
                function = function.with_marks(Skip(reason or name, scope.file, node.lineno, condition))
        return function

    def decorate(self, decorator: Any, function: Function) -> Function:
        """Returns a function with what a decorator adds to it, or the wrapper that it puts in its place."""
        result = super().decorate(decorator, function)
        # A wrapper has decorators of its own: functools.wraps passes on the marks of what it wraps.
        return self.decorated(result) if result.node is not function.node else result

    # What skips when a function is called

    def run(self, function: Function, args: Sequence[Any] = (), keywords: dict[str, Any] | None = None) -> Any:
        """Follows a call; one deep inside others is only followed if it may skip, not for its value."""
        if self._depth > _DEEPEST_VALUE and not self._is_relevant(function):
            return UNKNOWN
        return super().run(function, args, keywords)

    def skips_of(
        self, function: Function, receiver: Instance | Class | None, values: dict[str, Any]
    ) -> tuple[Skip, ...]:
        """Returns the skips in a call of a function: the conditional ones, then the one that is certain, if any."""
        if not self._is_relevant(function):
            return ()
        follow = partial(self.run, function, () if receiver is None else (receiver,), values)
        return self._skips_in(function.scope.file, function.node.lineno, follow)

    def read_what_may_skip(self) -> None:
        """Reads the imported modules that mention a skip, and finds all functions whose body may skip or call one."""
        done: set[Path] = set()
        while waiting := self.modules.keys() - done:
            done |= waiting
            for module in filter(None, (self.modules[path] for path in waiting)):
                for path in self._imported_files(module.scope) - self.modules.keys():
                    if "skip" in path.read_text(errors="replace").lower():
                        self.module(path)
        self._may_skip.clear()
        called: dict[str, set[str]] = {}
        for module in filter(None, list(self.modules.values())):
            aliases = {name for name, value in module.scope.names.items() if _SKIPS.search(_external_name(value))}
            found = list(_DEFINED.finditer(module.source))
            for this, following in zip_longest(found, found[1:]):
                text = module.source[this.end() : following.start() if following else None]
                calls = set(_CALLED.findall(text))
                called.setdefault(this[1], set()).update(calls)
                if _SKIPS.search(text) or aliases & calls:
                    self._skipping_names.add(this[1])
            self._skipping_names |= aliases
        size = -1
        while size != len(self._skipping_names):
            size = len(self._skipping_names)
            self._skipping_names |= {name for name, calls in called.items() if calls & self._skipping_names}

    def _imported_files(self, scope: Scope) -> set[Path]:
        values = [*scope.names.values(), *scope.names.get("*", ())]
        imports = [value for value in values if isinstance(value, Imported)]
        names = {(name, i) for i in imports for name in (i.module, f"{i.module}.{i.name}".lstrip("."))}
        found = {self.find_module(name, imported.level, imported.file) for name, imported in names}
        return {path for path in found if path is not None}

    def _is_relevant(self, function: Function) -> bool:
        """Returns whether the body of a function names a skip, or calls a function that may skip."""
        key = id(function.node)
        if key not in self._may_skip:
            body = self._text(function.node, function.scope).partition(":")[2]
            calls_skip = not self._skipping_names.isdisjoint(_CALLED.findall(body))
            self._may_skip[key] = function.scope.kind == "function" or bool(_SKIPS.search(body)) or calls_skip
        return self._may_skip[key]


def _external_name(value: Any) -> str:
    if isinstance(value, Imported):
        return f"{value.module}.{value.name}"
    return value.name if isinstance(value, External) else ""


def _merge(orders: list[list[Any]]) -> list[Any]:
    """Merges orders of classes (C3); where they contradict each other, the first one takes precedence."""
    merged: list[Any] = []
    while orders := [order for order in orders if order]:
        heads = [order[0] for order in orders]
        head = next((head for head in heads if not any(head in order[1:] for order in orders)), heads[0])
        merged.append(head)
        orders = [[cls for cls in order if cls != head] for order in orders]
    return merged
