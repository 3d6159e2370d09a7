"""The function that torch.export traces: a method of a model with a flat signature, and what it returns.

The function returns what the model returns; if there are Python values in that, a tuple of the tensors.
"""

from __future__ import annotations

import contextlib
import inspect
import keyword
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from exportkit._torch_compat.pytree import tree_leaves
from exportkit._torch_compat.symbolic_shapes import hold_equal, traced_expression
from exportkit._torch_compat.traced_values import depends_on_values
from exportkit.arguments.table import nested_spec
from exportkit.calls.call import Call, shapes_of
from exportkit.calls.observation import Observation
from exportkit.calls.signature import Signature
from exportkit.errors import ExportError
from exportkit.plan.leaves import is_below
from exportkit.plan.plan import Plan
from exportkit.plan.solved_sizes import cached_length
from exportkit.probing.missing import MissingDefaults
from exportkit.probing.simplify import with_joined_lists
from exportkit.rewrites.known_values import KnownValues
from exportkit.rewrites.size_keys import size_keys
from exportkit.rewrites.table import BUFFER_VALUES, GRADIENTS, Rewrite, adapted_call
from exportkit.running.eager import autocast
from exportkit.trees import Tree, check_opened, cloned, fingerprint, flatten, join, set_stored_length, text_of
from exportkit.trees.object_parts import Unread, Unreadable
from exportkit.trees.structure import path_of


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


class TracedMethod:
    """A method of a model as a function of the tensors of a plan.

    Args:
        model: The model.
        method: The method.
        plan: What varies.
        example: What to trace with.
        rules: Rewrites that are in force during the trace.

    Attributes:
        forward: The function. It has a parameter for each argument that holds tensors.
        arguments: What to trace it with, by parameter.
        skips_entry: Whether a dictionary has an entry for a size of the trace, which the trace did not take.
    """

    def __init__(
        self, model: torch.nn.Module, method: str, plan: Plan, example: Example, rules: Sequence[Rewrite]
    ) -> None:
        self._flat, self._plan, self._outputs = FlatSignature.of(example.call), plan, example.outputs
        self._returns_tensors = example.outputs.has_objects or any(
            leaf is not None for leaf in example.outputs.constants().values()
        )
        self.skips_entry = False
        self._traced: list[Tree] = []  # what the model returned in the trace
        parameters = self._flat.parameters
        self.arguments = {name: parameter.tree.map(_clone).build() for name, parameter in parameters.items()}
        self._autocast, self._records_gradients = example.call.autocast, example.call.gradients
        self.forward = self._forward(model, method, example.joined_outputs, rules)
        kinds = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in parameters]
        self.forward.__signature__ = inspect.Signature(kinds)  # type: ignore[attr-defined]

    def _forward(
        self, model: torch.nn.Module, method: str, joined: tuple[str, ...], rules: Sequence[Rewrite]
    ) -> Callable[..., Any]:
        flat, plan, traced, returns_tensors = self._flat, self._plan, self._traced, self._returns_tensors
        is_known, dtypes = BUFFER_VALUES in rules, self._autocast
        records = GRADIENTS in rules and self._records_gradients
        buffers = list(model.buffers()) if is_known else []
        own = vars(model).get(method)  # a method of the class is looked up while rewrites are in force

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
            shapes = shapes_of(tensors)
            _tie_sizes(plan, shapes)
            # The counters of caches say what the traced inputs say, so the trace cannot freeze them.
            length = cached_length(plan, shapes)
            for value in given.values() if length is not None else ():
                set_stored_length(value, length)
            known = KnownValues(zip(model.buffers(), buffers, strict=True)) if is_known else contextlib.nullcontext()
            recorded = torch.enable_grad() if records else contextlib.nullcontext()
            looked_up = contextlib.nullcontext() if torch.compiler.is_dynamo_compiling() else self._looking_sizes_up()
            with known, autocast(dtypes) if dtypes else contextlib.nullcontext(), recorded, looked_up:
                result = adapted_call(rules, model, flat.values(given), flat.signature.names, call_method)
            tree = with_joined_lists(flatten(result), joined)
            inputs = {id(tensor) for tensor in tensors.values()}
            if any(id(leaf) in inputs for leaf in tree.leaves):  # an input of a graph cannot be its output
                tree = tree.map(lambda leaf: leaf.clone() if id(leaf) in inputs else leaf)
            if returns_tensors:
                if not torch.compiler.is_dynamo_compiling():  # with Dynamo, nothing leaves the function but its result
                    traced.append(tree)
                tree = tree.map(_number_as_tensor)
            return tuple(tree.tensors().values()) if returns_tensors else tree.build()

        return forward

    @contextlib.contextmanager
    def _looking_sizes_up(self) -> Iterator[None]:
        with size_keys() as keys:
            yield
        self.skips_entry |= keys.skipped

    def dynamic_shapes(self) -> dict[str, Any]:
        """Returns dynamic axes without a minimum: torch.export assumes 2, and the graph serves smaller sizes, too."""

        def spec_of(path: str) -> dict[int, Any]:
            found = {}
            for axis, size in enumerate(self._plan.by_path[path].sizes):
                if not size.is_static:
                    most = None if size.variable is None else self._plan.variable(size.variable).maximum
                    found[axis] = torch.export.Dim.DYNAMIC if most is None else torch.export.Dim.DYNAMIC(max=most)
            return found

        return {name: nested_spec(part.path, part.tree, spec_of) for name, part in self._flat.parameters.items()}

    def input_paths(self) -> tuple[str, ...]:
        """Returns the paths of the tensors in the order in which torch flattens the arguments.

        This holds however their classes are registered.
        """
        paths = {}
        for name, value in self.arguments.items():
            for path, tensor in flatten(value).tensors().items():
                paths[id(tensor)] = join(self._flat.parameters[name].path, path)
        return tuple(paths[id(leaf)] for leaf in tree_leaves(self.arguments) if isinstance(leaf, torch.Tensor))

    def returned(self, observation: Observation) -> tuple[tuple[str, ...], dict[str, Any]]:
        """Returns the paths of the tensors that a program returns, and expressions for numbers that follow from sizes.

        Raises:
            ExportError: if a Python value among the outputs depends on the inputs in a way that a program cannot
                follow.
        """
        if not self._returns_tensors:
            return _output_order(self._outputs.build()), {}
        _require_given_back(self._outputs, observation)
        return _followed(self._outputs, self._traced[-1] if self._traced else None)


@dataclass(frozen=True)
class Parameter:
    """One parameter of the traced function.

    Attributes:
        path: Path of the value, such as ``args[0]``.
        tree: The value.
        argument: Parameter of the model's method that it belongs to.
        key: Position in ``*args`` or key in ``**kwargs``; None for any other argument.
    """

    path: str
    tree: Tree
    argument: str
    key: int | str | None


def _parameter_name(key: str, taken: Collection[str]) -> str:
    """A key of ``**kwargs``, which may be any text, as the name of a parameter."""
    name = re.sub(r"\W", "_", key)
    if not name.isidentifier() or keyword.iskeyword(name):
        name = f"_{name}"
    while name in taken:
        name += "_"
    return name


@dataclass(frozen=True)
class FlatSignature:
    """Parameters of the traced function by name, and the values of everything else, which it fills in.

    They are explicit: torch.export (2.13) cannot trace tensors given through ``*args`` or ``**kwargs``, and constants
    need not be inputs of a graph.
    """

    signature: Signature
    parameters: Mapping[str, Parameter]
    fixed: Mapping[str, Any]

    @classmethod
    def of(cls, call: Call) -> FlatSignature:
        """Returns the signature for a call: a parameter for each argument that holds tensors.

        Elements of ``*args`` and ``**kwargs`` are parameters of their own.
        """
        signature = call.signature
        found: dict[str, Parameter] = {}
        for argument, tree in call.arguments.items():
            parts: dict[Any, Tree] = {None: tree}
            if argument == signature.var_positional:
                parts = {position: flatten(value) for position, value in enumerate(tree.build())}
            elif argument == signature.var_keyword:
                parts = {key: flatten(value) for key, value in tree.build().items()}
            taken = set(call.arguments) - {argument}
            for key, part in parts.items():
                if not part.tensors():
                    continue
                name, path = argument, path_of(() if key is None else (key,), argument)
                if key is not None:
                    name = key if isinstance(key, str) and key not in taken else f"{argument}_{key}"
                found[_parameter_name(name, {*taken, *found})] = Parameter(path, part, argument, key)
        return cls(signature, found, call.values())

    def values(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the model's own arguments by parameter, for values of the flat parameters."""
        values = dict(self.fixed)
        for name, container in ((self.signature.var_positional, list), (self.signature.var_keyword, dict)):
            if name is not None and name in values:  # as a new container whose elements can be replaced
                values[name] = container(values[name])
        for name, value in given.items():
            parameter = self.parameters[name]
            if parameter.key is None:
                values[parameter.argument] = value
            else:
                values[parameter.argument][parameter.key] = value
        return values


def _tie_sizes(plan: Plan, shapes: Mapping[str, tuple[Any, ...]]) -> None:
    """Tells a trace which sizes are the same by the plan, so that each variable has one symbol.

    Otherwise the layers of a cache have symbols of their own, as long as no operator compares them.

    Args:
        plan: The plan.
        shapes: Shapes of the traced inputs by path.
    """
    found: dict[str, Any] = {}
    others: dict[Any, Any] = {}  # such as lengths of sliding windows
    sums = []
    for leaf in plan.leaves:
        for size, value in zip(leaf.sizes, shapes.get(leaf.path, ()), strict=False):
            if size.variable is not None:
                hold_equal(value, found.setdefault(size.variable, value))
            elif size.is_linear and not size.is_static:
                sums.append((size, value))
            elif not size.is_static:
                hold_equal(value, others.setdefault(size, value))
    for size, value in sums:
        if size.variables() <= found.keys():
            hold_equal(value, size.evaluate(found))


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
    leaves = outputs.by_path()
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
        if type(leaf) is Unread and not any(not place or is_below(path, place) for place in places):
            raise _not_followed(path, f"a {leaf.cls.__qualname__}", "the same one for each call")


def _not_followed(where: str, expected: str, got: str) -> ExportError:
    return ExportError(
        "What the model returns depends on its inputs in a way that a graph cannot follow.",
        where=where,
        expected=f"{expected}, as in eager mode",
        got=f"{got} in the trace",
        hint="return tensors, or numbers that are computed from sizes or with .item().",
    )


def _clone(leaf: Any) -> Any:
    return Unread(Unreadable(leaf.cls), leaf.cls) if type(leaf) is Unread else cloned(leaf)
