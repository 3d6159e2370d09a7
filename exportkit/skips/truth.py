"""Takes what a run of pytest printed (``-rs``, with ``-v`` if possible) or its JUnit XML; gives what became of tests.

The formats are those of pytest 7 to 9: https://docs.pytest.org/en/stable/how-to/output.html. Plain ``-rs`` names places
instead of tests; ``-v -rs``, ``-rs --no-fold-skipped`` and JUnit XML name tests.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from exportkit.errors import DestinationError, InvalidRequestError

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_STATUS = "PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS"
_VERBOSE = re.compile(rf"^(?P<id>\S+\.py::.+?) (?P<status>{_STATUS})(?: \((?P<reason>.*)\))?\s*(?:\[\s*\d+%\])?$")
_WORKER = re.compile(rf"^\[gw\d+\](?: \[\s*\d+%\])? (?P<status>{_STATUS}) (?P<id>\S+\.py::.+?)\s*$")
_FOLDED = re.compile(
    r"^SKIPPED \[(?P<times>\d+)\] (?P<file>.+?)(?::(?P<line>\d+))?: ?(?:unittest\.case\.SkipTest: )?(?P<reason>.*)$"
)
_UNFOLDED = re.compile(
    r"^SKIPPED (?P<id>\S+\.py(?:::.+?)?) - (?:(?:Skipped|unittest\.case\.SkipTest): ?)?(?P<reason>.*)$"
)
_SUMMARY = re.compile(rf"^(?:{_STATUS}|SUBSKIPPED|SUBFAILED|SUBPASSED|XFAIL at setup of) |^=+ ")
_MODULE_SKIP = re.compile(r"^\('.*', \d+, ['\"](?:Skipped|unittest\.case\.SkipTest): (?P<reason>.*)['\"]\)$", re.DOTALL)


class Place(NamedTuple):
    """A line of the summary: so many tests were skipped at this place; without a line (0) by a mark of their class."""

    file: str
    line: int
    times: int
    reason: str


@dataclass
class Truth:
    """What a run says.

    Attributes:
        skipped: Identifiers of skipped tests, and the reasons.
        ran: Identifiers of tests that ran.
        modules: Files that were skipped as a whole, and the reasons.
        places: Places of skips, where no tests are named.
        skips_only: Whether it names skipped tests only, so that a test that it does not name ran.
        dotted: Whether identifiers are those of JUnit XML: ``package.module.Class::test``.
    """

    skipped: dict[str, str] = field(default_factory=dict)
    ran: set[str] = field(default_factory=set)
    modules: dict[str, str] = field(default_factory=dict)
    places: list[Place] = field(default_factory=list)
    dotted: bool = False
    skips_only: bool = False

    def add(self, test: str, status: str, reason: str) -> None:
        """Notes the outcome of a test; one with a subtest that was skipped has two, and ran."""
        if status != "SKIPPED":
            self.ran.add(test)
        else:
            self.skipped[test] = reason


def read_truth(path: str | Path) -> Truth:
    """Returns what a file with the output or the JUnit XML of pytest says.

    Raises:
        DestinationError: The file cannot be read.
        InvalidRequestError: It is neither of the two.
    """
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise DestinationError("The result of pytest cannot be read.", where=str(path), got=error.strerror) from error
    truth = _from_xml(text, str(path)) if text.lstrip().startswith("<") else _from_output(text)
    truth.skipped = {test: reason for test, reason in truth.skipped.items() if test not in truth.ran}
    if not (truth.skipped or truth.ran or truth.modules or truth.places or _ended_well(text)):
        raise InvalidRequestError(
            "The file holds no result of pytest.",
            where=str(path),
            expected="what `pytest -v -rs` prints, or the file of `pytest --junitxml`",
            hint="run `pytest -v -rs tests > result.txt`.",
        )
    return truth


def _ended_well(text: str) -> bool:
    return re.search(r"\b\d+ (passed|failed|xfailed)\b.* in [\d.]+s", text) is not None or "<testsuite" in text


def _from_xml(text: str, where: str) -> Truth:
    truth = Truth(dotted=True)
    try:
        cases = list(ET.fromstring(text).iter("testcase"))
    except ET.ParseError as error:
        raise InvalidRequestError("The JUnit XML cannot be parsed.", where=where, got=error) from error
    for case in cases:
        skipped = case.find("skipped")
        classname, name = case.get("classname", ""), case.get("name", "")
        if skipped is None or skipped.get("type") == "pytest.xfail":
            truth.ran.add(f"{classname}::{name}")
        elif not classname:
            match = _MODULE_SKIP.match(skipped.text or "")
            truth.modules[name] = match["reason"] if match else skipped.get("message", "")
        else:
            truth.skipped[f"{classname}::{name}"] = skipped.get("message", "")
    return truth


def _from_output(text: str) -> Truth:
    truth = Truth()
    lines = _COLOUR.sub("", text).splitlines()
    for position, line in enumerate(lines):
        if match := _VERBOSE.match(line) or _WORKER.match(line):
            truth.add(match["id"], match["status"], match.groupdict().get("reason") or "")
        elif match := _FOLDED.match(line):
            reason = "\n".join([match["reason"], *_continued(lines[position + 1 :])])
            truth.places.append(Place(match["file"], int(match["line"] or 0), int(match["times"]), reason))
        elif match := _UNFOLDED.match(line):
            reason = "\n".join([match["reason"], *_continued(lines[position + 1 :])])
            if "::" in match["id"]:
                truth.skipped[match["id"]] = reason
            else:
                truth.modules[match["id"]] = reason
            truth.skips_only = not truth.ran
    return truth


def _continued(lines: Iterable[str]) -> Iterable[str]:
    """The further lines of a reason that has several."""
    for line in lines:
        if _SUMMARY.match(line) or re.match(r"^\d+ (passed|failed|skipped)", line):
            return
        yield line
