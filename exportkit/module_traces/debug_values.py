"""How transformers' debugger describes tensors. In comes the record of a tensor; out comes its description in the tree.

It is ``{"shape", "dtype", "value", "mean", "std", "min", "max"}``, all texts, the statistics for the usual types of
floating-point numbers only. The value is the tensor as it is printed, or the name of a file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from exportkit._torch_compat.memory import scientific_text
from exportkit.errors import TraceError
from exportkit.module_traces.forms import NAMES, dtype_of, form_of
from exportkit.module_traces.records import TensorRecord
from exportkit.module_traces.trace import Trace

_MEASURED = (torch.float16, torch.float32, torch.bfloat16)
_NO_NAME = re.compile(r'[/\\:*?"<>|\0\s]')


class TextValues:
    """Describes tensors with their values as lines of text."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def __call__(self, record: TensorRecord, _module: str, _number: int, _steps: tuple[Any, ...]) -> dict[str, Any]:
        """Returns the description of a tensor."""
        tensor = _stored(self._trace, record)
        value = [_unstored(record)] if tensor is None else scientific_text(tensor).splitlines()
        return _described(record, tensor, value)


class FileValues:
    """Describes tensors with the names of files that hold their values, under the key ``data``.

    Args:
        trace: The trace.
        folder: Where to write the files.
    """

    def __init__(self, trace: Trace, folder: Path) -> None:
        self._trace, self._folder = trace, folder
        self._names: set[str] = set()

    def __call__(self, record: TensorRecord, module: str, number: int, steps: tuple[Any, ...]) -> dict[str, Any]:
        """Returns the description of a tensor, and writes its file."""
        tensor = _stored(self._trace, record)
        if tensor is None:
            return _described(record, None, _unstored(record))
        place = steps if steps[0] == "outputs" else ("inputs", *steps)
        name = self._new_name("_".join([module, *map(str, place)]), number)
        _save(tensor, self._folder / f"{name}.safetensors")
        return _described(record, tensor, f"./{name}.safetensors")

    def _new_name(self, wanted: str, number: int) -> str:
        """A name that no other tensor has, of this call of the module or another one."""
        name = _NO_NAME.sub("_", wanted) + (f".call_{number}" if number else "")
        others = (f"{name}.{count}" for count in range(2, len(self._names) + 3))
        free = name if name not in self._names else next(other for other in others if other not in self._names)
        self._names.add(free)
        return free


def _stored(trace: Trace, record: TensorRecord) -> torch.Tensor | None:
    try:
        return trace.tensor(record)
    except TraceError:
        return None


def _unstored(record: TensorRecord) -> str:
    return f"tensor(..., device='{record.device}', size={record.shape})"


def _described(record: TensorRecord, tensor: torch.Tensor | None, value: Any) -> dict[str, Any]:
    shape = torch.Size(record.shape) if tensor is None or tensor.is_nested else tensor.shape
    described = {"shape": repr(shape), "dtype": f"torch.{record.dtype}", "value": value}
    if dtype_of(record.dtype) in _MEASURED:
        described |= {name: _statistic(name, record, tensor) for name in ("mean", "std", "min", "max")}
    return described


def _statistic(name: str, record: TensorRecord, tensor: torch.Tensor | None) -> str:
    """The repr of what a method of the tensor returns; of a tensor that has no such method, of its record."""
    found = None
    if tensor is not None and tensor.layout is torch.strided and not tensor.is_nested and tensor.numel() > 1:
        found = getattr(tensor, name)()
    if found is None:
        value = getattr(record, name)
        found = torch.tensor(float("nan") if value is None else value, dtype=dtype_of(record.dtype))
    text = scientific_text(found)
    return text if record.device == "cpu" else f"{text[:-1]}, device='{record.device}')"


def _save(tensor: torch.Tensor, path: Path) -> None:
    """Writes a tensor; one that is not dense, as its parts."""
    form = form_of(tensor)
    parts = {f"data.{name}" if name else "data": _writable(part) for name, part in form.parts.items()}
    details = {name: str(value) for name, value in form.details.items()}
    save_file(parts, path, metadata={"dtype": str(tensor.dtype), **details})


def _writable(dense: torch.Tensor) -> torch.Tensor:
    """A dense tensor of a type that SafeTensors has: pairs for complex numbers, bytes for what it lacks."""
    plain = dense.resolve_conj().resolve_neg().contiguous()
    if plain.dtype in NAMES:
        return plain
    if plain.dtype.is_complex and plain.dtype is not torch.complex32:
        return torch.view_as_real(plain).contiguous()
    return plain.reshape(-1).view(torch.uint8)
