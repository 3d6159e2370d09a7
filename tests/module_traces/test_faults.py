"""How sure and how sensitive comparing is: faults drawn from a seed, pairs of runs without one, three hard cases."""

import functools

import pytest
import torch
from torch import nn

from tests.module_traces.faults import faults, inputs, made, sound_pairs, traced

SEED, COUNT = 1, 50


@functools.cache
def right_trace(kind, seed, padded):
    return traced(made(kind), inputs(kind, seed, padded))


def test_modules_that_were_changed_are_named():
    missed = []
    for fault in faults(SEED, COUNT):
        wrong = traced(fault.model, inputs(fault.kind, fault.seed, fault.padded))
        found = right_trace(fault.kind, fault.seed, fault.padded).compare(wrong)
        if found.first is None or not fault.is_named(found.first.path):
            missed.append((fault.name, fault.kind, fault.path, found.first))

    assert len(missed) <= 0.05 * COUNT, missed


PAIRS = sound_pairs()


@pytest.mark.parametrize("name", PAIRS)
def test_rounding_is_no_fault(name):
    kind, first, second, padded, dtype = PAIRS[name]
    given = inputs(kind, 5, padded)
    cast = {key: value.to(dtype) if value.is_floating_point() else value for key, value in given.items()}

    found = traced(first, given).compare(traced(second, cast))

    assert found.first is None, str(found)
    assert found.ok


class Through(nn.Module):
    """Returns what the function makes of its input, in a module of its own."""

    def __init__(self, change):
        super().__init__()
        self.inner = Inner(change)

    def forward(self, x):
        return self.inner(x) * 1


class Inner(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, x):
        return self.change(x)


def with_permuted_channels(x):
    order = torch.arange(x.shape[-1])
    order[:100] = order[:100].flip(0)
    return x[..., order]


def with_one_element_changed(x):
    x = x.clone()
    x.view(-1)[-3] += 777
    return x


@pytest.mark.parametrize("values", ["all", None])
@pytest.mark.parametrize(
    ("x", "change"),
    [
        (torch.randn(4, 2000, generator=torch.Generator().manual_seed(0)), with_permuted_channels),
        (torch.arange(10_000), with_one_element_changed),
        (torch.linspace(0, 1, 10_000, dtype=torch.float64), with_one_element_changed),
    ],
)
def test_faults_that_statistics_in_text_do_not_show(x, change, values):
    right = traced(Through(lambda x: x), {"x": x}, values)
    wrong = traced(Through(change), {"x": x}, values)

    found = right.compare(wrong)

    assert not found.ok
    assert next(row for row in found.tensors if row.verdict != "equal").module == "inner"
    if values == "all":
        assert found.first is not None
        assert found.first.path == "inner"
    else:
        assert "inner (Inner)" in found.verdict()
