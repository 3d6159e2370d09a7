"""Proves a model that was exported in parts: called with what the first part takes, it returns what the model returned.

In come the recorded calls of the model and of its parts; out goes a row for each call that a part fed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from exportkit.calls.call import Call
from exportkit.onnx_files.onnx_model import OnnxModel
from exportkit.probing.simplify import as_simplified
from exportkit.proof.report import Row
from exportkit.trees import Tree, join

RowOf = Callable[[Row, Call, Mapping[str, torch.Tensor], float, Callable[[], Any]], Row]


def assembled_rows(onnx_model: OnnxModel, row_of: RowOf) -> Iterator[Row]:
    """Yields a row for the first recorded call that each call of a part fed.

    Args:
        onnx_model: The model with its parts.
        row_of: Runs the graph, and compares.
    """
    exported = onnx_model.exported
    for name, part in onnx_model.parts.items():
        for fed, call in enumerate(part.exported.observation.calls):
            outputs = call.outputs.tensors()
            renamed = {
                to: t for e in exported.edges[name] for p, t in outputs.items() if (to := e.renamed(p)) is not None
            }
            made = as_simplified(renamed, exported.plan.joined, exported.plan.unused)
            index = next((c.index for c in exported.observation.calls if _was_given(c.tensors(), made)), None)
            if index is None:
                continue
            whole = exported.observation.calls[index]
            values = _without(whole, set(made)) | call.copies()
            row = Row("assembled", f"{index} from {name} {fed}", {}, "proven")
            yield row_of(row, whole, whole.outputs.tensors(), whole.latency, lambda v=values: onnx_model(**v))


def _was_given(given: Mapping[str, torch.Tensor], made: Mapping[str, torch.Tensor]) -> bool:
    return bool(made) and all(path in given and torch.equal(given[path], tensor) for path, tensor in made.items())


def _without(arguments: Call, made: set[str]) -> dict[str, Any]:
    """The arguments by name, but for those that hold nothing else than what a part made."""
    values = arguments.copies()
    caught = arguments.signature.var_keyword
    kept = {
        name: value
        for name, value in values.items()
        if name != caught and not _is_made(name, arguments.arguments[name], made)
    }
    return kept | dict(values.get(caught, {}) if caught else {})


def _is_made(name: str, tree: Tree, made: set[str]) -> bool:
    tensors = tree.tensors()
    return bool(tensors) and all(join(name, path) in made for path in tensors)
