"""Writes files completely or not at all, never over other files, and says later whether they were changed.

New files are written to a temporary folder beside the old ones, and take their place once all of them are complete. A
process that is killed leaves its temporary folder; the next one that writes to the same place removes it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

from exportkit.errors import DestinationError, ExportkitError, InvalidTypeError, described
from exportkit.json_data import parse_json

TEMPORARY = ".exportkit-saving-"
_CHUNK = 2**20  # bytes that are read at once; they stay in the cache of the processor until they are hashed

_unfinished: dict[Path, Path] = {}  # temporary folders that are being written to, and what to remove of them

Stamp = tuple[int, ...]
Damaged = Callable[[Path, object], ExportkitError]  # given a file, and what is wrong with it


def as_path(path: str | os.PathLike[str]) -> Path:
    """Returns a path.

    Raises:
        InvalidTypeError: if it is neither a string nor a path.
    """
    try:
        return Path(path)
    except TypeError:
        raise InvalidTypeError("Not a path.", expected="a string or a pathlib.Path", got=repr(path)) from None


def check_file(path: str | os.PathLike[str], name: str = "model.onnx") -> Path:
    """Returns the path if a file can be written there.

    Args:
        path: The path.
        name: What a file in a directory might be called.

    Raises:
        DestinationError: if it is a directory, or cannot be written.
        InvalidTypeError: if it is not a path.
    """
    target = as_path(path)
    if target.is_dir():
        raise DestinationError("A file cannot be written over a directory.", where=str(target), hint=f"{target / name}")
    parent = next(folder for folder in target.absolute().parents if folder.exists())
    if not parent.is_dir():
        raise DestinationError("This path cannot be written to.", where=str(target), got=f"{parent} is a file")
    if not os.access(parent, os.W_OK):
        raise DestinationError("This path cannot be written to.", where=str(target), got=f"{parent} is not writable")
    return target


def write_text(path: str | os.PathLike[str], text: str, noun: str) -> Path:
    """Writes a text file, in a folder that is created if it does not exist, and returns its path.

    Args:
        path: The file.
        text: Its content.
        noun: What it is, such as "The page", for messages.

    Raises:
        DestinationError: if it cannot be written.
    """
    target = as_path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DestinationError(f"{noun} cannot be written.", where=str(target), got=error.strerror) from error
    return target


def check_folder(target: Path, noun: str, is_ours: Callable[[Path], bool]) -> Path:
    """Returns the path of a folder if it is new or empty, or holds a thing of the same kind.

    Args:
        target: The folder.
        noun: What will be written there, such as "an observation".
        is_ours: Whether a folder with files in it holds such a thing. It is also asked about the temporary folder of a
            process that was killed after it had moved some of its files.

    Raises:
        DestinationError: if the folder holds something else, or cannot be read.
    """
    try:
        names = [item.name for item in target.iterdir()] if target.exists() else []
        found = sorted(name for name in names if not name.startswith(TEMPORARY))
        if not found or any(map(is_ours, [target, *abandoned_folders(target)])):
            return target
    except OSError as error:
        raise DestinationError(f"{noun.capitalize()} cannot be written here.", where=str(target), got=error) from error
    raise DestinationError(
        f"{noun.capitalize()} cannot be written over other files.",
        where=str(target),
        expected=f"a new or empty directory, or one that holds {noun}",
        got=", ".join(found[:5]),
        hint="choose a different directory, or empty this one.",
    )


@contextlib.contextmanager
def replacing(target: Path, noun: str, last: str = "", clear: Callable[[], None] | None = None) -> Iterator[Path]:
    """Yields an empty folder to write to, and moves its files to ``target`` when the block ends without an error.

    After an error, everything is as it was. What processes left here that were killed is removed: at the beginning, or
    at the end if it holds ``last``, because only that file then says which of the files in ``target`` are theirs.

    Args:
        target: Where the files belong; other files there stay.
        noun: What is written, such as "an observation", for messages.
        last: Name of the file that is moved last, so that the others are known to be complete if it is there.
        clear: Removes old files that the new ones do not replace; called after the block, before anything is moved.

    Raises:
        DestinationError: if something cannot be written, for instance because the disk is full.
    """
    is_new = not target.exists()
    try:
        target.mkdir(parents=True, exist_ok=True)
        for left in abandoned_folders(target):
            if not last or not (left / last).exists():
                shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=TEMPORARY, dir=target, ignore_cleanup_errors=True) as name:
            temporary = Path(name)
            with _locked(temporary):
                _unfinished[temporary] = target if is_new else temporary
                try:
                    yield temporary
                finally:
                    del _unfinished[temporary]
                if clear is not None:
                    clear()
                for left in abandoned_folders(target):
                    shutil.rmtree(left, ignore_errors=True)
                files = [path for path in temporary.rglob("*") if path.is_file()]
                for path in sorted(files, key=lambda path: (path.name == last, path)):
                    place = target / path.relative_to(temporary)
                    place.parent.mkdir(parents=True, exist_ok=True)
                    os.replace(path, place)
    except BaseException as error:
        if is_new:
            shutil.rmtree(target, ignore_errors=True)
        if isinstance(error, OSError) and not isinstance(error, ExportkitError):
            raise DestinationError(
                f"{noun[:1].upper()}{noun[1:]} cannot be written here.", where=str(target), got=error
            ) from error
        raise


def remove_unfinished() -> None:
    """Removes what is being written, for a process that is about to end."""
    for path in _unfinished.values():
        shutil.rmtree(path, ignore_errors=True)


def abandoned_folders(target: Path) -> list[Path]:
    """Returns the temporary folders of processes that were killed while they wrote to ``target``."""
    found = [path for path in target.glob(f"{TEMPORARY}*") if path.is_dir() and not path.is_symlink()]
    return [path for path in sorted(found) if _is_abandoned(path)]


def _is_abandoned(folder: Path) -> bool:
    """Whether no process holds the lock of a temporary folder: the system takes it from one that ends in any way."""
    with _locked(folder) as is_free:
        return is_free


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Holds the lock of a folder, if it is free; yields whether it was."""
    try:
        import fcntl

        handle = os.open(folder, os.O_RDONLY)
    except (ImportError, OSError):  # Windows, or a folder of another user
        yield False
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_free = True
    except OSError:
        is_free = False
    try:
        yield is_free
    finally:
        os.close(handle)


def digest_of(file: Path) -> str:
    """Returns the XXH3 hash of a file, 128 bits, as ``xxh128sum`` prints it.

    It finds damage of any kind, at the speed of memory. It does not protect against tampering: anyone who can
    write a file can also write its digest.

    Raises:
        OSError: if the file cannot be read.
    """
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(_CHUNK))
    with file.open("rb", buffering=0) as content:
        while size := content.readinto(buffer):
            digest.update(buffer[:size])
    return digest.hexdigest()


def stamp_of(file: Path) -> Stamp:
    """Returns numbers that change whenever a file is written or replaced.

    Raises:
        OSError: if there is no such file.
    """
    found = file.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def listing(folder: Path) -> str:
    """Returns what is at a path, in a few words for an error message."""
    if not folder.is_dir():
        return "a file" if folder.exists() else "nothing"
    names = sorted(item.name for item in folder.iterdir())
    return ", ".join(names[:8] + ["..."] * (len(names) > 8)) or "an empty folder"


# JSON files with a format, its version, a digest of themselves, and the versions of the software that wrote them.

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
    damaged: Damaged,
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
            f"This version cannot read {noun} of this format.",
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


def damaged_error(kind: type[ExportkitError], what: str, hint: str) -> Damaged:
    """Returns what makes the error for a file that is not as it was written.

    Args:
        kind: The class of the error.
        what: What is damaged, in one sentence.
        hint: What to do about it.
    """
    return lambda file, cause: kind(what, where=str(file), got=cause, hint=hint)


@contextlib.contextmanager
def reading(file: Path, damaged: Damaged) -> Iterator[None]:
    """Raises the error for a damaged file in place of all errors but those of exportkit.

    The file may hold anything, and so anything may be raised for what it holds.

    Args:
        file: The file that is named.
        damaged: Makes the error for a file that is not as it was written.
    """
    try:
        yield
    except ExportkitError:
        raise
    except Exception as error:
        raise damaged(file, described(error)) from error


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
