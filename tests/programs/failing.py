"""Models that cannot be exported, each for one reason; besides the standard library they import torch alone.

A plain ``int`` would be kept symbolic: see exportkit.rewrites.lists.
"""

import builtins
import dataclasses
import threading

import numpy as np
import torch

LOCK = threading.RLock()  # Dynamo cannot enter it, so that strict tracing, which keeps int() symbolic, fails too


class Positive(torch.nn.Module):
    """Decides by a value of each row, and keeps the rows in a dict."""

    def forward(self, x):
        rows = {number: row * 2 if row.sum() > 0 else row - 1 for number, row in enumerate(x)}
        return torch.stack([*rows.values()])


class Branch(torch.nn.Module):
    """Decides by a value, in its second layer."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(6, 6), Positive()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Count(torch.nn.Module):
    """Makes a number of a tensor on one line, and decides by it on another."""

    def forward(self, x, lengths):
        longest = lengths.max().item()
        return torch.stack([row * 2 if longest > 3 else row for row in x])


class Items(torch.nn.Module):
    """Makes numbers of a tensor of free length."""

    def forward(self, x, lengths):
        return torch.stack([x[:length, :length].sum() for length in lengths.tolist()])


class Fixed(torch.nn.Module):
    """Makes a number of a size, in a submodule."""

    def __init__(self):
        super().__init__()
        self.scale = Scale()

    def forward(self, data):
        with LOCK:
            return self.scale(data["x"])


class Scale(torch.nn.Module):
    def forward(self, x):
        return x * builtins.int(x.shape[1])


class Loop(torch.nn.Module):
    """Loops over tokens, and ends early where there are too many."""

    def forward(self, x):
        states = [x[:, 0]]
        for step in range(1, x.shape[1]):
            if step > 50:
                break
            states.append(states[step // 2] * 0.5 + x[:, step])
        return states[-1]


class Folded(torch.nn.Module):
    """Has a constant size in it."""

    def forward(self, x):
        return (x.expand(3, -1, -1) if torch.compiler.is_exporting() else x).flatten(1)


@dataclasses.dataclass
class Pair:
    first: torch.Tensor
    second: torch.Tensor | None = None


class TakesBoth(torch.nn.Module):
    """Takes a dataclass and a model output, and makes a number of the batch."""

    def forward(self, pair, states):
        with LOCK:
            count = builtins.int(pair.first.shape[0]) if torch.compiler.is_exporting() else 1
        return (pair.first + states.last_hidden_state) * count


class Raises(torch.nn.Module):
    """Raises while it is traced."""

    def forward(self, x):
        if torch.compiler.is_exporting():
            raise ValueError("not this way")
        return x


class Numpy(torch.nn.Module):
    """Leaves torch for a function of NumPy that torch does not have."""

    def forward(self, x):
        return x + torch.from_numpy(np.unwrap(x.numpy()))


class Bessel(torch.nn.Module):
    def forward(self, x):
        return torch.special.bessel_j0(x) + 1


class Untranslated(torch.nn.Module):
    """Uses an operator that ONNX does not have, in its second layer."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(6, 6), Bessel())

    def forward(self, x):
        return self.layers(x)


LOCK = threading.Lock()


class Box:
    def __init__(self, tensor):
        self.tensor, self.lock = tensor, LOCK


class Boxed(torch.nn.Module):
    """Returns an object that cannot be built again."""

    def forward(self, x):
        return Box(x * 2)


class Doubled(torch.nn.Module):
    """Decides by how two sizes are related."""

    def forward(self, a, b):
        if a.shape[1] * 2 == b.shape[1]:
            return a.sum() + b.sum()
        return a.sum() - b.sum()


class Short(torch.nn.Module):
    """Decides by a size."""

    def forward(self, x):
        if x.shape[1] < 9:
            return x.sum(1)
        return x.sum(1) * 2


class Odd(torch.nn.Module):
    """Decides by whether a size is odd."""

    def forward(self, x):
        return x.sum(1) if x.shape[1] % 2 else x.sum(1) * 2


class EvenTable(torch.nn.Module):
    """Makes another table where a size is even."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Buffer(torch.ones(6))

    def forward(self, x):
        if x.shape[1] % 2 == 0:
            self.table = torch.nn.Buffer(self.table * 2)
        return x + self.table


class Table(torch.nn.Module):
    """Has so many positions, and no more."""

    def __init__(self):
        super().__init__()
        self.positions = torch.nn.Parameter(torch.randn(16, 6))

    def forward(self, x):
        return x + self.positions[: x.shape[1]]


class Grown(torch.nn.Module):
    """Makes its table of positions longer where it is too short, as models with sinusoidal positions do."""

    def __init__(self):
        super().__init__()
        self.table, self.longest = torch.nn.Buffer(self.positions(16)), 16

    @staticmethod
    def positions(length):
        return torch.arange(length).float()[:, None] / 16

    def forward(self, x):
        if x.shape[1] > self.longest:
            self.table, self.longest = torch.nn.Buffer(self.positions(x.shape[1])), x.shape[1]
        return x + self.table[: x.shape[1]]
