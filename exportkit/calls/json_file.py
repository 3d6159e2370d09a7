"""JSON files with a format, its version, a digest of themselves, and the versions of the software that wrote them."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import xxhash

from exportkit.errors import DestinationError, ExportkitError
from exportkit.json_data import parse_json

_DIGEST = '"digest": "{}"'


def write_json_file(file: Path, form: tuple[str, int], data: Mapping[str, Any]) -> None:
    """Writes data that `read_json_file` reads. The digest covers every byte of the file but its own.

    Raises:
        ValueError: if the data holds something that JSON cannot.
        OSError: if the file cannot be written.
    """
    head = {"format": form[0], "version": form[1], "digest": ""}
    text = json.dumps({**head, **data}, indent=1, allow_nan=False) + "\n"
    digest = xxhash.xxh3_128_hexdigest(text.encode())
    file.write_text(text.replace(_DIGEST.format(""), _DIGEST.format(digest), 1), "utf-8")


def read_json_file(
    file: Path,
    form: tuple[str, int],
    *,
    noun: str,
    written: str,
    damaged: Callable[[Path, object], ExportkitError],
    foreign: type[ExportkitError] = DestinationError,
) -> dict[str, Any]:
    """Returns what a JSON file holds, if it is of this format and version, and as it was written.

    Args:
        file: The file.
        form: The format and its version.
        noun: What it describes, with its article, such as "an observation".
        written: How such a file is made, in words.
        damaged: Makes the error for a file that is not as it was written.
        foreign: The error for a different format or version.

    Raises:
        DestinationError: if the file does not exist.
    """
    try:
        content = file.read_bytes()
    except OSError as error:
        raise DestinationError(
            f"No {noun.partition(' ')[2]} can be read here.", where=str(file.parent), expected=written, got=error
        ) from error
    try:
        data = parse_json(content)
    except ValueError as error:
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
    digest = str(found.get("digest"))
    text = content.replace(_DIGEST.format(digest).encode(errors="replace"), _DIGEST.format("").encode(), 1)
    if xxhash.xxh3_128_hexdigest(text) != digest:
        raise damaged(file, "the content does not match the digest in it: the file was changed after it was written")
    return found


def _written_by(data: Mapping[str, Any]) -> str | None:
    versions = data.get("written_by")
    if not isinstance(versions, dict):
        return None
    listed = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"it was written by {listed}. Write it again with this version."


def versions(*packages: str) -> dict[str, str | None]:
    """Returns the versions of the software that writes a file, to explain why it cannot be read elsewhere."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found
