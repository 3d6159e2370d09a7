"""Gives a model on the meta device the weights of safetensors files.

The tensors of the copy are the memory of the files themselves. The operating system reads a page when it is used and
may drop it again, so a model needs no memory of its own to be exported.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from exportkit._torch_compat.modules import buffer_table, parameter_table, wraps_tensors
from exportkit._torch_compat.transformers import compute_buffers
from exportkit.errors import DestinationError, InvalidRequestError, nearest_text
from exportkit.files import as_path
from exportkit.plan.tables import first_of


def with_weights(model: torch.nn.Module, weights: str | os.PathLike[str] | None) -> torch.nn.Module:
    """Returns a model with values: the model itself if it has them, else a copy with the values of the files.

    Args:
        model: The model; stays as it is.
        weights: A safetensors file, or a folder with such files; None for a model that has its values.

    Raises:
        InvalidRequestError: if weights are missing, of another shape, not wanted, or hold several tensors.
        DestinationError: if the files cannot be read.
    """
    wrappers = [(name, tensor) for name, tensor in _tensors(model) if wraps_tensors(tensor)]
    if wrappers:
        raise InvalidRequestError(
            "Weights that consist of several tensors, such as quantised ones, cannot be part of a graph.",
            where=first_of([name for name, _ in wrappers], 3),
            expected="plain tensors",
            got=type(wrappers[0][1]).__name__,
            hint="unwrap them before the calls are recorded, for instance with "
            "torchao.utils.unwrap_tensor_subclass(model), or export the model as it was before and pass weights= to "
            "to_onnx.",
        )
    missing = [name for name, tensor in _tensors(model) if tensor.is_meta]
    if weights is None:
        if missing:
            raise InvalidRequestError(
                "This model has no weights: they are on the meta device.",
                where=first_of(missing, 3),
                hint="export(model, observer, weights='folder with safetensors files'). If something puts them in "
                "place while the model runs, as the offloading of accelerate does, take it off first: "
                "accelerate.hooks.remove_hook_from_module(model, recurse=True).",
            )
        return model
    if not missing:
        raise InvalidRequestError(
            "The model already has weights, so none are read from files.",
            where=str(weights),
            hint="leave out weights=, or create the model under `with torch.device('meta'):`.",
        )
    with _opened(as_path(weights)) as files:
        return _filled(model, files)


def _filled(model: torch.nn.Module, files: Mapping[str, Any]) -> torch.nn.Module:
    known: dict[int, Any] = {id(tensor): tensor for _, tensor in _tensors(model) if not tensor.is_meta}
    filled = copy.deepcopy(model, known)  # tensors with values are shared, not copied
    names: dict[int, list[str]] = {}
    tensors = dict(_tensors(filled))
    for name, tensor in tensors.items():
        if tensor.is_meta:
            names.setdefault(id(tensor), []).append(name)
    sources = {tied[0]: next((name for name in tied if name in files), None) for tied in names.values()}
    # before anything is read: computing a buffer may write to weights beside it, which does nothing on the meta device
    _compute_buffers(filled, [name for name, source in sources.items() if source is None])
    for tied in names.values():
        source = sources[tied[0]]
        if source is not None:
            value = _read(files[source], source, tensors[source])
            for name in tied:
                _set(filled, name, value)
    _require_values(filled, files)
    return filled


def _read(file: Any, name: str, wanted: torch.Tensor) -> torch.Tensor:
    value = file.get_tensor(name)
    if value.shape != wanted.shape:
        raise InvalidRequestError(
            "A weight has different shapes in the file and in the model.",
            where=name,
            expected=tuple(wanted.shape),
            got=tuple(value.shape),
            hint="create the model from the configuration that belongs to these files.",
        )
    value = value.to(wanted.dtype)
    return torch.nn.Parameter(value, requires_grad=False) if isinstance(wanted, torch.nn.Parameter) else value


def _compute_buffers(model: torch.nn.Module, names: Iterable[str]) -> None:
    """Lets modules compute the buffers that no file has, such as the frequencies of positions."""
    for path in sorted({name.rpartition(".")[0] for name in names}):
        module = model.get_submodule(path)
        if any(not parameter.is_meta for parameter in module.parameters()):
            continue  # these values are the caller's
        buffers = buffer_table(module)
        before = {name: buffer for name, buffer in buffers.items() if buffer is not None and buffer.is_meta}
        buffers |= {name: _unset(buffer) for name, buffer in before.items()}
        compute_buffers(model, path)
        for name, buffer in before.items():
            computed = buffers[name]
            if computed is None or torch.equal(torch.nan_to_num(computed), torch.nan_to_num(_unset(buffer))):
                buffers[name] = buffer


def _unset(like: torch.Tensor) -> torch.Tensor:
    """A tensor with values that no computation returns."""
    value = (
        torch.nan if like.is_floating_point() else torch.iinfo(like.dtype).min if like.dtype != torch.bool else False
    )
    return torch.full_like(like, value, device="cpu")


def _require_values(model: torch.nn.Module, files: Mapping[str, Any]) -> None:
    lacking = [name for name, tensor in _tensors(model) if tensor.is_meta]
    if not lacking:
        return
    raise InvalidRequestError(
        "The files lack weights of the model.",
        where=first_of(lacking, 3),
        got=f"files with {len(files)} tensors; nearest to {lacking[0]!r}: {nearest_text(lacking[0], files)}",
        hint="tensors that no file holds need values: create these modules outside of the meta device.",
    )


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[dict[str, Any]]:
    """The open file of each tensor by its name. A tensor keeps the memory of its file when that is closed."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise DestinationError(
            "The folder contains no weights.",
            where=str(path),
            expected="*.safetensors",
            hint="model.save_pretrained(...)",
        )
    with contextlib.ExitStack() as stack:
        found: dict[str, Any] = {}
        for file in files:
            try:
                opened = stack.enter_context(safe_open(file, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise DestinationError("This file of weights cannot be read.", where=str(file), got=error) from error
            found |= dict.fromkeys(opened.keys(), opened)
        yield found


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _set(model: torch.nn.Module, name: str, value: torch.Tensor) -> None:
    path, _, attribute = name.rpartition(".")
    module = model.get_submodule(path)
    parameters = parameter_table(module)
    table = parameters if attribute in parameters else buffer_table(module)
    table[attribute] = value  # type: ignore[assignment]
