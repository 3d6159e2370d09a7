"""`infer_dynamic_shapes` means what it means in ``torch.onnx.InputObserver``, also where that one fails."""

import collections

import pytest
import torch

from exportkit import InputObserver
from exportkit.errors import NoCallsError, PlanError
from tests.models import Add, IdsDecoder, OptionalAdd, Scale, Total, Weighted, random_cache, random_ids, tiny_llama

D = torch.export.Dim.DYNAMIC


def calls(model, *every, **options):
    """Returns an observer of the given calls, each a tuple of positional and a dict of named arguments."""
    observer = InputObserver(**options)
    with observer(model, store_n_calls=len(every)):
        for args, kwargs in every:
            model(*args, **kwargs)
    return observer


def ones(*shape):
    return torch.ones(shape)


class Ignores(torch.nn.Module):
    """Takes anything by position and looks at nothing."""

    def forward(self, x, y=None, z=None):
        return x


# How arguments are given


def test_arguments_by_position_give_a_tuple():
    observer = calls(Add(), ((ones(2, 6), ones(1, 6)), {}), ((ones(3, 7), ones(1, 7)), {}))

    assert observer.infer_dynamic_shapes() == ({0: D, 1: D}, {1: D})


def test_arguments_by_name_give_a_dict_in_signature_order():
    observer = calls(Add(), ((), {"y": ones(1, 6), "x": ones(2, 6)}), ((), {"x": ones(3, 6), "y": ones(1, 6)}))

    shapes = observer.infer_dynamic_shapes()
    assert shapes == {"x": {0: D}, "y": {}}
    assert list(shapes) == ["x", "y"]


def test_arguments_by_position_and_name_give_a_dict():
    observer = calls(Add(), ((ones(2, 6),), {"y": ones(1, 6)}), ((ones(3, 6),), {"y": ones(1, 6)}))

    assert observer.infer_dynamic_shapes() == {"x": {0: D}, "y": {}}


def test_argument_may_come_by_position_in_one_call_and_by_name_in_another():
    observer = calls(Add(), ((ones(2, 6), ones(1, 6)), {}), ((ones(3, 6),), {"y": ones(1, 6)}))

    assert observer.infer_dynamic_shapes() == {"x": {0: D}, "y": {}}


def test_further_positions_are_a_tuple_under_their_name():
    observer = calls(Total(), ((ones(2), ones(3), ones(4)), {}), ((ones(5), ones(6), ones(4)), {}))

    assert observer.infer_dynamic_shapes() == {"x": {0: D}, "args": ({0: D}, {})}


def test_further_names_are_a_dict_under_their_name():
    observer = calls(Total(), ((ones(2),), {"y": ones(3)}), ((ones(5),), {"y": ones(6)}))

    assert observer.infer_dynamic_shapes() == {"x": {0: D}, "kwargs": {"y": {0: D}}}


def test_further_positions_and_names_together():
    observer = calls(Total(), ((ones(2), ones(3)), {"y": ones(3)}), ((ones(5), ones(3)), {"y": ones(6)}))

    assert observer.infer_dynamic_shapes() == {"x": {0: D}, "args": ({},), "kwargs": {"y": {0: D}}}


@pytest.mark.parametrize("name", ["kwargs", "args"])
def test_further_name_that_is_the_parameters_own_is_a_collision(name):
    observer = calls(Total(), ((ones(2), ones(3)), {name: ones(3)}))

    with pytest.raises(ValueError, match="Keyword argument name collision") as raised:
        observer.infer_dynamic_shapes()
    assert repr(name) in str(raised.value)


# Constants


def test_constants_are_none():
    observer = calls(Scale(), ((ones(2), 3), {"negate": True}), ((ones(4), 3), {"negate": True}))

    assert observer.infer_dynamic_shapes() == {"x": {0: D}, "factor": None, "negate": None}


def test_constants_by_position_are_none():
    observer = calls(Scale(), ((ones(2), 3, 0.5, False), {}), ((ones(4), 3, 0.5, False), {}))

    assert observer.infer_dynamic_shapes() == ({0: D}, None, None, None)


def test_constants_inside_other_values_are_none():
    value = lambda n: [ones(n), None, 4, {"text": "a", "more": (True, ones(n))}]  # noqa: E731
    observer = calls(Ignores(), ((value(2),), {}), ((value(3),), {}))

    assert observer.infer_dynamic_shapes() == ([{0: D}, None, None, {"text": None, "more": (None, {0: D})}],)


@pytest.mark.parametrize("constants", [(1, 2), (True, False), ("a", "b"), (1.0, 1.5)])
def test_constant_that_changes_is_refused(constants):
    first, second = constants
    observer = calls(Ignores(), ((ones(2), first), {}), ((ones(2), second), {}))

    with pytest.raises(RuntimeError, match="Two calls were made with different constant values") as raised:
        observer.infer_dynamic_shapes()
    assert "where: y, call 1" in str(raised.value)
    assert f"expected: {first!r}\n  got: {second!r}" in str(raised.value)


# Arguments that some calls lack


def test_axes_of_an_optional_argument_come_from_the_calls_that_have_it():
    observer = calls(OptionalAdd(), ((ones(5), ones(1)), {}), ((ones(6),), {}), ((ones(7), ones(7)), {}))

    assert observer.infer_dynamic_shapes() == ({0: D}, {0: D})


def test_argument_that_comes_with_later_calls_only():
    observer = calls(Ignores(), ((), {"x": ones(2)}), ((), {"x": ones(2), "z": ones(3)}))

    assert observer.infer_dynamic_shapes() == {"x": {}, "z": {}}


def test_position_that_was_never_given_between_others_is_none():
    observer = calls(Ignores(), ((ones(2), None, ones(3)), {}), ((ones(4), None, ones(3)), {}))

    assert observer.infer_dynamic_shapes() == ({0: D}, None, {})


def test_empty_list_is_told_from_a_missing_argument():
    observer = calls(Ignores(), ((ones(2), []), {}), ((ones(3), []), {}))

    assert observer.infer_dynamic_shapes() == ({0: D}, [])


def test_value_if_missing_counts_as_a_shape_by_name_and_by_position():
    every = ((ones(2, 3), ones(2, 3)), {}), ((ones(4, 3),), {})
    for key in ("y", 1):
        observer = calls(OptionalAdd(), *every, value_if_missing={key: torch.empty(0, 3)})
        assert observer.infer_dynamic_shapes() == ({0: D}, {0: D})


def test_value_if_missing_may_be_nested():
    missing = {"y": {"a": torch.empty(0, 3), "b": [torch.empty(2, 0)]}}
    given = {"a": ones(2, 3), "b": [ones(2, 4)]}
    observer = calls(Ignores(), ((ones(2), given), {}), ((ones(2),), {}), value_if_missing=missing)

    assert observer.infer_dynamic_shapes() == ({}, {"a": {0: D}, "b": [{1: D}]})


def test_value_if_missing_may_be_a_further_name():
    observer = calls(Total(), ((ones(2),), {"y": ones(3)}), ((ones(2),), {}), value_if_missing={"y": torch.empty(0)})

    assert observer.infer_dynamic_shapes() == {"x": {}, "kwargs": {"y": {0: D}}}


# Nested values


def test_keys_of_a_dict_may_come_in_another_order():
    observer = calls(
        Weighted(),
        (({"values": ones(2, 3), "weights": ones(5)},), {}),
        (({"weights": ones(5), "values": ones(4, 3)},), {}),
    )

    assert observer.infer_dynamic_shapes() == ({"values": {0: D}, "weights": {}},)


Pair = collections.namedtuple("Pair", ["a", "b"])


@pytest.mark.parametrize(
    ("value", "spec"),
    [
        (lambda n: [ones(n)], [{0: D}]),
        (lambda n: (ones(n),), ({0: D},)),
        (lambda n: {"a": ones(n)}, {"a": {0: D}}),
        (lambda n: [[ones(n)]], [[{0: D}]]),
        (lambda n: {"a": [{"b": (ones(n),)}]}, {"a": [{"b": ({0: D},)}]}),
        (lambda n: Pair(ones(n), ones(3)), Pair({0: D}, {})),
    ],
)
def test_containers_keep_their_structure(value, spec):
    observer = calls(Ignores(), ((value(2),), {}), ((value(4),), {}))

    (shapes,) = observer.infer_dynamic_shapes()
    assert shapes == spec
    assert type(shapes) is type(spec)


def test_cache_is_the_list_of_its_tensors():
    every = [((random_ids(1, 2),), {"past_key_values": random_cache(n)}) for n in (3, 4)]
    observer = calls(IdsDecoder(), *every)

    assert observer.infer_dynamic_shapes() == {"input_ids": {}, "past_key_values": [{2: D}] * 4}


def test_length_of_a_cache_is_dynamic_when_one_call_had_none():
    model, observer = tiny_llama(), InputObserver()
    with observer(model, store_n_calls=2):
        model.generate(random_ids(1, 5), max_new_tokens=3, do_sample=False)

    shapes = observer.infer_dynamic_shapes()
    assert shapes["past_key_values"] == [{2: D}] * 4
    assert shapes["input_ids"] == {1: D}
    assert shapes["use_cache"] is None
    assert list(shapes) == [name for name in observer.info.signature_names if name in shapes]


def test_registered_class_is_the_list_of_its_fields():
    from transformers.modeling_outputs import BaseModelOutput

    every = [((ones(2), BaseModelOutput(last_hidden_state=ones(2, n))), {}) for n in (3, 4)]
    observer = calls(Ignores(), *every)

    assert observer.infer_dynamic_shapes() == ({}, [{1: D}])


def test_list_that_changes_its_length_is_refused():
    observer = calls(Ignores(), (([ones(2)],), {}), (([ones(2), ones(2)],), {}))
    with pytest.raises(RuntimeError, match="Positional argument 0 has 2 tensors, and had 1"):
        observer.infer_dynamic_shapes()

    observer = calls(Ignores(), ((), {"x": [ones(2)]}), ((), {"x": [ones(2), ones(2)]}))
    with pytest.raises(RuntimeError, match="Named argument 'x' has 2 tensors, and had 1"):
        observer.infer_dynamic_shapes()


def test_input_that_changes_its_rank_is_refused():
    observer = calls(Ignores(), ((ones(2),), {}), ((ones(2, 3),), {}))

    with pytest.raises(PlanError, match="different ranks") as raised:
        observer.infer_dynamic_shapes()
    assert "where: x" in str(raised.value)
    assert "call 0: (2,), call 1: (2, 3)" in str(raised.value)


# The batch


def _observed_positions():
    return calls(
        Ignores(),
        ((ones(2, 4), ones(3, 2, 4), [ones(2, 8)]), {}),
        ((ones(2, 5), ones(3, 2, 5), [ones(2, 8)]), {}),
    )


def test_batch_hint_true_marks_all_inputs():
    assert _observed_positions().infer_dynamic_shapes(set_batch_dimension_for=True) == (
        {0: D, 1: D},
        {1: D, 2: D},
        [{0: D}],
    )


@pytest.mark.parametrize("hint", [{"z"}, {2}])
def test_batch_hint_by_name_or_position_marks_that_input(hint):
    assert _observed_positions().infer_dynamic_shapes(set_batch_dimension_for=hint) == ({1: D}, {2: D}, [{0: D}])


@pytest.mark.parametrize("hint", [None, False, set()])
def test_no_batch_hint_marks_nothing(hint):
    assert _observed_positions().infer_dynamic_shapes(set_batch_dimension_for=hint) == ({1: D}, {2: D}, [{}])


@pytest.mark.parametrize("hint", [True, {1}, {"y"}])
def test_batch_of_positions_with_three_rows_each_is_their_second_axis(hint):
    assert _observed_positions().infer_dynamic_shapes(set_batch_dimension_for=hint)[1] == {1: D, 2: D}


def test_batch_hint_marks_every_leaf_of_an_input():
    every = [((random_ids(1, 2),), {"past_key_values": random_cache(n)}) for n in (3, 4)]
    shapes = calls(IdsDecoder(), *every).infer_dynamic_shapes(set_batch_dimension_for={"past_key_values"})

    assert shapes == {"input_ids": {}, "past_key_values": [{0: D, 2: D}] * 4}


def test_batch_hint_leaves_scalars_and_constants_alone():
    observer = calls(Ignores(), ((torch.tensor(1.0), 3), {}))

    assert observer.infer_dynamic_shapes(set_batch_dimension_for=True) == ({}, None)


@pytest.mark.parametrize(
    ("hint", "marked"),
    [({0}, "x"), ({1}, "args[0]"), ({2}, "args[1]"), ({"args"}, "args[0] args[1]"), ({"y"}, "y"), ({"kwargs"}, "y")],
)
def test_batch_hint_reaches_further_positions_and_names(hint, marked):
    observer = calls(Total(), ((ones(2, 1), ones(2, 1), ones(2, 1)), {"y": ones(2, 1)}))

    spec = {name: {0: D} if name in marked.split() else {} for name in ("x", "args[0]", "args[1]", "y")}
    assert observer.infer_dynamic_shapes(set_batch_dimension_for=hint) == {
        "x": spec["x"],
        "args": (spec["args[0]"], spec["args[1]"]),
        "kwargs": {"y": spec["y"]},
    }


@pytest.mark.parametrize("hint", [{3}, {"w"}])
def test_batch_hint_for_an_input_that_does_not_exist_is_refused(hint):
    with pytest.raises(ValueError, match="not observed"):
        _observed_positions().infer_dynamic_shapes(set_batch_dimension_for=hint)


# Names


def _observed_add():
    return calls(Add(), ((), {"x": ones(2, 6), "y": ones(1, 6)}), ((), {"x": ones(3, 7), "y": ones(1, 7)}))


def test_names_are_given_by_input_and_axis():
    names = {"x": {0: "batch", 1: "length"}, 1: {1: "length"}}

    assert _observed_add().infer_dynamic_shapes(dim_names=names) == {
        "x": {0: "batch", 1: "length"},
        "y": {1: "length"},
    }


def test_axis_without_a_name_gets_one_of_its_own():
    assert _observed_add().infer_dynamic_shapes(dim_names={"x": {0: "batch"}}) == {
        "x": {0: "batch", 1: "x_dim_1"},
        "y": {1: "y_dim_1"},
    }


def test_axes_inside_nested_values_get_names_of_their_own():
    every = [((random_ids(1, 2),), {"past_key_values": random_cache(n, layers=1)}) for n in (3, 4)]
    shapes = calls(IdsDecoder(), *every).infer_dynamic_shapes(dim_names={"input_ids": {0: "batch"}})

    assert shapes["past_key_values"] == [
        {2: "past_key_values_layers_0_keys_dim_2"},
        {2: "past_key_values_layers_0_values_dim_2"},
    ]


def test_names_can_be_those_that_other_tools_give():
    every = [
        (
            (random_ids(2, n),),
            {"attention_mask": ones(2, past + n), "past_key_values": random_cache(past, batch=2, layers=1)},
        )
        for n, past in ((4, 6), (1, 10))
    ]
    shapes = calls(IdsDecoder(), *every).infer_dynamic_shapes(set_batch_dimension_for=True, dim_names=True)

    assert shapes == {
        "input_ids": {0: "batch_size", 1: "sequence_length"},
        "attention_mask": {0: "batch_size", 1: "total_sequence_length"},
        "past_key_values": [{0: "batch_size", 2: "past_sequence_length"}] * 2,
    }


def test_axes_that_no_other_tool_names_have_the_names_of_the_plan():
    assert _observed_add().infer_dynamic_shapes(dim_names=True) == {
        "x": {0: "batch_size", 1: "x_axis_1"},
        "y": {1: "x_axis_1"},
    }


def test_names_for_an_input_that_does_not_exist_are_refused():
    with pytest.raises(ValueError, match="Unexpected keyword argument 'w'"):
        _observed_add().infer_dynamic_shapes(dim_names={"w": {0: "batch"}})


# Removed inputs


def test_removed_inputs_are_left_out():
    observer = calls(Ignores(), ((), {"x": ones(2), "y": ones(3), "z": ones(4)}))
    observer.remove_inputs(["y", 2])

    assert observer.infer_dynamic_shapes() == {"x": {}}
    assert list(observer.infer_arguments()) == ["x"]
    assert len(observer.info.inputs[0].aligned_flat_list) == 1


def test_input_can_be_removed_when_only_some_calls_have_it():
    observer = calls(OptionalAdd(), ((ones(2), ones(2)), {}), ((ones(3),), {}))
    observer.remove_inputs([1])

    assert observer.infer_dynamic_shapes() == ({0: D},)


@pytest.mark.parametrize(("names", "count", "left"), [(["y"], 1, ["z"]), (["absent"], 0, ["y", "z"]), ("yz", 2, [])])
def test_inputs_that_come_by_var_keyword_are_removed_if_they_are_given(names, count, left):
    class Sum(torch.nn.Module):
        def forward(self, x, **kwargs):
            return x + sum(value.sum() for value in kwargs.values())

    observer = calls(Sum(), ((), {"x": ones(2), "y": ones(3), "z": ones(4)}))
    assert observer.remove_inputs(list(names)) == count
    assert list(observer.infer_arguments()) == ["x", *left]
    assert list(observer.infer_dynamic_shapes().get("kwargs", {})) == left
    assert list(observer.observation.calls[0].shapes()) == ["x", *(f"kwargs.{name}" for name in left)]


@pytest.mark.parametrize("names", [["args"], ["kwargs"], [1]])
def test_further_positions_and_names_cannot_be_removed(names):
    observer = calls(Total(), ((ones(2), ones(2)), {"y": ones(2)}))

    with pytest.raises(ValueError, match="Cannot remove variadic input"):
        observer.remove_inputs(names)


@pytest.mark.parametrize("name", ["w", 3, -1])
def test_removing_an_input_that_does_not_exist_removes_the_others_and_warns(name):
    observer = calls(Ignores(), ((ones(2), ones(3)), {}))

    with pytest.warns(RuntimeWarning, match=f"Unexpected keyword argument {name!r}.*no such input") as warned:
        assert observer.remove_inputs(["y", name]) == 1
    assert warned[0].filename == __file__
    assert observer.infer_dynamic_shapes() == ({},)


# Before anything was recorded


@pytest.mark.parametrize(
    "ask",
    [
        lambda observer: observer.infer_dynamic_shapes(),
        lambda observer: observer.infer_arguments(),
        lambda observer: observer.infer_arguments(exportable=True),
        lambda observer: observer.check_discrepancies("model.onnx"),
        lambda observer: observer.plan(),
        lambda observer: observer.observation,
    ],
)
def test_nothing_can_be_inferred_before_a_call(ask):
    with pytest.raises(RuntimeError, match=r"No inputs were captured\.") as raised:
        ask(InputObserver())
    assert isinstance(raised.value, NoCallsError)


def test_nothing_can_be_removed_before_a_call():
    with pytest.raises(RuntimeError, match="No input was captured"):
        InputObserver().remove_inputs(["x"])
    observer = InputObserver()
    with observer(Add()):
        pass
    with pytest.raises(RuntimeError, match="No input was captured"):
        observer.remove_inputs(["x"])


def test_observer_without_calls_is_empty():
    observer = InputObserver()

    assert observer.is_empty()
    assert observer.num_obs() == 0
    assert observer.info is None


@pytest.mark.parametrize("key", ["w", 3, -1])
def test_value_if_missing_for_an_input_that_does_not_exist_is_refused_at_the_call(key):
    with pytest.raises(ValueError, match="Unexpected keyword argument"):
        InputObserver(value_if_missing={key: ones(1)})(Ignores()).__enter__()


@pytest.mark.parametrize("key", [1.5, None, True, ("y",)])
def test_value_if_missing_for_no_name_and_no_position_is_refused(key):
    with pytest.raises(TypeError, match="Unexpected type"):
        InputObserver(value_if_missing={key: ones(1)})(Ignores()).__enter__()


def test_method_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="does not have a method 'other'"):
        InputObserver()(Add(), method_name="other").__enter__()
