"""Plain modules to capture from: no config, no library behind them."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from exportkit import capture_outputs


class Layer(nn.Module):
    def __init__(self, size=4):
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, hidden):
        return torch.tanh(self.linear(hidden))


class InPlace(nn.Module):
    def forward(self, hidden):
        return hidden.add_(1)


class KeywordOnly(Layer):
    def forward(self, *, scale=1.0, hidden_states=None):
        return super().forward(hidden_states) * scale


class Returning(Layer):
    """A layer that returns its states and their mean in some container."""

    def __init__(self, container):
        super().__init__()
        self.container = container

    def forward(self, hidden):
        hidden = super().forward(hidden)
        return self.container(hidden, hidden.mean(-1))


class Stack(nn.Module):
    """Runs its layers one after the other; states what can be captured."""

    _can_record_outputs = {"hidden_states": Layer}  # noqa: RUF012

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers or [Layer() for _ in range(3)])

    def run(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    @capture_outputs
    def forward(self, x):
        return self.run(x)


class InPool(Stack):
    """Runs each layer in a thread of a pool."""

    def run(self, x):
        with ThreadPoolExecutor(1) as pool:
            for layer in self.layers:
                x = pool.submit(layer, x).result()
        return x


@dataclass
class States:
    last_hidden_state: torch.Tensor
    hidden_states: Any = None


@dataclass(frozen=True)
class Frozen:
    value: torch.Tensor


def states_of(model, x):
    """The states by hand: what a stack is given, and what each layer makes of it."""
    states = [x]
    for layer in model.layers:
        states.append(layer(states[-1]))
    return states


def assert_same(captured, expected):
    assert isinstance(captured, tuple)
    assert len(captured) == len(expected)
    for got, want in zip(captured, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def traces(model):
    """What a capture could leave behind in a model."""
    return [
        (name, {key: (dict(value) if isinstance(value, dict) else value) for key, value in vars(module).items()})
        for name, module in model.named_modules()
    ]
