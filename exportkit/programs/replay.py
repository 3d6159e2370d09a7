"""Runs a traced program in torch on calls of other kinds than it was traced with, where it may have taken one path.

In comes an export; out go the recorded calls for which its program returns something else than the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch

from exportkit.calls.call import Call
from exportkit.probing.missing import completed_call
from exportkit.probing.simplify import as_simplified
from exportkit.running.compare import outputs_close
from exportkit.running.program import ProgramRunner

if TYPE_CHECKING:
    from exportkit.programs.exported import Exported


def unlike_the_model(exported: Exported, calls: Iterable[int]) -> list[int]:
    """Returns those of the recorded calls for which the program returns something else, or nothing at all.

    Args:
        exported: The export.
        calls: Numbers of recorded calls.
    """
    return [index for index in calls if not _returns_the_same(exported, index)]


def returns(exported: Exported, arguments: Call, expected: Mapping[str, torch.Tensor]) -> bool:
    """Returns whether the program returns for some arguments what the model returned.

    Args:
        exported: The export.
        arguments: A call with all inputs of the program.
        expected: What the model returned, by path.
    """
    captured = exported.captured
    try:
        returned = ProgramRunner(exported.program, captured.input_paths, captured.output_paths)(arguments)
    except Exception:  # whatever an operator raises for sizes that the trace did not foresee
        return False
    joined = exported.joined_outputs
    expected, got = as_simplified(expected, joined, ()), as_simplified(returned, joined, ())
    return outputs_close(expected, got)


def _returns_the_same(exported: Exported, index: int) -> bool:
    arguments = completed_call(
        exported.plan, exported.observation, exported.observation.calls[index], exported.fills.values
    )
    return returns(exported, arguments, exported.observation.calls[index].outputs.tensors())
