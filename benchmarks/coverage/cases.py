"""What a case is, and how one is added: the decorator `case`, and short names for random inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Sizes = tuple[Any, ...]


@dataclass(frozen=True)
class Case:
    """A model and the sizes that it is called with.

    Attributes:
        name: What the model is.
        family: What it belongs to: the file that it is in, or the task.
        make: Returns the model, and a function that runs it at given sizes. Libraries are imported in here.
        recorded: The sizes of the runs that are observed.
        truth: The sizes of other runs; one of them has one row.
        method: The method that is observed and exported.
        plain: Whether torch.onnx.export is tried, too.
    """

    name: str
    family: str
    make: Callable[[], tuple[torch.nn.Module, Callable[..., object]]]
    recorded: Sequence[Sizes]
    truth: Sequence[Sizes]
    method: str = "forward"
    plain: bool = True

    @property
    def id(self) -> str:
        """Returns the name of its file."""
        return f"{self.family}-{self.name}".replace(" ", "_").replace("/", "_")


CASES: list[Case] = []


def case(recorded: Sequence[Sizes], truth: Sequence[Sizes], **options: Any) -> Callable[[Any], Any]:
    """Adds a case. Decorates a function that returns a model, and a function that runs it at given sizes."""

    def add(make: Any) -> Any:
        family = make.__module__.rpartition(".")[2].replace("_", " ")
        CASES.append(Case(make.__name__.replace("_", " "), family, make, recorded, truth, **options))
        return make

    return add


def randn(*shape: int) -> torch.Tensor:
    """Returns normally distributed numbers."""
    return torch.randn(shape)


def ints(*shape: int, below: int = 50) -> torch.Tensor:
    """Returns integers from 1 on."""
    return torch.randint(1, below, shape)


def images(batch: int, height: int, width: int | None = None) -> torch.Tensor:
    """Returns images with three channels."""
    return torch.randn(batch, 3, height, width or height)
