"""Captures the model as one ExportedProgram whose inputs are the tensors of the plan, and nothing else.

While torch traces, ``forward`` is a function with a flat explicit signature; everything is put back afterwards.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from exportkit._torch_compat.graph import trace_module
from exportkit._torch_compat.pytree import tree_leaves
from exportkit.arguments.table import nested_spec
from exportkit.calls.call import Call
from exportkit.calls.recorder import recording_paused
from exportkit.calls.signature import Signature
from exportkit.errors import ExportError
from exportkit.overrides import replaced_attributes
from exportkit.plan.plan import Plan
from exportkit.plan.sizes import size_in
from exportkit.probing.simplify import with_joined_lists
from exportkit.programs.failure import Attempt, failure
from exportkit.programs.flat import FlatSignature
from exportkit.rewrites.library import operators_at_any_length
from exportkit.rewrites.lists import SYMBOLIC_LENGTH
from exportkit.rewrites.table import (
    LIBRARY_PATCHES,
    LISTS_OF_ONE,
    STRICT,
    SYMBOLIC_LENGTHS,
    Rewrite,
    adapted_call,
    applied,
)
from exportkit.trees import Tree, flatten, join, registered_caches, set_stored_length

_ABSENT = object()


@dataclass(frozen=True)
class Captured:
    """A traced program, and what its inputs and outputs are in terms of the model.

    Attributes:
        program: The program; its ``module()`` is called with the model's own arguments, less the constants.
        input_paths: Path of the leaf behind each graph input, in graph order.
        output_paths: Path of the leaf behind each tensor that the graph returns, in graph order.
        rules: Names of the rewrites that were in force while it was traced.
    """

    program: torch.export.ExportedProgram
    input_paths: tuple[str, ...]
    output_paths: tuple[str, ...]
    rules: tuple[str, ...] = ()


def capture_somehow(  # noqa: PLR0917 - what `capture` takes
    model: torch.nn.Module,
    method: str,
    plan: Plan,
    arguments: Call,
    outputs: Tree,
    rules: Sequence[Rewrite],
    joined: Sequence[str] = (),
) -> Captured:
    """Returns what `capture` does; where that fails, with one rewrite of the last resort after the other.

    Raises:
        ExportError: of the plainest attempt, if all of them fail.
    """

    def attempt(with_rules: Sequence[Rewrite]) -> Captured | ExportError:
        try:
            return capture(model, method, plan, arguments, outputs, with_rules, joined)
        except ExportError as error:
            return error

    plain = [rule for rule in rules if rule is not LISTS_OF_ONE]  # a guess from how lists are read, so it may be wrong
    first = attempt(rules)
    cause = attempt(plain) if isinstance(first, ExportError) and len(plain) < len(rules) else first
    found = cause
    for extra in _last_resorts(model, first) if isinstance(first, ExportError) else ():
        if isinstance(found, ExportError):
            found = attempt([extra, *rules])  # outermost, so that our own rules stay in force
    if isinstance(found, Captured):
        return found
    raise cause if isinstance(cause, ExportError) else found


def _last_resorts(model: torch.nn.Module, error: ExportError) -> list[Rewrite]:
    is_of_library = any(type(module).__module__.startswith("transformers.") for module in model.modules())
    fixed = any(text in str(error.__cause__) for text in ("specialized", SYMBOLIC_LENGTH))
    return [*([SYMBOLIC_LENGTHS, STRICT] if fixed else []), *([LIBRARY_PATCHES] if is_of_library else [])]


def capture(  # noqa: PLR0917 - one call, seen from all sides
    model: torch.nn.Module,
    method: str,
    plan: Plan,
    arguments: Call,
    outputs: Tree,
    rules: Sequence[Rewrite] = (),
    joined: Sequence[str] = (),
) -> Captured:
    """Returns the program that torch.export traces for the arguments, with the plan's variables as dynamic axes.

    The program returns what the model returns; if there are Python constants among that, a tuple of its tensors.

    Args:
        model: The model.
        method: The method to trace.
        plan: Says which axes are dynamic.
        arguments: A call at distinct sizes greater than 1.
        outputs: What the model returned for them in eager mode; used for its structure.
        rules: Rewrites to trace with.
        joined: Paths of lists that the program returns as a list of one, their concatenation; so they are in outputs.

    Raises:
        ExportError: if torch cannot trace the model.
    """
    flat = FlatSignature.of(arguments)
    kwargs = {name: parameter.tree.map(_clone).build() for name, parameter in flat.parameters.items()}
    tensors_only = any(leaf is not None for leaf in outputs.constants().values())
    call = getattr(model, method)

    def forward(**given: Any) -> Any:
        inputs = {id(tensor) for value in given.values() for tensor in flatten(value).tensors().values()}
        _set_stored_lengths(flat, plan, given)
        values, names = flat.values(given), flat.signature.names
        result = adapted_call(rules, model, values, names, lambda adapted: _called(call, flat.signature, adapted))
        return _returned(with_joined_lists(flatten(result), joined), inputs, tensors_only)

    with (
        registered_caches(),
        operators_at_any_length(),
        applied(rules, model),
        _forward_replaced(model, forward, flat.parameters),
        _quiet(),
        recording_paused(),
        torch.no_grad(),
        without_gradients(model.parameters()),
    ):
        specs = _specs(flat, plan)
        order = _input_order(flat, kwargs)
        try:
            program = torch.export.export(model, (), kwargs=kwargs, dynamic_shapes=specs, strict=STRICT in rules)
        except Exception as error:
            attempt = Attempt(
                model,
                method,
                plan,
                arguments,
                tuple(rule.name for rule in rules),
                lambda: capture(model, method, plan, arguments, outputs, rules),
            )
            raise failure("torch.export could not trace the model.", error, attempt) from error
        returned = tuple(outputs.tensors()) if tensors_only else _output_order(outputs.build())
        return Captured(program, order, returned, tuple(rule.name for rule in rules))


def _set_stored_lengths(flat: FlatSignature, plan: Plan, given: Mapping[str, Any]) -> None:
    """Sets the counters of caches to what the traced inputs say, so that the trace does not freeze them."""
    past = plan.with_role("past")
    if past is None:
        return
    shapes = {
        join(flat.parameters[name].path, path): tuple(tensor.shape)
        for name, value in given.items()
        for path, tensor in flatten(value).tensors().items()
    }
    length = size_in(plan, past.name, shapes)
    if length is not None:
        for value in given.values():
            set_stored_length(value, length)


def _called(call: Callable[..., Any], signature: Signature, values: Mapping[str, Any]) -> Any:
    args, kwargs = signature.unbind(values)
    return call(*args, **kwargs)


def _returned(tree: Tree, inputs: set[int], tensors_only: bool) -> Any:
    """What the traced function returns: inputs that come back are copied, as a graph's input cannot be its output."""
    if any(id(leaf) in inputs for leaf in tree.leaves):
        tree = tree.map(lambda leaf: leaf.clone() if id(leaf) in inputs else leaf)
    return tuple(tree.tensors().values()) if tensors_only else tree.build()


def _specs(flat: FlatSignature, plan: Plan) -> dict[str, Any]:
    largest = {variable.name: variable.maximum for variable in plan.variables}

    def spec_of(path: str) -> dict[int, Any]:
        sizes = enumerate(plan.by_path[path].sizes)
        return {axis: _dim(largest.get(size.variable or "")) for axis, size in sizes if not size.is_static}

    return {name: nested_spec(part.path, part.tree, spec_of) for name, part in flat.parameters.items()}


def _dim(maximum: int | None) -> Any:
    """A dynamic axis; torch.export needs no minimum, as it takes 2 for one and the graph serves less all the same."""
    return torch.export.Dim.DYNAMIC if maximum is None else torch.export.Dim.DYNAMIC(max=maximum)


def _input_order(flat: FlatSignature, kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """Paths of the tensors in the order in which torch flattens the arguments, whoever registered their classes."""
    paths = {}
    for name, value in kwargs.items():
        for path, tensor in flatten(value).tensors().items():
            paths[id(tensor)] = join(flat.parameters[name].path, path)
    return tuple(paths[id(leaf)] for leaf in tree_leaves(dict(kwargs)) if isinstance(leaf, torch.Tensor))


def _output_order(outputs: Any) -> tuple[str, ...]:
    paths: dict[int, list[str]] = {}
    for path, tensor in flatten(outputs).tensors().items():
        paths.setdefault(id(tensor), []).append(path)
    leaves = tree_leaves(outputs)
    return tuple(paths[id(leaf)].pop(0) for leaf in leaves if isinstance(leaf, torch.Tensor))


@contextlib.contextmanager
def without_gradients(parameters: Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """Lets parameters need no gradient: if they do, torch lays attention out in a way that cannot be translated."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


@contextlib.contextmanager
def _forward_replaced(model: torch.nn.Module, forward: Callable[..., Any], parameters: Iterable[str]) -> Iterator[None]:
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
    """Silences warnings, and the partial graph that torch prints when a trace fails: the error says what is wrong."""
    silent = replaced_attributes(trace_module(), {"print": lambda *_, **__: None})
    with warnings.catch_warnings(), silent:
        warnings.simplefilter("ignore")
        yield


def _clone(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf
