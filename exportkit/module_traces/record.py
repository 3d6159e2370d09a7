"""trace_model: records the module calls of a run. In comes a model that somebody runs; out comes a `Trace`."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import warnings
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from exportkit._torch_compat.modules import uncompiled
from exportkit.errors import InvalidTypeError
from exportkit.module_traces.recorder import Recorder
from exportkit.module_traces.selection import Selection
from exportkit.module_traces.trace import Trace
from exportkit.module_traces.watch import watched

if TYPE_CHECKING:
    import re


@contextlib.contextmanager
def trace_model(
    model: torch.nn.Module,
    folder: str | os.PathLike[str] | None = None,
    values: str | re.Pattern[str] | Iterable[str | re.Pattern[str]] | None = None,
    every: int = 1,
) -> Iterator[Trace]:
    """Records every call of every module of a model, for the time of a ``with`` block.

    Of each tensor that a module is given or returns, statistics and a hash are recorded, and its values on request. All
    goes to a folder while the model runs: the memory that a recording takes does not grow with it, and after a crash
    the folder tells which call it was in. The run itself is not changed: neither numbers, random numbers, gradients nor
    the model. What the disk cannot take is missing in the trace, and the trace says so.

    Args:
        model: Any module, called in any way: by itself, ``forward``, ``generate``, another method.
        folder: Where to keep the trace; a trace that is there is replaced. By default it is kept until the `Trace` is
            deleted.
        values: Of which modules to store the values: "all"; "ends", all but the blocks in the middle of lists of
            blocks; a path such as ``"model.layers.*.mlp"``, or an expression that is searched in paths, or a list of
            these.
        every: Store the values of every so many-eth call of a module: of a long generation, a sample.

    Raises:
        InvalidTypeError: if ``model`` is no module, or ``values`` something else.
        InvalidRequestError: if a path matches no module, or ``every`` is less than 1.
        DestinationError: if the folder holds other files, or cannot be written.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU())
        >>> with trace_model(model, values="all") as trace:
        ...     _ = model(torch.ones(5, 4))
        >>> [(call.path, call.class_name) for call in trace.calls]
        [('', 'Sequential'), ('0', 'Linear'), ('1', 'ReLU')]
        >>> record = trace.calls[1].outputs[0]
        >>> record.shape, trace.tensor(record).shape
        ((5, 3), torch.Size([5, 3]))
    """
    if not isinstance(model, torch.nn.Module):
        raise InvalidTypeError("Only modules can be traced.", expected="torch.nn.Module", got=type(model).__name__)
    model = uncompiled(model)  # of a compiled model, which runs what was compiled
    selection = Selection(model, values, every)
    target = Path(tempfile.mkdtemp(prefix="exportkit-trace-") if folder is None else folder)
    with recording(model, target, selection) as trace:
        if folder is None:
            weakref.finalize(trace, shutil.rmtree, target, ignore_errors=True)
        yield trace


@contextlib.contextmanager
def recording(
    model: torch.nn.Module, folder: Path, selection: Selection, without_gradients: bool = False
) -> Iterator[Trace]:
    """Records the calls of a model in a folder, for the time of a ``with`` block.

    Args:
        model: The model.
        folder: The folder.
        selection: Which values to store.
        without_gradients: Run the model under ``torch.no_grad()``.

    Raises:
        DestinationError: if nothing can be written there.
    """
    recorder = Recorder(model, folder, selection, without_gradients)
    try:
        with watched(model, recorder):
            yield Trace(folder, recorder.problems)
    finally:
        recorder.finish()
        if recorder.problems:
            warnings.warn(
                f"exportkit: the trace is incomplete; the model was not affected. {next(iter(recorder.problems))}",
                RuntimeWarning,
                stacklevel=4,
            )
