"""Takes the root of a suite and gives its modules, classes and functions as far as their source tells, read on demand.

Classes are resolved across files: bases, mixins and attributes are found in the order that Python would look in.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from exportkit.skips.externals import external_value, installed
from exportkit.skips.interpreter import Interpreter
from exportkit.skips.layout import Layout
from exportkit.skips.values import (
    UNKNOWN,
    Bound,
    Class,
    External,
    Frame,
    Function,
    Imported,
    Instance,
    NamedMark,
    Skip,
    Skipped,
    Super,
)

_DIRECT = re.compile(r"\b(?:skip|skipTest|SkipTest|importorskip)\b")
_CALLED = re.compile(r"(\w+)\s*\(")
_DEFINED = re.compile(r"^\s*(?:async\s+)?def\s+(\w+)", re.MULTILINE)
_SELF_ASSIGNED = re.compile(r"\b(?:self|cls)\.(\w+)\s*(?::[^=\n]+)?[-+*|&/]?=(?!=)")


@dataclass(frozen=True)
class Outcome:
    """What following a function gives: skips under a condition, and at the end one that is certain, if there is one."""

    skips: tuple[Skip, ...]


@dataclass(frozen=True)
class _Question:
    """An attribute that a method asks its class for; with ``after``, behind that class, as super() does."""

    name: str
    after: Class | None = None
    of_instance: bool = False


@dataclass
class _Answered:
    """A question, and for each answer what follows: the next question, or the outcome."""

    question: _Question
    after: dict[Any, _Answered | Outcome] = field(default_factory=dict)


class Module:
    """One file: its names, what its top-level code skips, and its text."""

    def __init__(self, file: str, source: str, tree: ast.Module) -> None:
        self.file, self.tree, self.lines = file, tree, source.splitlines()
        self.source = source
        self.frame = Frame("module", file)
        self.skip: Skip | None = None
        self.notes: tuple[Skip, ...] = ()
        self.aliases: set[str] | None = None  # names that skips have in it


class Suite(Interpreter):
    """The modules of a suite, and what their names mean."""

    def __init__(self, root: Path, layout: Layout) -> None:
        super().__init__()
        self.root, self.layout = root, layout
        self.modules: dict[Path, Module | None] = {}
        self.by_file: dict[str, Module] = {}
        self.problems: list[str] = []
        self.skipping_names: set[str] = set()
        self._inside = root / Path(layout.folder).parts[0] if Path(layout.folder).parts else root
        self._found: dict[tuple[str, int, str], Path | None] = {}
        self._frames: dict[int, Module] = {}
        self._decorated: dict[int, Function] = {}
        self._relevant: dict[int, bool] = {}
        self._self_assigned: dict[int, set[str]] = {}
        self._outcomes: dict[int, _Answered | Outcome] = {}
        self._answers: dict[tuple[int, _Question], Any] = {}
        self._asked: list[tuple[_Question, Any]] = []

    # Modules

    def module(self, path: Path) -> Module | None:
        """Returns the module of a file, read at most once; None if it cannot be read or parsed."""
        if path not in self.modules:
            self.modules[path] = None  # a circular import finds nothing yet
            file = path.relative_to(self.root).as_posix()
            try:
                source = path.read_text(encoding="utf-8")
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", SyntaxWarning)
                    tree = ast.parse(source)
            except (OSError, SyntaxError, ValueError) as error:
                self.problems.append(f"{file}: {type(error).__name__}: {error}")
                return None
            module = self.modules[path] = self.by_file[file] = Module(file, source, tree)
            self._frames[id(module.frame)] = module
            self._execute_module(module)
        return self.modules[path]

    def _execute_module(self, module: Module) -> None:
        outside, self.notes = self.notes, []
        conditions, self._conditions = self._conditions, []
        for statement in module.tree.body:
            try:
                self.execute([statement], module.frame)
            except Skipped as skipped:  # the rest is still read: its tests are those that do not run
                module.skip = module.skip or skipped.skip
            except RecursionError:
                self.problems.append(f"{module.file}, line {statement.lineno}: too deeply nested")
        module.notes, self.notes, self._conditions = tuple(self.notes), outside, conditions

    def read_what_may_skip(self) -> None:
        """Reads the modules that those read so far import, where their text has anything to do with skipping."""
        done: set[Path] = set()
        while waiting := [path for path in self.modules if path not in done]:
            done.update(waiting)
            for module in filter(None, (self.modules[path] for path in waiting)):
                for value in list(module.frame.names.values()) + module.frame.names.get("*", []):
                    path = self._module_of(value) if isinstance(value, Imported) else None
                    if (
                        path is not None
                        and path not in self.modules
                        and "skip" in path.read_text(errors="replace").lower()
                    ):
                        self.module(path)

    def _module_of(self, imported: Imported) -> Path | None:
        submodule = f"{imported.module}.{imported.name}".lstrip(".") if imported.name not in (None, "*") else None
        found = self.find_module(submodule, imported.level, imported.file) if submodule else None
        return found or self.find_module(imported.module, imported.level, imported.file)

    def find_module(self, name: str, level: int, file: str) -> Path | None:
        """Returns the file of a module that is part of the suite, as an import in ``file`` would find it."""
        key = (name, level, file.rpartition("/")[0])
        if key not in self._found:
            self._found[key] = self._find_module(name, level, file)
        return self._found[key]

    def _find_module(self, name: str, level: int, file: str) -> Path | None:
        here = (self.root / file).parent
        parts = name.split(".") if name else []
        if not level and installed(name) and not (self.root / parts[0]).exists() and not (here / parts[0]).exists():
            return None
        if level:
            folders = [here.parents[level - 2] if level > 1 else here]
        else:
            folders = [here, *(folder for folder in here.parents if folder.is_relative_to(self.root))]
        for folder in folders:
            path = folder.joinpath(*parts)
            for candidate in (path.with_suffix(".py") if parts else path / "__init__.py", path / "__init__.py"):
                if candidate.is_relative_to(self._inside) and candidate.is_file():
                    return candidate
        return None

    def is_importable(self, module: str) -> bool:
        top = module.partition(".")[0]
        return super().is_importable(module) or any(
            (folder / top).is_dir() or (folder / f"{top}.py").is_file() for folder in (self.root, self.root / "src")
        )

    def look_up(self, imported: Imported) -> Any:
        path = self.find_module(imported.module, imported.level, imported.file)
        if imported.name is None:
            module = self.module(path) if path is not None else None
            return module.frame if module is not None else External(imported.module)
        if path is not None:
            module = self.module(path)
            value = self._member(module, imported.name) if module is not None else UNKNOWN
            if value is not UNKNOWN:
                return value
        submodule = self.find_module(f"{imported.module}.{imported.name}".lstrip("."), imported.level, imported.file)
        if submodule is not None and submodule != path:
            module = self.module(submodule)
            return module.frame if module is not None else UNKNOWN
        inside = path is not None or imported.level > 0
        return UNKNOWN if inside else external_value(f"{imported.module}.{imported.name}")

    def _member(self, module: Module, name: str) -> Any:
        return (
            self._Name(ast.Name(name, ast.Load()), module.frame)
            if name in module.frame.names
            else self.missing_name(name, module.frame)
        )

    def missing_name(self, name: str, frame: Frame) -> Any:
        while frame.parent is not None:
            frame = frame.parent
        for star in frame.names.get("*", ()):
            path = self.find_module(star.module, star.level, star.file)
            module = self.module(path) if path is not None else None
            value = UNKNOWN if module is None or name.startswith("_") else self._member(module, name)
            if value is not UNKNOWN:
                return value
        return UNKNOWN

    # Classes

    def bases(self, cls: Class) -> tuple[Any, ...]:
        """Returns the base classes of a class: those of the suite, and the names of the others."""
        if not cls.bases:
            values = tuple(
                self.evaluate(base, cls.scope) for base in cls.node.bases if not isinstance(base, ast.Starred)
            )
            cls.bases = tuple(value for value in values if isinstance(value, Class | External)) or (
                External("builtins.object"),
            )
        return cls.bases

    def order(self, cls: Class) -> tuple[Any, ...]:
        """Returns the classes in the order in which Python looks for attributes (C3 linearisation)."""
        if cls.cached_order is None:
            cls.cached_order = (cls,)  # a class that is its own base has no other
            sequences = [list(self.order(base)) if isinstance(base, Class) else [base] for base in self.bases(cls)]
            cls.cached_order = (cls, *_merge([*sequences, list(self.bases(cls))]))
        return cls.cached_order

    def is_test_case(self, cls: Class) -> bool:
        """Whether a class is a ``unittest.TestCase``; a base outside the suite is one if its name says so."""
        return any(
            isinstance(base, External) and "TestCase" in base.name.rpartition(".")[2] for base in self.order(cls)
        )

    def member(self, cls: Class, name: str, after: Class | None = None) -> tuple[Any, Class] | None:
        """Returns an attribute of a class and the class that has it; ``after`` starts behind a class, as super() does."""
        order = self.order(cls)
        start = order.index(after) + 1 if after in order else 0
        for base in order[start:]:
            if isinstance(base, Class) and name in base.body.names:
                return self._Name(ast.Name(name, ast.Load()), base.body), base
        return None

    def attribute(self, value: Any, name: str) -> Any:
        if isinstance(value, Frame):
            module = self._frames.get(id(value))
            return self._member(module, name) if module is not None else UNKNOWN
        if isinstance(value, Class):
            return self._class_attribute(value, _Question(name), value)
        if isinstance(value, Instance):
            return self._class_attribute(value.cls, _Question(name, of_instance=True), value)
        if isinstance(value, Super):
            cls = value.instance.cls if isinstance(value.instance, Instance) else value.instance
            return self._class_attribute(cls, _Question(name, value.after), value.instance)
        return UNKNOWN

    def _class_attribute(self, cls: Class, question: _Question, receiver: Any) -> Any:
        value, owner = self._answer(cls, question)
        self._asked.append((question, _key(value)))
        after = question.after
        if not isinstance(value, Function) or isinstance(value.node, ast.Lambda):
            return value
        kinds = {ast.unparse(decorator) for decorator in value.node.decorator_list}
        if "staticmethod" in kinds or (isinstance(receiver, Class) and "classmethod" not in kinds and after is None):
            return value
        if kinds & {"property", "cached_property", "functools.cached_property"}:
            return self.run(value, (receiver,), owner=owner)
        return Bound(value, cls if "classmethod" in kinds else receiver, owner)

    def _answer(self, cls: Class, question: _Question) -> tuple[Any, Any]:
        """What a class answers to a question of a method, and the class that the answer is from."""
        known_answer = self._answers.get((id(cls), question))
        if known_answer is None:
            name = question.name
            if name == "__name__":
                known_answer = cls.name, cls
            elif name == "__class__":
                known_answer = cls, cls
            elif question.of_instance and any(
                name in self._assigned_on_self(base) for base in self.order(cls) if isinstance(base, Class)
            ):
                known_answer = UNKNOWN, None
            else:
                known_answer = self.member(cls, name, question.after) or (UNKNOWN, None)
            self._answers[id(cls), question] = known_answer
        return known_answer

    def outcome(self, function: Function, cls: Class, receiver: Instance | Class, owner: Class | None) -> Outcome:
        """Returns what comes of a method of a class; followed once for all classes that answer its questions alike.

        A method asks its class for attributes one after the other, and what it asks next depends on the answers alone:
        the answers lead through a tree to the outcome.
        """
        if not self.may_skip(function):
            return _NOTHING
        if function.frame.kind == "function":  # a wrapper: what it wraps is another function each time
            return self.followed(function, (receiver,), {}, owner)
        node = self._outcomes.get(id(function.node))
        while isinstance(node, _Answered):
            following = node.after.get(_key(self._answer(cls, node.question)[0]))
            if following is None:
                break
            node = following
        else:
            if node is not None:
                return node
        outside, self._asked = self._asked, []
        outcome = self.followed(function, (receiver,), {}, owner)
        self._remember(id(function.node), self._asked, outcome)
        asked, self._asked = self._asked, outside
        self._asked += asked
        return outcome

    def followed(
        self, function: Function, args: tuple[Any, ...], values: dict[str, Any], owner: Class | None
    ) -> Outcome:
        outside, self.notes = self.notes, []
        try:
            self.run(function, args, values, owner)
            return Outcome(tuple(self.notes))
        except Skipped as skipped:
            return Outcome((*self.notes, skipped.skip))
        except RecursionError:
            self.problems.append(f"{function.frame.file}, line {function.node.lineno}: too deeply nested")
            return Outcome(tuple(self.notes))
        finally:
            self.notes = outside

    def _remember(self, function: int, asked: list[tuple[_Question, Any]], outcome: Outcome) -> None:
        if not asked:
            self._outcomes[function] = outcome
            return
        node = self._outcomes.setdefault(function, _Answered(asked[0][0]))
        for (_, answer), (question, _) in zip(asked, asked[1:]):
            node = node.after.setdefault(answer, _Answered(question))
        node.after[asked[-1][1]] = outcome

    def _assigned_on_self(self, cls: Class) -> set[str]:
        if id(cls) not in self._self_assigned:
            text = self.text(cls.node, cls.frame)
            self._self_assigned[id(cls)] = set(_SELF_ASSIGNED.findall(text))
        return self._self_assigned[id(cls)]

    # Functions

    def text(self, node: ast.AST, frame: Frame) -> str:
        """Returns the source of a function's or class's body, decorators and the line of ``def`` left out."""
        lines = self.by_file[frame.file].lines[node.lineno - 1 : node.end_lineno]  # type: ignore[attr-defined]
        return "\n".join(lines)

    def decorated(self, function: Function) -> Function:
        """Returns a function as its decorators leave it: with their marks, or the wrapper that they put in its place."""
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
        result = super().decorate(decorator, function)
        # A wrapper has decorators of its own: functools.wraps hands on the marks of what it wraps.
        return self.decorated(result) if result.node is not function.node else result

    # Which functions need to be followed

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


def _key(value: Any) -> Any:
    """What makes two answers the same: the value of a constant, the identity of anything else."""
    if isinstance(value, list | tuple):
        return (type(value), *map(_key, value))
    return (type(value), value) if isinstance(value, _PLAIN) else id(value)


_NOTHING = Outcome(())
_PLAIN = (str, int, float, type(None), External)
_NO_ARGUMENTS = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])


def _bodies(module: Module) -> Iterable[tuple[str, str]]:
    """Yields the name and the text of each function, up to the next one; what is nested counts on its own."""
    found = list(_DEFINED.finditer(module.source))
    for this, following in zip(found, [*found[1:], None]):
        yield this[1], module.source[this.end() : following.start() if following else None]


def _merge(sequences: list[list[Any]]) -> list[Any]:
    """Merges orders of classes (C3); where they contradict each other, the first one goes ahead."""
    merged: list[Any] = []
    while sequences := [sequence for sequence in sequences if sequence]:
        heads = [sequence[0] for sequence in sequences]
        head = next((h for h in heads if not any(h in sequence[1:] for sequence in sequences)), heads[0])
        merged.append(head)
        sequences = [[value for value in sequence if value is not head and value != head] for sequence in sequences]
    return merged
