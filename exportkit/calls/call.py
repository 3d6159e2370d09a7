"""One invocation of a model's method: the parameters of the method, the arguments by path, and what came back.

A recorded call, a call built at chosen sizes, and a call that was never made are all a `Call`. Its arguments are bound
to the parameters of the method, and unbound again, by the `Signature`, and nowhere else.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from exportkit.errors import ArgumentError, InvalidTypeError, UnknownInputError
from exportkit.trees import Tree, cloned, first_name, flatten, join, joined, set_stored_length

NumberKind = Literal["int", "float", "size"]  # a number to calculate with, by its type, or one that makes sizes
NOTHING = flatten(None)  # the outputs of a call that was not made


@dataclass(frozen=True)
class Signature:
    """Parameters of an observed method, without ``self``.

    Attributes:
        names: Names of all parameters, in order.
        var_positional: Name of ``*args``, if there is one.
        var_keyword: Name of ``**kwargs``, if there is one.
        defaults: Default values by name, of the parameters that have one.
        positional_only: Names of parameters that cannot be given by name.
        numbers: Python numbers that a graph takes as tensors, by path.
    """

    names: tuple[str, ...]
    var_positional: str | None
    var_keyword: str | None
    defaults: Mapping[str, Any]
    positional_only: frozenset[str]
    numbers: Mapping[str, NumberKind] = field(default_factory=dict)

    @classmethod
    def of(cls, method: Callable[..., Any]) -> Signature:
        """Returns the signature of a bound method or function."""
        parameters = inspect.signature(method).parameters
        variadic: dict[Any, str] = {}
        defaults: dict[str, Any] = {}
        positional_only = set()
        for name, parameter in parameters.items():
            if parameter.default is not parameter.empty:
                defaults[name] = parameter.default
            if parameter.kind is parameter.POSITIONAL_ONLY:
                positional_only.add(name)
            variadic[parameter.kind] = name
        return cls(
            names=tuple(parameters),
            var_positional=variadic.get(inspect.Parameter.VAR_POSITIONAL),
            var_keyword=variadic.get(inspect.Parameter.VAR_KEYWORD),
            defaults=defaults,
            positional_only=frozenset(positional_only),
        )

    def plain(self) -> tuple[str, ...]:
        """Returns the names of the parameters that take one value each, so neither ``*args`` nor ``**kwargs``."""
        return tuple([name for name in self.names if name not in (self.var_positional, self.var_keyword)])

    def by_name(self) -> frozenset[str]:
        """Returns the names of the parameters that get the arguments of these names; ``**kwargs`` gets all others."""
        apart = frozenset() if self.var_keyword is None else self.positional_only
        return frozenset(self.plain()) - apart

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the given arguments by parameter, in signature order; numbers that are inputs of a graph as tensors.

        ``*args`` is a tuple and ``**kwargs`` a dict, each under the parameter's own name. Wrong arguments are bound as
        far as possible: rejecting them is up to the method.
        """
        values = self.bind_unchanged(args, kwargs)
        values |= self.numbers_as_tensors(values)
        return self.in_order(values)

    def bind_unchanged(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the given arguments by parameter, in signature order, see `bind`: the very objects."""
        positions = self._positions()
        values = dict(zip(positions, args, strict=False))
        rest = tuple(args[len(positions) :])
        if self.var_positional is not None and rest:
            values[self.var_positional] = rest
        by_name = self.by_name()
        extra: dict[str, Any] = {}
        for name, value in kwargs.items():
            (values if name in by_name else extra)[name] = value
        if self.var_keyword is not None and extra:
            values[self.var_keyword] = extra
        return self.in_order(values)

    def in_order(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns values by parameter in the order of the parameters."""
        return {name: values[name] for name in self.names if name in values}

    def numbers_as_tensors(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arguments that hold numbers which a graph takes as tensors, with these tensors in them.

        Args:
            values: Values by parameter name. Defaults are used for parameters that are not given.
        """
        found = {}
        for name, kinds, tree, leaves in self._with_numbers(values):
            fitting = {path: kind for path, kind in kinds.items() if _fits(leaves.get(path), kind)}
            if fitting:
                made = {path: number_as_tensor(leaves[path], kind) for path, kind in fitting.items()}
                found[name] = tree.with_leaves(made).build()
        return found

    def _with_numbers(
        self, values: Mapping[str, Any]
    ) -> Iterator[tuple[str, dict[str, NumberKind], Tree, dict[str, Any]]]:
        """Yields each argument with such numbers: its name, the numbers by path, and what it holds."""
        for name, kinds in self.numbers_by_name().items():
            tree = flatten(values[name] if name in values else self.defaults.get(name))
            yield name, kinds, tree, tree.by_path()

    def require_numbers(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raises ArgumentError if a Python number that a graph takes as a tensor is given as anything else."""
        for name, kinds, _, leaves in self._with_numbers(self.bind_unchanged(args, kwargs)):
            for path, kind in kinds.items():
                value = leaves.get(path)
                if path in leaves and not _fits(value, kind):
                    raise ArgumentError(
                        "This argument must be a Python number, as in the recorded calls.",
                        where=join(name, path),
                        expected=_NUMBERS[kind],
                        got=f"{type(value).__name__} {value}"[:200],
                        hint="record calls with a different type to allow it.",
                    )

    def numbers_by_name(self) -> dict[str, dict[str, NumberKind]]:
        """Returns the kinds of the numbers by parameter, and by their path in its value."""
        found: dict[str, dict[str, NumberKind]] = {}
        for full, kind in self.numbers.items():
            name = first_name(full)
            found.setdefault(name, {})[full[len(name) :].removeprefix(".")] = kind
        return found

    def require_fit(self, args: tuple[Any, ...], kwargs: Iterable[str]) -> None:
        """Raises ArgumentError if more arguments are given by position than there are, or one of them twice.

        Args:
            args: Positional arguments.
            kwargs: Names of the others.
        """
        positions = self._positions()
        if len(args) > len(positions) and self.var_positional is None:
            raise ArgumentError(
                "More arguments were given by position than the model takes.",
                expected=f"at most {len(positions)}: {', '.join(positions)}",
                got=len(args),
            )
        twice = [name for name in positions[: len(args)] if name in kwargs and name not in self.positional_only]
        if twice:
            raise ArgumentError(
                "An argument was given twice.",
                where=", ".join(twice),
                expected="each argument by position or by name",
                got="both",
            )

    def unbind(
        self, values: Mapping[str, Any], named: Iterable[str] | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns ``args, kwargs`` for the given values, the reverse of `bind`.

        Args:
            values: Values by parameter.
            named: Parameters to give by name, by default all. Parameters before ``*args`` and positional-only ones are
                given by position in any case.
        """
        positions = self._positions()
        rest = tuple(values.get(self.var_positional or "", ()))
        by_name = set(self.names if named is None else named) - self.positional_only
        given = [name for name in positions if name in values and name not in by_name]
        leading = positions[: positions.index(given[-1]) + 1] if given else ()
        if rest:  # none may be left out before these
            leading = positions
        args = (*(values.get(name, self.defaults.get(name)) for name in leading), *rest)
        kwargs = {n: values[n] for n in self.plain() if n in values and n not in leading}
        return args, {**kwargs, **values.get(self.var_keyword or "", {})}

    def name_of(self, key: str | int) -> str:
        """Returns the parameter that a user names by ``key``: its name or its position.

        Raises:
            UnknownInputError: if there is no such parameter.
        """
        if isinstance(key, int) and not isinstance(key, bool) and 0 <= key < len(self.names):
            return self.names[key]
        if key in self.names:
            return str(key)
        raise UnknownInputError(
            f"Unexpected keyword argument {key!r}: the observed method has no such input.",
            expected=f"one of {', '.join(self.names)}, or a position below {len(self.names)}",
            got=repr(key),
            hint="inputs are named as in the method's signature.",
        )

    def _positions(self) -> tuple[str, ...]:
        names = self.names
        stop = names.index(self.var_positional) if self.var_positional is not None else len(names)
        return tuple([name for name in names[:stop] if name != self.var_keyword])


_NUMBERS: Mapping[NumberKind, str] = {"int": "an int of 64 bits", "float": "a float", "size": "an int, 0 or larger"}


def number_as_tensor(value: Any, kind: NumberKind) -> torch.Tensor:
    """Returns a Python number as a tensor that holds exactly this number, or has it as its last size.

    Args:
        value: The number.
        kind: What it is.
    """
    if kind == "size":  # torch and the plan know sizes; without elements, it takes no memory
        return torch.empty(0, value)
    return torch.tensor(value, dtype=torch.int64 if kind == "int" else torch.float64)


def number_in(tensor: torch.Tensor, kind: NumberKind) -> Any:
    """Returns the Python number that `number_as_tensor` made a tensor of.

    Args:
        tensor: The tensor.
        kind: What it is.
    """
    return tensor.shape[1] if kind == "size" else tensor.item()


def _fits(value: Any, kind: NumberKind) -> bool:
    if kind == "float":
        return type(value) is float
    return type(value) is int and (0 if kind == "size" else -(2**63)) <= value < 2**63


@dataclass(frozen=True)
class Call:
    """One call of a method, made or not.

    Attributes:
        arguments: Its arguments by parameter, in signature order. In a recorded call, tensors are snapshots taken
            before the call.
        signature: Parameters of the method.
        named: Parameters that the caller gave by name; the others were given by position.
        outputs: What the method returned, as it was right after the call; `NOTHING` if the call was not made.
        index: Number of a recorded call among the stored ones, in the order in which they began; otherwise None.
        latency: Duration of the method itself in seconds; NaN if the call was not made.
        cached_tokens: Number of tokens that the counters of its caches are set to; None leaves them as recorded.
        label: What the call stands for, such as "one token".
        sizes: Sizes of the plan's variables, if the call was built for such sizes.
        error: Why there are no outputs, if building or making the call failed.
        gradients: Whether torch recorded gradients in a recorded call, or those that the call is made of.
        autocast: The types of devices for which ``torch.autocast`` was on then, each with its dtype in half precision.
        seed: If the method draws random numbers of torch, the seed of those that it gets where results are compared.
    """

    arguments: Mapping[str, Tree]
    signature: Signature
    named: frozenset[str] = frozenset()
    outputs: Tree = NOTHING
    index: int | None = None
    latency: float = math.nan
    cached_tokens: int | None = None
    label: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict)
    error: str = ""
    gradients: bool = False
    autocast: tuple[tuple[str, str], ...] = ()
    seed: int | None = None

    @property
    def is_made(self) -> bool:
        """Whether the call was made, so that it has outputs."""
        return self.outputs is not NOTHING

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the input tensors by full path, such as ``past_key_values.layers[0].keys``."""
        return dict(self._tensors)

    @functools.cached_property
    def _tensors(self) -> dict[str, torch.Tensor]:
        return tensors_in(self.arguments)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the input tensors by full path."""
        return shapes_in(self.arguments)

    def constants(self) -> dict[str, Any]:
        """Returns the inputs that are not tensors by full path, ``None`` included."""
        return {join(name, p): c for name, tree in self.arguments.items() for p, c in tree.constants().items()}

    def generators(self) -> list[torch.Generator]:
        """Returns the random number generators among the inputs."""
        return [value for value in self.constants().values() if isinstance(value, torch.Generator)]

    def has(self, name: str) -> bool:
        """Returns whether the argument has a leaf other than None."""
        return name in self.arguments and any(leaf is not None for leaf in self.arguments[name].leaves)

    def values(self) -> dict[str, Any]:
        """Returns the nested values by parameter: new containers and caches that hold the tensors themselves."""
        return self._built(self.arguments)

    def copies(self) -> dict[str, Any]:
        """Returns the nested values by parameter, with copies of the tensors, so that a model may write to them."""
        return self._built({name: tree.map(cloned) for name, tree in self.arguments.items()})

    def args_kwargs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns ``args, kwargs`` to call the method with: copies, given by name wherever the method allows it."""
        return self.signature.unbind(self.copies())

    def args_kwargs_as_given(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the same, with arguments given by position or by name as the caller of a recorded call gave them."""
        return self.args_kwargs() if self.index is None else self.signature.unbind(self.copies(), self.named)

    def with_tensors(self, tensors: Mapping[str, torch.Tensor | None]) -> Call:
        """Returns a call, not made yet, with other tensors.

        Args:
            tensors: The tensors that change, by full path; None takes one out.
        """
        arguments = {}
        for name, tree in self.arguments.items():
            changed = {}
            for path in tree.tensor_paths:
                full = join(name, path)
                if full in tensors:
                    changed[path] = tensors[full]
            arguments[name] = tree.with_leaves(changed) if changed else tree
        return self.with_arguments(arguments)

    def without(self, names: Set[str]) -> Call:
        """Returns the same call without the arguments of these names, those in ``**kwargs`` included."""
        kept = {name: tree for name, tree in self.arguments.items() if name not in names}
        catch_all, caught = self.signature.var_keyword, self._caught()
        if catch_all is not None and not names.isdisjoint(caught):
            del kept[catch_all]
            if left := {name: value for name, value in caught.items() if name not in names}:
                kept[catch_all] = flatten(left)
        return replace(self, arguments=kept)

    def names(self) -> set[str]:
        """Returns the names of the inputs that the call gives, those in ``**kwargs`` included."""
        return {*self.arguments, *self._caught()} - {str(self.signature.var_keyword)}

    def _caught(self) -> dict[str, Any]:
        tree = self.arguments.get(str(self.signature.var_keyword))
        return {} if tree is None else dict(tree.build())

    def with_arguments(self, arguments: Mapping[str, Tree]) -> Call:
        """Returns a call, not made yet, with other arguments."""
        return replace(self, arguments=arguments, outputs=NOTHING, index=None, latency=math.nan)

    def _built(self, trees: Mapping[str, Tree]) -> dict[str, Any]:
        values = {name: tree.build() for name, tree in trees.items()}
        if self.cached_tokens is not None:
            for value in values.values():
                set_stored_length(value, self.cached_tokens)
        return values


def given_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns arguments by position and by name.

    Args:
        inputs: A tuple or list of positional ones, a mapping of named ones, a pair of both, or a single tensor.

    Raises:
        InvalidTypeError: for anything else.
    """
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, torch.Tensor):
        return (inputs,), {}
    if not isinstance(inputs, tuple | list):
        raise InvalidTypeError(
            "Not arguments of a model.", expected="a tuple, a mapping, or a tensor", got=type(inputs).__name__
        )
    is_pair = len(inputs) == 2 and isinstance(inputs[0], tuple) and isinstance(inputs[1], dict)
    return (inputs[0], dict(inputs[1])) if is_pair else (tuple(inputs), {})


def tensors_in(arguments: Mapping[str, Tree]) -> dict[str, torch.Tensor]:
    """Returns the tensors among arguments by full path."""
    found: dict[str, torch.Tensor] = {}
    for name, tree in arguments.items():
        found |= zip(joined(name, tree.tensor_paths), tree.tensors().values(), strict=True)
    return found


def shapes_in(arguments: Mapping[str, Tree]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the tensors among arguments by full path."""
    found: dict[str, tuple[int, ...]] = {}
    for name, tree in arguments.items():
        found |= zip(joined(name, tree.tensor_paths), tree.shapes(), strict=True)
    return found


def shapes_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of tensors by path."""
    return {path: tuple(tensor.shape) for path, tensor in tensors.items()}


def shapes_text(values: Mapping[str, torch.Tensor | tuple[int, ...]]) -> str:
    """Returns the shapes of tensors as text for a message: ``x (2, 3), layers[0].keys and 23 alike (2, 4, 7, 8)``.

    Tensors of one shape whose names differ in numbers only are alike.

    Args:
        values: Tensors or shapes, by name.
    """
    groups: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name, value in values.items():
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else value
        groups.setdefault((re.sub(r"\d+", "", name), shape), []).append(name)
    labels = [(name, f" and {len(others)} alike" if others else "", key[1]) for key, (name, *others) in groups.items()]
    return ", ".join(f"{name}{alike} {shape}" for name, alike, shape in labels)
