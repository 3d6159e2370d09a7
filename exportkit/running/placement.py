"""Says what computes a graph in onnxruntime: a device, its execution providers, and the options of the session."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from exportkit._torch_compat.cuda import multiplies_in_tf32
from exportkit.errors import InvalidRequestError, InvalidTypeError, MissingPackageError

CPU = "CPUExecutionProvider"
_CUDA = "CUDAExecutionProvider"
_ON_CPU = torch.device("cpu")

Provider = str | tuple[str, Mapping[str, Any]]


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


@dataclass(frozen=True)
class Placement:
    """What computes a graph in onnxruntime; made by `placed`.

    Attributes:
        device: Where the outputs are, and inputs are moved to if the graph runs on the CPU alone.
        providers: The execution providers, the preferred one first.
        options: The options of the session; None for those of exportkit.
    """

    device: torch.device = _ON_CPU
    providers: tuple[Provider, ...] = (CPU,)
    options: Any = None

    @property
    def is_cpu(self) -> bool:
        """Whether the CPU computes the graph."""
        return self.names[0] == CPU

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the execution providers."""
        return tuple([each if isinstance(each, str) else each[0] for each in self.providers])


def placed(
    device: str | torch.device, providers: str | Sequence[Provider] | None = None, options: Any = None
) -> Placement:
    """Returns what computes a graph on a device.

    Products of float32 matrices on CUDA are as precise as torch is set to compute them, see
    ``torch.set_float32_matmul_precision``; onnxruntime by itself would use TF32.

    Args:
        device: "cpu", or "cuda" with or without an index.
        providers: Execution providers of onnxruntime, as ``InferenceSession`` takes them; by default those of the
            device, and the CPU for what they do not compute.
        options: An ``onnxruntime.SessionOptions``. It is used for all sessions of the graph; configuration entries that
            these need are added to it.

    Raises:
        InvalidRequestError: if the device does not exist.
        InvalidTypeError: if the options are something else.
        MissingPackageError: if onnxruntime is not installed, or not with a provider.
    """
    module = require_onnxruntime()
    place = _device(device)
    if options is not None and not isinstance(options, module.SessionOptions):
        raise InvalidTypeError(
            "Invalid session options.",
            where="session_options",
            expected="an onnxruntime.SessionOptions",
            got=type(options).__name__,
        )
    if providers is None:
        on_cuda = (_CUDA, {"device_id": str(place.index), "use_tf32": str(int(multiplies_in_tf32()))})
        providers = [on_cuda, CPU] if place.type == "cuda" else [CPU]
    providers = [providers] if isinstance(providers, str) else providers
    placement = Placement(place, tuple(providers) or (CPU,), options)
    missing = [name for name in placement.names if name not in module.get_available_providers()]
    if missing:
        raise MissingPackageError(
            "The installed onnxruntime does not have this execution provider.",
            where="providers",
            expected=", ".join(missing),
            got=", ".join(module.get_available_providers()),
            hint="pip install onnxruntime-gpu instead of onnxruntime." if _CUDA in missing else None,
        )
    return placement


def _device(device: str | torch.device) -> torch.device:
    """The device, with its index; InvalidRequestError if it does not exist, or is neither the CPU nor a CUDA device."""
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InvalidRequestError("No such device.", where="device", got=repr(device)) from error
    if place.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if str(place) == "cuda":
            place = torch.device("cuda", torch.cuda.current_device() if count else 0)
        if place.index >= count:
            raise InvalidRequestError(
                "No such device.",
                where="device",
                expected=f"one of the {count} CUDA devices that torch finds" if count else "cpu: torch finds no CUDA",
                got=str(place),
            )
    elif place.type != "cpu":
        raise InvalidRequestError(
            "Tensors cannot be given to onnxruntime on this device.",
            where="device",
            expected="cpu or cuda",
            got=str(place),
            hint='pass tensors on the CPU and choose the provider: .to("cpu", providers=[...]).',
        )
    return place
