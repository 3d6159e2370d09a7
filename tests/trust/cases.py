"""What a case is, and how it is written: the decorators `case` and `control`, and short names for calls."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

_RANDOM = torch.Generator().manual_seed(0)


@dataclass(frozen=True)
class Call:
    """Arguments of a model."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def copied(self) -> Call:
        """Returns the call with arguments of its own, since a model may change them."""
        return copy.deepcopy(self)

    def __str__(self) -> str:
        parts = [_shown(value) for value in self.args]
        return ", ".join([*parts, *(f"{name}={_shown(value)}" for name, value in self.kwargs.items())])


@dataclass(frozen=True)
class Case:
    """A model, how it is recorded, and what has to be true of its graph afterwards.

    Attributes:
        name: What the model does.
        group: The class of mistakes, from the name of the file.
        model: Makes the model.
        recorded: The calls that are recorded, or a function that runs the model, such as one that calls ``generate``.
        serves: Calls that have to be right: any tool can serve them, so refusing them is a mistake, too. The recorded
            calls belong to them, and the report has to say "proven".
        truth: Calls that have to be right or loud.
        may_refuse: Nothing has to be served: also the export may fail, or the report may not be proven.
        finding: A pattern; a finding of the report that matches it announces wrong results. Only for effects that
            cannot be part of a graph.
        control: A well-behaved model. Nothing about it may be loud.
        plan: Edits the plan before the export.
        same: Says whether two results are the same, for models whose result is not determined, such as ties.
        slack: Factor on the tolerance, for deep models.
        training: Leave the model in training mode.
        source: The text of a model that was generated.
    """

    name: str
    group: str
    model: Callable[[], nn.Module]
    recorded: Sequence[Call] | Callable[[nn.Module], object]
    serves: Sequence[Call] = ()
    truth: Sequence[Call] = ()
    may_refuse: bool = False
    finding: str = ""
    control: bool = False
    plan: Callable[[Any], Any] | None = None
    same: Callable[[Any, Any], bool] | None = None
    slack: float = 1.0
    training: bool = False
    source: str = ""

    @property
    def id(self) -> str:
        """Returns the name for pytest."""
        return f"{self.group}-{self.name}".replace(" ", "_")


CASES: list[Case] = []


def x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns normally distributed numbers, different ones each time."""
    return torch.randn(shape, generator=_RANDOM).to(dtype)


def ints(*shape: int, below: int = 8) -> torch.Tensor:
    """Returns integers from 0 on."""
    return torch.randint(0, below, shape, generator=_RANDOM)


def call(*args: Any, **kwargs: Any) -> Call:
    """Returns a call with these arguments."""
    return Call(args, kwargs)


def at(*shapes: tuple[int, ...]) -> list[Call]:
    """Returns a call with one tensor for each shape."""
    return [Call((x(*shape),)) for shape in shapes]


RECORDED = tuple(at((2, 5), (3, 7)))


def case(
    recorded: Sequence[Call] | Callable[[nn.Module], object] = RECORDED, **options: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds a case; decorates a ``forward`` method, a class of modules, or a function that makes a module."""

    def add(described: Callable[..., Any]) -> Callable[..., Any]:
        group = described.__module__.rpartition(".")[2].replace("_", " ")
        name = described.__name__.replace("_", " ")
        CASES.append(Case(name, group, _maker(described), recorded, **options))
        return described

    return add


def control(
    recorded: Sequence[Call] | Callable[[nn.Module], object] = RECORDED, serves: Sequence[Call] = (), **options: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds a case of a well-behaved model: it has to be proven, and right in all calls."""
    return case(recorded, serves=serves, control=True, **options)


def _maker(described: Callable[..., Any]) -> Callable[[], nn.Module]:
    if isinstance(described, type):
        return described
    names = described.__code__.co_varnames[: described.__code__.co_argcount]
    return type(described.__name__, (nn.Module,), {"forward": described}) if names[:1] == ("self",) else described


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_shown(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}({', '.join(map(_shown, value))})"
    return repr(value)[:60]
