"""JSON files with a format, the version of the format, and the versions of the software that wrote them."""

from __future__ import annotations

import importlib.metadata
import json
import platform
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
        noun: What it describes, with its article, such as "an observation".
        written: How such a file is made, in words.
        damaged: Makes the error for a file that is not valid JSON.
        foreign: The error for a different format or version.

    Raises:
        DestinationError: if the file does not exist.
    """
    try:
        data = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise DestinationError(
            f"No {noun.partition(' ')[2]} can be read here.", where=str(file.parent), expected=written, got=error
        ) from error
    except (ValueError, RecursionError) as error:
        raise damaged(file, error) from error
    found: dict[str, Any] = data if isinstance(data, dict) else {}
    if (found.get("format"), found.get("version")) != form:
        raise foreign(
            f"Not {noun} that this version reads.",
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


def versions(*packages: str) -> dict[str, str | None]:
    """Returns the versions of the software that writes a file, to explain why it cannot be read elsewhere."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found
