"""Every exception that exportkit raises, in one tree.

    ExportkitError
    ├── ObservationError          nothing (usable) was recorded                 RuntimeError
    │   └── NoCallsError          no call at all
    ├── InvalidRequestError       an argument of an exportkit function is wrong ValueError
    │   ├── UnknownMethodError    the model has no such method
    │   └── UnknownInputError     an input name that the signature lacks
    ├── InvalidTypeError          ... is of the wrong type                      TypeError
    ├── TreeError                 a value that cannot be taken apart            TypeError
    │   └── UnregisteredClassError
    ├── CompatibilityError        a private API of torch or transformers is gone
    ├── PlanError                 the recorded calls contradict each other      RuntimeError
    │   └── ArgumentError         arguments cannot be built, or do not fit a plan
    ├── ExportError               torch.export or the ONNX translation failed   RuntimeError
    ├── CaptureError              what a module returned cannot be captured     RuntimeError
    ├── TraceError                a trace that is damaged, or lacks what is asked RuntimeError
    ├── PatchError                a replacement computes something else         RuntimeError
    ├── DestinationError          a path that cannot be read or written         OSError
    ├── MissingPackageError       an optional package is not installed          ImportError
    └── RuntimeFailure            onnxruntime refused the graph or a call       RuntimeError

Each message says what happened, where, expected against got, and what to do about it. The built-in base
classes are those that callers of ``torch.onnx.InputObserver`` already catch.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


class ExportkitError(Exception):
    """Base of all exceptions of this package.

    Args:
        what: One sentence: what happened.
        where: Leaf path, axis, calls: where it happened.
        expected: What would have been right.
        got: What came instead.
        hint: What to do about it.
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
        parts = (("where", where), ("expected", expected), ("got", got), ("hint", hint))
        super().__init__("\n".join([what, *(f"  {label}: {text}" for label, text in parts if text is not None)]))


class ObservationError(ExportkitError, RuntimeError):
    """Nothing usable was recorded."""


class NoCallsError(ObservationError):
    """No call was recorded at all."""


class InvalidRequestError(ExportkitError, ValueError):
    """An argument given to an exportkit function is wrong."""


class UnknownMethodError(InvalidRequestError):
    """The model has no method of that name."""


class UnknownInputError(InvalidRequestError):
    """The observed method has no input of that name."""


class InvalidTypeError(ExportkitError, TypeError):
    """An argument given to an exportkit function has the wrong type."""


class TreeError(ExportkitError, TypeError):
    """A nested value cannot be taken apart or put together."""


class UnregisteredClassError(TreeError):
    """An object holds tensors, and nothing says how to reach them."""


class CompatibilityError(ExportkitError):
    """A private API of torch or transformers that exportkit relies on is gone."""


class PlanError(ExportkitError, RuntimeError):
    """The recorded calls contradict each other, or contradict an edit of the plan."""


class ArgumentError(PlanError):
    """Arguments cannot be built from a plan, or do not fit it."""


class ExportError(ExportkitError, RuntimeError):
    """torch.export or the translation to ONNX failed.

    Attributes:
        details: All that torch said; empty if it said nothing.
        attempt: What was tried; None if that is not known.
    """

    details: str = ""
    attempt: Any = None

    def repro(self, directory: str | os.PathLike[str]) -> Path:
        """Writes a script that shows the same failure without exportkit, and returns its path.

        It holds shapes, types and versions, and neither values of tensors nor weights.

        Args:
            directory: Where to write ``repro.py``.

        Raises:
            InvalidRequestError: if the error came before there was anything to run.
            DestinationError: if the directory cannot be written.
        """
        if self.attempt is None:
            raise InvalidRequestError("Nothing was traced yet when this error was raised, so there is nothing to show.")
        script: Path = self.attempt.repro(directory)
        return script


class CaptureError(ExportkitError, RuntimeError):
    """What a module returned cannot be captured, or nothing was."""


class TraceError(ExportkitError, RuntimeError):
    """A trace is damaged, or does not hold what is asked for."""


class PatchError(ExportkitError, RuntimeError):
    """A replacement of a class or module computes something else, or cannot take its place."""


class DestinationError(ExportkitError, OSError):
    """A path cannot be read or written."""


class MissingPackageError(ExportkitError, ImportError):
    """An optional package is not installed."""


class RuntimeFailure(ExportkitError, RuntimeError):
    """onnxruntime refused the graph, or refused a call."""
