"""From a plan to arguments: whatever the model, they satisfy the plan, at distinct sizes greater than 1."""

import torch
from hypothesis import given
from hypothesis import strategies as st

import exportkit
from exportkit.arguments.build import build_call
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
