"""torch.nn.Module: tables of parameters, buffers, submodules and hooks; compiled modules."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from exportkit._torch_compat import require
from exportkit._torch_compat.tracing import apart_from_modes, is_tracing

_HOOK_TABLES = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs")


def parameter_table(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """Returns the table in which a module keeps its own parameters. Seen in torch 2.13."""
    return module._parameters


def buffer_table(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Returns the table in which a module keeps its own buffers; a scripted module has no dict. Seen in torch 2.13."""
    return module._buffers


def module_table(module: torch.nn.Module) -> dict[str, torch.nn.Module | None]:
    """Returns the table in which a module keeps its own submodules. Seen in torch 2.13."""
    return module._modules


def wraps_tensors(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor holds other tensors, as quantised weights do. Seen in torch 2.13."""
    from torch.utils import _python_dispatch

    is_wrapper = require(_python_dispatch, "is_traceable_wrapper_subclass")
    return bool(is_wrapper(tensor))


def uncompiled(model: Any) -> Any:
    """Returns the module that ``torch.compile`` compiled, or the model itself. Seen in torch 2.13."""
    return getattr(model, "_orig_mod", model)


def forward_of(module: torch.nn.Module) -> Any:
    """Returns the function ``forward`` of a module's class; None for a scripted module, whose class has none.

    Seen in torch 2.13.
    """
    return getattr(type(module), "forward", None)


def forward_parameters(module: torch.nn.Module) -> list[str]:
    """Returns the names of what the ``forward`` of a module takes, ``self`` included; none for a scripted module."""
    function = forward_of(module)
    return [] if function is None else [*inspect.signature(function).parameters]


def paths_of_modules(model: torch.nn.Module) -> dict[torch.nn.Module, list[str]]:
    """Returns all paths to each module inside a model, in the order of ``named_modules``. Seen in torch 2.13.

    ``named_modules`` passes each module up through one generator per level, which takes three times as long.
    """
    paths = {model: [""]}

    def walk(module: torch.nn.Module, prefix: str) -> None:
        for name, child in module._modules.items():
            if child is not None:
                paths.setdefault(child, []).append(prefix + name)
                if child._modules:
                    walk(child, f"{prefix}{name}.")

    walk(model, "")
    return paths


# What a call of a module runs, hooks included, unless it is compiled; looked up on the instance. Seen in torch 2.13.
CALL_WITH_HOOKS = "_call_impl"


def has_hooks(module: torch.nn.Module) -> bool:
    """Returns whether a module has hooks of its own that run before or after its forward. Seen in torch 2.13."""
    return bool(module._forward_pre_hooks or module._forward_hooks)


def put_hooks_in_trace(
    module: torch.nn.Module, before: Callable[..., None], after: Callable[..., None]
) -> list[dict[int, Any]]:
    """Gives a module two hooks while dynamo traces, and returns the tables for `take_hooks_in_trace`.

    dynamo cannot trace the registration of hooks, but it can trace that the tables are replaced. The old tables are
    read through ``vars``, so that the very same objects, which dynamo guards, are put back. Seen in torch 2.13.
    """
    tables = [vars(module)[name] for name in _HOOK_TABLES]
    ours = (before, True, after, True)
    for name, table, value in zip(_HOOK_TABLES, tables, ours, strict=True):
        setattr(module, name, {-1: value, **table} if name == "_forward_pre_hooks" else {**table, -1: value})
    return tables


def take_hooks_in_trace(module: torch.nn.Module, tables: list[dict[int, Any]]) -> None:
    """Puts back the tables that `put_hooks_in_trace` returned. Seen in torch 2.13."""
    for name, table in zip(_HOOK_TABLES, tables, strict=True):
        setattr(module, name, table)


def causal_mask_detection() -> tuple[ModuleType, str]:
    """Returns the function by which torch's Transformer detects a causal mask: its module and its name.

    Seen in torch 2.13.
    """
    import torch.nn.modules.transformer as owner

    name = "_detect_is_causal_mask"
    require(owner, name)
    return owner, name


def inference_kernels() -> tuple[ModuleType, str]:
    """Returns what says whether Transformer layers may use their kernels for inference: its module and its name.

    Seen in torch 2.13.
    """
    name = "_is_fastpath_enabled"
    require(torch.backends.mha, name)
    return torch.backends.mha, name


def recurrent_functions() -> tuple[ModuleType, ModuleType]:
    """Returns the module with the functions of recurrent layers and packed sequences, and the one with the layers.

    The layers look the functions up there by name. Seen in torch 2.13.
    """
    import torch._VF as functions
    import torch.nn.modules.rnn as layers

    return functions, layers


def conversions_left_out() -> tuple[type[torch.nn.Module], dict[str, Callable[..., Any]]]:
    """Returns what lets ``module.to(x.device)`` do nothing where a module is already there, as functions by attribute.

    In a trace, torch cannot put even the same parameters in place of those that it has. Seen in torch 2.13.
    """
    original = require(torch.nn.Module, "_apply")

    def converted(module: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        if not is_tracing():  # in another thread
            return original(module, fn, recurse)
        kinds = {(tensor.dtype, tensor.device) for tensor in (*module.parameters(recurse), *module.buffers(recurse))}
        with apart_from_modes():
            made = {kind: fn(torch.empty(0, dtype=kind[0], device=kind[1])) for kind in kinds}
        is_there = all((tensor.dtype, tensor.device) == kind for kind, tensor in made.items())
        return module if is_there else original(module, fn, recurse)

    return torch.nn.Module, {"_apply": converted}
