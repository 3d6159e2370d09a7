"""Captures the model as one ExportedProgram whose inputs are the tensors of the plan, and nothing else.

While torch traces, ``forward`` has a flat explicit signature: ``*args`` and ``**kwargs`` with tensors cannot be
exported, and Python constants need not be inputs. Everything is put back afterwards.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from exportkit import _torch_compat
from exportkit.arguments import Arguments, nested_spec
from exportkit.axes import Plan
from exportkit.errors import ExportError
from exportkit.observe import Signature
from exportkit.observe.recorder import recording_paused
from exportkit.trees import Tree, flatten, join, register_flattening_functions

_ABSENT = object()


@dataclass(frozen=True)
class Captured:
    """A traced program, and what its inputs and outputs are in terms of the model.

    Attributes:
        program: The program; its ``module()`` is called with the model's own arguments, less the constants.
        input_paths: Path of the leaf behind each graph input, in graph order.
        output_paths: Path of the leaf behind each tensor that the graph returns, in graph order.
    """

    program: torch.export.ExportedProgram
    input_paths: tuple[str, ...]
    output_paths: tuple[str, ...]


def capture(model: torch.nn.Module, method: str, plan: Plan, arguments: Arguments, outputs: Any) -> Captured:
    """Returns the program that torch.export traces for the arguments, with the plan's variables as dynamic axes.

    Args:
        model: The model.
        method: The method to trace.
        plan: Says which axes are dynamic.
        arguments: Arguments at distinct sizes greater than 1.
        outputs: What the model returned for them in eager mode; used for its structure.

    Raises:
        ExportError: if torch cannot trace the model.
    """
    dynamic = plan.dynamic_axes()
    spec_of = lambda path: dict.fromkeys(dynamic[path], torch.export.Dim.DYNAMIC)  # noqa: E731
    flat, rebuild = _flat_parameters(arguments)
    kwargs = {name: tree.map(_clone).build() for name, (_, tree) in flat.items()}
    with register_flattening_functions():
        specs = {name: nested_spec(path, tree, spec_of) for name, (path, tree) in flat.items()}
        order = _input_order(flat, kwargs)
        call = getattr(model, method)

        def forward(**given: Any) -> Any:
            args, named = rebuild(given)
            return call(*args, **named)

        with _forward_replaced(model, forward, list(flat)), _quiet(), recording_paused(), torch.no_grad():
            try:
                program = torch.export.export(model, (), kwargs=kwargs, dynamic_shapes=specs)
            except Exception as error:
                raise _export_error(error, plan) from error
        return Captured(program, order, _output_order(outputs))


def _flat_parameters(arguments: Arguments) -> tuple[dict[str, tuple[str, Tree]], Callable[[Mapping[str, Any]], Any]]:
    """One parameter for each argument that holds tensors, elements of ``*args`` and ``**kwargs`` one by one.

    Returns them as name -> (path, tree), with the function that makes ``args, kwargs`` of their values.
    """
    signature = arguments.observation.signature
    flat: dict[str, tuple[str, Tree]] = {}
    places: dict[str, tuple[str, Any]] = {}
    fixed: dict[str, Any] = {}
    for name, tree in arguments.trees.items():
        parts = {None: tree}
        if name == signature.var_positional:
            parts = {i: flatten(value) for i, value in enumerate(tree.build())}
        elif name == signature.var_keyword:
            parts = {key: flatten(value) for key, value in tree.build().items()}
        fixed[name] = tree.build()
        for key, part in parts.items():
            if part.tensors():
                parameter = _free_name(name, key, set(flat) | set(arguments.trees) - {name})
                flat[parameter] = (_part_path(name, key), part)
                places[parameter] = (name, key)

    def rebuild(given: Mapping[str, Any]) -> Any:
        values = {name: _opened(name, value, signature) for name, value in fixed.items()}
        for parameter, value in given.items():
            name, key = places[parameter]
            if key is None:
                values[name] = value
            else:
                values[name][key] = value
        return signature.unbind(values)

    return flat, rebuild


def _opened(name: str, value: Any, signature: Signature) -> Any:
    """``*args`` and ``**kwargs`` as containers whose elements can be replaced."""
    if name == signature.var_positional:
        return list(value)
    return dict(value) if name == signature.var_keyword else value


def _free_name(name: str, key: int | str | None, taken: set[str]) -> str:
    wanted = name if key is None else key if isinstance(key, str) else f"{name}_{key}"
    return wanted if wanted not in taken and wanted.isidentifier() else f"{name}_{key}"


def _part_path(name: str, key: int | str | None) -> str:
    return name if key is None else f"{name}[{key}]" if isinstance(key, int) else f"{name}.{key}"


def _input_order(flat: Mapping[str, tuple[str, Tree]], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """Paths of the tensors in the order in which torch flattens the arguments, whoever registered their classes."""
    paths = {}
    for name, value in kwargs.items():
        root = flat[name][0]
        for path, tensor in flatten(value).tensors().items():
            paths[id(tensor)] = join(root, path)
    return tuple(paths[id(leaf)] for leaf in _torch_compat.tree_leaves(dict(kwargs)) if isinstance(leaf, torch.Tensor))


def _output_order(outputs: Any) -> tuple[str, ...]:
    paths: dict[int, list[str]] = {}
    for path, tensor in flatten(outputs).tensors().items():
        paths.setdefault(id(tensor), []).append(path)
    leaves = _torch_compat.tree_leaves(outputs)
    return tuple(paths[id(leaf)].pop(0) for leaf in leaves if isinstance(leaf, torch.Tensor))


@contextlib.contextmanager
def _forward_replaced(model: torch.nn.Module, forward: Callable[..., Any], parameters: list[str]) -> Iterator[None]:
    """Gives the model another ``forward`` with explicit parameters, and takes it away again."""
    kinds = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in parameters]
    forward.__signature__ = inspect.Signature(kinds)  # type: ignore[attr-defined]
    before = vars(model).get("forward", _ABSENT)
    model.forward = forward
    try:
        yield
    finally:
        if before is _ABSENT:
            del model.forward
        else:
            model.forward = before


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _clone(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _export_error(error: Exception, plan: Plan) -> ExportError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ExportError(
        "torch.export could not trace the model.",
        where=f"variables {', '.join(v.name for v in plan.variables) or 'none'}",
        got=f"{type(error).__name__}: {' '.join(lines[:3])[:500]}",
        hint="the full message of torch is the cause of this exception (__cause__).",
    )
