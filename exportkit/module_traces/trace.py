"""Records the module calls of a run and holds them: `trace_model` and `Trace`."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
import shutil
import tempfile
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from exportkit._torch_compat.modules import uncompiled
from exportkit.errors import DestinationError, InvalidRequestError, InvalidTypeError, require_module
from exportkit.files import as_path
from exportkit.module_traces.comparison import Comparison, compare_traces
from exportkit.module_traces.files import INDEX, TENSORS, check_destination
from exportkit.module_traces.instrument import instrumented
from exportkit.module_traces.recorder import TraceRecorder
from exportkit.module_traces.trace_data import TraceData
from exportkit.plan.leaves import is_below
from exportkit.trees import join

ALL, ENDS = "all", "ends"


class Trace(TraceData):
    """The module calls of a run, in a folder.

    A trace can be read while it is being recorded: it contains what was recorded so far. If the recording was
    interrupted, the trace contains what was written until then, and `complete` is False.

    Args:
        folder: The folder.
        problems: What is known to be missing, beyond what the folder says; may grow.
    """

    def compare(self, other: Trace, names: Mapping[str, str] | None = None) -> Comparison:
        """Returns how another run differs from this one, the reference: what differs first, and what each module adds.

        Calls are matched by path and number, else by order. Dtypes, devices and code may differ: rounding does not
        count as a difference. Tensors without stored values are compared by statistics and hash, as far as that is
        possible.

        Args:
            other: The other run.
            names: Regular expressions for parts of its paths, and their replacements in this run:
                ``{"^model[.]": "", "query": "q_proj"}``.

        Raises:
            InvalidRequestError: if the traces have no call in common.
            TraceError: if one of them is damaged.

        Example:
            >>> from exportkit import trace_model
            >>> model, x = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()), torch.ones(5, 4)
            >>> with trace_model(model, values="all") as right:
            ...     _ = model(x)
            >>> _ = model[0].bias.data.add_(0.1)
            >>> with trace_model(model, values="all") as wrong:
            ...     _ = model(x)
            >>> print(right.compare(wrong).verdict())
            The runs differ in 0 (Linear).
        """
        return compare_traces(self, other, names)

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Copies the trace into a directory, which is created.

        Raises:
            DestinationError: if the directory holds other files, or cannot be written.
        """
        target = as_path(directory)
        if target.exists() and target.resolve() == self.folder.resolve():
            return
        check_destination(target)
        try:
            target.mkdir(parents=True, exist_ok=True)
            for name in (TENSORS, INDEX):
                shutil.copyfile(self.folder / name, target / name)
        except OSError as error:
            raise DestinationError("A trace cannot be written here.", where=str(target), got=error) from error


@contextlib.contextmanager
def trace_model(
    model: torch.nn.Module,
    folder: str | os.PathLike[str] | None = None,
    values: str | re.Pattern[str] | Iterable[str | re.Pattern[str]] | None = None,
    every: int = 1,
) -> Iterator[Trace]:
    """Records every call of every module of a model, for the time of a ``with`` block.

    For each tensor that a module is given or returns, statistics and a hash are recorded, and its values on request.
    All of it is written to a folder while the model runs, so the memory that a recording needs does not grow with the
    run, and after a crash the folder shows in which call it happened. The run itself does not change: results, random
    numbers, gradients and the model stay the same. If the disk is full, the rest of the run is missing from the trace,
    and `Trace.problems` says so.

    Args:
        model: Any module, called in any way: directly, or through ``forward``, ``generate`` or another method.
        folder: Where to keep the trace; a trace that is there is replaced. By default it is kept until the `Trace` is
            deleted.
        values: The modules whose values to store: "all"; "ends", all but the blocks in the middle of lists of blocks; a
            path such as ``"model.layers.*.mlp"``; a compiled expression that is searched for in paths; or a list of
            these.
        every: Store the values of every n-th call of each module only: a sample of a long generation.

    Raises:
        InvalidTypeError: if ``model`` is not a module, or ``values`` is something else.
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
    require_module(model, "traced")
    model = uncompiled(model)  # the model inside a compiled one, which runs what was compiled
    selection = ValueSelection(model, values, every)
    with contextlib.ExitStack() as stack:
        if folder is None:
            folder = tempfile.mkdtemp(prefix="exportkit-trace-")
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
        with recording(model, Path(folder), selection) as trace:
            weakref.finalize(trace, stack.pop_all().close)
            yield trace


@contextlib.contextmanager
def recording(
    model: torch.nn.Module, folder: Path, selection: ValueSelection, without_gradients: bool = False
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
    recorder = TraceRecorder(model, folder, selection, selection.text, without_gradients)
    try:
        with instrumented(model, recorder):
            yield Trace(folder, recorder.problems)
    finally:
        recorder.finish()
        if recorder.problems:
            warnings.warn(
                f"exportkit: the trace is incomplete; the model was not affected. {next(iter(recorder.problems))}",
                RuntimeWarning,
                stacklevel=4,
            )


class ValueSelection:
    """Says whether the values of a call are stored.

    Args:
        model: The model.
        values: See `trace_model`.
        every: Store the values of every n-th call of each module only.

    Raises:
        InvalidRequestError: if a pattern matches no module, or ``every`` is not a positive number.
        InvalidTypeError: if ``values`` is something else.
    """

    def __init__(self, model: torch.nn.Module, values: Any, every: int = 1) -> None:
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise InvalidRequestError(
                "The number of calls between stored ones must be positive.",
                where="every",
                expected="1 or more",
                got=repr(every),
            )
        self._every = every
        self._stores_all = isinstance(values, str) and values == ALL
        self._paths = frozenset() if self._stores_all else frozenset(_selected(model, values))
        self.text = values if values is None or isinstance(values, str) else repr(values)

    def __call__(self, path: str, number: int) -> bool:
        """Returns whether the values of that call of the module are stored."""
        return (self._stores_all or path in self._paths) and number % self._every == 0


def _selected(model: torch.nn.Module, values: Any) -> Iterable[str]:
    """Paths of the selected modules."""
    if values is None:
        return ()
    paths = [path for path, _ in model.named_modules()]
    if isinstance(values, str) and values == ENDS:
        middle: list[str] = []  # blocks in lists of modules that are neither the first nor the last there
        for path, module in model.named_modules():
            numbered = [name for name, child in module.named_children() if name.isdigit() and any(child.children())]
            middle += [join(path, name) for name in numbered[1:-1]]
        return [path for path in paths if not any(is_below(path, block) for block in middle)]
    patterns = list(values) if isinstance(values, list | tuple | set | frozenset) else [values]
    return {path for pattern in patterns for path in _matching(pattern, paths)}


def _matching(pattern: Any, paths: list[str]) -> list[str]:
    if isinstance(pattern, re.Pattern):
        found = [path for path in paths if pattern.search(path)]
    elif isinstance(pattern, str):
        found = [path for path in paths if fnmatch.fnmatchcase(path, pattern)]
    else:
        raise InvalidTypeError(
            "Unsupported selection of values to store.",
            where="values",
            expected='None, "all", "ends", a module path (also with * and ?), a compiled regular expression, or a list',
            got=repr(pattern),
        )
    if not found:
        text = pattern if isinstance(pattern, str) else pattern.pattern
        raise InvalidRequestError(
            "No module has such a path, so no values would be stored.",
            where="values",
            got=repr(text),
            hint=f"paths are such as {', '.join(map(repr, paths[-3:]))}; * stands for anything in them.",
        )
    return found
