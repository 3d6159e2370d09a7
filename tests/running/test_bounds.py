"""How far results may be apart: bounds that follow the size of the numbers, for every dtype and special value."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from exportkit.running.bounds import local_scale, magnitudes, rounding_bound, usual_bound
from exportkit.running.compare import compare_tensors, unit_of

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
NAN, INF = math.nan, math.inf

shapes = st.lists(st.integers(1, 6), max_size=4).map(tuple)
powers = st.integers(-60, 60)
seeds = st.integers(0, 2**16)


def values(shape, seed, dtype=torch.float32, mean=0.0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + mean).to(dtype)


def agrees(expected, got, bound=rounding_bound, **options):
    return compare_tensors("x", expected, got, bound=bound, **options).reason is None


@given(shapes, seeds, st.sampled_from([*FLOATS, torch.int64, torch.bool, torch.complex64]))
def test_every_tensor_agrees_with_itself(shape, seed, dtype):
    tensor = values(shape, seed).to(dtype)

    assert agrees(tensor, tensor.clone())
    assert agrees(tensor, tensor.clone(), usual_bound)


@given(shapes, seeds, powers, st.floats(-1e-3, 1e-3))
def test_the_verdict_does_not_depend_on_the_scale(shape, seed, power, error):
    expected = values(shape, seed)
    got = expected * (1 + error * values(shape, seed + 1))
    factor = 2.0**power

    assert agrees(expected, got) == agrees(expected * factor, got * factor)


@given(shapes, seeds, powers, st.sampled_from(FLOATS[:3]))
def test_some_roundings_agree_and_a_wrong_factor_does_not(shape, seed, power, dtype):
    scaled = values(shape, seed, torch.float64) * 2.0 ** (power // 12)
    expected, unit = scaled.to(dtype), unit_of(dtype)
    noise = values(shape, seed + 1, torch.float64).clamp(-3, 3) * scaled.square().mean().sqrt() * 0.5

    if min(shape, default=1) >= 4:
        assert agrees(expected, (scaled + noise * unit).to(dtype))
    if bool((expected != 0).any()):
        assert not agrees(expected, (scaled * 1.1).to(dtype))


@given(st.integers(2, 9), st.integers(8, 40), seeds, st.data(), st.sampled_from([1e-6, 1e-5, 1.0, 1e3, 1e6]))
def test_one_wrong_element_among_many_shows_at_every_scale(rows, columns, seed, data, scale):
    expected = values((rows, columns), seed) * scale
    row, column = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    got = expected.clone()
    got[row, column] += 1e-3 * scale

    found = compare_tensors("x", expected, got, bound=rounding_bound)

    assert found.reason is not None
    assert found.index == (row, column)


@given(shapes, seeds, st.data(), st.sampled_from([NAN, INF, -INF]))
def test_special_values_equal_themselves_alone(shape, seed, data, special):
    expected = values((*shape, 3), seed)
    position = tuple(data.draw(st.integers(0, size - 1)) for size in expected.shape)
    got = expected.clone()
    got[position] = special

    assert agrees(got, got.clone())
    assert not agrees(expected, got, usual_bound)
    assert not agrees(got, expected, usual_bound)
    assert not agrees(got, torch.where(got == expected, got, -INF if special == INF else INF), usual_bound)


@given(seeds, st.sampled_from([1e-3, 1e3, 1e6]), st.booleans(), st.integers(0, 19))
def test_columns_and_rows_of_different_size_have_a_scale_each(seed, factor, is_row, index):
    table = values((20, 20), seed, mean=4.0)
    table[:, 7] *= factor
    wrong = table.clone()
    wrong[3, index] *= 1.001

    assert not agrees(*((table.T, wrong.T) if is_row else (table, wrong)))


@pytest.mark.parametrize("dtype", FLOATS)
def test_denormals_and_exact_zeros(dtype):
    tiny = torch.tensor([torch.finfo(dtype).smallest_normal / 4]).to(dtype)

    assert agrees(tiny, torch.zeros_like(tiny)) is (dtype is not torch.float16)
    assert not agrees(torch.zeros(9, dtype=dtype), torch.full((9,), 1e-5, dtype=dtype))


def test_what_vanishes_beside_the_rest_may_vanish():
    expected = torch.tensor([[0.9, -1e-27]] * 9)

    assert agrees(expected, expected.where(expected > 0, 0.0))
    assert not agrees(expected, expected.where(expected > 0, 1e-5))


def test_coarse_dtypes_have_the_usual_bound_at_most():
    for dtype in FLOATS:
        tensor = torch.ones(9, dtype=dtype)
        assert bool((rounding_bound(tensor, times=100.0) <= usual_bound(tensor) * 1.1).all())


@given(shapes, seeds)
def test_integers_have_no_bound(shape, seed):
    tensor = (values(shape, seed) * 1e6).to(torch.int64)

    assert not agrees(tensor, tensor + 1, usual_bound)


def test_the_scale_does_not_overflow_and_ignores_special_values():
    assert float(local_scale(magnitudes(torch.tensor([1e300, NAN, INF], dtype=torch.float64))).max()) == 1e300
    assert local_scale(magnitudes(torch.empty(0, 3))).numel() == 0
    assert not bool(local_scale(magnitudes(torch.zeros(3, 20))).any())


LEEWAY = torch.tensor([0.0, 1e-5, INF])


@pytest.mark.parametrize(
    ("got", "agrees_now"),
    [([1.0, 1.0, 1.0], True), ([1.0, 1.000009, 7.0], True), ([1.0, 1.0, NAN], True), ([1.0, 1.1, 1.0], False)],
)
def test_elements_may_move_as_far_as_was_measured(got, agrees_now):
    expected = torch.ones(3)
    found = compare_tensors("x", expected, torch.tensor(got), bound=rounding_bound, leeway=LEEWAY)

    assert (found.reason is None) is agrees_now
    assert found.left_out == (0 if got == [1.0] * 3 else 1)


def test_a_tensor_with_nothing_to_compare_does_not_agree():
    found = compare_tensors("x", torch.ones(3), torch.zeros(3), leeway=torch.tensor(INF))

    assert found.reason == "nothing can be compared: the model's own result is arbitrary here"
    assert agrees(torch.ones(3), torch.ones(3), leeway=torch.tensor(INF))


def test_integers_may_be_what_they_were_in_a_run():
    expected, leeway = torch.tensor([3, 5]), torch.tensor([1.0, 0.0])

    assert agrees(expected, torch.tensor([4, 5]), leeway=leeway)
    assert not agrees(expected, torch.tensor([5, 5]), leeway=leeway)
    assert not agrees(expected, torch.tensor([3, 6]), leeway=leeway)
