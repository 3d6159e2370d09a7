"""What is said when an export fails: in comes torch's exception, out goes one root cause, and a file with the rest.

Only an error that leaves exportkit is looked into, so that exports which succeed pay nothing: the model may then be
traced a second time, to see which line of it fixed the size of an axis.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from exportkit.calls.call import Call
from exportkit.errors import ExportError, ExportkitError
from exportkit.plan.plan import Plan
from exportkit.programs.causes import Cause, cause_of_trace, cause_of_translation

_DETAILS = "exportkit-details-"


@dataclass(frozen=True)
class Attempt:
    """What was tried: enough to look for the cause, and to write a script that tries it again.

    Attributes:
        model: The model.
        method: The method.
        plan: Says which axes are dynamic.
        arguments: The arguments it was traced with.
        rules: Names of the rewrites that were in force.
        trace: Traces again, if tracing failed.
        onnx: Whether it is about the translation to ONNX.
    """

    model: torch.nn.Module
    method: str
    plan: Plan
    arguments: Call
    rules: tuple[str, ...] = ()
    trace: Callable[[], Any] | None = None
    onnx: bool = False

    def repro(self, directory: str | os.PathLike[str]) -> Path:
        """Writes a script that does the same with torch alone, and returns its path."""
        from exportkit.programs.repro import write_attempt

        return write_attempt(self, directory)


def failure(what: str, error: Exception, attempt: Attempt) -> ExportError:
    """Returns the error for an exception of torch, without a root cause yet.

    Args:
        what: One sentence: what could not be done.
        error: The exception.
        attempt: What was tried.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    failed = ExportError(
        what,
        where=f"variables {', '.join(v.name for v in attempt.plan.variables) or 'none'}",
        got=f"{type(error).__name__}: {' '.join(lines[:3])[:500]}",
        hint="the full message of torch is the cause of this exception (__cause__).",
    )
    failed.attempt = attempt
    return failed


@contextlib.contextmanager
def explained(attempt: Callable[[], Attempt] | None = None) -> Iterator[None]:
    """Gives errors of a ``with`` block, or of a decorated function, their root cause and the file with the rest.

    Args:
        attempt: Says what was tried, where the errors do not.
    """
    try:
        yield
    except ExportError as error:
        cause = error.__cause__
        if error.attempt is None and attempt is not None:
            error.attempt = attempt()
        if error.attempt is None or cause is None or error.details:
            raise
        raise _explained(error, cause) from cause


def in_one_line(error: ExportkitError) -> str:
    """Returns what an error says, in one line; of an export that failed, the root cause and where it is."""
    cause, attempt = error.__cause__, getattr(error, "attempt", None)
    found = _root_cause(cause, attempt) if cause is not None and attempt is not None else None
    if found is None:
        what, *lines = str(error).splitlines()
        got = next((line.removeprefix("  got: ") for line in lines if line.startswith("  got: ")), "")
        return f"{what} {got}".strip()[:300]
    place = str(found.place or "").partition("\n")[0]
    return f"{found.what} ({place})" if place else found.what


def _explained(error: ExportError, cause: BaseException) -> ExportError:
    attempt = error.attempt
    details = "".join(traceback.format_exception(cause))
    found = _root_cause(cause, attempt) or Cause(str(error).partition("\n")[0], None, None, str(cause)[:500], None)
    file = _written(details)
    better = ExportError(
        found.what,
        where=str(found.place or "outside of the model's code"),
        expected=found.expected,
        got=found.got,
        hint="\n        ".join(text for text in (found.hint, file and f"all that torch says: {file}") if text),
    )
    better.attempt, better.details = attempt, details
    return better


def _root_cause(cause: BaseException, attempt: Attempt) -> Cause | None:
    """The cause; None if to look for it fails, which must never hide the error itself."""
    with contextlib.suppress(Exception):
        if attempt.onnx:
            return cause_of_translation(cause)
        return cause_of_trace(cause, attempt.model, attempt.plan, attempt.arguments, attempt.trace)
    return None


def _written(details: str) -> Path | None:
    """A file with the details among the temporary files; None where none can be written."""
    with contextlib.suppress(OSError):
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", prefix=_DETAILS, suffix=".txt", delete=False) as file:
            file.write(details)
        return Path(file.name)
    return None
