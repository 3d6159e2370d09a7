"""A trace: what every module call was given and returned, as a folder holds it.

In comes a folder that a recording wrote, or is writing; out go its calls and, one by one, the tensors whose values were
stored. A folder whose recording did not end is read as far as it goes, and says so.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from exportkit.errors import DestinationError, TraceError
from exportkit.module_traces.content import Content, read_content
from exportkit.module_traces.files import INDEX, TENSORS, check_destination
from exportkit.module_traces.records import ModuleCall, TensorRecord

if TYPE_CHECKING:
    from exportkit.module_traces.comparison import Comparison


class Trace:
    """The module calls of a run, in a folder.

    A trace whose recording goes on can be read, too: it holds what was recorded so far.

    Args:
        folder: The folder.
        problems: What is known to be missing, beyond what the folder says; may grow.
    """

    def __init__(self, folder: str | os.PathLike[str], problems: Collection[str] = ()) -> None:
        self.folder = Path(folder)
        self._problems = problems
        self._content: Content | None = None

    def __repr__(self) -> str:
        partial = "" if self.complete else ", incomplete"
        return f"Trace({self.metadata['model']}: {len(self.calls)} calls{partial})"

    @property
    def calls(self) -> tuple[ModuleCall, ...]:
        """The calls, in the order in which they began."""
        return self._read().calls

    @property
    def complete(self) -> bool:
        """Whether the recording ended, and nothing is missing; `problems` says what is."""
        return not self.problems

    @property
    def problems(self) -> tuple[str, ...]:
        """Why the trace is incomplete; empty if it is complete."""
        return tuple(dict.fromkeys((*self._problems, *self._read().problems)))

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Class of the model (``model``), which values were stored (``values``), and versions of what wrote it."""
        return self._read().metadata

    def tensor(self, record: TensorRecord) -> torch.Tensor:
        """Returns the values of a tensor, on the CPU; they are read from the file when they are used.

        Args:
            record: A record of this trace.

        Raises:
            TraceError: if its values were not stored, or the file is damaged.
        """
        if record.key is None:
            raise TraceError(
                "The values of this tensor were not stored.",
                where=record.path,
                hint='record them: trace_model(model, values="all"), or the paths of the modules that matter.',
            )
        entry = self._read().stored.get(record.key)
        if entry is None:
            raise TraceError("This trace has no such tensor.", where=record.key, hint="the record is of another trace.")
        tensor = self._read().tensor(entry)
        return tensor.reshape(record.shape) if entry["kind"] == "dense" else tensor

    def compare(self, other: Trace, names: Mapping[str, str] | None = None) -> Comparison:
        """Returns how another run differs from this one, which is taken for right: what differs first, and what adds.

        Calls are matched by path and number, else by order. Element types, devices and code may differ: rounding is no
        difference. Tensors without stored values are compared by statistics and hash, as far as these carry.

        Args:
            other: The other run.
            names: Regular expressions for parts of its paths, and what they are in this one:
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
        from exportkit.module_traces.compare import compare_traces

        return compare_traces(self, other, names)

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Copies the trace into a directory, which is created.

        Raises:
            DestinationError: if the directory holds other files, or cannot be written.
        """
        target = Path(directory)
        if target.exists() and target.resolve() == self.folder.resolve():
            return
        check_destination(target)
        try:
            target.mkdir(parents=True, exist_ok=True)
            for name in (TENSORS, INDEX):
                shutil.copyfile(self.folder / name, target / name)
        except OSError as error:
            raise DestinationError("A trace cannot be written here.", where=str(target), got=error) from error

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> Trace:
        """Returns the trace in a directory. Nothing in it is executed.

        Raises:
            DestinationError: if there is no trace.
            TraceError: if it is damaged, or was written by a version that this one does not read. One whose recording
                was cut short is read as far as it goes; see `complete`.
        """
        trace = cls(directory)
        trace._read()
        return trace

    def _read(self) -> Content:
        """What the index holds; read again as long as it grows."""
        if self._content is None or not self._content.is_current():
            self._content = read_content(self.folder / INDEX)
        return self._content
