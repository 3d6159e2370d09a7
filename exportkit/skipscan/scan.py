"""Scans a test suite: collects the tests of its files as pytest does, and says which of them are skipped, and why.

A test is listed once for each class that defines or inherits it, and once for each of its known parameters.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from exportkit.errors import InvalidRequestError
from exportkit.skipscan.layout import LAYOUTS, Layout, layout_of
from exportkit.skipscan.marks import Variant, decorator_skips, pytest_skips, variants
from exportkit.skipscan.pytest_run import Merger, read_run
from exportkit.skipscan.result import Difference, Row, SkipScan, Test, most_skipped_first
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


def scan_skipped_tests(
    root: str | Path = ".",
    layout: Layout | str | None = None,
    *,
    marks: Mapping[str, str | None] | None = None,
    truth: str | Path | Sequence[str | Path] = (),
    progress: Callable[[int, int], None] | None = None,
) -> SkipScan:
    """Finds the tests of a pytest or unittest suite that are skipped, and why, from the source alone.

    The suite is not imported. Decorators, marks, set-up methods, fixtures, helper functions and test bodies are
    followed as far as possible without running them. Conditions are evaluated for the interpreter, platform and
    packages of the scan itself; one that is only known at run time is reported as a condition, not as a skip.

    Args:
        root: The root of the suite, where its absolute imports start.
        layout: How the suite is laid out: a `Layout`, ``"pytest"`` or ``"transformers"``; detected if None.
        marks: Decorators known by name, such as ``{"slow": "test is slow"}``, in addition to those of the layout.
        truth: The output of ``pytest -v -rs``, or its JUnit XML: the result is then that of the run, and
            ``differences`` lists where the scan disagrees.
        progress: Called with the number of scanned files and the total.

    Returns:
        The scan, with a row for each test and its groups, which are files or models.

    Raises:
        InvalidRequestError: The folder does not exist, or has no test files.

    Example:
        >>> scan = scan_skipped_tests("tests")           # doctest: +SKIP
        >>> print(scan.row("test_forward"))              # doctest: +SKIP
    """
    folder = Path(root).resolve()
    if not folder.is_dir():
        raise InvalidRequestError("No such folder.", where=str(root), hint="give the root of the test suite.")
    if isinstance(layout, str) and layout not in LAYOUTS:
        raise InvalidRequestError("No such layout.", expected=" or ".join(LAYOUTS), got=layout)
    chosen = LAYOUTS[layout] if isinstance(layout, str) else layout or layout_of(folder)
    if marks:
        chosen = replace(chosen, marks={**marks, **{k: v for k, v in chosen.marks.items() if k not in marks}})
    files = chosen.test_files(folder)
    if not files:
        expected = " or ".join(chosen.patterns)
        raise InvalidRequestError("No test files found.", where=str(folder / chosen.folder), expected=expected)
    runs = [read_run(path) for path in ([truth] if isinstance(truth, str | Path) else truth)]
    suite = Suite(folder, chosen)
    tests, bases = _collect(suite, files, progress)
    differences: list[Difference] = []
    for run in runs:
        tests, found = Merger(tests, run, folder, chosen.group_of).merged()
        differences += found
    groups = sorted({chosen.group_of(path.relative_to(folder).as_posix()) for path in files})
    rows = most_skipped_first(_rows(tests, bases, groups, bool(chosen.bases)))
    return SkipScan(str(root), rows, tuple(tests), tuple(differences), tuple(suite.problems))


def _collect(
    suite: Suite, files: Sequence[Path], progress: Callable[[int, int], None] | None
) -> tuple[Sequence[Test], dict[str, str]]:
    """Returns the tests of all files, and the origins of the tests in the base files."""
    collector, tests, bases = Collector(suite), list[Test](), dict[str, str]()
    for file, origin in suite.layout.bases.items():
        module = suite.module(suite.root / file) if (suite.root / file).is_file() else None
        if module is not None:
            bases = dict.fromkeys(collector.names_in(module), origin) | bases
    for path in files:
        suite.module(path)
    suite.read_what_may_skip()
    for done, path in enumerate(files, 1):
        module = suite.module(path)
        if module is not None:
            tests += collector.tests(module)
        if progress is not None:
            progress(done, len(files))
    return tests, bases


def _rows(tests: Sequence[Test], bases: Mapping[str, str], groups: Sequence[str], has_bases: bool) -> Iterator[Row]:
    by_name: dict[str, dict[str, list[Test]]] = {name: {} for name in bases}
    for test in tests:
        if not has_bases or test.name in bases:
            by_name.setdefault(test.name, {}).setdefault(test.group, []).append(test)
    for name, by_group in by_name.items():
        files = sorted({test.defined_in for found in by_group.values() for test in found})
        origin = bases.get(name) or (files[0] if len(files) == 1 else f"{len(files)} files")
        yield _row(name, origin, by_group, groups if has_bases else sorted(by_group))


def _row(name: str, origin: str, by_group: Mapping[str, Sequence[Test]], groups: Sequence[str]) -> Row:
    skipped = {g: [test for test in by_group.get(g, ()) if test.status == "skipped"] for g in groups}
    conditional = {g: [test for test in by_group.get(g, ()) if test.status == "conditional"] for g in groups}
    return Row(
        test=name,
        origin=origin,
        ran=tuple(g for g in groups if not skipped[g]),
        skipped=tuple(g for g in groups if skipped[g]),
        reasons=tuple(f"{g}: {_reasons(skipped[g])}" for g in groups if skipped[g]),
        partly=tuple(g for g in groups if 0 < len(skipped[g]) < len(by_group.get(g, ()))),
        conditional=tuple(f"{g}: {_reasons(conditional[g])}" for g in groups if conditional[g] and not skipped[g]),
        without=tuple(g for g in groups if g not in by_group),
    )


def _reasons(tests: Sequence[Test]) -> str:
    skips = [skip for test in tests for skip in test.skips]
    texts = [f"{skip.reason} [if {skip.condition}]".strip() if skip.condition else skip.reason for skip in skips]
    return "; ".join(dict.fromkeys(texts))


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
    fixtures: list[dict[str, _Fixture]]


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
        fixtures = list(self._fixtures_of(module, path))
        return _Container(module, path, is_test_case, marks, decorators, set_up, set_up_method, fixtures)

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
        yield from module.skips
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
        scopes = reversed(container.fixtures)
        automatic = [name for scope in scopes for name, fixture in scope.items() if fixture.automatic]
        cls = container.path[-1] if container.path else None
        done: set[str] = set()
        waiting = [*reversed(wanted), *reversed(automatic)]
        while waiting:
            name = waiting.pop()
            fixture = next((scope[name] for scope in container.fixtures if name in scope), None)
            if fixture is None or name in done:
                continue
            done.add(name)
            needed = [other for other in _requested(fixture.function, fixture.is_method) if other not in done]
            waiting += reversed(needed)
            receiver = Instance(cls) if fixture.is_method and cls is not None else None
            yield from self._suite.skips_of(fixture.function, receiver, {})

    def _fixtures_of(self, module: Module, path: tuple[Class, ...]) -> Iterator[dict[str, _Fixture]]:
        """Yields the fixtures by name that tests can request, the closest definitions first."""
        suite = self._suite
        for cls in path[-1:]:
            for base in suite.suite_classes(cls):
                yield self._defined_in(base.body.names, base)
        yield self._defined_in(module.scope.names, None)
        file = suite.root / module.file
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
