"""Takes the tests of the static scan and what a run says of them, and gives the tests as the run has them.

Out comes also each difference: what the scan missed, took for a skip wrongly, could not decide, or gave another reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from exportkit.skips.collection import Test
from exportkit.skips.truth import Place, Truth
from exportkit.skips.values import Skip

_EXPANDED = re.compile(r"_\d+(_.*)?$")  # parameterized.expand: test_x becomes test_x_0, test_x_1_name


@dataclass(frozen=True)
class Difference:
    """A test of which the static scan and a run say different things.

    Attributes:
        test: Identifier of the test.
        kind: ``"missed"``: it was skipped, and the scan says that it runs. ``"wrong"``: it ran, and the scan says that
            it is skipped. ``"decided"``: the scan knew the condition only. ``"reason"``: skipped for another reason.
        scan: What the scan says.
        run: What the run says.
    """

    test: str
    kind: Literal["missed", "wrong", "decided", "reason"]
    scan: str
    run: str


class Merger:
    """Merges one run into the tests of a scan."""

    def __init__(self, tests: Iterable[Test], truth: Truth, root: Path, group_of: Callable[[str], str]) -> None:
        self._tests, self._root, self._group_of = tuple(tests), root, group_of
        self._files = {test.file for test in self._tests}
        self._dotted = {file.removesuffix(".py").replace("/", "."): file for file in self._files}
        convert = self._from_dotted if truth.dotted else self._from_id
        self._skipped = {convert(test): reason for test, reason in truth.skipped.items()}
        self._ran = {convert(test) for test in truth.ran}
        self._places, self._skips_only = truth.places, truth.skips_only
        file_of = self._file_of_dotted if truth.dotted else self._file
        self._modules = {file_of(name): reason for name, reason in truth.modules.items()}
        self._modules |= self._modules_at_places()

    def merged(self) -> tuple[tuple[Test, ...], tuple[Difference, ...]]:
        """Returns the tests as the run has them, and the differences."""
        named = bool(self._skipped or self._ran)
        found = self._by_name() if named else self._by_place()
        result: list[Test] = []
        differences: list[Difference] = []
        for before, after in found:
            result.append(after)
            difference = _difference(before, after) if before is not None and after.source == "truth" else None
            if difference is not None:
                differences.append(difference)
            if before is None and after.status == "skipped":
                differences.append(Difference(after.id, "missed", "not found", _text(after)))
        return tuple(result), tuple(differences)

    # A run that names tests

    def _by_name(self) -> Iterable[tuple[Test | None, Test]]:
        waiting = {**dict.fromkeys(self._ran), **self._skipped}
        plain: dict[str, list[str]] = {}
        for test_id in waiting:
            plain.setdefault(test_id.partition("[")[0], []).append(test_id)
            plain.setdefault(_EXPANDED.sub("", test_id.partition("[")[0]), []).append(test_id)
        exact = {test.id for test in self._tests}
        for test in self._tests:
            if test.file in self._modules:
                yield test, self._as_run(test, self._modules[test.file], skipped=True)
                continue
            ids = [test.id] if test.id in waiting else []
            if not ids and test.parameters is None:
                ids = [
                    other for other in dict.fromkeys(plain.get(test.id, ())) if other in waiting and other not in exact
                ]
            if not ids:
                yield test, self._as_run(test, "", skipped=False) if self._skips_only else test
            for test_id in ids:
                reason = waiting.pop(test_id)
                name = test_id.rpartition("::")[2] if "[" not in test_id else test.name
                parameters = test_id.partition("[")[2][:-1] if "[" in test_id else test.parameters
                variant = replace(test, name=test.name if "[" in test_id else name, parameters=parameters)
                after = self._as_run(variant, reason or "", skipped=reason is not None)
                yield replace(test, name=after.name, parameters=after.parameters), after
        for test_id, reason in waiting.items():
            file = test_id.partition("::")[0]
            if file in self._files:
                yield None, self._unknown(test_id, file, reason)

    def _as_run(self, test: Test, reason: str, skipped: bool) -> Test:
        if not skipped:
            return replace(test, status="ran", skips=(), source="truth")
        static = test.skips[0] if test.skips else Skip("", test.defined_in, test.lines[0])
        reason = self._whole_reason(test, reason, static.reason)
        return replace(test, status="skipped", skips=(replace(static, reason=reason, condition=""),), source="truth")

    def _whole_reason(self, test: Test, reason: str, expected: str) -> str:
        """The reason in full: beside the name of a test, pytest cuts it to what fits into one line of the terminal."""
        whole = [place.reason for place in self._places]
        first_line, cut = expected.partition("\n")[0], reason.endswith("...") or not reason
        start = reason.removesuffix("...") if cut else reason
        if expected in whole and (first_line.startswith(start) if cut else first_line == reason):
            return expected
        if not whole or reason in whole:
            return reason
        here = [place.reason for place in self._places if self._is_at(test, place)]
        return next((text for text in (*here, *whole) if text.startswith(start)), reason)

    def _unknown(self, test_id: str, file: str, reason: str | None) -> Test:
        head, _, parameters = test_id.partition("[")
        _, *classes, name = head.split("::")
        skips = () if reason is None else (Skip(reason, file, 0),)
        return Test(
            file, "::".join(classes), name, parameters[:-1] or None, self._group_of(file), file, (0, 0),
            "ran" if reason is None else "skipped", skips, "truth",
        )  # fmt: skip

    # A run that names places

    def _by_place(self) -> Iterable[tuple[Test | None, Test]]:
        skipped: dict[int, str] = {}
        open_tests: set[int] = set()
        for place in self._places:
            here = [i for i, test in enumerate(self._tests) if i not in skipped and self._is_at(test, place)]
            if not here:  # in a fixture, a helper, or outside the suite: what the scan expects for that reason
                here = [
                    i for i, test in enumerate(self._tests) if i not in skipped and _expects(test, place, self._file)
                ]
            if len(here) > place.times:
                expected = [i for i in here if _reason(self._tests[i]) == place.reason]
                open_tests.update(here if len(expected) != place.times else ())
                here = expected if len(expected) == place.times else []
            skipped.update(dict.fromkeys(here, place.reason))
        for i, test in enumerate(self._tests):
            if test.file in self._modules:
                yield test, self._as_run(test, self._modules[test.file], skipped=True)
            elif i in skipped:
                yield test, self._as_run(test, skipped[i], skipped=True)
            else:
                yield test, test if i in open_tests else self._as_run(test, "", skipped=False)

    def _is_at(self, test: Test, place: Place) -> bool:
        return self._file(place.file) == test.defined_in and test.lines[0] <= place.line <= test.lines[1]

    def _modules_at_places(self) -> dict[str, str]:
        """Files that the summary has a skip for, at a line of no test, that the scan takes for skipped there too."""
        found = {}
        for place in self._places:
            file = self._file(place.file)
            tests = [test for test in self._tests if test.file == file]
            here = [test for test in tests if any((s.file, s.line) == (file, place.line) for s in test.skips)]
            outside = not any(self._is_at(test, place) for test in self._tests)
            if (
                tests
                and outside
                and place.times == 1
                and not any(t.id in self._ran or t.id in self._skipped for t in tests)
            ) and (len(here) == len(tests) or self._ran or self._skipped):
                found[file] = place.reason
        return found

    # Names of files

    def _from_id(self, test_id: str) -> str:
        file, _, rest = test_id.partition("::")
        return f"{self._file(file)}::{rest}"

    def _file(self, name: str) -> str:
        """The file as the scan names it: pytest's names are relative to its own root."""
        if name in self._files or (self._root / name).is_file():
            return name
        endings = [file for file in self._files if file.endswith(f"/{name}") or name.endswith(f"/{file}")]
        return endings[0] if len(endings) == 1 else name

    def _from_dotted(self, test_id: str) -> str:
        classname, _, name = test_id.partition("::")
        parts = classname.split(".")
        for length in range(len(parts), 0, -1):
            file = self._file_of_dotted(".".join(parts[:length]))
            if file in self._files:
                return "::".join([file, *parts[length:], name])
        return test_id

    def _file_of_dotted(self, name: str) -> str:
        if name in self._dotted:
            return self._dotted[name]
        endings = [file for dotted, file in self._dotted.items() if dotted.endswith(f".{name}")]
        return endings[0] if len(endings) == 1 else name


def _expects(test: Test, place: Place, file_of: Callable[[str], str]) -> bool:
    if test.status == "skipped" and _reason(test) == place.reason and "site-packages" in place.file:
        return True
    if not place.line:
        return test.status == "skipped" and _reason(test) == place.reason and test.file == file_of(place.file)
    return any((skip.file, skip.line) == (file_of(place.file), place.line) for skip in test.skips)


def _reason(test: Test) -> str:
    return test.skips[0].reason if test.skips else ""


def _text(test: Test) -> str:
    if test.status == "conditional":
        return "; ".join(f"skipped if {skip.condition}" for skip in test.skips)
    return f"skipped: {_reason(test)}" if test.status == "skipped" else "ran"


def _difference(before: Test, after: Test) -> Difference | None:
    if before.status == "conditional":
        kind: Literal["missed", "wrong", "decided", "reason"] = "decided"
    elif before.status != after.status:
        kind = "missed" if after.status == "skipped" else "wrong"
    elif before.status == "skipped" and _plain(_reason(before)) != _plain(_reason(after)):
        kind = "reason"
    else:
        return None
    return Difference(after.id, kind, _text(before), _text(after))


def _plain(reason: str) -> str:
    return "" if reason == "Skipped" else reason.strip()  # what pytest prints for no reason
