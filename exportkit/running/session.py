"""One onnxruntime session: torch tensors in, torch tensors out, every element type that both sides know."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from exportkit.errors import InvalidTypeError, MissingPackageError, RuntimeFailure

if TYPE_CHECKING:
    import onnxruntime

_TYPES = {
    "tensor(float)": torch.float32,
    "tensor(double)": torch.float64,
    "tensor(float16)": torch.float16,
    "tensor(bfloat16)": torch.bfloat16,
    "tensor(int8)": torch.int8,
    "tensor(int16)": torch.int16,
    "tensor(int32)": torch.int32,
    "tensor(int64)": torch.int64,
    "tensor(uint8)": torch.uint8,
    "tensor(uint16)": torch.uint16,
    "tensor(uint32)": torch.uint32,
    "tensor(uint64)": torch.uint64,
    "tensor(bool)": torch.bool,
}
_BFLOAT16 = 16  # TensorProto.BFLOAT16


def require_onnxruntime() -> Any:
    """Returns the onnxruntime module.

    Raises:
        MissingPackageError: if it is not installed.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingPackageError(
            "onnxruntime is not installed, so an ONNX model cannot be run or proven.",
            hint='pip install "exportkit[runtime]"',
        ) from error
    return onnxruntime


class Session:
    """Runs one ONNX model on the CPU.

    Args:
        model: Path of a file, or a serialised ModelProto.
        threads: Number of threads; 0 lets onnxruntime choose.
    """

    def __init__(self, model: str | Path | bytes, threads: int = 0) -> None:
        runtime = require_onnxruntime()
        options = runtime.SessionOptions()
        options.log_severity_level = 4  # what fails is raised, not printed
        options.intra_op_num_threads = threads
        source = model if isinstance(model, bytes) else str(model)
        try:
            self._session: onnxruntime.InferenceSession = runtime.InferenceSession(
                source, options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:
            raise RuntimeFailure(
                "onnxruntime cannot load the model.",
                where="serialised model" if isinstance(model, bytes) else str(model),
                got=_first_line(error),
            ) from error
        self.inputs = {value.name: _TYPES.get(value.type, value.type) for value in self._session.get_inputs()}
        self.shapes = {value.name: tuple(value.shape) for value in self._session.get_inputs()}
        self.outputs = [value.name for value in self._session.get_outputs()]
        self._output_types = [_TYPES.get(value.type) for value in self._session.get_outputs()]

    def run(self, feeds: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Returns the outputs in order.

        Args:
            feeds: Tensors by name of the graph's input.

        Raises:
            RuntimeFailure: if onnxruntime refuses the call.
        """
        values = {name: _to_runtime(name, tensor) for name, tensor in feeds.items()}
        try:
            results = self._session.run_with_ort_values(self.outputs, values)
        except Exception as error:
            shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in feeds.items())
            raise RuntimeFailure("onnxruntime refused the call.", where=shapes, got=_first_line(error)) from error
        return [_to_torch(value, dtype) for value, dtype in zip(results, self._output_types, strict=True)]


def _to_runtime(name: str, tensor: torch.Tensor) -> Any:
    runtime = require_onnxruntime()
    plain = tensor.detach().cpu().contiguous()
    if plain.dtype is torch.bfloat16:
        return runtime.OrtValue.ortvalue_from_numpy_with_onnx_type(plain.view(torch.uint16).numpy(), _BFLOAT16)
    if plain.dtype not in _TYPES.values():
        raise InvalidTypeError(
            "This element type has no counterpart in onnxruntime.",
            where=name,
            expected=", ".join(str(dtype).removeprefix("torch.") for dtype in _TYPES.values()),
            got=str(plain.dtype).removeprefix("torch."),
            hint="convert the input, for instance with .view(torch.uint8) or .to(torch.float32).",
        )
    return runtime.OrtValue.ortvalue_from_numpy(plain.numpy())


def _to_torch(value: Any, dtype: torch.dtype | None) -> torch.Tensor:
    if dtype is torch.bfloat16:
        return torch.from_dlpack(value).clone()
    return torch.from_numpy(value.numpy())


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)[:500]
