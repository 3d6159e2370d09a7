"""The files of transformers' model_addition_debugger_context, written from a trace.

In comes a model that somebody runs; out come two JSON files, a tree of calls with and without values, and beside them
the trace that they were made of. Names and layout of the files are those of ``transformers.model_debugging_utils``.
"""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError

from exportkit.errors import InvalidTypeError
from exportkit.module_traces.debug_tree import DebugTree, without_values
from exportkit.module_traces.debug_values import FileValues, TextValues
from exportkit.module_traces.record import recording
from exportkit.module_traces.selection import ALL, ENDS, Selection
from exportkit.module_traces.trace import Trace


@contextlib.contextmanager
def model_addition_debugger_context(
    model: torch.nn.Module,
    debug_path: str | os.PathLike[str] | None = None,
    do_prune_layers: bool = True,
    use_repr: bool = True,
) -> Iterator[torch.nn.Module]:
    """Writes what the modules of a model were given and returned, the way transformers does, for a ``with`` block.

    The files are ``<Class>_debug_tree_FULL_TENSORS.json`` and ``<Class>_debug_tree_SUMMARY.json``, without values. They
    are written when the block ends, also by an exception. Several calls of the model are children of one tree. The
    model runs without gradients; of distributed processes the first one writes. Beside them is the folder
    ``<Class>_debug_trace`` with the `Trace` of the run, which also has what modules with children return, and hashes.

    Args:
        model: Any module.
        debug_path: Where to write; by default, the current directory.
        do_prune_layers: Leave out the blocks between the first and the last one.
        use_repr: Show values as text. Otherwise each tensor is written into a SafeTensors file, and its name shown.

    Raises:
        InvalidTypeError: if ``model`` is no module.
        DestinationError: if the directory cannot be written.
    """
    if not isinstance(model, torch.nn.Module):
        raise InvalidTypeError("Only modules can be debugged.", expected="torch.nn.Module", got=type(model).__name__)
    if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_rank():
        with torch.no_grad():
            yield model
        return
    target, name = Path(debug_path or "."), type(model).__name__
    selection = Selection(model, ENDS if do_prune_layers else ALL)
    begun: list[Trace] = []
    try:
        with recording(model, target / f"{name}_debug_trace", selection, without_gradients=True) as trace:
            begun.append(trace)
            yield model
    finally:
        for trace in begun:
            values = TextValues(trace) if use_repr else FileValues(trace, target)
            _write_files(target / f"{name}_debug_tree", DebugTree(trace, model, values, do_prune_layers))


def _write_files(start: Path, tree: DebugTree) -> None:
    try:
        root = tree.root()
        for end, node in (("FULL_TENSORS", root), ("SUMMARY", without_values(root))):
            Path(f"{start}_{end}.json").write_text(json.dumps(node, indent=2), "utf-8")
    except (OSError, SafetensorError) as error:  # the run of the model goes on
        warnings.warn(f"exportkit: the files could not be written: {error}", RuntimeWarning, stacklevel=4)
