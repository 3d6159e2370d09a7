"""Reads a JSON file that says what it is: in comes its path, out goes what it holds, or an error that says what it is.

Each file of this package has a format, a version of it, and the versions of what wrote it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from exportkit.errors import DestinationError, ExportkitError


def read_json_file(
    file: Path,
    form: tuple[str, int],
    *,
    noun: str,
    written: str,
    damaged: Callable[[Path, object], ExportkitError],
    foreign: type[ExportkitError] = DestinationError,
) -> dict[str, Any]:
    """Returns what a JSON file holds, if it is of this format and version.

    Args:
        file: The file.
        form: The format and its version.
        noun: What it describes, in words.
        written: How such a file is made, in words.
        damaged: Makes the error for a file that is no JSON.
        foreign: The error for another format or version.

    Raises:
        DestinationError: if the file is not there.
    """
    try:
        data = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise DestinationError(
            f"No {noun} can be read here.", where=str(file.parent), expected=written, got=error
        ) from error
    except (ValueError, RecursionError) as error:
        raise damaged(file, error) from error
    found: dict[str, Any] = data if isinstance(data, dict) else {}
    if (found.get("format"), found.get("version")) != form:
        raise foreign(
            f"This is no {noun} that this version reads.",
            where=str(file),
            expected=" ".join(map(str, form)),
            got=f"{found.get('format')} {found.get('version')}",
            hint=_written_by(found),
        )
    return found


def _written_by(data: Mapping[str, Any]) -> str | None:
    versions = data.get("written_by")
    if not isinstance(versions, dict):
        return None
    return f"it was written by {', '.join(f'{name} {version}' for name, version in versions.items())}."
