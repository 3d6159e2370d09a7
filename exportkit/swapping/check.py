"""Compares the outputs of a module and its replacement on the same inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from exportkit.errors import InvalidTypeError, PatchError
from exportkit.overrides import ClassOf, replaced
from exportkit.running.compare import compare_tensors, tolerances
from exportkit.swapping.replacement import is_rebuilt, rebuilt, require_same_forward
from exportkit.trees import flatten


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
        inputs: Arguments: a tuple, a dict by name, or a single tensor.
        rtol: Relative tolerance; if both are None, `torch.testing.assert_close` chooses by dtype.
        atol: Absolute tolerance.

    Raises:
        PatchError: if an output, the structure of the outputs or the signature of ``forward`` differs.
        InvalidTypeError: if ``original`` is not a module.

    Example:
        >>> class Same(torch.nn.Linear):
        ...     def forward(self, input):
        ...         return input @ self.weight.T + self.bias
        >>> check_patch(torch.nn.Linear(4, 2), Same, torch.ones(3, 4)).largest < 1e-5
        True
    """
    if not isinstance(original, torch.nn.Module):
        raise InvalidTypeError("Only modules can be checked.", expected="torch.nn.Module", got=type(original).__name__)
    expected = _run(original, inputs)
    if isinstance(patched, type):
        require_same_forward(type(original), patched)
        with _standing_in(original, patched) as stand_in:
            got = _run(stand_in, inputs)
    else:
        got = _run(patched, inputs)
    return PatchCheck(_compared(type(original).__name__, flatten(expected), flatten(got), rtol, atol))


@contextlib.contextmanager
def _standing_in(original: torch.nn.Module, patched: type[torch.nn.Module]) -> Iterator[torch.nn.Module]:
    if is_rebuilt(patched):
        yield rebuilt(original, patched)
        return
    with replaced([(ClassOf(original), patched)]):
        yield original


def _run(module: Callable[..., Any], inputs: Any) -> Any:
    copies = flatten(inputs).map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf).build()
    args = () if isinstance(copies, Mapping) else copies if isinstance(copies, tuple) else (copies,)
    kwargs = copies if isinstance(copies, Mapping) else {}
    with _buffers_kept(module), torch.random.fork_rng(), torch.no_grad():
        return flatten(module(*args, **kwargs)).map(_detached).build()


def _detached(leaf: Any) -> Any:
    """A copy: the output may be a buffer, which is put back."""
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


@contextlib.contextmanager
def _buffers_kept(module: Any) -> Iterator[None]:
    buffers = list(module.buffers()) if isinstance(module, torch.nn.Module) else []
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)


def _compared(name: str, expected: Any, got: Any, rtol: float | None, atol: float | None) -> tuple[CheckedOutput, ...]:
    if set(expected.paths) != set(got.paths):
        raise PatchError(
            f"The replacement of {name} returns something of another structure.",
            expected=", ".join(expected.paths),
            got=", ".join(got.paths),
        )
    values = dict(zip(got.paths, got.leaves, strict=True))
    return tuple(
        CheckedOutput(path, _difference(name, path, leaf, values[path], rtol, atol))
        for path, leaf in zip(expected.paths, expected.leaves, strict=True)
    )


def _difference(name: str, path: str, expected: Any, got: Any, rtol: float | None, atol: float | None) -> float:
    if not isinstance(expected, torch.Tensor) or not isinstance(got, torch.Tensor):
        if type(expected) is not type(got) or expected != got:
            raise PatchError(
                f"The replacement of {name} returns another value.", where=path, expected=expected, got=got
            )
        return 0.0
    usual = tolerances(expected.dtype, same_kernels=True)
    tolerance = usual[0] if rtol is None else rtol, usual[1] if atol is None else atol
    found = compare_tensors(path, expected, got, tolerance=tolerance)
    reason = found.reason
    if expected.device != got.device or expected.layout != got.layout:
        reason = f"{got.layout} on {got.device} instead of {expected.layout} on {expected.device}"
    if reason is not None:
        raise PatchError(f"The replacement of {name} computes something else.", where=path or "the output", got=reason)
    return found.absolute
