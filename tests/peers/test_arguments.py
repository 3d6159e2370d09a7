"""`infer_arguments` returns a recorded call, or values of your own, completed with what other calls had."""

import pytest
import torch

from exportkit import InputObserver, make_dynamic_cache, register_flattening_functions, string_type
from exportkit.errors import InvalidTypeError
from tests.models import (
    Add,
    IdsDecoder,
    OptionalAdd,
    Scale,
    Total,
    random_cache,
    random_ids,
    tiny_llama,
    tiny_mistral,
    tiny_t5,
)
from tests.peers.test_dynamic_shapes import Ignores, calls, ones

D = torch.export.Dim.DYNAMIC


def text(value):
    return string_type(value, with_shape=True)


def _observed_optional():
    """Three calls, the last without y: (1, 7), (1, 8), nothing."""
    return calls(OptionalAdd(), ((ones(5, 1), ones(1, 7)), {}), ((ones(6, 1), ones(1, 8)), {}), ((ones(7, 1),), {}))


# Which call


def test_first_call_with_the_most_inputs_is_taken():
    observer = calls(OptionalAdd(), ((ones(1),), {}), ((ones(2), ones(2)), {}), ((ones(3), ones(3)), {}))

    assert text(observer.infer_arguments()) == "(T1s2,T1s2)"


def test_cache_without_layers_counts_as_an_input():
    prompt = {"input_ids": random_ids(1, 3), "past_key_values": make_dynamic_cache([])}
    token = {"input_ids": random_ids(1, 1), "past_key_values": random_cache(3)}

    inferred = calls(IdsDecoder(), ((), prompt), ((), token)).infer_arguments()

    assert inferred["input_ids"].shape == (1, 3)
    assert inferred["past_key_values"].get_seq_length() == 0


def test_call_can_be_chosen_by_its_number():
    observer = calls(Add(), *[((ones(n), ones(n)), {}) for n in (2, 3, 4)])

    assert [text(observer.infer_arguments(i)) for i in (0, 1, 2, -1)] == [
        "(T1s2,T1s2)",
        "(T1s3,T1s3)",
        "(T1s4,T1s4)",
        "(T1s4,T1s4)",
    ]


def test_values_are_those_that_were_recorded():
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    observer = calls(Add(), ((x, y), {}))

    inferred = observer.infer_arguments()
    assert torch.equal(inferred[0], x)
    assert torch.equal(inferred[1], y)


@pytest.mark.parametrize("number", [3, -4, 100])
def test_call_that_was_not_recorded_is_refused(number):
    with pytest.raises(ValueError, match=f"no recorded call {number}") as raised:
        _observed_optional().infer_arguments(number)
    assert "expected: 0 to 2" in str(raised.value)


@pytest.mark.parametrize("value", ["x", 1.5, [1], True, {1}])
def test_anything_else_than_a_call_is_refused(value):
    with pytest.raises(ValueError, match=f"Unexpected type {type(value).__name__}"):
        _observed_optional().infer_arguments(value)


# What a call lacks


def test_missing_tensor_is_empty_along_its_last_dynamic_axis():
    assert text(_observed_optional().infer_arguments(2)) == "(T1s7x1,T1s1x0)"


def test_missing_tensor_of_one_shape_is_zeros():
    observer = calls(OptionalAdd(), ((ones(2, 3), ones(2, 3)), {}), ((ones(4, 3),), {}))
    _, y = observer.infer_arguments(1)

    assert torch.equal(y, torch.zeros(2, 3))


def test_missing_tensor_keeps_its_element_type():
    mask = torch.ones(2, 3, dtype=torch.bool)
    observer = calls(Ignores(), ((ones(2), mask), {}), ((ones(2), mask[:, :2]), {}), ((ones(2),), {}))

    assert text(observer.infer_arguments(2)) == "(T1s2,T9s2x0)"


def test_missing_cache_is_a_cache_of_length_zero():
    model, observer = tiny_llama(), InputObserver()
    with observer(model):
        model.generate(random_ids(1, 5), max_new_tokens=3, do_sample=False)
    cache = observer.infer_arguments(0)["past_key_values"]

    assert cache.get_seq_length() == 0
    assert [tuple(layer.keys.shape) for layer in cache.layers] == [(1, 2, 0, 4)] * 2


def test_missing_cache_of_one_length_is_empty_all_the_same():
    every = ((random_ids(1, 2),), {"past_key_values": random_cache(4)}), ((random_ids(1, 3),), {})
    observer = calls(IdsDecoder(), *every)

    assert observer.infer_arguments(1)["past_key_values"].get_seq_length() == 0


def test_model_gives_the_recorded_result_for_the_completed_prefill():
    model, observer = tiny_llama(), InputObserver()
    with observer(model):
        model.generate(random_ids(1, 5), max_new_tokens=3, do_sample=False)
    with torch.no_grad():
        logits = model(**observer.infer_arguments(0)).logits

    torch.testing.assert_close(logits, observer.observation.calls[0].outputs.tensors()["logits"])


def test_missing_part_of_a_nested_value_is_filled_in():
    observer = calls(
        Ignores(), (({"a": ones(2), "b": ones(3)},), {}), (({"a": ones(4)},), {}), (({"a": ones(4), "b": ones(5)},), {})
    )

    assert text(observer.infer_arguments(1)) == "(dict(a:T1s4,b:T1s0))"


def test_value_if_missing_is_the_completion():
    every = ((ones(2, 3), ones(2, 3)), {}), ((ones(4, 3),), {})
    observer = calls(OptionalAdd(), *every, value_if_missing={"y": torch.full((1, 3), 7.0)})

    assert observer.infer_arguments(1)[1].tolist() == [[7, 7, 7]]


def test_completed_arguments_have_the_leaves_of_the_dynamic_shapes():
    model, observer = tiny_t5(), InputObserver()
    with observer(model):
        model.generate(random_ids(1, 5), max_new_tokens=3, do_sample=False)
    shapes = observer.infer_dynamic_shapes(set_batch_dimension_for=True)

    with register_flattening_functions():
        for number in range(3):
            arguments = observer.infer_arguments(number)
            assert list(arguments) == list(shapes)
            for name, spec in shapes.items():
                if isinstance(spec, list):
                    assert len(torch.utils._pytree.tree_leaves(arguments[name])) == len(spec)


# Values of your own


def test_positional_values_are_completed():
    assert text(_observed_optional().infer_arguments((ones(9, 1),))) == "(T1s9x1,T1s1x0)"


def test_named_values_are_completed():
    assert text(_observed_optional().infer_arguments({"y": ones(1, 9), "x": ones(2, 1)})) == "(T1s2x1,T1s1x9)"


def test_given_values_are_used_themselves():
    x, y = ones(2, 1), ones(1, 9)
    inferred = _observed_optional().infer_arguments((x, y))

    assert inferred[0] is x
    assert inferred[1] is y


def test_given_cache_is_used():
    every = [((random_ids(1, 2),), {"past_key_values": random_cache(n)}) for n in (3, 4)]
    cache = random_cache(9)
    inferred = calls(IdsDecoder(), *every).infer_arguments({"input_ids": random_ids(1, 2), "past_key_values": cache})

    assert inferred["past_key_values"].layers[1].values is cache.layers[1].values


def test_given_empty_cache_is_completed():
    every = [((random_ids(1, 2),), {"past_key_values": random_cache(n)}) for n in (3, 4)]
    fresh = make_dynamic_cache([])
    inferred = calls(IdsDecoder(), *every).infer_arguments({"input_ids": random_ids(1, 2), "past_key_values": fresh})

    assert [tuple(layer.keys.shape) for layer in inferred["past_key_values"].layers] == [(1, 4, 0, 32)] * 2


def test_constants_are_completed_with_those_recorded():
    observer = calls(Scale(), ((), {"x": ones(2), "factor": 3, "negate": True}))

    inferred = observer.infer_arguments({"x": ones(5)})
    assert text(inferred["x"]) == "T1s5"
    assert (inferred["factor"], inferred["negate"]) == (3, True)


# In which form


def test_arguments_by_position_are_a_tuple():
    assert text(calls(Add(), ((ones(2), ones(3)[:2]), {})).infer_arguments()) == "(T1s2,T1s2)"


def test_arguments_by_name_are_a_dict_in_signature_order():
    inferred = calls(Add(), ((), {"y": ones(2), "x": ones(2)})).infer_arguments()

    assert list(inferred) == ["x", "y"]


def test_arguments_by_position_and_name_are_a_dict():
    observer = calls(Add(), ((ones(2),), {"y": ones(2)}), ((ones(3), ones(3)), {}))

    assert text(observer.infer_arguments(1)) == "dict(x:T1s3,y:T1s3)"


def test_further_positions_alone_are_a_tuple():
    assert text(calls(Total(), ((ones(1), ones(2), ones(3)), {})).infer_arguments()) == "(T1s1,T1s2,T1s3)"


def test_further_names_are_among_the_named():
    observer = calls(Total(), ((ones(1),), {"y": ones(2)}))

    assert text(observer.infer_arguments()) == "dict(x:T1s1,y:T1s2)"


def test_further_positions_with_names_are_neither_tuple_nor_dict():
    observer = calls(Total(), ((ones(1), ones(2)), {"y": ones(3)}))

    with pytest.raises(RuntimeError, match="mixed with named inputs") as raised:
        observer.infer_arguments()
    assert "infer_arguments(as_args_kwargs=True)" in str(raised.value)
    assert text(observer.infer_arguments(as_args_kwargs=True)) == "((T1s1,T1s2),dict(y:T1s3))"


def test_args_and_kwargs_can_be_had_in_any_case():
    assert text(_observed_optional().infer_arguments(as_args_kwargs=True)) == "((T1s5x1,T1s1x7),dict())"
    named = calls(Add(), ((), {"x": ones(2), "y": ones(2)}))
    assert text(named.infer_arguments(as_args_kwargs=True)) == "((),dict(x:T1s2,y:T1s2))"


def test_flat_arguments_are_the_list_of_tensors():
    assert text(_observed_optional().infer_arguments(2, flat=True)) == "#2[T1s7x1,T1s1x0]"
    every = [((random_ids(1, 2),), {"past_key_values": random_cache(n, layers=1)}) for n in (3, 4)]
    assert text(calls(IdsDecoder(), *every).infer_arguments(flat=True)) == "#3[T7s1x2,T1s1x4x3x32,T1s1x4x3x32]"


def test_constants_stay_where_they_were_given():
    observer = calls(Scale(), ((ones(2), 3), {}))
    assert observer.infer_arguments()[1] == 3
    observer = calls(Ignores(), (([ones(2), None, 4],), {"y": "text"}))
    inferred = observer.infer_arguments()
    assert inferred["x"][1:] == [None, 4]
    assert inferred["y"] == "text"


def test_arguments_call_the_model():
    for every in (((ones(2), 3), {}), ((ones(2),), {"factor": 3}), ((), {"negate": True, "factor": 3, "x": ones(2)})):
        args, kwargs = calls(Scale(), every).infer_arguments(as_args_kwargs=True)
        assert Scale()(*args, **kwargs).abs().tolist() == [3, 3]


# For an export


def test_exportable_sizes_are_distinct_and_greater_than_one():
    observer = calls(Add(), *[((ones(1, n), ones(1, n)), {}) for n in (1, 2)])
    x, y = observer.infer_arguments(exportable=True)

    assert min(x.shape) > 1
    assert x.shape[0] != x.shape[1]
    torch.export.export(Add(), (x, y), dynamic_shapes=observer.infer_dynamic_shapes(set_batch_dimension_for=True))


def test_exportable_arguments_have_the_form_of_recorded_ones():
    observer = calls(Scale(), ((ones(1, 4),), {"factor": 3}), ((ones(1, 5),), {"factor": 3}))

    assert list(observer.infer_arguments(exportable=True)) == list(observer.infer_arguments())
    args, kwargs = observer.infer_arguments(exportable=True, as_args_kwargs=True)
    assert (args, kwargs["factor"]) == ((), 3)
    assert text(observer.infer_arguments(exportable=True, flat=True)).startswith("#1[T1s")


def test_exportable_arguments_are_made_of_all_calls():
    with pytest.raises(ValueError, match="built from all calls together"):
        _observed_optional().infer_arguments(1, exportable=True)


def test_values_for_inputs_that_do_not_exist_are_an_error():
    observer = calls(Add(), ((ones(2, 3), ones(2, 3)), {}))
    with pytest.raises(ValueError, match="no such input"):
        observer.infer_arguments({"w": torch.ones(2, 3)})
    with pytest.raises(ValueError, match="More values were given"):
        observer.infer_arguments((torch.ones(2, 3),) * 3)


@pytest.mark.parametrize("build", [tiny_t5, tiny_mistral])
def test_a_completed_prompt_gives_what_the_prompt_gave(build):
    model, observer = build(), InputObserver()
    ids = torch.randint(3, 60, (1, 9))
    with observer(model):
        model.generate(ids, max_new_tokens=3, do_sample=False)
    with torch.no_grad():
        again = model(**observer.infer_arguments(0), return_dict=True)
    torch.testing.assert_close(again.logits, observer.observation.calls[0].outputs.tensors()["logits"])


@pytest.mark.parametrize("size", [3, 2**17])
def test_writing_to_inferred_arguments_leaves_the_recording_alone(size):
    observer = calls(Ignores(), ((ones(size),), {}), ((ones(size),), {}))
    (first,) = observer.infer_arguments()
    first.zero_()

    assert observer.infer_arguments()[0].eq(1).all()
    assert observer.observation.calls[0].tensors().popitem()[1].eq(1).all()


# Python values in **kwargs


class Caught(torch.nn.Module):
    """Multiplies by a number that is given by name, and that the signature does not mention."""

    def forward(self, x, **kwargs):
        return x * kwargs.get("factor", 1)


@pytest.mark.parametrize("exportable", [False, True])
def test_number_in_variadic_keywords_is_among_the_arguments(exportable):
    observer = calls(Caught(), ((ones(2),), {"factor": 3}), ((ones(3),), {"factor": 3}))
    args, kwargs = observer.infer_arguments(as_args_kwargs=True, exportable=exportable)

    assert Caught()(*args, **kwargs)[0] == 3
    assert observer.infer_dynamic_shapes() == {"x": {0: D}, "kwargs": {"factor": None}}


def test_number_in_variadic_keywords_is_not_lost_in_silence_by_torch_export():
    observer = calls(Caught(), ((ones(2),), {"factor": 3}), ((ones(3),), {"factor": 3}))
    args, kwargs = observer.infer_arguments(as_args_kwargs=True)

    with pytest.raises(Exception, match="tree_name"):
        torch.export.export(Caught(), args, kwargs, dynamic_shapes=observer.infer_dynamic_shapes())


def test_flags_in_variadic_keywords_are_left_out():
    observer = calls(Caught(), ((ones(2),), {"return_dict": True}), ((ones(3),), {"return_dict": True}))

    assert text(observer.infer_arguments()) == "dict(x:T1s2)"
    assert observer.infer_dynamic_shapes() == {"x": {0: D}}


def test_flags_in_variadic_keywords_that_matter_are_not_left_out_silently():
    class Negated(torch.nn.Module):
        def forward(self, x, **kwargs):
            return -x if kwargs.get("negate") else x

    model, observer = Negated(), InputObserver()
    with observer(model):
        model(ones(2), negate=True, return_dict=False)
    with pytest.warns(RuntimeWarning, match="negate=True, return_dict=False is left out"):
        assert text(observer.infer_arguments()) == "dict(x:T1s2)"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda o: o.infer_dynamic_shapes(set_batch_dimension_for=5), "set_batch_dimension_for names inputs"),
        (lambda o: o.infer_dynamic_shapes(set_batch_dimension_for="x"), "set_batch_dimension_for names inputs"),
        (lambda o: o.infer_dynamic_shapes(dim_names=5), "dim_names names axes"),
        (lambda o: o.infer_dynamic_shapes(dim_names={"x": "rows"}), "dim_names names axes"),
        (lambda o: o.remove_inputs(5), "The inputs to remove must be a list"),
        (lambda o: o.remove_inputs("x"), "The inputs to remove must be a list"),
    ],
)
def test_wrong_types_are_named(call, message):
    observer = calls(OptionalAdd(), ((ones(2),), {}))

    with pytest.raises(InvalidTypeError, match=message):
        call(observer)


def test_arrays_of_numpy_among_the_arguments_are_constants():
    import numpy as np

    observer = calls(Caught(), ((ones(2),), {"factor": np.ones(2)}), ((ones(2),), {"factor": np.ones(2)}))

    assert observer.infer_arguments()["factor"].tolist() == [1, 1]
    assert "kwargs.factor=array([1., 1.]) is baked into the graph." in str(observer.plan())
