"""Asks the model how many frames of audio it takes for each state that its encoder made of them.

In come which numbers of frames and states the model accepts together; out goes the number of frames as an expression.
"""

from __future__ import annotations

from collections.abc import Callable

from exportkit.plan.expression import Expression

_LARGEST_STEP = 2**14

Accepts = Callable[[int, int], bool]


def frames_of_states(accepts: Accepts, frames: int, states: int, name: str) -> Expression | None:
    """Returns the number of frames as a multiple of the number of states, plus a constant; None if it is none.

    An encoder shortens its input by strides, so each further state stands for as many more frames, and a mask over
    frames may be no longer than the states reach.

    Args:
        accepts: Whether the model accepts so many frames with so many states.
        frames: The recorded number of frames.
        states: The recorded number of states.
        name: The variable for the number of states.

    Example:
        >>> str(frames_of_states(lambda frames, states: (frames - 1) // 4 + 1 <= states, 28, 7, "states"))
        '4*states'
    """
    if states > 1 and accepts(frames, states - 1):
        return None
    first = _most_frames(accepts, frames, states)
    second = None if first is None else _most_frames(accepts, first + 1, states + 1)
    if first is None or second is None:
        return None
    stride = second - first
    third = second + stride
    if not accepts(third, states + 2) or accepts(third + 1, states + 2):
        return None
    return Expression(((name, stride),), frames - stride * states)


def _most_frames(accepts: Accepts, least: int, states: int) -> int | None:
    """The largest number of frames that is accepted; None if ``least`` is too many, or none is."""
    if not accepts(least, states):
        return None
    low, step = least, 1
    while accepts(low + step, states):
        low, step = low + step, 2 * step
        if step > _LARGEST_STEP:
            return None
    high = low + step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if accepts(middle, states) else (low, middle)
    return low
