"""From a plan to arguments: whatever the model, they satisfy the plan, at distinct sizes greater than 1."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import exportkit
from exportkit.arguments.build import build_call, resize
from exportkit.plan.sizes import choose_sizes


class Anything(torch.nn.Module):
    """Takes any number of tensors, and returns nothing that depends on them."""

    def forward(self, **tensors):
        return torch.zeros(1)


def observed(tables):
    """An observer of calls in which each input has the shapes of its row, one for each call."""
    model, observer = Anything(), exportkit.InputObserver()
    with observer(model, store_n_calls=len(tables[0])):
        for call in range(len(tables[0])):
            model(**{f"x{i}": torch.zeros(shapes[call]) for i, shapes in enumerate(tables) if shapes[call] is not None})
    return observer


sizes = st.integers(1, 9)


@st.composite
def call_tables(draw):
    """Shapes of up to four inputs in up to four calls; a rank for each input; some inputs absent in some calls."""
    calls = draw(st.integers(2, 4))
    tables = []
    for _ in range(draw(st.integers(1, 4))):
        rank = draw(st.integers(1, 3))
        shapes = draw(st.lists(st.tuples(*[sizes] * rank), min_size=calls, max_size=calls))
        absent = draw(st.sets(st.integers(1, calls - 1), max_size=calls - 1))
        tables.append([None if call in absent else shape for call, shape in enumerate(shapes)])
    return tables


@given(call_tables())
def test_arguments_satisfy_the_plan_at_distinct_sizes(tables):
    observer = observed(tables)
    plan = observer.plan(probe=False)
    chosen = choose_sizes(plan)
    tensors = build_call(plan, observer.observation, chosen).tensors()
    shapes = plan.shapes(chosen)
    assert {path: tuple(tensor.shape) for path, tensor in tensors.items()} == shapes
    dynamic = {str(size): size.evaluate(chosen) for leaf in plan.leaves for size in leaf.sizes if not size.is_static}
    assert len(set(dynamic.values())) == len(dynamic)
    assert not plan.static_sizes() & set(dynamic.values())
    assert min(dynamic.values(), default=2) > 1


@given(call_tables())
def test_plans_reproduce_every_size_that_was_seen(tables):
    plan = observed(tables).plan(probe=False)
    for leaf in plan.leaves:
        for call, shape in enumerate(leaf.shapes):
            seen = {v.name: v.seen[call] for v in plan.variables}
            for size, have in zip(leaf.sizes, shape or (), strict=False):
                if all(seen[name] is not None for name in size.variables()):
                    assert size.evaluate(seen) == have


def test_counters_of_windows_follow_the_length_of_the_cache():
    from tests.models import tiny_mistral

    model, observer = tiny_mistral(sliding_window=6), exportkit.InputObserver()
    with observer(model):
        model.generate(torch.randint(3, 60, (1, 9)), max_new_tokens=3, do_sample=False, pad_token_id=0)
    plan = observer.plan()
    chosen = {**choose_sizes(plan), "past_sequence": 4}
    cache = build_call(plan, plan.observation, chosen).values()["past_key_values"]
    assert cache.get_seq_length() == 4
    assert cache.layers[0].keys.shape[2] == 4


def test_arguments_can_be_changed_by_the_model_without_changing_the_recorded_calls():
    observer = observed([[(2, 3), (4, 3)]])
    plan = observer.plan(probe=False)
    arguments = build_call(plan, observer.observation, {"batch": 2})
    _, kwargs = arguments.args_kwargs()
    kwargs["x0"].add_(1)
    assert not bool(arguments.tensors()["tensors.x0"].any())
    assert not bool(observer.observation.calls[0].tensors()["tensors.x0"].any())


# Tensors of chosen shapes, made of recorded ones

dims = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@given(dims, st.data(), st.sampled_from([torch.float32, torch.int64, torch.bool, torch.float16]))
def test_shape_type_and_values_are_as_wanted(have, data, dtype):
    want = data.draw(st.lists(st.integers(0, 7), min_size=len(have), max_size=len(have)))
    tensor = torch.arange(torch.Size(have).numel()).reshape(have).to(dtype)
    made = resize(tensor, want, dynamic=range(len(have)))
    assert tuple(made.shape) == tuple(want)
    assert made.dtype == dtype
    assert set(made.flatten().tolist()) <= set(tensor.flatten().tolist())


@pytest.mark.parametrize("shape", [(3, 3), (1, 3), (2, 3), (3, 2), (2, 2)])
def test_the_values_are_copies_of_the_recorded_ones_at_shorter_sizes_too(shape):
    tensor = torch.arange(1, 10).reshape(3, 3)
    made = resize(tensor, shape)
    assert torch.equal(made, tensor[: shape[0], : shape[1]])
    made.zero_()
    assert bool(tensor.all())


@pytest.mark.parametrize(("mask", "padded"), [([0, 1, 1, 1], "left"), ([1, 1, 1, 0], "right")])
def test_padding_stays_on_its_side_when_a_mask_is_stretched(mask, padded):
    made = resize(torch.tensor([mask, [1, 1, 1, 1]]), (2, 11))[0].tolist()
    assert made == sorted(made, reverse=padded == "right")
    assert 0 in made
    assert 1 in made


def test_a_mask_of_one_position_hides_no_row_if_it_can():
    mask = torch.tensor([[0, 1, 1], [1, 1, 1], [1, 1, 0]])
    assert resize(mask, (3, 1)).tolist() == [[1], [1], [1]]


def test_repeated_rows_differ():
    made = resize(torch.arange(6.0).reshape(1, 6), (3, 6), dynamic=(0, 1))
    assert not torch.equal(made[0], made[1])
    assert not torch.equal(made[1], made[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_repeated_values_differ_slightly_and_the_largest_come_last(dtype):
    tensor = torch.tensor([[0.5, -1.5, 2.25, 0.0, -torch.inf, 3.0]], dtype=dtype).expand(2, 6)
    made = resize(tensor, (2, 15))[0]
    assert made[:3].abs().lt(made[6:9].abs()).all()
    assert made[6:9].abs().lt(made[12:15].abs()).all()
    assert torch.allclose(made[:3], tensor[0, :3], rtol=0.15)
    assert made[3:6].tolist() == made[9:12].tolist() == [0.0, -torch.inf, 3.0]


def test_values_along_static_axes_stay_in_their_places():
    matrix = torch.tensor([[[0.5, 0.1, 2.0], [0.2, 0.7, 1.0], [0.0, 0.0, 1.0]]])
    made = resize(matrix, (4, 3, 3), dynamic=(0,))
    assert made[:, 2].tolist() == [[0, 0, 1]] * 4
    assert torch.allclose(made, matrix.expand(4, 3, 3), rtol=0.15)


def test_integers_are_rolled_along_axes_that_vary_only():
    grid = torch.tensor([[1, 4, 6]])
    assert resize(grid, (2, 3), dynamic=(0,)).tolist() == [[1, 4, 6], [1, 4, 6]]
    assert resize(grid, (2, 3), dynamic=(0, 1)).tolist() == [[1, 4, 6], [6, 1, 4]]


def test_a_tensor_only_seen_empty_is_made_up():
    made = resize(torch.empty(0, 3), (4, 3))
    assert made.shape == (4, 3)
    assert bool(made.isfinite().all())
    assert len(made.unique()) == 12
    assert resize(torch.empty(0, 3, dtype=torch.int64), (2, 3)).tolist() == [[0] * 3] * 2
