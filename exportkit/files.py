"""Checks paths before anything is written there, so that no other files are overwritten."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from exportkit.errors import DestinationError


def check_file(path: str | os.PathLike[str]) -> Path:
    """Returns the path if a file can be written there.

    Raises:
        DestinationError: if it is a directory, or cannot be written.
    """
    target = Path(path)
    if target.is_dir():
        raise DestinationError(
            "A file cannot be written over a directory.", where=str(target), hint=f"{target / 'model.onnx'}"
        )
    parent = next(folder for folder in target.absolute().parents if folder.exists())
    if not parent.is_dir():
        raise DestinationError("This path cannot be written to.", where=str(target), got=f"{parent} is a file")
    if not os.access(parent, os.W_OK):
        raise DestinationError("This path cannot be written to.", where=str(target), got=f"{parent} is not writable")
    return target


def check_folder(target: Path, noun: str, is_ours: Callable[[Path], bool], temporary: str = "") -> Path:
    """Returns the path of a folder if it is new or empty, or holds a thing of the same kind.

    Args:
        target: The folder.
        noun: What is to be written there, such as "an observation".
        is_ours: Whether a folder with files in it holds such a thing.
        temporary: Prefix of files that do not count.

    Raises:
        DestinationError: if the folder holds something else, or cannot be read.
    """
    try:
        names = [item.name for item in target.iterdir()] if target.exists() else []
        found = sorted(name for name in names if not temporary or not name.startswith(temporary))
        if not found or is_ours(target):
            return target
    except OSError as error:
        raise DestinationError(f"{noun.capitalize()} cannot be written here.", where=str(target), got=error) from error
    raise DestinationError(
        f"{noun.capitalize()} is not written over other files.",
        where=str(target),
        expected=f"a new or empty directory, or one that holds {noun}",
        got=", ".join(found[:5]),
        hint="choose a different directory, or empty this one.",
    )
