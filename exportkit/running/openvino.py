"""Runs ONNX models in OpenVINO, on the CPU and in float32."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from exportkit.errors import MissingPackageError, RuntimeFailure, first_line
from exportkit.running.session import GraphSession

# OpenVINO computes in bfloat16 or float16 by itself where the processor has instructions for them.
_OPTIONS = {"INFERENCE_PRECISION_HINT": "f32"}


def require_openvino() -> Any:
    """Returns the openvino module.

    Raises:
        MissingPackageError: if it is not installed.
    """
    try:
        import openvino
    except ImportError as error:
        raise MissingPackageError(
            "OpenVINO is not installed, so nothing can be proven in it.", hint='pip install "exportkit[openvino]"'
        ) from error
    return openvino


class OpenVinoSession(GraphSession):
    """One ONNX model in OpenVINO.

    Args:
        path: The file.

    Raises:
        MissingPackageError: if openvino is not installed.
        RuntimeFailure: if it cannot load the model.
    """

    runtime = "OpenVINO"

    def __init__(self, path: Path) -> None:
        import onnx

        self._module = module = require_openvino()
        graph = onnx.load(path, load_external_data=False).graph
        self.inputs = [value.name for value in graph.input]
        self.outputs = [value.name for value in graph.output]
        axes = {value.name: value.type.tensor_type.shape.dim for value in graph.input}
        self.shapes = {name: tuple([dim.dim_param or dim.dim_value for dim in dims]) for name, dims in axes.items()}
        try:
            core = module.Core()
            self._request = core.compile_model(core.read_model(path), "CPU", _OPTIONS).create_infer_request()
        except Exception as error:
            raise RuntimeFailure(
                "OpenVINO cannot load the model.",
                where=str(path),
                got=first_line(error),
                hint="export without runtime= and without weights=: such a graph uses only standard ONNX operators.",
            ) from error
        types = [value.type.tensor_type.elem_type for value in (*graph.input, *graph.output)]
        if onnx.TensorProto.DOUBLE in types:
            self.in_float32 = tuple(sorted({node.op_type for node in graph.node}))

    @property
    def finding(self) -> str:
        """With which precision OpenVINO computes."""
        version = self._module.__version__.partition("-")[0]
        return (
            f"OpenVINO {version} computes in float32 and with integers of 32 bits; the domain does not exclude "
            "larger ones."
        )

    def _outputs(self, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        self._request.infer({name: self._value(tensor) for name, tensor in given.items()})
        values = [self._request.get_output_tensor(position) for position in range(len(self.outputs))]
        return dict(zip(self.outputs, map(self._tensor, values), strict=True))

    def _value(self, tensor: torch.Tensor) -> Any:
        if tensor.dtype is not torch.bfloat16:
            return self._module.Tensor(tensor.numpy(), shared_memory=False)
        return self._module.Tensor(tensor.view(torch.uint16).numpy(), list(tensor.shape), self._module.Type.bf16)

    def _tensor(self, value: Any) -> torch.Tensor:
        """A copy, as the request goes on to use the memory; numpy has no bfloat16."""
        array = np.array(value.data)
        if value.element_type == self._module.Type.bf16:
            return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
        return torch.from_numpy(array)
