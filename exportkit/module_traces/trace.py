"""Defines `Trace`, the public value: a trace that is compared, saved and loaded."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from exportkit.errors import DestinationError
from exportkit.module_traces.comparison import Comparison, compare_traces
from exportkit.module_traces.files import INDEX, TENSORS, check_destination
from exportkit.module_traces.trace_data import TraceData


class Trace(TraceData):
    """The module calls of a run, in a folder.

    A trace can be read while it is being recorded: it holds what was recorded so far. One whose recording never ended
    is read as far as it goes, and says so.

    Args:
        folder: The folder.
        problems: What is known to be missing, beyond what the folder says; may grow.
    """

    def compare(self, other: Trace, names: Mapping[str, str] | None = None) -> Comparison:
        """Returns how another run differs from this one, the reference: what differs first, and what each module adds.

        Calls are matched by path and number, else by order. Dtypes, devices and code may differ: rounding does not
        count as a difference. Tensors without stored values are compared by statistics and hash, as far as these tell.

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
