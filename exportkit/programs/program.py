"""Traces a model: one ExportedProgram whose inputs are the tensors of the plan, with all that is known about it.

While torch traces, the ``forward`` of the model is a `TracedMethod`; afterwards everything is put back.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from exportkit._torch_compat.graph import (
    arguments_of,
    dtype_of,
    export_with_gradients,
    nodes_in,
    trace_module,
    without_regions,
)
from exportkit._torch_compat.loop_operators import with_constants_outside
from exportkit._torch_compat.symbolic_shapes import ShapeGuard, answered_questions
from exportkit._torch_compat.traced_values import is_counted, size_in_trace, value_error
from exportkit._torch_compat.tracing import (
    constraints_that_solve,
    dispatch_restored,
    distribution_checks,
    limits_of_floats,
    lines_without,
    modes_that_change,
    module_calls,
)
from exportkit.arguments.build import build_call
from exportkit.calls.call import Call
from exportkit.calls.observation import Observation
from exportkit.calls.recorder import recording_paused
from exportkit.errors import ExportError
from exportkit.overrides import attribute_slots, original_attribute, replaced, replaced_attributes
from exportkit.plan.plan import Plan
from exportkit.probing.missing import Absences, MissingDefaults, completed_call
from exportkit.probing.sized_calls import run_sized, sized_call
from exportkit.programs.copied_layers import CopiedLayers
from exportkit.programs.domain import Domain
from exportkit.programs.failure import failure
from exportkit.programs.kept_state import WithEffects
from exportkit.programs.python_values import PythonValues
from exportkit.programs.repro import TraceRequest
from exportkit.programs.reused_layers import ReusedLayers
from exportkit.programs.traced_method import Example, TracedMethod
from exportkit.rewrites import branches
from exportkit.rewrites.branches import questions_noted
from exportkit.rewrites.lists import operators_at_any_length
from exportkit.rewrites.model_code import ModelLine, is_model_code
from exportkit.rewrites.table import BUFFER_VALUES, DECIDES, GRADIENTS, LOOPS, STRICT, Rewrite, applied
from exportkit.running.bounds import HALF
from exportkit.running.eager import Answer, EagerRunner, autocast, kernels_of, sampled_answer
from exportkit.running.module_state import modules_kept
from exportkit.running.program import ProgramRunner, tensor_placeholders
from exportkit.trees import Tree, caches_opened
from exportkit.trees.tree import dtype_name

_SQUEEZES = tuple(getattr(torch.ops.aten.squeeze, name) for name in ("default", "dim", "dims"))


@dataclass(frozen=True, repr=False)
class TracedProgram:
    """One traced program: its inputs and outputs in terms of the model, and its origin.

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
        joined_outputs: Paths of lists, such as one tensor for each image, that the graph returns as one tensor.
        member_rows: Rows of each tensor of such a list, by its path, if they are always the same.
        skips_entry: Whether a dictionary has an entry for a size of the trace, which the trace did not take.
        absences: The sets of inputs that may be left out together.
        crossings: Sizes that break conditions of the trace which change nothing.
        samples: Sizes for which the model runs, one for each pattern of 0 and 1 in the domain that was tried.
        suspects: Calls in which the program departs from the model by their values.
        questions: What the code of the model asked about sizes during the trace, also what torch knew by then.
        layers: The layers that need not run for questions that are not about weights.
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
    skips_entry: bool = False
    absences: Absences = field(default_factory=Absences)
    crossings: tuple[Mapping[str, int], ...] = ()
    samples: tuple[Mapping[str, int], ...] = ()
    suspects: tuple[Call, ...] = field(default=(), compare=False)
    questions: tuple[ShapeGuard, ...] = field(default=(), compare=False, repr=False)
    layers: ReusedLayers | None = field(default=None, compare=False)
    seconds: dict[str, float] = field(default_factory=dict, compare=False)

    def __repr__(self) -> str:
        names = ", ".join(self.plan.names) or "none"
        where = f"{self.observation.model_name}.{self.method}"
        return f"TracedProgram({where}, {len(self.input_paths)} inputs, variables: {names})"

    @property
    def paths_by_node(self) -> dict[str, str]:
        """The path of the leaf behind each tensor that the program takes, by the name of its node."""
        return dict(zip(tensor_placeholders(self.program), self.input_paths, strict=True))

    @property
    def eager(self) -> EagerRunner:
        """The model, run in eager mode."""
        return EagerRunner(self.model, self.method)

    @property
    def runner(self) -> ProgramRunner:
        """The program, run in torch."""
        return ProgramRunner(self.program, self.input_paths, self.output_paths)

    @property
    def stateful(self) -> bool:
        """Whether the model keeps a state on its modules, which its graph takes and returns."""
        return isinstance(self.model, WithEffects) and self.model.stateful

    @property
    def begins_anew(self) -> bool:
        """Whether the model keeps a state on its modules, and each call is a first call."""
        return isinstance(self.model, WithEffects) and self.model.begins_anew

    @property
    def may_decide_by_values(self) -> bool:
        """Whether rewrites were in force that let a graph decide by values, or by the iteration of a loop."""
        return any(name.startswith((*DECIDES, LOOPS.name)) for name in self.rules)

    @property
    def half_dtypes(self) -> tuple[str, ...]:
        """The dtypes in half precision in which the program computes something."""
        dtypes = {dtype_of(node) for node in nodes_in(self.program.graph_module)}
        return tuple(dtype_name(dtype) for dtype in HALF if dtype in dtypes)

    @property
    def wraps(self) -> bool:
        """Whether the graph returns the result of the model together with everything else that a call changes."""
        return isinstance(self.model, WithEffects) and self.model.wraps

    def sized_call(self, sizes: Mapping[str, int]) -> Call:
        """Returns a call at the given sizes of all variables, as `exportkit.probing.sized_calls.sized_call` does."""
        return sized_call(self.plan, self.observation, self.defaults, sizes)

    def completed(self, call: Call) -> Call:
        """Returns a call with the default values for the inputs that it leaves out."""
        return completed_call(self.plan, self.observation, call, self.defaults.values)

    def answered(self, call: Call) -> Call:
        """Returns a call for which the model runs, with what it returned, as `run_sized` does."""
        return run_sized(self.plan, self.model, self.method, call)

    def sampled_answer(
        self, question: Callable[[], Answer], is_sure: Callable[[Answer], bool] = lambda _: True
    ) -> Answer:
        """Returns the answer to a question that is not about weights, and that runs the model or the program.

        Args:
            question: What runs them.
            is_sure: Whether an answer counts that a part of the weights and of the layers gave; otherwise the question
                is asked again, of the whole model.
        """
        return sampled_answer(self.model, question, is_sure, shortcut=self.layers)

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
    traced, copied = TracedMethod(model, method, plan, example, rules), CopiedLayers()
    names = tuple(rule.name for rule in rules)
    with (
        caches_opened([*traced.arguments.values(), example.outputs.build()]),
        operators_at_any_length(tracing=True),
        applied(rules, model),
        replaced_attributes(model, {"forward": traced.forward}),
        _quiet(None if BUFFER_VALUES in rules or GRADIENTS in rules else copied.call),
        recording_paused(),
        kernels_of(example.call),
        autocast(()),  # the traced method turns it on
        torch.no_grad(),
        without_gradients(model.parameters()),
    ):
        specs, input_paths = traced.dynamic_shapes(), traced.input_paths()
        try:
            with modules_kept(model), _no_error_caught(), questions_noted(STRICT in rules) as questions:
                program = _exported(model, traced.arguments, specs, rules)
        except ExportError:
            raise
        except Exception as error:
            again = functools.partial(trace, model, method, plan, observation, example, rules)
            request = TraceRequest(model, method, plan, example.call, names, again)
            raise failure(error, request) from error
        program = with_constants_outside(without_regions(program))
        _leave_buffers(program)
        _settle_views(program)
        output_paths, numbers = traced.returned(observation)
    values = PythonValues.of(
        observation.signature, observation.merged_arguments, observation.calls, plan.joined, example.read
    )
    return TracedProgram(
        program,
        input_paths,
        output_paths,
        names,
        plan,
        observation,
        model,
        method,
        example.sizes,
        example.defaults,
        example.outputs,
        numbers,
        replace(Domain.of_plan(plan), values=values),
        example.joined_outputs,
        example.member_rows,
        skips_entry=traced.skips_entry,
        questions=answered_questions(program, questions),
        layers=ReusedLayers.of(program, copied.copies),
    )


def _exported(
    model: torch.nn.Module, arguments: dict[str, Any], specs: dict[str, Any], rules: Sequence[Rewrite]
) -> torch.export.ExportedProgram:
    strict = STRICT in rules
    if GRADIENTS in rules:
        return export_with_gradients(model, arguments, specs, strict)
    return torch.export.export(model, (), kwargs=arguments, dynamic_shapes=specs, strict=strict)


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
    """Writes down what a trace took for granted about shapes, where running the program would ask for it again.

    That is the size that a -1 stands for, as an empty tensor does not show it, and the axes that a squeeze leaves out:
    in the trace, an axis of any size is one of several elements, so it stays.
    """
    views = (torch.ops.aten.view.default, torch.ops.aten.reshape.default)
    for node in program.graph.nodes:
        shape = getattr(node.meta.get("val"), "shape", None)  # none if the operator raised
        if node.target in views and -1 in node.args[1] and shape is not None:
            sizes = zip(node.args[1], shape, strict=True)
            node.update_arg(1, [real if size == -1 and type(real) is int else size for size, real in sizes])
        elif node.target in _SQUEEZES and shape is not None:
            _settle_squeeze(node, len(shape))
    program.graph_module.recompile()


def _settle_squeeze(node: torch.fx.Node, rank: int) -> None:
    """Names the axes that the trace left out; one that has one element under a condition only is selected from."""
    value: torch.fx.Node = arguments_of(node)["self"]
    shape, axes = value.meta["val"].shape, arguments_of(node).get("dim", range(len(value.meta["val"].shape)))
    axes = sorted({axis % max(len(shape), 1) for axis in ([axes] if isinstance(axes, int) else axes)})
    any_size = [axis for axis in axes if isinstance(shape[axis], torch.SymInt)] if len(shape) else []
    if not any_size or any(map(is_counted, shape)):
        return  # of a size that is counted, the graph itself makes sure that it is not 1
    gone = [axis for axis in axes if (size_in_trace(shape[axis]) if axis in any_size else shape[axis]) == 1]
    if len(gone) != len(shape) - rank:
        return
    if set(any_size).isdisjoint(gone):
        node.target, node.args, node.kwargs = _SQUEEZES[-1], (value, gone), {}
        return
    select = torch.ops.aten.select.int
    for axis in gone[:0:-1]:
        with node.graph.inserting_before(node):
            inner = node.graph.call_function(select, (value, axis, 0))
        inner.meta = {**node.meta, "val": select(value.meta["val"], axis, 0)}
        value = inner
    node.target, node.args, node.kwargs = select, (value, gone[0], 0), {}


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
            place = ModelLine(caught.tb_frame.f_code.co_filename, caught.tb_lineno)
            noted.clear()
            raise ExportError(
                "The model branches on the values of a tensor, and catches the error that this raises in a trace.",
                where=str(place),
                expected="code that takes the same branch in a trace as in eager mode",
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
    checked = replaced_attributes(owner, {name: False})
    quiet = warnings.catch_warnings(action="ignore")
    with quiet, silent, unlogged, checked, dispatch_restored():
        lines = lines_without([branches.__file__])
        repairs = [module_calls(around), constraints_that_solve(), limits_of_floats(), modes_that_change(), lines]
        with replaced(attribute_slots(repairs)):
            yield
