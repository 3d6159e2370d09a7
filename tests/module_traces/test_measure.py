"""The hash of a tensor's bytes, and its statistics."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exportkit._torch_compat.memory import memory_of
from exportkit.module_traces.measure import chunks_of, measure

SIZES = st.integers(1, 5000)


def digest(data):
    return measure(torch.tensor(list(data), dtype=torch.uint8)).hash


@given(st.binary(min_size=1, max_size=100), st.data())
def test_one_byte_that_changes_shows(data, draw):
    place = draw.draw(st.integers(0, len(data) - 1))
    other = draw.draw(st.integers(0, 255).filter(lambda byte: byte != data[place]))
    assert digest(data) != digest(data[:place] + bytes([other]) + data[place + 1 :])


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=2, max_size=50), st.randoms())
def test_elements_that_change_places_show(values, random):
    shuffled = random.sample(values, len(values))
    one, other = torch.tensor(values, dtype=torch.int32), torch.tensor(shuffled, dtype=torch.int32)
    assert (measure(one).hash == measure(other).hash) is (values == shuffled)


@given(SIZES, st.sets(st.integers(0, 4999), min_size=1, max_size=6))
def test_signs_that_change_show(size, places):
    x = torch.rand(size) + 1
    y = x.clone()
    for place in places:
        y[place % size] = -x[place % size]
    assert measure(x).hash != measure(y).hash


@given(st.binary(max_size=20))
def test_bytes_that_are_added_show(data):
    assert digest(data) != digest(data + b"\0")


def test_the_hash_does_not_depend_on_how_a_tensor_lies_in_memory(monkeypatch):
    x = torch.randn(700, 1000)
    expected = measure(x).hash
    assert measure(x.t().contiguous().t()).hash == expected
    assert measure(x[None].expand(1, 700, 1000)).hash == expected
    monkeypatch.setattr("exportkit.module_traces.measure._LARGEST_COPY", 10_000)
    assert measure(x.t().contiguous().t()).hash == expected
    assert measure(x[:1].expand(700, 1000)).hash == measure(x[:1].repeat(700, 1)).hash


def test_pieces_are_the_bytes_in_order():
    x = torch.arange(200_000)
    assert b"".join(map(bytes, chunks_of(x))) == x.numpy().tobytes()
    assert b"".join(map(bytes, chunks_of(x[1::2]))) == x[1::2].numpy().tobytes()
    assert b"".join(map(bytes, chunks_of(x[5:9]))) == x[5:9].numpy().tobytes()


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(100_000),
        lambda: torch.randn(777, 777) * 3 + 5,
        lambda: torch.randn(5000) * 1e-3 + 1000,
        lambda: torch.randn(5000, dtype=torch.float64) * 1e-6 + 1e6,
        lambda: torch.randn(5000) * 1e25,
        lambda: torch.randn(5000).half(),
        lambda: torch.randn(5000).bfloat16(),
        lambda: torch.randn(5000).to(torch.float8_e5m2),
        lambda: torch.randint(-1000, 1000, (5000,)),
        lambda: torch.randn(5000) > 0,
        lambda: torch.full((5000,), 3.25),
        lambda: torch.randn(513),
    ],
)
def test_statistics_are_those_of_torch(make):
    x = make()
    exact = x.to(torch.float64)
    found = measure(x).statistics
    scale = float(exact.abs().max())
    assert found.mean == pytest.approx(float(exact.mean()), abs=1e-6 * scale)
    assert found.std == pytest.approx(float(exact.std()), rel=1e-4, abs=1e-12 * scale)
    assert (found.min, found.max) == (float(exact.min()), float(exact.max()))
    assert (found.nan, found.inf) == (0, 0)


def test_numbers_that_are_not_finite_are_counted_and_left_out():
    x = torch.tensor([1.0, math.nan, math.inf, -math.inf, 3.0, math.nan])
    assert measure(x).statistics == (2.0, math.sqrt(2), 1.0, 3.0, 2, 2)
    assert measure(x[1:3]).statistics == (None, None, None, None, 1, 1)


def test_statistics_of_one_number_and_of_none():
    assert measure(torch.tensor(2.5)).statistics == (2.5, None, 2.5, 2.5, 0, 0)
    assert measure(torch.empty(0)).statistics == (None, None, None, None, 0, 0)


def test_statistics_of_complex_numbers_are_those_of_their_absolute_values():
    assert measure(torch.tensor([3 + 4j, 0])).statistics[:4] == (2.5, math.sqrt(12.5), 0.0, 5.0)


def test_memory_is_read_without_a_mark_on_the_tensor():
    x = torch.randn(10)
    assert bytes(memory_of(x[2:])) == x[2:].numpy().tobytes()
    y = torch.randn(10)
    memory_of(y)
    assert y.untyped_storage().resizable()
    z = torch._lazy_clone(y)
    assert bytes(memory_of(z)) == bytes(memory_of(y))
    assert torch._C._is_cow_tensor(z)
