"""Weights of a module in an ONNX model that are not those of the program.

In come both, and the nodes of the module in each; out goes the name of such a weight. Translation writes weights as
they are: one that differs was changed afterwards, by an optimisation or in the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from exportkit.divergence.graph_run import Inside
from exportkit.running.program import state_of

if TYPE_CHECKING:
    import onnx


def changed_weight(
    model: onnx.ModelProto,
    folder: Path | None,
    inside: Inside,
    program: torch.export.ExportedProgram,
    program_inside: Inside,
) -> str | None:
    """Returns the name of a weight that has the size of one in the program, and other values; None if there is none.

    Args:
        model: The ONNX model.
        folder: Where its external weights are, if it has any.
        inside: The module in it.
        program: The program.
        program_inside: The module in that.
    """
    state = state_of(program)
    known = [state[name] for name in program_inside.entering if isinstance(state.get(name), torch.Tensor)]
    for weight in _weights(model, inside):
        like = [tensor for tensor in known if tensor.numel() == np.prod(weight.dims) and tensor.numel() > 1]
        if like and tensor_is_new(_array(weight, folder), like):
            return weight.name
    return None


def tensor_is_new(array: np.ndarray, known: list[torch.Tensor]) -> bool:
    """Returns whether an array is none of these tensors, as it is or transposed."""
    flat = torch.from_numpy(np.ascontiguousarray(array, np.float64)).reshape(-1)
    forms = (form for tensor in known for form in (tensor, tensor.transpose(0, -1)))
    return not any(torch.equal(flat, form.detach().cpu().to(torch.float64).reshape(-1)) for form in forms)


def _weights(model: onnx.ModelProto, inside: Inside) -> Iterator[onnx.TensorProto]:
    own = {name for node in inside.nodes for name in node.outputs}
    used = {name for node in model.graph.node if own.intersection(node.output) for name in node.input}
    return (weight for weight in model.graph.initializer if weight.name in used)


def _array(weight: onnx.TensorProto, folder: Path | None) -> np.ndarray:
    from onnx import numpy_helper

    return numpy_helper.to_array(weight, str(folder or ""))
