"""Reads the outcome of a pytest run and merges it into the tests of a scan, noting every difference.

The formats are those of pytest 7 to 9: https://docs.pytest.org/en/stable/how-to/output.html. Plain ``-rs`` gives the
locations of skips; ``-v -rs``, ``-rs --no-fold-skipped`` and JUnit XML name the tests.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple

from exportkit.errors import DestinationError, InvalidRequestError
from exportkit.skipscan.result import Difference, Test
from exportkit.skipscan.values import Skip

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_STATUS = "PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS"
_ERROR = r"(?:Skipped|unittest\.case\.SkipTest): ?"
_VERBOSE = re.compile(rf"^(?P<id>\S+\.py::.+?) (?P<status>{_STATUS})(?: \((?P<reason>.*)\))?\s*(?:\[\s*\d+%\])?$")
_WORKER = re.compile(rf"^\[gw\d+\](?: \[\s*\d+%\])? (?P<status>{_STATUS}) (?P<id>\S+\.py::.+?)(?P<reason>)\s*$")
_FOLDED = re.compile(rf"^SKIPPED \[(?P<times>\d+)\] (?P<file>.+?)(?::(?P<line>\d+))?: ?(?:{_ERROR})?(?P<reason>.*)$")
_UNFOLDED = re.compile(rf"^SKIPPED (?P<id>\S+\.py(?:::.+?)?) - (?:{_ERROR})?(?P<reason>.*)$")
_ENTRY = re.compile(
    rf"^(?:{_STATUS}|SUBSKIPPED|SUBFAILED|SUBPASSED|XFAIL at setup of) |^=+ |^\d+ (passed|failed|skipped)"
)
_TOTALS = re.compile(r"\b\d+ (passed|failed|xfailed)\b.* in [\d.]+s|<testsuite")
_MODULE_SKIP = re.compile(rf"^\('.*', \d+, ['\"]{_ERROR}(?P<reason>.*)['\"]\)$", re.DOTALL)
_EXPANDED = re.compile(r"_\d+(_.*)?$")  # parameterized.expand turns test_x into test_x_0, test_x_1_name


class Location(NamedTuple):
    """A line of the short summary: the number of tests skipped at a location; line 0 for a mark of a class."""

    file: str
    line: int
    times: int
    reason: str


@dataclass
class PytestRun:
    """The outcome of a pytest run.

    Attributes:
        skipped: Names of the skipped tests, and their reasons.
        ran: Names of the tests that ran.
        modules: Files that were skipped as a whole, and the reasons.
        locations: Locations of skips, for a run that does not name the tests.
        only_skips: Whether only skipped tests are named, so that all others ran.
        dotted: Whether names are those of JUnit XML: ``package.module.Class::test``.
    """

    skipped: dict[str, str] = field(default_factory=dict)
    ran: set[str] = field(default_factory=set)
    modules: dict[str, str] = field(default_factory=dict)
    locations: list[Location] = field(default_factory=list)
    only_skips: bool = False
    dotted: bool = False


def read_run(path: str | Path) -> PytestRun:
    """Returns the outcome that the output of pytest, or its JUnit XML, describes.

    Raises:
        DestinationError: The file cannot be read.
        InvalidRequestError: The file is neither of these.
    """
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise DestinationError("The pytest result cannot be read.", where=str(path), got=error.strerror) from error
    run = _from_xml(text, str(path)) if text.lstrip().startswith("<") else _from_output(text)
    # A test with a skipped subtest, or one that skips in its teardown, has two outcomes: it ran.
    run.skipped = {test: reason for test, reason in run.skipped.items() if test not in run.ran}
    if not (run.skipped or run.ran or run.modules or run.locations or _TOTALS.search(text)):
        raise InvalidRequestError(
            "Not a pytest result.",
            where=str(path),
            expected="the output of `pytest -v -rs`, or the file of `pytest --junitxml`",
            hint="run `pytest -v -rs tests > result.txt`.",
        )
    return run


def _from_xml(text: str, where: str) -> PytestRun:
    run = PytestRun(dotted=True)
    try:
        cases = list(ET.fromstring(text).iter("testcase"))
    except ET.ParseError as error:
        raise InvalidRequestError("The JUnit XML cannot be parsed.", where=where, got=error) from error
    for case in cases:
        skipped = case.find("skipped")
        module, name = case.get("classname", ""), case.get("name", "")
        if skipped is None or skipped.get("type") == "pytest.xfail":
            run.ran.add(f"{module}::{name}")
        elif module:
            run.skipped[f"{module}::{name}"] = skipped.get("message", "")
        else:
            match = _MODULE_SKIP.match(skipped.text or "")
            run.modules[name] = match["reason"] if match else skipped.get("message", "")
    return run


def _from_output(text: str) -> PytestRun:
    run = PytestRun()
    lines = _COLOUR.sub("", text).splitlines()
    for number, line in enumerate(lines, 1):
        if match := _VERBOSE.match(line) or _WORKER.match(line):
            if match["status"] == "SKIPPED":
                run.skipped[match["id"]] = match["reason"] or ""
            else:
                run.ran.add(match["id"])
        elif match := _FOLDED.match(line):
            reason = _whole(match["reason"], lines[number:])
            run.locations.append(Location(match["file"], int(match["line"] or 0), int(match["times"]), reason))
        elif match := _UNFOLDED.match(line):
            named = run.skipped if "::" in match["id"] else run.modules
            named[match["id"]] = _whole(match["reason"], lines[number:])
            run.only_skips = not run.ran
    return run


def _whole(reason: str, following: Iterable[str]) -> str:
    """Returns a reason with its further lines."""
    lines = [reason]
    for line in following:
        if _ENTRY.match(line):
            break
        lines.append(line)
    return "\n".join(lines)


class Merger:
    """Merges one run into the tests of a scan."""

    def __init__(self, tests: Iterable[Test], run: PytestRun, root: Path, group_of: Callable[[str], str]) -> None:
        self._tests, self._root, self._group_of = tuple(tests), root, group_of
        self._files = {test.file for test in self._tests}
        self._only_skips = run.only_skips
        if run.dotted:
            self._dotted = {file.removesuffix(".py").replace("/", "."): file for file in self._files}
            named, file_of = self._from_dotted, self._file_of_dotted
        else:
            named, file_of = self._from_id, self._file
        self._skipped = {named(test): reason for test, reason in run.skipped.items()}
        self._ran = {named(test) for test in run.ran}
        self._locations = [location._replace(file=self._file(location.file)) for location in run.locations]
        self._modules = {file_of(name): reason for name, reason in run.modules.items()} | self._modules_at_locations()

    def merged(self) -> tuple[tuple[Test, ...], tuple[Difference, ...]]:
        """Returns the tests with the outcome of the run, and the differences from the scan."""
        result: list[Test] = []
        differences: list[Difference] = []
        for before, after in self._by_name() if self._skipped or self._ran else self._by_location():
            result.append(after)
            kind = _kind(before, after)
            if kind is not None:
                scan = "not found" if before is None else before.verdict
                differences.append(Difference(after.id, kind, scan, after.verdict))
        return tuple(result), tuple(differences)

    def _by_name(self) -> Iterator[tuple[Test | None, Test]]:
        """Yields the tests before and after the merge, for a run that names tests."""
        waiting: dict[str, str | None] = {**dict.fromkeys(self._ran), **self._skipped}
        by_start: dict[str, list[str]] = {}
        for test_id in waiting:
            start = test_id.partition("[")[0]
            for name in {start, _EXPANDED.sub("", start)}:
                by_start.setdefault(name, []).append(test_id)
        static = {test.id for test in self._tests}
        for test in self._tests:
            if test.file in self._modules:
                yield test, self._as_run(test, self._modules[test.file])
                continue
            ids = [test.id] if test.id in waiting else []
            if not ids and test.parameters is None:
                ids = [other for other in by_start.get(test.id, ()) if other in waiting and other not in static]
            if not ids:
                yield test, self._as_run(test, None) if self._only_skips else test
            for test_id in ids:
                head, _, parameters = test_id.partition("[")
                name = test.name if parameters else head.rpartition("::")[2]
                before = replace(test, name=name, parameters=parameters[:-1] or test.parameters)
                yield before, self._as_run(before, waiting.pop(test_id))
        for test_id, reason in waiting.items():
            head, _, parameters = test_id.partition("[")
            file, *classes, name = head.split("::")
            if file in self._files:
                status: Literal["ran", "skipped"] = "ran" if reason is None else "skipped"
                skips = () if reason is None else (Skip(reason, file, 0),)
                where = ("::".join(classes), name, parameters[:-1] or None, self._group_of(file), file, (0, 0))
                yield None, Test(file, *where, status, skips, "truth")

    def _as_run(self, test: Test, reason: str | None) -> Test:
        """Returns a test with the outcome of the run; without a reason it ran."""
        if reason is None:
            return replace(test, status="ran", skips=(), source="truth")
        static = test.skips[0] if test.skips else Skip("", test.defined_in, test.lines[0])
        skip = replace(static, reason=self._full_reason(test, reason), condition="")
        return replace(test, status="skipped", skips=(skip,), source="truth")

    def _full_reason(self, test: Test, reason: str) -> str:
        """Returns the whole reason: beside the name of a test, pytest cuts it to the width of the terminal."""
        full = [location.reason for location in self._locations]
        is_cut = reason.endswith("...") or not reason
        start, first_line = reason.removesuffix("..."), test.reason.partition("\n")[0]
        if test.reason in full and (first_line.startswith(start) if is_cut else first_line == reason):
            return test.reason
        if not full or reason in full:
            return reason
        here = [location.reason for location in self._locations if _is_at(test, location)]
        return next((text for text in (*here, *full) if text.startswith(start)), reason)

    def _by_location(self) -> Iterator[tuple[Test, Test]]:
        """Yields the tests before and after the merge, for a run that gives locations of skips."""
        skipped: dict[int, str] = {}
        undecided: set[int] = set()
        for location in self._locations:
            left = [(i, test) for i, test in enumerate(self._tests) if i not in skipped]
            # A skip in a fixture, in a helper or outside the suite is assigned to the tests that the scan expects.
            here = [i for i, test in left if _is_at(test, location)] or [
                i for i, test in left if _is_expected(test, location)
            ]
            if len(here) > location.times:
                expected = [i for i in here if self._tests[i].reason == location.reason]
                if len(expected) != location.times:
                    undecided.update(here)
                    expected = []
                here = expected
            skipped.update(dict.fromkeys(here, location.reason))
        for i, test in enumerate(self._tests):
            if i in undecided and i not in skipped and test.file not in self._modules:
                yield test, test
            else:
                yield test, self._as_run(test, self._modules.get(test.file, skipped.get(i)))

    def _modules_at_locations(self) -> dict[str, str]:
        """Returns files that were skipped once, at a line outside all tests, where the scan expects this too."""
        found = {}
        named = self._ran | self._skipped.keys()
        for location in self._locations:
            tests = [test for test in self._tests if test.file == location.file]
            if location.times > 1 or not tests or any(_is_at(test, location) for test in self._tests):
                continue
            expected = all(
                any(skip.file == location.file and skip.line == location.line for skip in t.skips) for t in tests
            )
            if not any(test.id in named for test in tests) and (expected or named):
                found[location.file] = location.reason
        return found

    def _from_id(self, test_id: str) -> str:
        file, _, rest = test_id.partition("::")
        return f"{self._file(file)}::{rest}"

    def _file(self, name: str) -> str:
        """Returns the file as the scan names it: pytest's names are relative to its own root."""
        if name in self._files or (self._root / name).is_file():
            return name
        endings = [file for file in self._files if file.endswith(f"/{name}") or name.endswith(f"/{file}")]
        return endings[0] if len(endings) == 1 else name

    def _from_dotted(self, test_id: str) -> str:
        module, _, name = test_id.partition("::")
        parts = module.split(".")
        for length in range(len(parts), 0, -1):
            file = self._file_of_dotted(".".join(parts[:length]))
            if file in self._files:
                return "::".join([file, *parts[length:], name])
        return test_id

    def _file_of_dotted(self, name: str) -> str:
        endings = [file for dotted, file in self._dotted.items() if dotted.endswith(f".{name}")]
        return self._dotted.get(name, endings[0] if len(endings) == 1 else name)


def _is_at(test: Test, location: Location) -> bool:
    return location.file == test.defined_in and test.lines[0] <= location.line <= test.lines[1]


def _is_expected(test: Test, location: Location) -> bool:
    is_elsewhere = "site-packages" in location.file or (not location.line and test.file == location.file)
    if is_elsewhere and test.status == "skipped" and test.reason == location.reason:
        return True
    return any((skip.file, skip.line) == (location.file, location.line) for skip in test.skips)


def _kind(before: Test | None, after: Test) -> Literal["missed", "wrong", "decided", "reason"] | None:
    if after.source == "static":
        return None
    if before is None or before.status == "ran":
        return "missed" if after.status == "skipped" else None
    if before.status == "conditional":
        return "decided"
    if after.status == "ran":
        return "wrong"
    same = after.reason == "Skipped" and not before.reason  # what pytest prints without a reason
    return None if same or before.reason.strip() == after.reason.strip() else "reason"
