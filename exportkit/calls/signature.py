"""The parameters of a method: binds the arguments of a call to them, and makes tensors of Python numbers and back."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from exportkit.errors import ArgumentError, UnknownInputError
from exportkit.trees import Tree, first_name, flatten, join

NumberKind = Literal["int", "float", "size"]  # a number to calculate with, by its type, or one that makes sizes
_NUMBERS: Mapping[NumberKind, str] = {"int": "an int of 64 bits", "float": "a float", "size": "an int, 0 or larger"}


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
