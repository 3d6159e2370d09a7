"""Defines `Runner`, and compares two runners: whether they return the same results for given calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from exportkit.calls.call import Call
from exportkit.running.compare import Difference, Tensors, compare_outputs
from exportkit.trees import Tree, flatten

Compare = Callable[[Call, Tensors, Tensors], Iterable[Difference]]


class Runner(Protocol):
    """Takes a call and returns its outputs: the model, an exported program, ONNX Runtime, or another runtime."""

    def __call__(self, call: Call, /) -> Tensors:
        """Returns the output tensors by path. The tensors of the call stay as they are.

        Raises:
            Exception: whatever stops the run.
        """


@dataclass(frozen=True)
class Outcome:
    """What came of one call on two runners.

    Attributes:
        call: The call.
        differences: One for each output, in order; empty if the second runner raised.
        error: What the second runner raised, or None.
        seconds: How long the second runner took.
    """

    call: Call
    differences: tuple[Difference, ...] = ()
    error: Exception | None = None
    seconds: float = 0.0

    @property
    def wrong(self) -> tuple[Difference, ...]:
        """The outputs that count as different."""
        return tuple(difference for difference in self.differences if difference.reason is not None)

    @property
    def agrees(self) -> bool:
        """Whether both runners returned the same, within the tolerance."""
        return self.error is None and not self.wrong


class Returned(dict[str, torch.Tensor]):
    """Output tensors by path, together with the value that holds them.

    Attributes:
        tree: The value.
    """

    tree: Tree

    @classmethod
    def of(cls, value: Any) -> Returned:
        """Returns the tensors in what a model or a graph returned."""
        tree = flatten(value)
        found = cls(tree.tensors())
        found.tree = tree
        return found


def recorded(call: Call, /) -> dict[str, torch.Tensor]:
    """Returns what came back when a call was made: the runner for calls whose outputs are known."""
    return call.outputs.tensors()


def compare_calls(
    expected: Runner, got: Runner, calls: Iterable[Call], compare: Compare | None = None
) -> Iterator[Outcome]:
    """Yields what comes of each call on two runners.

    A call for which the first one raises is not a call of the model, and is left out.

    Args:
        expected: The runner that is taken for right; `recorded` for calls whose outputs are known.
        got: The runner that is compared with it.
        calls: The calls.
        compare: Compares the outputs of a call; `compare_outputs` by default.
    """
    for call in calls:
        try:
            wanted = expected(call)
        except Exception:  # whatever the model raises for a call that it does not accept
            continue
        started = time.perf_counter()
        try:
            found = got(call)
        except Exception as error:
            yield Outcome(call, error=error, seconds=time.perf_counter() - started)
            continue
        seconds = time.perf_counter() - started
        differences = compare_outputs(wanted, found) if compare is None else compare(call, wanted, found)
        yield Outcome(call, tuple(differences), seconds=seconds)
