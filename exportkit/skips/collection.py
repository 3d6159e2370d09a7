"""Takes a test file and gives the tests that pytest would collect from it, each with the verdict of the static scan.

A test comes once for each class that has or inherits it, and once for each of its known parameters.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from exportkit.skips.fixtures import Fixture, Fixtures, requested
from exportkit.skips.marks import other_skips, pytest_skips, unpacked
from exportkit.skips.modules import Module
from exportkit.skips.parameters import Variant, variants
from exportkit.skips.suite import Suite
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


@dataclass
class _Place:
    """A class of a test file, or the file itself, with what all of its tests share."""

    module: Module
    path: tuple[Class, ...]
    test_case: bool
    marks: tuple[Any, ...]
    classes: str
    group: str
    wanted: tuple[str, ...]  # fixtures that its marks ask for
    skips: tuple[Skip, ...] | None = None
    decorators: tuple[Skip, ...] | None = None
    set_up: tuple[Skip, ...] | None = None
    set_up_method: tuple[Skip, ...] | None = None
    fixtures: tuple[Fixture, ...] | None = None


class Collector:
    """Collects the tests of files, and says what skips them."""

    def __init__(self, suite: Suite) -> None:
        self._suite, self._fixtures = suite, Fixtures(suite)
        self._lines: dict[int, tuple[int, int]] = {}
        self._followed: dict[int, tuple[Skip, ...]] = {}

    def names_in(self, module: Module) -> list[tuple[str, Function]]:
        """Returns the names of all test functions that a file itself defines, those of its mixins included."""
        found: dict[str, Function] = {}
        for value in list(module.frame.names.values()):
            if isinstance(value, Class):
                names = {n: self._suite.member(value, n) for n in value.body.names if n.startswith("test")}
                for name, member in names.items():
                    if member is not None and isinstance(member[0], Function):
                        found.setdefault(name, member[0])
            elif (
                isinstance(value, Function)
                and not isinstance(value.node, ast.Lambda)
                and value.node.name.startswith("test")
            ):
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
                yield from self._of_function(self._place(module, (), False), name, value, None)

    def _of_class(self, module: Module, name: str, path: tuple[Class, ...]) -> Iterator[Test]:
        cls, suite = path[-1], self._suite
        test_case = suite.is_test_case(cls)
        if not (test_case or name.startswith("Test")) or self._is_off(cls):
            return
        if not test_case and suite.member(cls, "__init__") is not None:
            return  # pytest does not collect it
        place, seen = self._place(module, path, test_case), set[str]()
        for base in suite.order(cls):
            if not isinstance(base, Class):
                continue
            for member, held in list(base.body.names.items()):
                if member in seen or (test_case and not member.startswith("test")):
                    continue
                seen.add(member)
                value = suite.look_up(held) if isinstance(held, Imported) else held
                if isinstance(value, Bound):
                    value = value.function
                if isinstance(value, Function) and member.startswith("test"):
                    yield from self._of_function(place, member, value, base)
                elif isinstance(value, Class) and not test_case:
                    yield from self._of_class(module, member, (*path, value))

    def _place(self, module: Module, path: tuple[Class, ...], test_case: bool) -> _Place:
        marks = [mark for outer in reversed(path) for mark in self._marks_of(outer)]
        marks.append(module.frame.names.get("pytestmark", ()))
        group = self._suite.layout.group_of(module.file)
        classes = "::".join(cls.name for cls in path)
        return _Place(module, path, test_case, tuple(marks), classes, group, _wanted(marks))

    def _is_off(self, cls: Class) -> bool:
        found = self._suite.member(cls, "__test__")
        return found is not None and found[0] is False

    def _of_function(self, place: _Place, name: str, value: Function, owner: Class | None) -> Iterator[Test]:
        function = self._suite.decorated(value)
        if any(getattr(mark, "name", "") == "pytest.fixture" for mark in function.marks):
            return
        for variant in _NO_VARIANTS if place.test_case else variants((*function.marks, *place.marks)):
            skips = tuple(_up_to_certain(self._skips(place, function, owner, variant)))
            lines = self._lines_of(value)
            if any(not skip.file for skip in skips):  # a mark without a call has no place of its own
                skips = tuple(s if s.file else Skip(s.reason, value.frame.file, lines[0], s.condition) for s in skips)
            certain = skips[-1:] if skips and not skips[-1].condition else ()
            yield Test(
                file=place.module.file,
                classes=place.classes,
                name=name,
                parameters=variant.identifier,
                group=place.group,
                defined_in=value.frame.file,
                lines=lines,
                status="skipped" if certain else "conditional" if skips else "ran",
                skips=certain or skips,
            )

    def _lines_of(self, function: Function) -> tuple[int, int]:
        node = function.node
        if id(node) not in self._lines:
            first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])
            self._lines[id(node)] = (first, node.end_lineno or first)
        return self._lines[id(node)]

    def _marks_of(self, cls: Class) -> tuple[Any, ...]:
        """The marks of a class and of its bases, as pytest gathers them."""
        marks: list[Any] = []
        for base in reversed(self._suite.order(cls)):
            if isinstance(base, Class):
                marks += [base.body.names.get("pytestmark", ()), *self._suite.marks_of_class(base)]
        return tuple(marks)

    # What skips a test, in the order in which pytest and unittest decide

    def _skips(self, place: _Place, function: Function, owner: Class | None, variant: Variant) -> Iterator[Skip]:
        if place.test_case and not function.marks:
            if place.skips is None:  # the same for each of its tests that has no marks of its own
                place.skips = tuple(_up_to_certain(self._before_body(place, function, variant)))
            yield from place.skips
        else:
            yield from self._before_body(place, function, variant)
        awaited = not place.test_case or not isinstance(function.node, ast.AsyncFunctionDef)
        if self._suite.may_skip(function) and (awaited or self._awaits(place.path[-1])):
            yield from self._run(place, function, owner, variant.values)

    def _before_body(self, place: _Place, function: Function, variant: Variant) -> Iterator[Skip]:
        """What skips before the test itself runs: marks and decorators, set-up, fixtures."""
        if place.module.skip is not None:
            yield place.module.skip
        yield from place.module.notes
        if variant.empty is not None:
            yield variant.empty
        yield from pytest_skips(self._suite, (*function.marks, *place.marks, *variant.marks), place.module.frame)
        yield from self._of_class_decorators(place)
        yield from other_skips((*function.marks, *variant.marks))
        if place.set_up is None:
            place.set_up = tuple(_up_to_certain(self._set_up(place)))
        yield from place.set_up
        yield from self._of_fixtures(place, function, variant)
        if place.set_up_method is None:
            names = ("setUp", "asyncSetUp") if place.test_case else ("setup_method",)
            place.set_up_method = tuple(self._of_methods(place, names))
        yield from place.set_up_method

    def _of_class_decorators(self, place: _Place) -> tuple[Skip, ...]:
        if place.decorators is None:
            place.decorators = tuple(self._skips_of_classes(place))
        return place.decorators

    def _skips_of_classes(self, place: _Place) -> Iterator[Skip]:
        for cls in reversed(place.path):
            for base in self._suite.order(cls):
                if isinstance(base, Class):
                    yield from other_skips(self._suite.marks_of_class(base), by_unittest=place.test_case)
        yield from other_skips(place.marks, by_unittest=False)

    def _run(self, place: _Place, function: Function, owner: Class | None, values: dict[str, Any]) -> tuple[Skip, ...]:
        if owner is None or function.is_static:
            if values or function.frame.kind == "function":
                return self._suite.followed(function, (), values, None).skips
            if id(function.node) not in self._followed:  # a fixture is the same for each of its tests
                self._followed[id(function.node)] = self._suite.followed(function, (), {}, None).skips
            return self._followed[id(function.node)]
        receiver = Instance(place.path[-1])
        if values:
            return self._suite.followed(function, (receiver,), values, owner).skips
        return self._suite.outcome(function, receiver.cls, receiver, owner).skips

    def _set_up(self, place: _Place) -> Iterator[Skip]:
        """What skips in the set-up of the module and of the class."""
        for name in ("setUpModule", "setup_module", *(() if place.path else ("setup_function",))):
            value = place.module.frame.names.get(name)
            if isinstance(value, Function) and self._suite.may_skip(value):
                args = (UNKNOWN,) if value.node.args.args else ()
                yield from self._suite.followed(value, args, {}, None).skips
        yield from self._of_methods(place, ("setUpClass",) if place.test_case else ("setup_class",), of_class=True)

    def _of_methods(self, place: _Place, names: tuple[str, ...], of_class: bool = False) -> Iterator[Skip]:
        for name in names if place.path else ():
            cls = place.path[-1]
            found = self._suite.member(cls, name)
            if found is not None and isinstance(found[0], Function):
                method, receiver = self._suite.decorated(found[0]), cls if of_class else Instance(cls)
                if self._suite.may_skip(method):
                    yield from self._suite.outcome(method, cls, receiver, found[1]).skips

    def _of_fixtures(self, place: _Place, function: Function, variant: Variant) -> Iterator[Skip]:
        wanted = [*place.wanted, *_wanted(function.marks)]
        if not place.test_case:
            wanted += [name for name in requested(function, bool(place.path)) if name not in variant.values]
        cls = place.path[-1] if place.path else None
        if not wanted and place.fixtures is None:
            place.fixtures = tuple(self._fixtures.before(place.module.file, place.module.frame, cls, ()))
        found = self._fixtures.before(place.module.file, place.module.frame, cls, wanted) if wanted else place.fixtures
        for fixture in found or ():
            if self._suite.may_skip(fixture.function):
                yield from self._run(place, fixture.function, fixture.owner, {})

    def _awaits(self, cls: Class) -> bool:
        """Whether unittest runs the asynchronous tests of a class; else it makes a coroutine and leaves it."""
        bases = [base.name for base in self._suite.order(cls) if isinstance(base, External)]
        return any(base not in ("unittest.TestCase", "unittest.case.TestCase", "builtins.object") for base in bases)


_NO_VARIANTS = [Variant()]


def _up_to_certain(skips: Iterable[Skip]) -> Iterator[Skip]:
    for skip in skips:
        yield skip
        if not skip.condition:
            return


def _wanted(marks: Iterable[Any]) -> tuple[str, ...]:
    """The fixtures that ``usefixtures`` marks ask for."""
    used = [m for m, _ in unpacked(marks) if isinstance(m, Applied) and m.name == "pytest.mark.usefixtures"]
    return tuple(name for mark in used for name in mark.args if isinstance(name, str))
