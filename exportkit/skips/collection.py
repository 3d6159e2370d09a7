"""Takes a test file and gives the tests that pytest would collect from it, each with the verdict of the static scan.

A test comes once for each class that has or inherits it, and once for each of its known parameters.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from exportkit.skips.fixtures import Fixtures, requested
from exportkit.skips.marks import other_skips, pytest_skips, unpacked
from exportkit.skips.parameters import Variant, variants
from exportkit.skips.suite import Module, Suite
from exportkit.skips.values import (
    UNKNOWN,
    Applied,
    Bound,
    Class,
    External,
    Function,
    Imported,
    Instance,
    Skip,
    Skipped,
)


@dataclass(frozen=True)
class Test:
    """One test of the suite.

    Attributes:
        file: The file that it is collected from, relative to the root.
        classes: Its class, with ``::`` between nested ones; empty for a function.
        name: Name of the method or function.
        parameters: Identifier of its parameters; None without any, or if they are not known.
        group: The column of the result that it counts for.
        defined_in: The file that defines it, which is that of a base class for an inherited test.
        lines: First and last line there, decorators included.
        status: What becomes of it: ``"skipped"`` for certain, ``"conditional"`` if that hangs on what only a run tells.
        skips: Why: one skip if it is certain, else each with its condition.
        source: What says so: the ``"static"`` scan or the ``"truth"`` of a run.
    """

    __test__ = False  # not for pytest, which looks at names

    file: str
    classes: str
    name: str
    parameters: str | None
    group: str
    defined_in: str
    lines: tuple[int, int]
    status: Literal["ran", "skipped", "conditional"]
    skips: tuple[Skip, ...] = ()
    source: Literal["static", "truth"] = "static"

    @property
    def id(self) -> str:
        """The identifier that pytest has for it."""
        parameters = "" if self.parameters is None else f"[{self.parameters}]"
        return "::".join(filter(None, (self.file, self.classes, self.name + parameters)))


class Collector:
    """Collects the tests of files, and says what skips them."""

    def __init__(self, suite: Suite) -> None:
        self._suite, self._fixtures = suite, Fixtures(suite)
        self._class_marks: dict[int, tuple[Any, ...]] = {}

    def names_in(self, module: Module) -> list[tuple[str, Function]]:
        """Returns the names of all test functions that a file itself defines, those of its mixins included."""
        found: dict[str, Function] = {}
        for value in list(module.frame.names.values()):
            if isinstance(value, Class):
                names = {n: self._suite.member(value, n) for n in value.body.names if n.startswith("test")}
                for name, member in names.items():
                    if member is not None and isinstance(member[0], Function):
                        found.setdefault(name, member[0])
            elif isinstance(value, Function) and not isinstance(value.node, ast.Lambda) and value.node.name.startswith("test"):
                found.setdefault(value.node.name, value)
        return list(found.items())

    def tests(self, module: Module) -> Iterator[Test]:
        """Yields the tests of a file in the order of its names."""
        for name in list(module.frame.names):
            value = module.frame.names[name]
            if isinstance(value, Imported):
                if not name.lower().startswith("test") and "Test" not in name:
                    continue
                value = self._suite.look_up(value)
            if isinstance(value, Class):
                yield from self._of_class(module, name, (value,))
            elif isinstance(value, Function) and name.startswith("test"):
                yield from self._of_function(module, name, value, (), None)

    def _of_class(self, module: Module, name: str, path: tuple[Class, ...]) -> Iterator[Test]:
        cls, suite = path[-1], self._suite
        test_case = suite.is_test_case(cls)
        if not (test_case or name.startswith("Test")) or self._is_off(cls):
            return
        if not test_case and suite.member(cls, "__init__") is not None:
            return  # pytest does not collect it
        seen: set[str] = set()
        for base in suite.order(cls):
            for member in list(base.body.names) if isinstance(base, Class) else ():
                if member in seen:
                    continue
                seen.add(member)
                value = base.body.names[member]
                if isinstance(value, Imported):
                    value = suite.look_up(value)
                if isinstance(value, Bound):
                    value = value.function
                if isinstance(value, Function) and member.startswith("test"):
                    yield from self._of_function(module, member, value, path, base)
                elif isinstance(value, Class) and not test_case:
                    yield from self._of_class(module, member, (*path, value))

    def _is_off(self, cls: Class) -> bool:
        found = self._suite.member(cls, "__test__")
        return found is not None and found[0] is False

    def _of_function(
        self, module: Module, name: str, value: Function, path: tuple[Class, ...], owner: Class | None
    ) -> Iterator[Test]:
        function = self._suite.decorated(value)
        if any(getattr(mark, "name", "") == "pytest.fixture" for mark in function.marks):
            return
        cls = path[-1] if path else None
        test_case = cls is not None and self._suite.is_test_case(cls)
        marks = (*function.marks, *(mark for outer in reversed(path) for mark in self._marks_of(outer)))
        marks = (*marks, module.frame.names.get("pytestmark", ()))
        first = min([value.node.lineno, *(d.lineno for d in getattr(value.node, "decorator_list", ()))])
        for variant in [Variant()] if test_case else variants(marks):
            skips = tuple(self._skips(module, function, path, owner, test_case, marks, variant))
            skips = tuple(skip if skip.file else Skip(skip.reason, value.frame.file, first, skip.condition) for skip in skips)
            certain = tuple(skip for skip in skips if not skip.condition)
            yield Test(
                file=module.file,
                classes="::".join(cls.name for cls in path),
                name=name,
                parameters=variant.identifier,
                group=self._suite.layout.group_of(module.file),
                defined_in=value.frame.file,
                lines=(first, value.node.end_lineno or first),
                status="skipped" if certain else "conditional" if skips else "ran",
                skips=certain or skips,
            )

    def _marks_of(self, cls: Class) -> tuple[Any, ...]:
        """The marks of a class and of its bases, as pytest gathers them."""
        if id(cls) not in self._class_marks:
            marks: list[Any] = []
            for base in reversed(self._suite.order(cls)):
                if isinstance(base, Class):
                    marks += [base.body.names.get("pytestmark", ()), *self._suite.marks_of_class(base)]
            self._class_marks[id(cls)] = tuple(marks)
        return self._class_marks[id(cls)]

    def _skips(
        self,
        module: Module,
        function: Function,
        path: tuple[Class, ...],
        owner: Class | None,
        test_case: bool,
        marks: tuple[Any, ...],
        variant: Variant,
    ) -> Iterator[Skip]:
        """Yields what skips a test, up to the first skip that is certain."""
        for skip in self._in_order(module, function, path, owner, test_case, marks, variant):
            yield skip
            if not skip.condition:
                return

    def _in_order(
        self,
        module: Module,
        function: Function,
        path: tuple[Class, ...],
        owner: Class | None,
        test_case: bool,
        marks: tuple[Any, ...],
        variant: Variant,
    ) -> Iterator[Skip]:
        if module.skip is not None:
            yield module.skip
        yield from module.notes
        if variant.empty is not None:
            yield variant.empty
        yield from pytest_skips(self._suite, (*marks, *variant.marks), module.frame)
        for cls in reversed(path):
            for base in self._suite.order(cls):
                if isinstance(base, Class):
                    yield from other_skips(self._suite.marks_of_class(base), by_unittest=test_case)
        yield from other_skips((*function.marks, *variant.marks))
        yield from other_skips(unpacked_values(module.frame.names.get("pytestmark", ())), by_unittest=False)
        yield from self._skips_of_run(module, function, path, owner, test_case, marks, variant)

    def _skips_of_run(
        self,
        module: Module,
        function: Function,
        path: tuple[Class, ...],
        owner: Class | None,
        test_case: bool,
        marks: tuple[Any, ...],
        variant: Variant,
    ) -> Iterator[Skip]:
        """Follows set-up, fixtures and body of a test, as far as they may skip."""
        suite = self._suite
        cls = path[-1] if path else None
        receiver = () if cls is None else (Instance(cls),)
        steps = [*self._set_up_module(module, path), *self._set_up(cls, test_case, before_fixtures=True)]
        wanted = [name for mark, _ in unpacked(marks) for name in _used(mark)]
        if not test_case:
            wanted += [name for name in requested(function, cls is not None) if name not in variant.values]
        for fixture in self._fixtures.before(module.file, module.frame, cls, wanted):
            steps.append((fixture.function, receiver if fixture.owner else (), {}, fixture.owner))
        steps += self._set_up(cls, test_case, before_fixtures=False)
        if not (test_case and isinstance(function.node, ast.AsyncFunctionDef) and not self._awaits(cls)):
            steps.append((function, receiver if owner is not None else (), variant.values, owner))
        suite.notes = []
        for step, args, values, step_owner in steps:
            if not suite.may_skip(step):
                continue
            is_static = any(ast.unparse(d) == "staticmethod" for d in getattr(step.node, "decorator_list", ()))
            try:
                suite.run(step, () if is_static else args, values, step_owner)
            except Skipped as skipped:
                yield from suite.notes
                yield skipped.skip
                return
        yield from suite.notes

    def _awaits(self, cls: Class | None) -> bool:
        """Whether unittest runs the asynchronous tests of a class; else it makes a coroutine and leaves it."""
        bases = self._suite.order(cls) if cls is not None else ()
        return any(isinstance(base, External) and base.name != "unittest.TestCase" and "object" not in base.name for base in bases)

    def _set_up_module(self, module: Module, path: tuple[Class, ...]) -> Iterator[tuple[Any, ...]]:
        names = ("setUpModule", "setup_module") if path else ("setUpModule", "setup_module", "setup_function")
        for name in names:
            value = module.frame.names.get(name)
            if isinstance(value, Function):
                yield value, (UNKNOWN,) if value.node.args.args else (), {}, None

    def _set_up(self, cls: Class | None, test_case: bool, before_fixtures: bool) -> Iterator[tuple[Any, ...]]:
        if cls is None:
            return
        names = ("setUpClass",) if test_case else ("setup_class",)
        if not before_fixtures:
            names = ("setUp", "asyncSetUp") if test_case else ("setup_method",)
        for name in names:
            found = self._suite.member(cls, name)
            if found is not None and isinstance(found[0], Function):
                receiver = cls if before_fixtures else Instance(cls)
                yield self._suite.decorated(found[0]), (receiver,), {}, found[1]


def unpacked_values(marks: Any) -> Iterator[Any]:
    """Yields the single marks of what ``pytestmark`` holds."""
    return (mark for mark, _ in unpacked([marks]))


def _used(mark: Any) -> tuple[str, ...]:
    used = isinstance(mark, Applied) and mark.name == "pytest.mark.usefixtures"
    return tuple(name for name in mark.args if isinstance(name, str)) if used else ()
