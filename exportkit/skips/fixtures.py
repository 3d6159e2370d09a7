"""Takes a test and finds the fixtures that run before it: asked for by name, by ``usefixtures``, or automatic.

Out come functions in the order in which they run, those of ``conftest.py`` files included.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exportkit.skips.externals import FIXTURES
from exportkit.skips.suite import Suite
from exportkit.skips.values import Applied, Class, External, Frame, Function, Imported


@dataclass(frozen=True)
class Fixture:
    """A fixture, and the class that it is a method of."""

    function: Function
    automatic: bool
    owner: Class | None


class Fixtures:
    """The fixtures of a suite, looked up once for each file and class."""

    def __init__(self, suite: Suite) -> None:
        self._suite = suite
        self._found: dict[int, dict[str, Fixture]] = {}

    def before(self, file: str, frame: Frame, cls: Class | None, names: Iterable[str]) -> list[Fixture]:
        """Returns the fixtures that run before a test that asks for ``names``, each after those that it asks for."""
        scopes = list(self._scopes(file, frame, cls))  # the closest first
        automatic = [name for scope in reversed(scopes) for name, fixture in scope.items() if fixture.automatic]
        ordered: dict[str, Fixture] = {}
        for name in (*automatic, *names):
            self._add(name, scopes, ordered, set())
        return list(ordered.values())

    def _add(self, name: str, scopes: list[dict[str, Fixture]], ordered: dict[str, Fixture], asking: set[str]) -> None:
        fixture = next((scope[name] for scope in scopes if name in scope), None)
        if fixture is None or name in ordered or name in asking:
            return
        for argument in requested(fixture.function, method=fixture.owner is not None):
            self._add(argument, scopes, ordered, asking | {name})
        ordered[name] = fixture

    def _scopes(self, file: str, frame: Frame, cls: Class | None) -> Iterator[dict[str, Fixture]]:
        if cls is not None:
            for base in self._suite.order(cls):
                if isinstance(base, Class):
                    yield self._in(base.body, base)
        yield self._in(frame, None)
        folder = (self._suite.root / file).parent
        while folder.is_relative_to(self._suite.root):
            conftest = self._conftest(folder)
            if conftest is not None:
                yield self._in(conftest, None)
            if folder == self._suite.root:
                break
            folder = folder.parent

    def _conftest(self, folder: Path) -> Frame | None:
        path = folder / "conftest.py"
        if path not in self._suite.modules and not path.is_file():
            self._suite.modules[path] = None
        module = self._suite.module(path)
        return module.frame if module is not None else None

    def _in(self, frame: Frame, owner: Class | None) -> dict[str, Fixture]:
        if id(frame) not in self._found:
            found: dict[str, Fixture] = {}
            for name, held in list(frame.names.items()):
                value = self._suite.look_up(held) if _may_import_fixture(held) else held
                if isinstance(value, Function) and self._may_be_fixture(value):
                    function = self._suite.decorated(value)
                    mark = next((mark for mark in function.marks if _is_fixture(mark)), None)
                    if mark is not None:
                        keywords = mark.keywords if isinstance(mark, Applied) else {}
                        alias = keywords.get("name")
                        automatic = keywords.get("autouse") is True
                        found[alias if isinstance(alias, str) else name] = Fixture(function, automatic, owner)
            self._found[id(frame)] = found
        return self._found[id(frame)]

    def _may_be_fixture(self, function: Function) -> bool:
        """Whether the text of a decorator says so; a list of parameters is long, and is not worked out for it."""
        lines = self._suite.by_file[function.frame.file].lines
        return any(
            "fixture" in line
            for decorator in function.decorators
            for line in lines[decorator.lineno - 1 : decorator.end_lineno]
        )


def requested(function: Function, method: bool) -> list[str]:
    """Returns the names of the arguments that pytest fills with fixtures."""
    arguments = function.node.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    without_default = names[: len(names) - len(arguments.defaults)] if arguments.defaults else names
    keyword_only = [
        a.arg for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=False) if default is None
    ]
    return [*without_default[1 if method else 0 :], *keyword_only]


def _may_import_fixture(value: Any) -> bool:
    return isinstance(value, Imported) and value.name is not None and (value.level > 0 or "fixture" in value.module)


def _is_fixture(mark: Any) -> bool:
    return isinstance(mark, Applied | External) and mark.name in FIXTURES
