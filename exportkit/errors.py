"""Every exception that exportkit raises, in one tree.

    ExportkitError
    ├── ObservationError          nothing usable was recorded                     RuntimeError
    │   └── NoCallsError          no call was recorded
    ├── InvalidRequestError       an argument of an exportkit function is invalid ValueError
    │   ├── UnknownMethodError    the model has no such method
    │   └── UnknownInputError     the method has no such input
    ├── InvalidTypeError          an argument has the wrong type                  TypeError
    ├── TreeError                 a nested value cannot be flattened or rebuilt   TypeError
    │   └── UnregisteredClassError
    ├── CompatibilityError        a private API of torch or transformers is gone
    ├── PlanError                 the recorded calls contradict each other        RuntimeError
    │   └── ArgumentError         a call cannot be built, or does not fit
    ├── ExportError               torch.export or the ONNX translation failed     RuntimeError
    ├── CaptureError              the output of a module cannot be captured       RuntimeError
    ├── TraceError                a trace is damaged or incomplete                RuntimeError
    ├── PatchError                a replacement computes something else           RuntimeError
    ├── DestinationError          a path cannot be read or written                OSError
    ├── MissingPackageError       an optional package is not installed            ImportError
    └── RuntimeFailure            onnxruntime raised for the graph or a call      RuntimeError

Each message says what happened, where, what was expected, what was found, and what to do about it. The built-in base
classes are the ones that users of ``torch.onnx.InputObserver`` already catch. The functions below the tree are checks
and parts of messages that several packages share.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def described(error: BaseException, most: int | None = None) -> str:
    """Returns the class of an error and its message, as a traceback shows them.

    Args:
        error: The error.
        most: The largest number of characters of the message, which is on one line then; None for the whole message.
    """
    return f"{type(error).__name__}: {_message(error) if most is None else short_text(error, most)}"


def short_text(error: object, most: int = 240) -> str:
    """Returns the message of an error on one line.

    Args:
        error: The error, or a text.
        most: The largest number of characters.
    """
    return " ".join(_message(error).split())[:most]


def first_line(error: Exception) -> str:
    """Returns the first line of an error's text, or the name of its class."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)[:500]


def _message(error: object) -> str:
    try:
        return str(error)
    except Exception:  # an error of a model may raise in its own __str__
        return "(its message cannot be shown)"


class ExportkitError(Exception):
    """Base class of all exceptions of this package.

    Args:
        what: What happened, in one sentence.
        where: Where it happened: a path, an axis, a call, a file.
        expected: What was expected.
        got: What was found instead.
        hint: What to do about it.

    Attributes:
        where: Where it happened; None if that is not known.
    """

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        expected: object = None,
        got: object = None,
        hint: str | None = None,
    ) -> None:
        self.where = where
        parts = (("where", where), ("expected", expected), ("got", got), ("hint", hint))
        super().__init__("\n".join([what, *(f"  {label}: {text}" for label, text in parts if text is not None)]))


class ObservationError(ExportkitError, RuntimeError):
    """Nothing usable was recorded."""


class NoCallsError(ObservationError):
    """No call was recorded at all."""


class InvalidRequestError(ExportkitError, ValueError):
    """An argument of an exportkit function is invalid."""


class UnknownMethodError(InvalidRequestError):
    """The model has no method with this name."""


class UnknownInputError(InvalidRequestError):
    """The observed method has no input with this name."""


class InvalidTypeError(ExportkitError, TypeError):
    """An argument of an exportkit function has the wrong type."""


class TreeError(ExportkitError, TypeError):
    """A nested value cannot be flattened or rebuilt."""


class UnregisteredClassError(TreeError):
    """An object holds tensors, but its class is not registered."""


class CompatibilityError(ExportkitError):
    """A private API of torch or transformers that exportkit relies on does not exist."""


class PlanError(ExportkitError, RuntimeError):
    """The recorded calls contradict each other or an edit of the plan, or no plan can state which sizes are served."""


class ArgumentError(PlanError):
    """A call cannot be built from a plan, or does not fit a plan or a graph."""


class ExportError(ExportkitError, RuntimeError):
    """torch.export or the translation to ONNX failed.

    Attributes:
        details: The full message of torch; empty if there is none.
        request: What was traced; None if unknown.
        loops: What torch raised when loops over a length were to become operators; None if that was not tried.
        sides: The condition on sizes that some recorded calls break, and their numbers; None if that is not the cause.
        decision: File and line that decide what kind of result there is; None if that is not the cause.
    """

    details: str = ""
    request: Any = None
    loops: BaseException | None = None
    sides: tuple[str, frozenset[int]] | None = None
    decision: tuple[str, int] | None = None

    def repro(self, directory: str | os.PathLike[str]) -> Path:
        """Writes a script that fails in the same way with torch alone, and returns its path.

        The script contains shapes, dtypes and versions, and neither tensor values nor weights.

        Args:
            directory: Where to write ``repro.py``.

        Raises:
            InvalidRequestError: if the error was raised before anything was traced.
            DestinationError: if the directory cannot be written.
        """
        if self.request is None:
            raise InvalidRequestError("Nothing was traced when this error was raised, so it cannot be reproduced.")
        script: Path = self.request.repro(directory)
        return script


class CaptureError(ExportkitError, RuntimeError):
    """The output of a module cannot be captured, or nothing was captured."""


class TraceError(ExportkitError, RuntimeError):
    """A trace is damaged, or does not contain the requested values."""


class PatchError(ExportkitError, RuntimeError):
    """A replacement computes something else, or cannot take the place of a class or module."""


class DestinationError(ExportkitError, OSError):
    """A path cannot be read or written."""


class MissingPackageError(ExportkitError, ImportError):
    """An optional package is not installed."""


class RuntimeFailure(ExportkitError, RuntimeError):
    """onnxruntime cannot load the graph, or raises for a call."""


def nearest(text: str, candidates: Iterable[str]) -> list[str]:
    """Returns up to three candidates that are most similar to a text, ignoring case, best first."""
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    found = difflib.get_close_matches(text.lower(), by_lower, n=3, cutoff=0.4)
    return [by_lower[name] for name in found]


def nearest_text(text: str, candidates: Iterable[str], separator: str = ", ") -> str:
    """Returns these candidates as a part of a hint."""
    return separator.join(nearest(text, candidates)) or "nothing similar"


def require_module(value: object, done: str) -> None:
    """Raises InvalidTypeError unless a value is a module.

    Args:
        value: What a user gave.
        done: What is done with modules, such as ``traced``.
    """
    import torch

    if not isinstance(value, torch.nn.Module):
        raise InvalidTypeError(f"Only modules can be {done}.", expected="torch.nn.Module", got=type(value).__name__)
