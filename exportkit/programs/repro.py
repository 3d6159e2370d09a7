"""Writes ``repro.py``, a script that repeats a trace with torch alone.

The script holds the shapes and dtypes of the inputs, the range of integer inputs (they may have to stay within a
vocabulary), and the class and configuration of the model. It holds no values of tensors, no weights and no text:
strings among the inputs are kept only if they are a single word, as options are.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from exportkit._torch_compat.transformers import attention_implementation
from exportkit.calls.call import Call
from exportkit.files import as_path, write_text
from exportkit.plan.plan import Plan
from exportkit.trees import join
from exportkit.trees.json_form import dump_tree
from exportkit.trees.object_parts import named
from exportkit.trees.tree import dtype_name, is_inexact

_SEED = 0
# Settings that name a folder on a disk, not an architecture.
_PRIVATE_SETTINGS = ("_name_or_path", "name_or_path")


@dataclass(frozen=True)
class TraceRequest:
    """What torch was asked to do: enough to look for the cause of a failure, and to repeat it in a script.

    Attributes:
        model: The model.
        method: The method.
        plan: Says which axes are dynamic.
        call: What it was traced with.
        rules: Names of the rewrites that were in force.
        trace: Traces again, if tracing failed.
        onnx: Whether the program was translated to ONNX, too.
    """

    model: torch.nn.Module
    method: str
    plan: Plan
    call: Call
    rules: tuple[str, ...] = ()
    trace: Callable[[], Any] | None = None
    onnx: bool = False

    def repro(self, directory: str | os.PathLike[str]) -> Path:
        """Writes a script that does the same with torch alone, and returns its path.

        Args:
            directory: Where to write ``repro.py``; created if it is missing.

        Raises:
            DestinationError: if it cannot be written.
            TreeError: if an input is of a class that cannot be found by its name.
        """
        return write_text(as_path(directory) / "repro.py", _script(self), "The script")


def _script(request: TraceRequest) -> str:
    data = json.dumps(_spec(request), indent=1)
    from exportkit.programs import standalone

    body = inspect.getsource(standalone).partition("\nimport contextlib")[2]
    return (
        f'"""Traces {type(request.model).__name__}.{request.method} with torch.export, at the shapes it had.\n\n'
        f"Written by exportkit; needs {_versions()}.\n"
        f"{_needs(request)}"
        f'"""\n\nimport contextlib{body}\n\nSPEC = r"""\n{data}\n"""\n\nif __name__ == "__main__":\n    main(SPEC)\n'
    )


def _versions() -> str:
    packages = ["torch", *(name for name in ("transformers", "onnxscript") if name in sys.modules)]
    found = [f"{name} {importlib.metadata.version(name)}" for name in packages]
    return ", ".join([f"Python {platform.python_version()}", *found])


def _needs(request: TraceRequest) -> str:
    cls = type(request.model)
    lines = [f"{cls.__module__} must be importable: put its folder on PYTHONPATH.\n"] if _is_importable(cls) else []
    lines += ["The trace used rewrites of exportkit, so exportkit must be installed.\n"] if request.rules else []
    return "".join(lines)


def _spec(request: TraceRequest) -> dict[str, Any]:
    plan, tensors = request.plan, request.call.tensors()
    largest = {variable.name: variable.maximum for variable in plan.variables}
    return {
        "seed": _SEED,
        "model": _model_spec(request.model),
        "method": request.method,
        "arguments": _argument_specs(request),
        "tensors": {path: _tensor_spec(tensor) for path, tensor in tensors.items()},
        "dynamic": {
            path: {
                axis: largest.get(size.variable or "")
                for axis, size in enumerate(plan.by_path[path].sizes)
                if not size.is_static
            }
            for path in tensors
        },
        "rules": list(request.rules),
        "past": _past(request),
        "onnx": request.onnx,
    }


def _past(request: TraceRequest) -> tuple[str, int] | None:
    """An axis whose size is the number of cached tokens."""
    past = request.plan.with_role("past")
    return None if past is None else next(iter(request.plan.axes_of(past.name)), None)


def _argument_specs(request: TraceRequest) -> dict[str, Any]:
    signature = request.call.signature
    kinds = dict.fromkeys(signature.positional_only, "positional")
    kinds |= {signature.var_positional or "": "args", signature.var_keyword or "": "kwargs"}
    if signature.var_positional in request.call.arguments:  # what stands before *args is given by position
        kinds = dict.fromkeys(signature.names[: signature.names.index(signature.var_positional)], "positional") | kinds
    return {
        name: {
            "kind": kinds.get(name, "named"),
            "layout": dump_tree(tree.map(_without_text)),
            "paths": [join(name, path) for path in tree.tensors()],
        }
        for name, tree in request.call.arguments.items()
    }


def _without_text(leaf: Any) -> Any:
    return leaf if not isinstance(leaf, str) or leaf.isidentifier() else "text"


def _tensor_spec(tensor: torch.Tensor) -> dict[str, Any]:
    numbers = is_inexact(tensor) or not tensor.numel()
    low, high = (0, 1) if numbers else (int(tensor.min()), int(tensor.max()))
    return {
        "shape": list(tensor.shape),
        "dtype": dtype_name(tensor.dtype),
        "low": low,
        "high": high,
    }


def _model_spec(model: torch.nn.Module) -> dict[str, Any]:
    cls = type(model)
    config = _configuration(model)
    types = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()} - {torch.float32}
    return {
        "name": f"{cls.__module__}.{cls.__qualname__}",
        "cls": f"{cls.__module__}:{cls.__qualname__}" if _is_importable(cls) else None,
        "config": config,
        "config_cls": None if config is None else f"{type(model.config).__module__}:{type(model.config).__qualname__}",
        "attention": attention_implementation(getattr(model, "config", None)),
        "arguments": _constructor_arguments(model),
        "dtype": dtype_name(types.pop()) if len(types) == 1 else None,
        "training": model.training,
    }


def _configuration(model: torch.nn.Module) -> dict[str, Any] | None:
    """The configuration of a transformers model as JSON data."""
    config: Any = getattr(model, "config", None)
    if not hasattr(type(model), "config_class") or not hasattr(config, "to_json_string"):
        return None
    settings: dict[str, Any] = _public(json.loads(config.to_json_string(use_diff=False)))
    return settings


def _public(settings: Any) -> Any:
    if isinstance(settings, Mapping):
        return {name: _public(value) for name, value in settings.items() if name not in _PRIVATE_SETTINGS}
    return settings


def _constructor_arguments(model: torch.nn.Module) -> dict[str, Any] | None:
    """Arguments for the constructor, from attributes with the names of its parameters; None if some are missing."""
    parameters = inspect.signature(type(model)).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    kept = {p.name: value for p in named if isinstance(value := vars(model).get(p.name), int | float)}
    needed = {p.name for p in named if p.default is p.empty}
    return kept if needed <= set(kept) else None


def _is_importable(cls: type) -> bool:
    return cls.__module__ != "__main__" and named(f"{cls.__module__}:{cls.__qualname__}") is cls
