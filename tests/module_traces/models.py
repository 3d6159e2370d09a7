"""Models that the tests of tracing run, and tensors of every kind."""

import threading
import warnings
from dataclasses import dataclass

import torch
from torch import nn


class Block(nn.Module):
    """A layer with two layers inside."""

    def __init__(self, size=4):
        super().__init__()
        self.first, self.second = nn.Linear(size, size), nn.Linear(size, size)

    def forward(self, x, scale=None):
        x = self.second(torch.relu(self.first(x)))
        return x if scale is None else x * scale


class Stack(nn.Module):
    """Blocks in a row, and a method that is not forward."""

    def __init__(self, depth=4):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def twice(self, x):
        """Calls two of the blocks, and not forward."""
        return self.blocks[0](self.blocks[1](x, scale=2.0))


class Passes(nn.Module):
    """Returns what it is given, of whatever kind."""

    def forward(self, x):
        return x


class Wraps(nn.Module):
    """A model with one module in it that returns what it is given."""

    def __init__(self):
        super().__init__()
        self.inner = Passes()

    def forward(self, x):
        return self.inner(x)


class Fails(nn.Module):
    """Refuses the second of its blocks' results."""

    def __init__(self):
        super().__init__()
        self.good, self.bad = nn.Linear(4, 4), Passes()

    def forward(self, x):
        y = self.good(x)
        self.bad(y)
        raise ValueError("no such thing")


@dataclass
class Pair:
    """A dataclass that nobody registered."""

    left: torch.Tensor
    right: torch.Tensor
    name: str = "pair"


def _quantized(dtype):
    return torch.quantize_per_tensor(torch.randn(3, 4), 0.1, 10, dtype)


def _per_channel():
    scales, points = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0, 1, 2])
    return torch.quantize_per_channel(torch.randn(3, 4), scales, points, 0, torch.qint8)


def _nested(layout):
    return torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=layout)


KINDS = {
    "float32": lambda: torch.randn(3, 4),
    "float64": lambda: torch.randn(3, 4, dtype=torch.float64),
    "float16": lambda: torch.randn(3, 4).half(),
    "bfloat16": lambda: torch.randn(3, 4).bfloat16(),
    "float8": lambda: torch.randn(3, 4).to(torch.float8_e4m3fn),
    "int64": lambda: torch.randint(-9, 9, (3, 4)),
    "bool": lambda: torch.tensor([True, False, True]),
    "complex64": lambda: torch.randn(3, 4, dtype=torch.complex64),
    "empty": lambda: torch.empty(0, 4),
    "one number": lambda: torch.tensor(2.5),
    "meta": lambda: torch.empty(3, 4, device="meta"),
    "quantized": lambda: _quantized(torch.quint8),
    "sparse": lambda: torch.eye(4).to_sparse(),
    "sparse rows": lambda: torch.eye(4).to_sparse_csr(),
    "nested": lambda: _nested(torch.strided),
    "expanded": lambda: torch.randn(1, 4).expand(3, 4),
    "not contiguous": lambda: torch.randn(4, 3).t(),
}
MORE_KINDS = {
    "per channel": _per_channel,
    "quantized to 32 bits": lambda: _quantized(torch.qint32),
    "jagged": lambda: _nested(torch.jagged),
    "sparse columns": lambda: torch.eye(4).to_sparse_csc(),
    "sparse blocks": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "not coalesced": lambda: torch.sparse_coo_tensor([[0, 0, 1]], [1.0, 2.0, 3.0], (3,)),
    "mkldnn": lambda: torch.randn(3, 4).to_mkldnn(),
    "complex128": lambda: torch.randn(3, 4, dtype=torch.complex128),
    "complex32": lambda: torch.randn(3, 4).to(torch.complex32),
    "conjugated": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "negated": lambda: torch.randn(3, dtype=torch.complex64).conj().imag,
    "float8, other": lambda: torch.randn(3, 4).to(torch.float8_e5m2fnuz),
    "float8, exponents": lambda: torch.rand(3, 4).to(torch.float8_e8m0fnu),
    "uint16": lambda: torch.tensor([1, 65535], dtype=torch.uint16),
    "parameter": lambda: nn.Parameter(torch.randn(3)),
    "with gradient": lambda: torch.randn(3, requires_grad=True) * 2,
    "all NaN": lambda: torch.full((3,), float("nan")),
    "infinite": lambda: torch.tensor([1.0, float("inf"), -float("inf")]),
    "large": lambda: torch.randn(300, 1000),
    "large, not contiguous": lambda: torch.randn(1000, 300).t(),
}


def made(kind):
    """Returns a tensor of a kind."""
    with warnings.catch_warnings(action="ignore"):  # of torch, that some of the kinds are new
        return {**KINDS, **MORE_KINDS}[kind]()


def dense(tensor):
    """Returns numbers that can be compared, of a tensor of any kind."""
    tensor = tensor.detach()
    if tensor.is_nested:
        return torch.cat([part.flatten() for part in tensor.unbind()])
    if tensor.is_quantized:
        return tensor.dequantize()
    tensor = tensor if tensor.layout is torch.strided else tensor.to_dense()
    tensor = tensor.resolve_conj().resolve_neg().contiguous()
    if tensor.dtype.is_complex and tensor.dtype is not torch.complex32:
        return torch.view_as_real(tensor)
    if tensor.dtype.itemsize == 1 or tensor.dtype is torch.complex32:
        return tensor.reshape(-1).view(torch.uint8)
    return tensor


def in_threads(*steps):
    """Runs each step in a thread of its own."""
    threads = [threading.Thread(target=step) for step in steps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
