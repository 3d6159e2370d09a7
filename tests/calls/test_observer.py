"""What an observer records, and that the model behaves as if nobody watched."""

import time
import warnings

import pytest
import torch

from exportkit import InputObserver
from exportkit.errors import InvalidRequestError, InvalidTypeError, NoCallsError, UnknownInputError, UnknownMethodError
from tests.models import (
    Add,
    AddsInPlace,
    Classifier,
    OptionalAdd,
    Scale,
    Total,
    random_cache,
    random_ids,
    tiny_gpt2,
    tiny_llama,
    tiny_t5,
)


def _shapes(observer, name="x"):
    return [tuple(call.tensors()[name].shape) for call in observer.observation.calls]


def _observe_add(observer, *rows, **options):
    model = Add()
    with observer(model, **options):
        for n in rows:
            model(torch.ones(n), torch.ones(n))


def test_inputs_outputs_and_latency_are_recorded():
    model, observer = Add(), InputObserver()
    x, y = torch.randn(2, 3), torch.randn(1, 3)
    with observer(model):
        result = model(x, y=y)
    (call,) = observer.observation.calls

    assert (call.index, call.named) == (0, {"y"})
    assert torch.equal(call.tensors()["x"], x)
    assert torch.equal(call.tensors()["y"], y)
    assert torch.equal(call.outputs.leaves[0], result)
    assert call.latency > 0
    assert (observer.observation.model_name, observer.observation.method_name) == ("Add", "forward")


def test_at_most_three_calls_are_stored_by_default():
    observer = InputObserver()
    _observe_add(observer, 1, 2, 3, 4, 5)

    assert _shapes(observer) == [(1,), (2,), (3,)]


@pytest.mark.parametrize(("budget", "stored"), [(0, 0), (1, 1), (4, 4), (9, 5)])
def test_number_of_stored_calls_is_a_budget(budget, stored):
    observer = InputObserver()
    _observe_add(observer, 1, 2, 3, 4, 5, store_n_calls=budget)

    assert observer.num_obs() == stored


def test_entering_again_adds_to_what_was_recorded():
    observer = InputObserver()
    _observe_add(observer, 1, 2, 3, store_n_calls=2)
    _observe_add(observer, 4, 5, 6, store_n_calls=2)

    assert _shapes(observer) == [(1,), (2,), (4,), (5,)]
    assert [call.index for call in observer.observation.calls] == [0, 1, 2, 3]


def test_calls_beyond_the_budget_return_what_they_always_do():
    model, observer = Add(), InputObserver()
    with observer(model, store_n_calls=1):
        results = [model(torch.ones(1), torch.ones(1) * n).item() for n in range(3)]

    assert results == [1, 2, 3]


def test_another_method_can_be_observed():
    model, observer = Classifier(), InputObserver()
    with observer(model, method_name="classify"):
        model.classify(torch.ones(5, 6))
        model(torch.ones(7, 6))

    assert _shapes(observer) == [(5, 6)]
    assert observer.observation.calls[0].outputs.leaves[0].shape == (5,)
    assert observer.observation.method_name == "classify"


def test_calls_outside_the_block_are_not_recorded():
    model, observer = Add(), InputObserver()
    model(torch.ones(1), torch.ones(1))
    with observer(model):
        model(torch.ones(2), torch.ones(2))
    model(torch.ones(3), torch.ones(3))

    assert _shapes(observer) == [(2,)]


def test_calls_that_bypass_hooks_are_recorded():
    model, observer = Add(), InputObserver()
    with observer(model):
        model.forward(torch.ones(2), torch.ones(2))

    assert observer.num_obs() == 1


def test_runs_of_exportkit_itself_are_not_recorded():
    model, observer = Add(), InputObserver()
    with observer(model, store_n_calls=100):
        model(torch.ones(2, 3), torch.ones(2, 3))
        observer.infer_arguments(exportable=True)

    assert observer.num_obs() == 1


def test_tracing_inside_the_block_is_not_recorded():
    model, observer = Add(), InputObserver()
    with observer(model):
        program = torch.export.export(model, (torch.ones(2), torch.ones(2)))
    assert observer.num_obs() == 0
    assert program.module()(torch.ones(2), torch.ones(2)).tolist() == [2, 2]


def test_snapshots_do_not_change_when_the_inputs_do():
    model, observer = Add(), InputObserver()
    x, y = torch.ones(2), torch.ones(2)
    with observer(model):
        result = model(x, y)
    x.zero_()
    result.zero_()
    (call,) = observer.observation.calls

    assert call.tensors()["x"].tolist() == [1, 1]
    assert call.outputs.leaves[0].tolist() == [2, 2]


def test_input_that_the_model_changes_in_place_is_recorded_as_it_was():
    model, observer = AddsInPlace(), InputObserver()
    x = torch.zeros(2)
    with observer(model):
        result = model(x)
    (call,) = observer.observation.calls

    assert result is x
    assert call.tensors()["x"].tolist() == [0, 0]
    assert call.outputs.leaves[0].tolist() == [1, 1]


def test_cache_that_the_model_extends_is_recorded_as_it_was():
    model, observer = tiny_llama(), InputObserver()
    cache = random_cache(5, heads=2, head_size=4)
    with observer(model), torch.no_grad():
        model(random_ids(1, 3), past_key_values=cache)
    (call,) = observer.observation.calls

    assert cache.get_seq_length() == 8
    assert call.tensors()["past_key_values.layers[0].keys"].shape == (1, 2, 5, 4)
    assert call.outputs.tensors()["past_key_values.layers[0].keys"].shape == (1, 2, 8, 4)


def test_list_that_the_model_changes_is_recorded_as_it_was():
    class Pops(torch.nn.Module):
        def forward(self, tensors):
            return tensors.pop()

    model, observer = Pops(), InputObserver()
    with observer(model):
        model([torch.ones(1), torch.ones(2)])

    assert list(observer.observation.calls[0].tensors()) == ["tensors[0]", "tensors[1]"]


def test_gradients_flow_through_an_observed_call():
    model, observer = Classifier(), InputObserver()
    x = torch.ones(2, 6, requires_grad=True)
    with observer(model):
        output = model(x)
    output.sum().backward()

    assert output.requires_grad
    assert torch.equal(x.grad, model.linear.weight.sum(0).expand(2, 6))
    (call,) = observer.observation.calls
    assert not call.tensors()["x"].requires_grad
    assert not call.outputs.leaves[0].requires_grad


class _Modes(torch.nn.Module):
    def forward(self, x):
        self.seen = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        return x + 1


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_model_runs_in_the_mode_of_its_caller(mode):
    model, observer = _Modes(), InputObserver()
    with observer(model), mode():
        expected = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        x = torch.ones(2)
        output = model(x)
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == expected
    assert model.seen == expected
    assert output.is_inference() == expected[1]


def test_snapshots_made_in_inference_mode_are_ordinary_tensors():
    model, observer = Add(), InputObserver()
    with observer(model), torch.inference_mode():
        model(torch.ones(2), torch.ones(2))
    (call,) = observer.observation.calls

    assert not call.tensors()["x"].is_inference()
    assert not call.outputs.leaves[0].is_inference()
    call.tensors()["x"].add_(1)


def test_random_numbers_are_the_same_as_without_observing():
    model = torch.nn.Dropout(0.5)
    torch.manual_seed(1)
    expected = model(torch.ones(8)), torch.rand(3)
    torch.manual_seed(1)
    with InputObserver()(model):
        got = model(torch.ones(8)), torch.rand(3)

    assert torch.equal(expected[0], got[0])
    assert torch.equal(expected[1], got[1])


@pytest.mark.parametrize("family", [tiny_llama, tiny_gpt2, tiny_t5])
@pytest.mark.parametrize("sample", [False, True])
def test_generate_returns_the_same_tokens(family, sample):
    model, observer = family(), InputObserver()
    ids = random_ids(2, 5)

    def generate():
        torch.manual_seed(3)
        return model.generate(ids, max_new_tokens=6, do_sample=sample)

    expected = generate()
    with observer(model, store_n_calls=4):
        got = generate()

    assert torch.equal(expected, got)
    assert observer.num_obs() == 4
    assert torch.equal(expected, generate())


def test_generate_is_recorded_with_the_empty_cache_of_the_prefill():
    model, observer = tiny_llama(), InputObserver()
    with observer(model):
        model.generate(random_ids(1, 5), max_new_tokens=3, do_sample=False)
    lengths = [
        call.tensors()["past_key_values.layers[1].values"].shape[2] if call.has("past_key_values") else None
        for call in observer.observation.calls
    ]

    assert lengths == [None, 5, 6]


def test_constants_are_recorded_as_they_were_given():
    model, observer = Scale(), InputObserver()
    with observer(model):
        model(torch.ones(2), 3, negate=True)
    (call,) = observer.observation.calls

    assert call.constants() == {"factor": 3, "negate": True}
    assert list(call.tensors()) == ["x"]


def test_none_is_told_from_an_argument_that_was_not_given():
    model, observer = OptionalAdd(), InputObserver()
    with observer(model):
        model(torch.ones(2), None)
        model(torch.ones(2))
    first, second = observer.observation.calls

    assert first.constants() == {"y": None}
    assert second.constants() == {}
    assert not first.has("y")
    assert not second.has("y")


def test_value_if_missing_by_position_leaves_given_tensors_alone():
    model, observer = OptionalAdd(), InputObserver(value_if_missing={1: torch.empty(0, 3)})
    with observer(model):
        model(torch.ones(2, 3), torch.full((2, 3), 7.0))
        model(torch.ones(2, 3))
    first, second = observer.observation.calls

    assert torch.equal(first.tensors()["y"], torch.full((2, 3), 7.0))
    assert second.tensors()["y"].shape == (0, 3)


def test_value_if_missing_by_name_leaves_values_given_by_position_alone():
    model, observer = OptionalAdd(), InputObserver(value_if_missing={"y": torch.empty(0, 3)})
    with observer(model):
        model(torch.ones(2, 3), torch.full((2, 3), 7.0))
        model(torch.ones(2, 3), None)
    first, second = observer.observation.calls

    assert torch.equal(first.tensors()["y"], torch.full((2, 3), 7.0))
    assert second.tensors()["y"].shape == (0, 3)


def test_value_if_missing_never_reaches_the_model():
    model, observer = OptionalAdd(), InputObserver(value_if_missing={"y": torch.full((2,), 100.0)})
    with observer(model):
        assert model(torch.ones(2)).tolist() == [1, 1]

    assert observer.observation.calls[0].outputs.leaves[0].tolist() == [1, 1]


def test_model_that_is_no_module_is_refused():
    with (
        pytest.raises(InvalidTypeError, match=r"Only a torch\.nn\.Module can be observed"),
        InputObserver()(lambda x: x),
    ):
        pass


def test_scripted_module_is_refused():
    with pytest.raises(InvalidTypeError, match="cannot trace a scripted module"):
        InputObserver()(torch.jit.script(torch.nn.Linear(2, 2))).__enter__()


@pytest.mark.parametrize("name", ["backwards", "weight_of_all"])
def test_method_that_does_not_exist_is_named(name):
    with pytest.raises(UnknownMethodError, match=f"Classifier does not have a method '{name}'"):
        InputObserver()(Classifier(), method_name=name).__enter__()


def test_module_inside_the_model_is_no_method():
    with pytest.raises(InvalidRequestError, match="'linear' is not a method") as raised:
        InputObserver()(Classifier(), method_name="linear").__enter__()
    assert "with observer(model.linear):" in str(raised.value)


@pytest.mark.parametrize("name", ["__call__", "__init__"])
def test_method_that_python_looks_up_on_the_class_is_refused(name):
    with pytest.raises(InvalidRequestError) as raised, InputObserver()(Add(), method_name=name):
        pass
    assert str(raised.value) == (
        f"{name} cannot be observed: Python looks it up on the class, not on the model.\n"
        "  where: method_name\n"
        f"  got: '{name}'\n"
        "  hint: observe forward, which a call of the model runs: method_name='forward'."
    )


@pytest.mark.parametrize("options", [{"store_n_calls": -1}, {"store_n_calls": "3"}, {"max_bytes": 2.5}])
def test_number_to_keep_that_is_none_is_named(options):
    (name,) = options
    with pytest.raises(
        InvalidRequestError,
        match=rf"Not a number of calls or bytes.\n  where: {name}\n  expected: an integer, 0 or more",
    ):
        InputObserver()(Add(), **options).__enter__()


@pytest.mark.parametrize("parts", [5, True, "encoder", [5]])
def test_parts_that_are_no_list_of_paths_are_named(parts):
    with pytest.raises(InvalidTypeError, match=r"Parts must be given by their paths in the model"):
        InputObserver()(Add(), parts=parts).__enter__()


@pytest.mark.parametrize("make", [lambda: InputObserver(5), lambda: InputObserver()(Add(), method_name=5).__enter__()])
def test_options_of_a_wrong_type_are_named(make):
    with pytest.raises(InvalidTypeError):
        make()


def test_refused_request_leaves_the_model_alone():
    model, observer = OptionalAdd(), InputObserver(value_if_missing={"z": torch.ones(1)})
    with pytest.raises(UnknownInputError), observer(model):
        pass

    assert "forward" not in vars(model)
    assert observer.is_empty()


def test_second_method_with_other_inputs_is_refused():
    observer = InputObserver()
    _observe_add(observer, 1)
    with pytest.raises(InvalidRequestError, match="already recorded a different method") as raised, observer(Scale()):
        pass
    assert "inputs x, y" in str(raised.value)
    assert "Scale.forward with inputs x, factor, offset, negate" in str(raised.value)


def test_observing_says_nothing_when_all_went_well():
    with warnings.catch_warnings(action="error"):
        _observe_add(InputObserver(), 1, 2)


def test_observer_tells_how_much_it_has():
    observer = InputObserver()
    assert repr(observer) == "InputObserver(0 calls)"
    _observe_add(observer, 1, 2)
    assert repr(observer) == "InputObserver(2 calls)"


class _SlowAtFirst(torch.nn.Module):
    is_prepared = False

    def forward(self, x):
        if not self.is_prepared:
            time.sleep(0.02)
            self.is_prepared = True
        return x + 1


@pytest.mark.parametrize("kept", [10, 1])
@pytest.mark.parametrize("application", [False, True])
def test_the_first_call_is_timed_apart_from_the_others(kept, application):
    model, observer = _SlowAtFirst(), InputObserver()
    with observer({"slow": model} if application else model, store_n_calls=kept):
        model(torch.ones(2))
        assert observer.seconds == observer.first_seconds
        model(torch.ones(3))
        model(torch.ones(4))
    assert observer.seconds > observer.first_seconds > 0.02


def _compiled_in_place(model):
    model.compile(backend="eager")
    return model


@pytest.mark.parametrize("compiled", [_compiled_in_place, lambda model: torch.compile(model, backend="eager")])
def test_calls_that_pass_the_observer_inside_a_compiled_model_are_explained(compiled):
    model, observer = Total(), InputObserver()
    run = compiled(model)
    with observer(model):
        run(torch.ones(2))
    with pytest.raises(NoCallsError, match=r"torch\.compile has compiled pass an observer inside"):
        observer.infer_dynamic_shapes()


def test_module_that_torch_compile_returned_is_observed():
    model, observer = torch.compile(Total(), backend="eager"), InputObserver()
    with observer(model):
        model(torch.ones(2))
        model(torch.ones(3))
    assert [list(call.shapes().values()) for call in observer.observation.calls] == [[(2,)], [(3,)]]


def test_constants_of_calls_that_are_not_stored_keep_their_types():
    model, observer = Scale(), InputObserver()
    with observer(model, store_n_calls=1):
        for factor in (2, 3, 3.0, 1, True, 3):
            model(torch.ones(2), factor)

    seen = [(shapes.constants["factor"], shapes.count) for shapes in observer.observation.further]
    assert list(map(repr, seen)) == ["(3, 2)", "(3.0, 1)", "(1, 1)", "(True, 1)"]


class _Shadowing(torch.nn.Module):
    def forward(self, x, /, **options):
        return x * options.get("x", 1.0)


def test_name_of_a_positional_parameter_may_be_given_among_other_names():
    model, observer = _Shadowing(), InputObserver()
    with observer(model, store_n_calls=1):
        model(torch.ones(2), x=3.0)
        model(torch.ones(3), x=4.0)

    (call,), (further,) = observer.observation.calls, observer.observation.further
    assert call.tensors().keys() == {"x"}
    assert call.constants() == {"options.x": 3.0}
    assert further.constants == {"options.x": 4.0}


def test_inputs_of_any_name_can_be_removed_from_all_calls():
    model, observer = _Shadowing(), InputObserver()
    with observer(model, store_n_calls=1):
        for n in (2, 3):
            model(torch.ones(n), **{"a-b": torch.ones(4), "mask": torch.ones(5), "some-scale": n, "other": n})

    (further,) = observer.observation.further
    assert {**further.inputs} == {"x": (3,), "options['a-b']": (4,), "options.mask": (5,)}
    given = observer.observation.constants_of(further)
    assert given["options"].build() == {"some-scale": 3, "other": 3}
    observer.remove_inputs(["a-b", "mask", "some-scale"])
    (further,) = observer.observation.further
    assert ({**further.inputs}, {**further.constants}) == ({"x": (3,)}, {"options.other": 3})
