"""Says whether the files of a folder are those that were saved: when it is loaded, and whenever it is proven again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from exportkit.errors import DestinationError
from exportkit.files import Stamp, damaged_error, digest_of, stamp_of
from exportkit.json_data import Size
from exportkit.onnx_files.contract import weights_beside

# Files that clients and people read, and may change.
_EDITABLE = {"config.json", "generation_config.json", "genai_config.json", "report.txt", "report.json"}
damaged = damaged_error(
    DestinationError, "This exported model is damaged.", "the folder was changed or cut short: save again."
)


@dataclass(frozen=True)
class SavedFile:
    """A file as it was saved: its size, and its digest as `digest_of` returns it."""

    bytes: Size
    xxh3_128: str


class CheckedFiles:
    """The files of a folder as the manifest lists them, with what each of them was when it was last checked.

    Args:
        folder: The folder.
        files: What was saved, by name.

    Raises:
        DestinationError: if a file is missing, or is not the one that was saved.
    """

    def __init__(self, folder: Path, files: Mapping[str, SavedFile]) -> None:
        self._files = {inside(folder, name): saved for name, saved in files.items()}
        self._stamps: dict[Path, Stamp] = {}

    def check(self, wanted: Callable[[Path], bool] | None = None) -> tuple[str, ...]:
        """Reads the files, and returns a sentence for each that was edited, if no proof depends on it.

        Args:
            wanted: Which files to read; of the others, only the size is checked. All by default.

        Raises:
            DestinationError: if any other file is missing, or is not the one that was saved.
        """
        edited = []
        for path, saved in self._files.items():
            changed = self._change(path, saved, wanted is None or wanted(path))
            if changed is not None and path.name not in _EDITABLE:
                raise changed
            if changed is not None:
                edited.append(f"{path.name} was edited since the folder was saved.")
        return tuple(edited)

    def _change(self, path: Path, saved: SavedFile, content: bool) -> DestinationError | None:
        """The error for a file that was changed; None if it is the one that was saved."""
        try:
            stamp = stamp_of(path)  # before it is read, so that a change meanwhile shows later
            got = f"{path.stat().st_size} bytes"
            if saved.bytes == path.stat().st_size and content:
                got = f"XXH3 {digest_of(path)}"
        except OSError as error:
            raise DestinationError(
                "A file of an exported model is missing.",
                where=str(path),
                expected=f"{saved.bytes} bytes",
                got=error.strerror,
                hint="copy the whole folder, or save again.",
            ) from error
        expected = f"XXH3 {saved.xxh3_128}" if got.startswith("XXH3") else f"{saved.bytes} bytes"
        if got != expected:
            return DestinationError(
                "A file of an exported model has changed since it was saved.",
                where=str(path),
                expected=expected,
                got=got,
                hint="copy the folder again; deliberate changes have to be saved and proven again.",
            )
        if content:
            self._stamps[path] = stamp
        return None

    def require(self, *files: Path) -> None:
        """Raises DestinationError if the manifest does not list one of these files, so that it cannot be checked."""
        for file in files:
            if file not in self._files:
                raise damaged(file, "the manifest does not list this file")

    def recheck(self, graph: Path) -> None:
        """Checks the files of a graph again if they were touched since they were read.

        Raises:
            DestinationError: if one of them is not the one that was saved.
        """
        for path in (graph, weights_beside(graph)):
            if path in self._stamps and (not path.exists() or stamp_of(path) != self._stamps[path]):
                changed = self._change(path, self._files[path], content=True)
                if changed is not None:
                    raise changed


def inside(folder: Path, name: str) -> Path:
    """Returns the path of a file in a folder.

    The file itself may be a link, as in the cache of the Hugging Face hub; it is named by a relative path without
    ``..``, and its directory is not a link to a place outside.

    Raises:
        DestinationError: if it is outside.
    """
    path, given = folder / name, PurePosixPath(name)
    place = path.parent if given.parts else folder
    if given.is_absolute() or ".." in given.parts or not place.resolve().is_relative_to(folder.resolve()):
        raise damaged(folder, f"{name} is outside of the folder")
    return path
