"""Takes the root of a test suite and says which files hold tests, how results are grouped, and which marks skip.

Out comes a `Layout`, plain data: two are ready, one for any pytest or unittest suite and one for that of transformers.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from exportkit.errors import InvalidRequestError

_IGNORED_FOLDERS = {"__pycache__", "node_modules", "site-packages", "venv", "build", "dist"}


@dataclass(frozen=True)
class Layout:
    """How a test suite is laid out.

    Attributes:
        folder: Where the test files are, relative to the root.
        patterns: Names of test files.
        group: What a column of the result is: a ``"file"``, or a ``"folder"`` directly below ``folder``, which
            transformers has one of for each model.
        bases: Base files and the origin that their tests are listed under. With base files the result has a row for
            each of their test methods; without, for each test of the suite, and the origin is the file that defines it.
        marks: Decorators that skip by a decision taken elsewhere, such as ``{"slow": "test is slow"}``: a test that
            has one counts as skipped for that reason. With None for a reason it is skipped under a condition, with an
            empty one never.
            Names may be patterns; an exact name goes before a pattern, and before what the suite itself defines.
    """

    folder: str = "."
    patterns: tuple[str, ...] = ("test_*.py", "*_test.py")
    group: Literal["file", "folder"] = "file"
    bases: Mapping[str, str] = field(default_factory=dict)
    marks: Mapping[str, str | None] = field(default_factory=lambda: {"require_*": None, "requires_*": None})

    def __post_init__(self) -> None:
        if self.group not in ("file", "folder"):
            raise InvalidRequestError("No such grouping.", expected="'file' or 'folder'", got=repr(self.group))

    def test_files(self, root: Path) -> list[Path]:
        """Returns the test files below ``root``, sorted, without the base files."""
        folder, bases = root / self.folder, {root / base for base in self.bases}
        found = {path for pattern in self.patterns for path in _files(folder, pattern)}
        return sorted(path for path in found - bases if self.group == "file" or path.parent != folder)

    def group_of(self, file: str) -> str:
        """Returns the column that the tests of a file (relative to the root) count for."""
        inside = Path(file).relative_to(self.folder)
        return inside.parts[0] if self.group == "folder" else inside.with_suffix("").as_posix()

    def named_mark(self, name: str) -> str | None:
        """Returns the key of ``marks`` that is exactly this name."""
        return name if name in self.marks else None

    def pattern_mark(self, name: str) -> str | None:
        """Returns the first key of ``marks`` that matches this name as a pattern."""
        return next((pattern for pattern in self.marks if fnmatch.fnmatchcase(name, pattern)), None)


TRANSFORMERS = Layout(
    folder="tests/models",
    patterns=("test_modeling_*.py",),
    group="folder",
    bases={"tests/test_modeling_common.py": "common", "tests/generation/test_utils.py": "GenerationMixin"},
    # Slow tests run only where RUN_SLOW asks for them, torch is always there; what else is required may be or not.
    marks={"slow": "test is slow", "tooslow": "test is too slow", "require_torch": "", "require_*": None},
)

LAYOUTS: Mapping[str, Layout] = {"pytest": Layout(), "transformers": TRANSFORMERS}


def layout_of(root: Path) -> Layout:
    """Returns the layout that a root has: that of transformers if a base file of it is there, else that of pytest."""
    return TRANSFORMERS if any((root / base).is_file() for base in TRANSFORMERS.bases) else LAYOUTS["pytest"]


def _files(folder: Path, pattern: str) -> Iterator[Path]:
    for path in folder.rglob(pattern):
        parents = path.relative_to(folder).parts[:-1]
        if path.is_file() and not any(part in _IGNORED_FOLDERS or part.startswith(".") for part in parents):
            yield path
