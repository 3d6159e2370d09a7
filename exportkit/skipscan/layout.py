"""Describes how a test suite is laid out: its test files, their groups, and the decorators known by name."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from exportkit.errors import InvalidRequestError

_IGNORED_FOLDERS = {"__pycache__", "node_modules", "site-packages", "venv", "build", "dist"}


@dataclass(frozen=True)
class Layout:
    """How a test suite is laid out.

    Attributes:
        folder: The folder with the test files, relative to the root.
        patterns: File name patterns of test files.
        group: What the tests are grouped by: ``"file"``, or ``"folder"`` for the folders directly below ``folder``
            (transformers has one per model).
        bases: Base files, and the origin under which their tests are listed. With base files, the result has one row
            per test method of these files. Without, it has one row per test of the suite, and the origin is the file
            that defines the test.
        marks: Decorators known by name, such as ``{"slow": "test is slow"}``. A decorator with a reason always skips,
            one with an empty reason never skips, and one with None skips under a condition. Names may be patterns; an
            exact name takes precedence over a pattern and over the definition in the suite.
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
        """Returns the sorted test files below ``root``, without the base files."""
        folder = root / self.folder
        found = {path for pattern in self.patterns for path in folder.rglob(pattern) if path.is_file()}
        found -= {root / base for base in self.bases}
        return sorted(path for path in found if self._is_searched(path.relative_to(folder).parts[:-1]))

    def _is_searched(self, parents: tuple[str, ...]) -> bool:
        if self.group == "folder" and not parents:
            return False
        return not any(part in _IGNORED_FOLDERS or part.startswith(".") for part in parents)

    def group_of(self, file: str) -> str:
        """Returns the group of a test file, given relative to the root."""
        inside = Path(file).relative_to(self.folder)
        return inside.parts[0] if self.group == "folder" else inside.with_suffix("").as_posix()

    def matching_pattern(self, name: str) -> str | None:
        """Returns the first key of ``marks`` that matches a decorator's name as a pattern."""
        return next((pattern for pattern in self.marks if fnmatch.fnmatchcase(name, pattern)), None)


TRANSFORMERS = Layout(
    folder="tests/models",
    patterns=("test_modeling_*.py",),
    group="folder",
    bases={"tests/test_modeling_common.py": "common", "tests/generation/test_utils.py": "GenerationMixin"},
    # Slow tests run only if RUN_SLOW is set. torch is always installed; other requirements depend on the machine.
    marks={"slow": "test is slow", "tooslow": "test is too slow", "require_torch": "", "require_*": None},
)

LAYOUTS: Mapping[str, Layout] = {"pytest": Layout(), "transformers": TRANSFORMERS}


def layout_of(root: Path) -> Layout:
    """Returns the transformers layout if ``root`` has one of its base files, and the pytest layout otherwise."""
    return TRANSFORMERS if any((root / base).is_file() for base in TRANSFORMERS.bases) else LAYOUTS["pytest"]
