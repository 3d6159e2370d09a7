"""Explains why a loop of the model was unrolled, which fixes the length that it runs over."""

from __future__ import annotations

import linecache
import traceback
from pathlib import Path
from typing import NamedTuple

from exportkit import rewrites
from exportkit._torch_compat.loop_operators import why_no_operator
from exportkit.rewrites.branches import is_model_code
from exportkit.rewrites.loop_reasons import reason_at

_REWRITES = Path(rewrites.__file__).parent
_HINTS = {
    "decides by": "compute both sides and choose with torch.where(condition, a, b).",
    "changes the": "give the tensor its final shape and dtype before the loop.",
    "of a slice": "keep all rows, and use a mask in place of the slice.",
    "a slice may end": "pad the tensor to a multiple of the step before the loop.",
    "attribute": "keep the value in a local variable, and pass it to the method.",
    "": "write this line in another way, so that every turn does the same to tensors of the same shapes and dtypes.",
}  # by a part of the reason


class Unrolled(NamedTuple):
    """Why a loop was unrolled.

    Attributes:
        text: What its body does, and in which line.
        hint: What to do about it.
    """

    text: str
    hint: str


def why_unrolled(file: str, line: int, error: BaseException | None) -> Unrolled | None:
    """Returns why a loop was unrolled; None if that is not known.

    Args:
        file: The file of the line that fixed a length.
        line: Its number.
        error: What was raised when loops over a length were to become operators.
    """
    reason = reason_at(file, line)
    if reason is not None:
        return Unrolled(_at(reason.text, file, reason.line), reason.hint)
    found = _raised(error) if error is not None else None
    if found is None:
        return None
    return Unrolled(_at(*found), next(hint for part, hint in _HINTS.items() if part in found[0]))


def _at(text: str, file: str, line: int) -> str:
    return f"the loop is unrolled: {text}, in {file}:{line}\n         {linecache.getline(file, line).strip()[:120]}"


def _raised(error: BaseException) -> tuple[str, str, int] | None:
    """Why a loop could not become an operator, with a line of the model."""
    frames = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    found = why_no_operator(error)
    if found is None and not Path(frames[-1][0]).is_relative_to(_REWRITES):
        return None
    text, inside = found or (str(error), [])
    own = [place for place in (*frames, *inside) if is_model_code(place[0])]
    return (text, *own[-1]) if own else None
