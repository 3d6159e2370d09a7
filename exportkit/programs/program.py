"""Traces a model: one ExportedProgram whose inputs are the tensors of the plan, with all that is known about it.

While torch traces, ``forward`` is a function with a flat explicit signature; afterwards everything is put back.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from exportkit._torch_compat.graph import trace_module
from exportkit._torch_compat.pytree import tree_leaves
from exportkit._torch_compat.symbolic_shapes import depends_on_values, traced_expression, value_error
from exportkit._torch_compat.tracing import constraints_that_solve, distribution_checks, module_calls
from exportkit.arguments.build import build_call
from exportkit.arguments.table import nested_spec
from exportkit.calls.call import Call
from exportkit.calls.observation import Observation
from exportkit.calls.recorder import recording_paused
from exportkit.errors import ExportError
from exportkit.overrides import original_attribute, replaced_attributes
from exportkit.plan.plan import Plan
from exportkit.plan.sizes import size_in
from exportkit.probing.missing import Absences, MissingDefaults
from exportkit.probing.simplify import with_joined_lists
from exportkit.programs.copied_layers import CopiedLayers
from exportkit.programs.domain import Domain
from exportkit.programs.failure import Place, failure, is_model_code
from exportkit.programs.python_values import PythonValues
from exportkit.programs.repro import TraceRequest
from exportkit.programs.subject import FlatSignature, WithEffects, tie_sizes
from exportkit.rewrites.known_values import KnownValues
from exportkit.rewrites.lists import operators_at_any_length
from exportkit.rewrites.table import BUFFER_VALUES, STRICT, Rewrite, adapted_call, applied
from exportkit.running.module_state import modules_kept
from exportkit.trees import (
    Tree,
    caches_opened,
    check_opened,
    fingerprint,
    flatten,
    join,
    set_stored_length,
    text_of,
)
from exportkit.trees.object_parts import Unread, Unreadable


@dataclass(frozen=True)
class Example:
    """What a model is traced with, and what it returned for that in eager mode.

    Attributes:
        sizes: Sizes of the variables: distinct and greater than 1.
        call: A call at these sizes.
        defaults: Values for missing inputs.
        outputs: What the model returned; used for its structure.
        joined_outputs: Paths of lists that the program returns as a list of one, their concatenation; so do
            ``outputs``.
        member_rows: Rows of each tensor of such a list, by its path, if they are always the same.
        read: Attributes of objects among the arguments that code reads, by the name of the class.
    """

    sizes: Mapping[str, int]
    call: Call
    defaults: MissingDefaults
    outputs: Tree
    joined_outputs: tuple[str, ...] = ()
    member_rows: Mapping[str, int] = field(default_factory=dict)
    read: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, repr=False)
class TracedProgram:
    """One traced program: its inputs and outputs in terms of the model, and what it was traced from.

    Attributes:
        program: The program; its ``module()`` is called with the model's own arguments, without the constants.
        input_paths: Path of the leaf behind each graph input, in graph order.
        output_paths: Path of the leaf behind each tensor that the graph returns, in graph order.
        rules: Names of the rewrites that were in force during the trace.
        plan: What varies.
        observation: The recorded calls.
        model: The model, the truth that the result is compared with.
        method: The exported method.
        sizes: Sizes of the variables during the trace.
        defaults: Values for missing inputs.
        outputs: Structure of what the model returns.
        numbers: Python numbers among the outputs that follow from sizes, by path: sympy expressions in torch's symbols.
        domain: Where the program may be used.
        joined_outputs: Paths of lists with a tensor for each image or the like, which the graph returns as one tensor.
        member_rows: Rows of each tensor of such a list, by its path, if they are always the same.
        absences: The sets of inputs that may be left out together.
        crossings: Sizes that break conditions of the trace which change nothing.
        samples: Sizes for which the model runs, one for each pattern of 0 and 1 in the domain that was tried.
        seconds: Duration of each stage, in seconds.
    """

    program: torch.export.ExportedProgram
    input_paths: tuple[str, ...]
    output_paths: tuple[str, ...]
    rules: tuple[str, ...]
    plan: Plan
    observation: Observation
    model: torch.nn.Module
    method: str
    sizes: Mapping[str, int]
    defaults: MissingDefaults
    outputs: Tree
    numbers: Mapping[str, Any]
    domain: Domain
    joined_outputs: tuple[str, ...] = ()
    member_rows: Mapping[str, int] = field(default_factory=dict)
    absences: Absences = field(default_factory=Absences)
    crossings: tuple[Mapping[str, int], ...] = ()
    samples: tuple[Mapping[str, int], ...] = ()
    seconds: dict[str, float] = field(default_factory=dict, compare=False)

    def __repr__(self) -> str:
        names = ", ".join(variable.name for variable in self.plan.variables) or "none"
        where = f"{self.observation.model_name}.{self.method}"
        return f"TracedProgram({where}, {len(self.input_paths)} inputs, variables: {names})"

    @property
    def stateful(self) -> bool:
        """Whether the model keeps a state on its modules, which its graph takes and returns."""
        return isinstance(self.model, WithEffects) and self.model.stateful

    @property
    def wraps(self) -> bool:
        """Whether the graph returns the result of the model together with what else a call changes."""
        return isinstance(self.model, WithEffects) and self.model.wraps

    def request(self, onnx: bool = False) -> TraceRequest:
        """Returns what torch was asked to do, to look for the cause of a failure.

        Args:
            onnx: Whether the translation to ONNX failed.
        """
        call = build_call(self.plan, self.observation, self.sizes)
        return TraceRequest(self.model, self.method, self.plan, call, self.rules, onnx=onnx)


def trace(
    model: torch.nn.Module,
    method: str,
    plan: Plan,
    observation: Observation,
    example: Example,
    rules: Sequence[Rewrite] = (),
) -> TracedProgram:
    """Returns the program that torch.export traces for an example, with the plan's variables as dynamic axes.

    The program returns what the model returns; if there are Python values in it, a tuple of its tensors, and of the
    numbers that depend on values of tensors, as tensors.

    Args:
        model: The model.
        method: The method to trace.
        plan: Says which axes are dynamic.
        observation: The recorded calls.
        example: What to trace with.
        rules: Rewrites to put in force.

    Raises:
        ExportError: if torch cannot trace the model.
    """
    flat, outputs = FlatSignature.of(example.call), example.outputs
    kwargs = {name: parameter.tree.map(_clone).build() for name, parameter in flat.parameters.items()}
    tensors_only = any(leaf is not None for leaf in outputs.constants().values()) or outputs.has_objects
    traced_outputs: list[Tree] = []
    buffers = list(model.buffers()) if BUFFER_VALUES in rules else []
    own = vars(model).get(method)  # a method of the class is looked up while rewrites are in force
    past = plan.with_role("past")

    def call_method(values: Mapping[str, Any]) -> Any:
        args, kwargs = flat.signature.unbind(values)
        return getattr(type(model), method)(model, *args, **kwargs) if own is None else own(*args, **kwargs)

    def forward(**given: Any) -> Any:
        # Strict tracing follows this function, too: Dynamo knows sets and dicts of plain values, not views of them.
        tensors = {
            join(flat.parameters[name].path, path): tensor
            for name, value in given.items()
            for path, tensor in flatten(value).tensors().items()
        }
        shapes = {path: tuple(tensor.shape) for path, tensor in tensors.items()}
        tie_sizes(plan, shapes)
        if past is not None:  # the counters of caches say what the traced inputs say, so the trace cannot freeze them
            length = size_in(plan, past.name, shapes)
            for value in given.values() if length is not None else ():
                set_stored_length(value, length)
        is_known = BUFFER_VALUES in rules
        with KnownValues(zip(model.buffers(), buffers, strict=True)) if is_known else contextlib.nullcontext():
            result = adapted_call(rules, model, flat.values(given), flat.signature.names, call_method)
        tree = with_joined_lists(flatten(result), example.joined_outputs)
        inputs = {id(tensor) for tensor in tensors.values()}
        if any(id(leaf) in inputs for leaf in tree.leaves):  # an input of a graph cannot be its output
            tree = tree.map(lambda leaf: leaf.clone() if id(leaf) in inputs else leaf)
        if tensors_only:
            if not torch.compiler.is_dynamo_compiling():  # with Dynamo, nothing leaves the function but its result
                traced_outputs.append(tree)
            tree = tree.map(_number_as_tensor)
        return tuple(tree.tensors().values()) if tensors_only else tree.build()

    kinds = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in flat.parameters]
    forward.__signature__ = inspect.Signature(kinds)  # type: ignore[attr-defined]
    names = tuple(rule.name for rule in rules)
    with (
        caches_opened([*kwargs.values(), outputs.build()]),
        operators_at_any_length(tracing=True),
        applied(rules, model),
        replaced_attributes(model, {"forward": forward}),
        _quiet(None if BUFFER_VALUES in rules else CopiedLayers().call),
        recording_paused(),
        torch.no_grad(),
        without_gradients(model.parameters()),
    ):
        specs, order = _specs(flat, plan), _input_order(flat, kwargs)
        try:
            with modules_kept(model), _no_error_caught():
                program = torch.export.export(model, (), kwargs=kwargs, dynamic_shapes=specs, strict=STRICT in rules)
        except ExportError:
            raise
        except Exception as error:
            again = lambda: trace(model, method, plan, observation, example, rules)  # noqa: E731
            request = TraceRequest(model, method, plan, example.call, names, again)
            raise failure("torch.export could not trace the model.", error, request) from error
        _leave_buffers(program)
        _settle_views(program)
        numbers: dict[str, Any] = {}
        if tensors_only:
            _require_given_back(outputs, observation)
            returned, numbers = _followed(outputs, traced_outputs[-1] if traced_outputs else None)
        else:
            returned = _output_order(outputs.build())
    values = PythonValues.of(
        observation.signature, observation.merged_arguments, observation.calls, plan.joined, example.read
    )
    return TracedProgram(
        program,
        order,
        returned,
        names,
        plan,
        observation,
        model,
        method,
        example.sizes,
        example.defaults,
        outputs,
        numbers,
        replace(Domain.of_plan(plan), values=values),
        example.joined_outputs,
        example.member_rows,
    )


def _leave_buffers(program: torch.export.ExportedProgram) -> None:
    """Erases assignments of buffers of other shapes, such as a longer table: torch copies into the old ones."""
    for node in list(program.graph.nodes):
        if node.target is not torch.ops.aten.copy_.default or node.users or node.args[0].op != "placeholder":
            continue
        old, new = (str(tuple(value.meta["val"].shape)) for value in node.args[:2])
        if node.args[0].name in program.graph_signature.inputs_to_buffers and old != new:
            program.graph.erase_node(node)
    program.graph_module.recompile()


def _settle_views(program: torch.export.ExportedProgram) -> None:
    """Writes the size that a -1 stands for where it is always the same: an empty tensor does not show it."""
    views = (torch.ops.aten.view.default, torch.ops.aten.reshape.default)
    for node in program.graph.nodes:
        shape = getattr(node.meta.get("val"), "shape", None)  # none if the operator raised
        if node.target in views and -1 in node.args[1] and shape is not None:
            sizes = zip(node.args[1], shape, strict=True)
            node.update_arg(1, [real if size == -1 and type(real) is int else size for size, real in sizes])
    program.graph_module.recompile()


def _specs(flat: FlatSignature, plan: Plan) -> dict[str, Any]:
    """Dynamic axes without a minimum: torch.export assumes 2, and the graph serves smaller sizes all the same."""

    def spec_of(path: str) -> dict[int, Any]:
        found = {}
        for axis, size in enumerate(plan.by_path[path].sizes):
            if not size.is_static:
                most = None if size.variable is None else plan.variable(size.variable).maximum
                found[axis] = torch.export.Dim.DYNAMIC if most is None else torch.export.Dim.DYNAMIC(max=most)
        return found

    return {name: nested_spec(part.path, part.tree, spec_of) for name, part in flat.parameters.items()}


def _input_order(flat: FlatSignature, kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """Paths of the tensors in the order in which torch flattens the arguments, however their classes are registered."""
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


def _number_as_tensor(leaf: Any) -> Any:
    """A number that depends on values of tensors as a tensor; Dynamo does not say which do, so there every number."""
    if torch.compiler.is_dynamo_compiling():
        is_wanted = isinstance(leaf, bool | int | float)
    else:
        is_wanted = not isinstance(leaf, torch.Tensor) and depends_on_values(leaf)
    if not is_wanted:
        return leaf
    dtype = torch.float64
    if isinstance(leaf, bool | torch.SymBool):
        dtype = torch.bool
    elif isinstance(leaf, int | torch.SymInt):
        dtype = torch.int64
    number: Any = leaf
    return torch.scalar_tensor(number, dtype=dtype)


def _followed(outputs: Tree, traced: Tree | None) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Paths of the outputs that a program returns as tensors, and expressions for numbers that follow from sizes.

    Args:
        outputs: What the model returned in eager mode.
        traced: What it returned as it was traced; None with Dynamo.

    Raises:
        ExportError: if a Python value among the outputs depends on the inputs in a way that a program cannot follow.
    """
    leaves = dict(zip(outputs.paths, outputs.leaves, strict=True))
    if traced is None:
        return tuple(path for path, leaf in leaves.items() if isinstance(leaf, torch.Tensor | bool | int | float)), {}
    tensors, numbers = [], {}
    if traced.paths != outputs.paths:
        raise _not_followed("the outputs", ", ".join(outputs.paths), ", ".join(traced.paths))
    for path, leaf in zip(traced.paths, traced.leaves, strict=True):
        if isinstance(leaf, torch.Tensor) != isinstance(leaves[path], torch.Tensor):
            raise _not_followed(path, text_of(fingerprint(leaves[path])), text_of(fingerprint(leaf)))
        if isinstance(leaf, torch.Tensor) or depends_on_values(leaf):
            tensors.append(path)
        elif traced_expression(leaf) is not None:
            numbers[path] = traced_expression(leaf)
        elif fingerprint(leaf) != fingerprint(leaves[path]):
            if not outputs.tensors():
                check_opened("output", outputs)
            raise _not_followed(path, text_of(fingerprint(leaves[path])), text_of(fingerprint(leaf)))
    return tuple(tensors), numbers


def _require_given_back(outputs: Tree, observation: Observation) -> None:
    """Raises ExportError if an output has a value that no graph can make, unless it is in an argument that is returned.

    Such an argument is changed in place, and remains the very object that the caller gave.
    """
    places = [written.place for written in observation.written.values() if written.place is not None]
    for path, leaf in outputs.constants().items():
        if type(leaf) is Unread and not any(path.startswith(place) for place in places):
            raise _not_followed(path, f"a {leaf.cls.__qualname__}", "the same one for each call")


def _not_followed(where: str, expected: str, got: str) -> ExportError:
    return ExportError(
        "What the model returns depends on its inputs in a way that a graph cannot follow.",
        where=where,
        expected=f"{expected}, as in eager mode",
        got=f"{got} in the trace",
        hint="return tensors, or numbers that are computed from sizes or with .item().",
    )


@contextlib.contextmanager
def _no_error_caught() -> Iterator[None]:
    """Raises ExportError if a model catches the error of a decision that cannot be traced: it went on without it."""
    cls, noted = value_error(), list[BaseException]()
    made = original_attribute(cls, "__init__")

    def init(self: BaseException, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        noted.append(self)

    with replaced_attributes(cls, {"__init__": init}):
        yield
    for error in noted:  # its traceback begins where it was caught
        caught = error.__traceback__
        if caught is not None and is_model_code(caught.tb_frame.f_code.co_filename):
            place = Place(caught.tb_frame.f_code.co_filename, caught.tb_lineno)
            noted.clear()
            raise ExportError(
                "The model decides by the values of a tensor, and catches the error that a trace raises there.",
                where=str(place),
                expected="code that goes the same way in a trace as in eager mode",
                hint="compute both results, and choose with torch.where; or decide outside of the model.",
            )


@contextlib.contextmanager
def without_gradients(parameters: Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """Makes parameters need no gradient: if they do, torch traces attention in a form that cannot be translated."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


@contextlib.contextmanager
def _quiet(around: Callable[..., Any] | None) -> Iterator[None]:
    """Silences warnings, checks of the values that distributions take, and what torch prints of a failed trace.

    The error says what is wrong. What torch itself gets wrong is repaired.
    """
    owner, name = distribution_checks()
    silent = replaced_attributes(trace_module(), {"print": lambda *_, **__: None})
    unlogged = replaced_attributes(logging.getLogger("torch._guards"), {"disabled": True})
    repaired = replaced_attributes(*module_calls(around)), replaced_attributes(*constraints_that_solve())
    checked = replaced_attributes(owner, {name: False})
    with warnings.catch_warnings(), silent, unlogged, checked, repaired[0], repaired[1]:
        warnings.simplefilter("ignore")
        yield


def _clone(leaf: Any) -> Any:
    if type(leaf) is Unread:
        return Unread(Unreadable(leaf.cls), leaf.cls)
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf
