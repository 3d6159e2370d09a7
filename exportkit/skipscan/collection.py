"""Collects the tests of a file as pytest does, and says for each of them what skips it.

A test is listed once for each class that defines or inherits it, and once for each of its known parameters.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from exportkit.skipscan.marks import Variant, decorator_skips, pytest_skips, variants
from exportkit.skipscan.result import Test
from exportkit.skipscan.suite import Module, Suite
from exportkit.skipscan.values import (
    UNKNOWN,
    Bound,
    Class,
    External,
    ExternalCall,
    Function,
    Imported,
    Instance,
    Skip,
    flattened,
)


@dataclass(frozen=True)
class _Fixture:
    function: Function
    automatic: bool
    is_method: bool


@dataclass
class _Container:
    """A class of a test file, or the file itself, with what all of its tests share."""

    module: Module
    path: tuple[Class, ...]
    is_test_case: bool
    marks: list[Any]
    decorators: list[Skip]
    set_up: list[Skip]
    set_up_method: list[Skip]


class Collector:
    """Collects the tests of files, and says what skips them."""

    def __init__(self, suite: Suite) -> None:
        self._suite = suite
        self._fixtures: dict[int, dict[str, _Fixture]] = {}

    def names_in(self, module: Module) -> set[str]:
        """Returns the names of all test functions in a base file, including those of its mixins."""
        classes = [value for value in module.scope.names.values() if isinstance(value, Class)]
        members = [(name, self._suite.member(cls, name)) for cls in classes for name in cls.body.names]
        functions = [*module.scope.names.items(), *members]
        return {name for name, value in functions if isinstance(value, Function) and name.startswith("test")}

    def tests(self, module: Module) -> Iterator[Test]:
        """Yields the tests of a file in the order of its names."""
        container = None
        for name, bound in list(module.scope.names.items()):
            is_imported_test = isinstance(bound, Imported) and "test" in name.lower()
            value = self._suite.name(name, module.scope) if is_imported_test else bound
            if isinstance(value, Class):
                yield from self._of_class(module, name, (value,))
            elif isinstance(value, Function) and name.startswith("test"):
                container = container or self._container(module, (), False)
                yield from self._of_function(container, name, value)

    def _of_class(self, module: Module, name: str, path: tuple[Class, ...]) -> Iterator[Test]:
        cls, suite = path[-1], self._suite
        is_test_case = suite.is_test_case(cls)
        is_plain = name.startswith("Test") and suite.member(cls, "__init__") is UNKNOWN
        if not (is_test_case or is_plain) or suite.member(cls, "__test__") is False:
            return
        container = None
        members = {member: base for base in reversed(suite.suite_classes(cls)) for member in base.body.names}
        for member, base in members.items():
            value = suite.member_of(base.body, member)
            value = value.function if isinstance(value, Bound) else value
            if isinstance(value, Function) and member.startswith("test"):
                container = container or self._container(module, path, is_test_case)
                yield from self._of_function(container, member, value)
            elif isinstance(value, Class) and not is_test_case:
                yield from self._of_class(module, member, (*path, value))

    def _container(self, module: Module, path: tuple[Class, ...], is_test_case: bool) -> _Container:
        suite, decorators, marks = self._suite, list[Skip](), list[Any]()
        for cls in reversed(path):
            for base in suite.suite_classes(cls):
                decorators += decorator_skips(suite.marks_of(base), by_unittest=is_test_case)
            for base in reversed(suite.suite_classes(cls)):
                marks += [base.body.names.get("pytestmark", ()), *suite.marks_of(base)]
        marks.append(module.scope.names.get("pytestmark", ()))
        set_up = [
            skip
            for name in ("setUpModule", "setup_module", *(() if path else ("setup_function",)))
            if isinstance(value := module.scope.names.get(name), Function)
            for skip in suite.skips_of(value, None, {})
        ]
        set_up += self._of_methods(path, ("setUpClass",) if is_test_case else ("setup_class",), of_class=True)
        set_up_method = self._of_methods(path, ("setUp", "asyncSetUp") if is_test_case else ("setup_method",))
        return _Container(module, path, is_test_case, marks, decorators, set_up, set_up_method)

    def _of_methods(self, path: tuple[Class, ...], names: tuple[str, ...], of_class: bool = False) -> list[Skip]:
        skips: list[Skip] = []
        for cls in path[-1:]:
            for name in names:
                method = self._suite.member(cls, name)
                if isinstance(method, Function):
                    receiver = cls if of_class else Instance(cls)
                    skips += self._suite.skips_of(self._suite.decorated(method), receiver, {})
        return skips

    def _of_function(self, container: _Container, name: str, definition: Function) -> Iterator[Test]:
        function, file = self._suite.decorated(definition), container.module.file
        node = definition.node
        lines = (min([node.lineno, *(d.lineno for d in node.decorator_list)]), node.end_lineno or node.lineno)
        marks = [*function.marks, *container.marks]
        for variant in [Variant()] if container.is_test_case else variants(marks):
            skips = tuple(_up_to_certain(self._skips(container, function, variant)))
            # A mark without a call has no location of its own.
            skips = tuple(s if s.file else Skip(s.reason, definition.scope.file, lines[0], s.condition) for s in skips)
            certain = skips[-1:] if skips and not skips[-1].condition else ()
            yield Test(
                file=file,
                classes="::".join(cls.name for cls in container.path),
                name=name,
                parameters=variant.identifier,
                group=self._suite.layout.group_of(file),
                defined_in=definition.scope.file,
                lines=lines,
                status="skipped" if certain else "conditional" if skips else "ran",
                skips=certain or skips,
            )

    def _skips(self, container: _Container, function: Function, variant: Variant) -> Iterator[Skip]:
        """Yields what skips a test, in the order in which pytest and unittest decide."""
        module = container.module
        if module.skip is not None:
            yield module.skip
        yield from module.conditional
        if variant.empty is not None:
            yield variant.empty
        yield from pytest_skips(self._suite, (*function.marks, *container.marks, *variant.marks), module.scope)
        yield from container.decorators
        yield from decorator_skips((*function.marks, *variant.marks))
        yield from container.set_up
        yield from self._of_fixtures(container, function, variant)
        yield from container.set_up_method
        cls = container.path[-1] if container.path else None
        is_run = cls is None or not isinstance(function.node, ast.AsyncFunctionDef) or self._awaits(cls)
        if is_run:
            receiver = None if cls is None or "staticmethod" in function.kinds else Instance(cls)
            yield from self._suite.skips_of(function, receiver, variant.values)

    def _awaits(self, cls: Class) -> bool:
        """Returns whether asynchronous tests of a class run; ``unittest.TestCase`` makes a coroutine and leaves it."""
        bases = {base.name for base in self._suite.order(cls) if isinstance(base, External)}
        return not bases <= {"unittest.TestCase", "unittest.case.TestCase"}

    # Fixtures

    def _of_fixtures(self, container: _Container, function: Function, variant: Variant) -> Iterator[Skip]:
        marks = [mark for mark in flattened([*container.marks, *function.marks]) if isinstance(mark, ExternalCall)]
        wanted = [name for mark in marks if mark.name == "pytest.mark.usefixtures" for name in mark.args]
        if not container.is_test_case:
            wanted += [name for name in _requested(function, bool(container.path)) if name not in variant.values]
        scopes = list(self._scopes(container))
        automatic = [name for scope in reversed(scopes) for name, fixture in scope.items() if fixture.automatic]
        cls = container.path[-1] if container.path else None
        done: set[str] = set()
        waiting = [*reversed(wanted), *reversed(automatic)]
        while waiting:
            name = waiting.pop()
            fixture = next((scope[name] for scope in scopes if name in scope), None)
            if fixture is None or name in done:
                continue
            done.add(name)
            needed = [other for other in _requested(fixture.function, fixture.is_method) if other not in done]
            waiting += reversed(needed)
            receiver = Instance(cls) if fixture.is_method and cls is not None else None
            yield from self._suite.skips_of(fixture.function, receiver, {})

    def _scopes(self, container: _Container) -> Iterator[dict[str, _Fixture]]:
        """Yields the fixtures by name that a test can request, the closest definitions first."""
        suite = self._suite
        for cls in container.path[-1:]:
            for base in suite.suite_classes(cls):
                yield self._defined_in(base.body.names, base)
        yield self._defined_in(container.module.scope.names, None)
        file = suite.root / container.module.file
        for folder in file.parents:
            if folder.is_relative_to(suite.root) and (folder / "conftest.py").is_file():
                conftest = suite.module(folder / "conftest.py")
                if conftest is not None:
                    yield self._defined_in(conftest.scope.names, None)

    def _defined_in(self, names: dict[str, Any], owner: Class | None) -> dict[str, _Fixture]:
        key = id(names)
        if key not in self._fixtures:
            found = self._fixtures[key] = {}
            for name, bound in list(names.items()):
                may_be_fixture = isinstance(bound, Imported) and (bound.level or "fixture" in bound.module)
                value = self._suite.look_up(bound) if may_be_fixture else bound
                if not isinstance(value, Function) or not any(
                    "fixture" in ast.unparse(d) for d in value.node.decorator_list
                ):
                    continue
                function = self._suite.decorated(value)
                for mark in function.marks:
                    if isinstance(mark, External | ExternalCall) and mark.name.endswith(".fixture"):
                        keywords = mark.keywords if isinstance(mark, ExternalCall) else {}
                        alias = keywords.get("name")
                        automatic = keywords.get("autouse") is True
                        found[alias if isinstance(alias, str) else name] = _Fixture(
                            function, automatic, owner is not None
                        )
        return self._fixtures[key]


def _requested(function: Function, is_method: bool) -> list[str]:
    """Returns the names of the arguments that pytest fills with fixtures."""
    arguments = function.node.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    return names[int(is_method) : len(names) - len(arguments.defaults)]


def _up_to_certain(skips: Iterable[Skip]) -> Iterator[Skip]:
    for skip in skips:
        yield skip
        if not skip.condition:
            return
