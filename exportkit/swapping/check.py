"""Compares the outputs of a module and its replacement on the same inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from exportkit.calls.call import given_arguments
from exportkit.errors import PatchError, require_module
from exportkit.overrides import ClassOf, replaced
from exportkit.running.bounds import fixed_bound, same_kernels_tolerance
from exportkit.running.compare import compare_tensors
from exportkit.swapping.mapping import is_rebuilt, rebuilt, require_same_forward
from exportkit.trees import Tree, flatten


@dataclass(frozen=True)
class CheckedOutput:
    """One output: its path, and the largest absolute difference between both modules (0 for equal constants)."""

    path: str
    difference: float


@dataclass(frozen=True)
class PatchCheck:
    """The outputs that were compared, all of them equal within the tolerance."""

    rows: tuple[CheckedOutput, ...]

    @property
    def largest(self) -> float:
        """The largest absolute difference of all outputs."""
        return max((row.difference for row in self.rows), default=0.0)

    def __str__(self) -> str:
        return f"equal: {len(self.rows)} outputs, largest difference {self.largest:.3g}"


def check_patch(
    original: torch.nn.Module,
    patched: torch.nn.Module | type[torch.nn.Module],
    inputs: Any,
    rtol: float | None = None,
    atol: float | None = None,
) -> PatchCheck:
    """Returns the differences between two modules in eager mode, all of them within the tolerance.

    Both get copies of the inputs and the same random numbers. Buffers are restored afterwards.

    Args:
        original: The original module.
        patched: A second module, or a class that is to replace the class of ``original``.
        inputs: Arguments: a tuple of positional ones, a mapping of named ones, a pair of both, or a single tensor.
        rtol: Relative tolerance; if both are None, `torch.testing.assert_close` chooses by dtype.
        atol: Absolute tolerance.

    Raises:
        PatchError: if an output, the structure of the outputs or the signature of ``forward`` differs.
        InvalidTypeError: if ``original`` is not a module, or ``inputs`` are not arguments.

    Example:
        >>> class Same(torch.nn.Linear):
        ...     def forward(self, input):
        ...         return input @ self.weight.T + self.bias
        >>> check_patch(torch.nn.Linear(4, 2), Same, torch.ones(3, 4)).largest < 1e-5
        True
    """
    require_module(original, "checked")
    expected = _run(original, inputs)
    if not isinstance(patched, type):
        got = _run(patched, inputs)
    else:
        require_same_forward(type(original), patched)
        if is_rebuilt(patched):
            got = _run(rebuilt(original, patched), inputs)
        else:
            with replaced([(ClassOf(original), patched)]):
                got = _run(original, inputs)
    name = type(original).__name__
    if set(expected.paths) != set(got.paths):
        raise PatchError(
            f"The replacement of {name} returns a different structure.",
            expected=", ".join(expected.paths),
            got=", ".join(got.paths),
        )
    values, pairs = got.by_path(), expected.by_path().items()
    return PatchCheck(
        tuple(CheckedOutput(path, _difference(name, path, leaf, values[path], rtol, atol)) for path, leaf in pairs)
    )


def _run(module: Callable[..., Any], inputs: Any) -> Tree:
    """What a module returns for copies of the inputs; its buffers are restored."""
    args, kwargs = flatten(given_arguments(inputs)).map(_copied).build()
    buffers = list(module.buffers()) if isinstance(module, torch.nn.Module) else []
    before = [buffer.clone() for buffer in buffers]
    with torch.random.fork_rng(), torch.no_grad():
        try:
            return flatten(module(*args, **kwargs)).map(_copied)  # a buffer may be among the outputs
        finally:
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def _difference(name: str, path: str, expected: Any, got: Any, rtol: float | None, atol: float | None) -> float:
    if not isinstance(expected, torch.Tensor) or not isinstance(got, torch.Tensor):
        if type(expected) is not type(got) or expected != got:
            raise PatchError(
                f"The replacement of {name} returns a different value.", where=path, expected=expected, got=got
            )
        return 0.0
    usual = same_kernels_tolerance(expected.dtype)
    relative, absolute = usual[0] if rtol is None else rtol, usual[1] if atol is None else atol
    found = compare_tensors(path, expected, got, bound=fixed_bound(relative, absolute))
    reason = found.reason
    if expected.device != got.device or expected.layout != got.layout:
        reason = f"{got.layout} on {got.device} instead of {expected.layout} on {expected.device}"
    if reason is not None:
        raise PatchError(f"The replacement of {name} returns different values.", where=path or "the output", got=reason)
    return found.absolute
