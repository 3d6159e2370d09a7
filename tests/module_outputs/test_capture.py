"""Capturing from any model inside a with block: the values, and that nothing stays."""

import asyncio
import contextlib
import copy
import gc
import pickle
import random
import re
import threading
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from exportkit import OutputRecorder, capture
from exportkit.errors import CaptureError, InvalidRequestError, InvalidTypeError
from exportkit.module_outputs import scope
from tests.module_outputs.models import (
    InPlace,
    KeywordOnly,
    Layer,
    Returning,
    Stack,
    States,
    assert_same,
    states_of,
    traces,
)


class Network(nn.Module):
    """A convolutional classifier in the manner of torchvision."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 8, 3, padding=1),
            nn.ReLU(),
        )
        self.classifier = nn.Linear(8, 5)

    def forward(self, x):
        return self.classifier(self.features(x).mean((2, 3)))


def by_hooks(model, modules, call):
    """What hooks put on by hand see."""
    seen = []
    handles = [module.register_forward_hook(lambda _m, _a, output: seen.append(output)) for module in modules]
    call()
    for handle in handles:
        handle.remove()
    return seen


def test_values_are_those_of_hooks_in_a_sequential():
    model, x = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), torch.randn(5, 4)
    expected = by_hooks(model, [model[0], model[2]], lambda: model(x))
    with capture(model, {"linear": nn.Linear}) as captured:
        model(x)
    assert_same(captured["linear"], expected)


def test_values_are_those_of_a_convolutional_network_before_its_activations_write_over_them():
    model, x = Network().eval(), torch.randn(2, 3, 8, 8)
    first = model.features[0](x)
    with capture(model, {"convolutions": nn.Conv2d, "features": "features"}) as captured:
        model(x)
    assert_same(captured["convolutions"][:1], [first])
    assert captured["convolutions"][0].min() < 0
    assert_same(captured["features"], [model.features(x)])


def test_hidden_states_begin_with_the_input_of_the_first_layer():
    model, x = Stack(), torch.randn(2, 4)
    with capture(model, {"hidden_states": Layer}) as captured:
        model(x)
    assert_same(captured["hidden_states"], states_of(model, x))


@pytest.mark.parametrize(
    "spec",
    [
        "linear",
        ".linear",
        "layers.1.linear",
        re.compile(r"layers\.\d+\.linear$"),
        nn.Linear,
        "Linear",
        OutputRecorder(nn.Linear),
        OutputRecorder(class_name="linear"),
        [OutputRecorder(nn.Linear, layer_name="layers.0"), OutputRecorder(nn.Linear, layer_name="layers.1")],
        (nn.Linear, nn.Conv1d),
    ],
)
def test_a_spec_is_a_class_a_path_an_expression_a_recorder_or_a_list(spec):
    model, x = Stack(), torch.randn(2, 4)
    expected = by_hooks(model, [layer.linear for layer in model.layers], lambda: model(x))
    with capture(model, {"linear": spec}) as captured:
        model(x)
    count = {"layers.1.linear": 1}.get(spec, 3) if isinstance(spec, str) else 2 if isinstance(spec, list) else 3
    assert_same(captured["linear"], expected[1:2] if count == 1 else expected[:count])


def test_specs_may_be_those_that_the_class_declares():
    model, x = Stack(), torch.randn(2, 4)
    with capture(model) as captured:
        model(x)
    assert_same(captured["hidden_states"], states_of(model, x))


def test_the_layer_name_tells_modules_of_one_class_apart():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.crossattention = Returning(lambda *o: o), Returning(lambda *o: o)

        def forward(self, hidden):
            return self.crossattention(self.attention(hidden)[0])[0]

    model, x = nn.Sequential(Block(), Block()), torch.randn(2, 4)
    specs = {
        "cross": OutputRecorder(Returning, index=1, layer_name="crossattention"),
        "self": OutputRecorder(Returning, index=1, layer_name="attention"),
    }
    with capture(model, specs) as captured:
        model(x)
    cross = by_hooks(model, [block.crossattention for block in model], lambda: model(x))
    assert_same(captured["cross"], [output[1] for output in cross])
    assert len(captured["self"]) == 2


@pytest.mark.parametrize(
    "container",
    [
        lambda *o: o,
        lambda *o: list(o),
        lambda hidden, mean: {"hidden": hidden, "mean": mean},
        States,
    ],
    ids=["tuple", "list", "dict", "dataclass"],
)
def test_the_index_selects_from_any_container(container):
    model, x = Returning(container), torch.randn(2, 4)
    hidden = Layer.forward(model, x)
    with capture(model, {"first": OutputRecorder(Returning), "second": Returning}) as captured:
        model(x)
    assert_same(captured["first"], [hidden])
    assert_same(captured["second"], [hidden.mean(-1)])


def test_the_index_may_be_a_name():
    model, x = Returning(lambda hidden, mean: {"hidden": hidden, "mean": mean}), torch.randn(2, 4)
    with capture(model, {"mean": OutputRecorder(Returning, index="mean")}) as captured:
        result = model(x)
    assert captured["mean"][0] is result["mean"]


def test_layers_called_with_keywords_only_have_an_input_too():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([KeywordOnly(), KeywordOnly()])

        def forward(self, x):
            for layer in self.layers:
                x = layer(scale=torch.tensor(2.0), hidden_states=x)
            return x

    model, x = Model(), torch.randn(2, 4)
    with capture(model, {"hidden_states": KeywordOnly}) as captured:
        result = model(x)
    assert captured["hidden_states"][0] is x
    assert captured["hidden_states"][2] is result


def test_layers_that_change_their_input_do_not_change_what_was_captured():
    model = Stack(InPlace(), InPlace(), InPlace())
    with capture(model, {"hidden_states": InPlace}) as captured:
        model(torch.zeros(2))
    assert [state.tolist() for state in captured["hidden_states"]] == [[0, 0], [1, 1], [2, 2], [3, 3]]


class OnData(nn.Module):
    def forward(self, hidden):
        hidden.data += 1
        return hidden


class OnView(nn.Module):
    def forward(self, hidden):
        hidden[:1] += 1
        return hidden


@pytest.mark.parametrize(
    ("cls", "make"),
    [(OnData, torch.zeros), (OnView, torch.zeros), (OnView, lambda n: torch.from_numpy(np.zeros(n, np.float32)))],
)
def test_the_same_for_changes_through_other_tensors(cls, make):
    model = Stack(cls(), cls())
    with capture(model, {"hidden_states": cls}) as captured:
        model(make(1))
    assert [state.item() for state in captured["hidden_states"]] == [0, 1, 2]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_same_without_gradients(mode):
    model = Stack(InPlace(), InPlace())
    with mode(), capture(model, {"hidden_states": InPlace}) as captured:
        model(torch.zeros(1))
    assert [state.item() for state in captured["hidden_states"]] == [0, 1, 2]


def test_values_are_the_tensors_themselves_so_that_gradients_reach_them():
    model, x = Stack(), torch.randn(2, 4)
    with capture(model, {"hidden_states": Layer}) as captured:
        result = model(x)
    states = captured["hidden_states"]
    (gradient,) = torch.autograd.grad(result.sum(), states[1])
    assert states[0] is x
    assert states[3] is result
    assert gradient.abs().sum() > 0


def test_gradients_flow_through_copies_as_well():
    weight = nn.Parameter(torch.ones(1))
    model = Stack(InPlace(), InPlace())
    with capture(model, {"hidden_states": InPlace}) as captured:
        model(weight * 2)
    (captured["hidden_states"][0] * 3).sum().backward()
    assert weight.grad.item() == 6


def test_a_module_with_two_parents_is_captured_once():
    model, x = Stack(), torch.randn(2, 4)
    model.again = nn.ModuleList(model.layers)
    with capture(model, {"hidden_states": Layer}) as captured:
        model(x)
    assert len(captured["hidden_states"]) == 4


def test_a_module_that_is_called_twice_is_captured_twice():
    layer = Layer()
    model, x = Stack(layer, layer), torch.randn(2, 4)
    with capture(model, {"hidden_states": Layer}) as captured:
        model(x)
    assert_same(captured["hidden_states"], states_of(model, x))


def test_a_model_that_calls_itself_is_one_call():
    class Countdown(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Layer()

        def forward(self, x):
            return self.layer(x) if len(x) == 1 else self.layer(x[:1]) + self(x[1:])

    model = Countdown()
    with capture(model, {"layer": Layer}) as captured:
        model(torch.randn(3, 4))
    assert len(captured.calls) == 1
    assert len(captured["layer"]) == 3


def test_a_layer_that_was_replaced_since_the_last_capture_is_captured():
    model, x = Stack(), torch.randn(2, 4)
    for _ in range(2):
        with capture(model, {"hidden_states": Layer}) as captured:
            model(x)
        assert_same(captured["hidden_states"], states_of(model, x))
        model.layers[1] = Layer()


def test_each_call_has_values_of_its_own():
    model = Stack()
    inputs = [torch.randn(n, 4) for n in (1, 2, 3)]
    with capture(model, {"hidden_states": Layer}) as captured:
        for x in inputs:
            model(x)
        assert len(captured.calls) == 3
    assert [len(call["hidden_states"][0]) for call in captured.calls] == [1, 2, 3]
    assert_same(captured["hidden_states"], states_of(model, inputs[-1]))


def test_a_call_that_fails_has_none():
    model = Stack()
    with capture(model, {"hidden_states": Layer}) as captured:
        model(torch.randn(2, 4))
        with pytest.raises(RuntimeError):
            model(torch.randn(2, 5))
        try:
            raise ValueError  # an exception that is being handled is not one of the call
        except ValueError:
            model(torch.randn(1, 4))
    assert [len(call["hidden_states"]) for call in captured.calls] == [4, 4]


def test_modules_may_be_called_by_themselves():
    model, x = Stack(), torch.randn(2, 4)
    with capture(model, {"hidden_states": Layer}) as captured:
        model.run(x)
    assert_same(captured["hidden_states"], states_of(model, x))


def test_modules_that_are_called_by_themselves_do_not_hide_calls():
    model, x = Stack(), torch.randn(2, 4)
    with capture(model, {"hidden_states": Layer}) as captured:
        model(x)
        model.layers[1](x)
    assert_same(captured["hidden_states"], states_of(model, x))
    assert [len(call["hidden_states"]) for call in captured.calls] == [2, 4]


def test_nested_captures_do_not_see_each_other():
    model, x = nn.Sequential(Stack(), Stack()), torch.randn(2, 4)
    with capture(model, {"hidden_states": Layer}) as outer:
        with capture(model[1], {"hidden_states": Layer, "linear": nn.Linear}) as inner:
            model(x)
        model(x[:1])
    assert len(outer.calls) == 2
    assert len(outer.calls[0]["hidden_states"]) == 7
    assert len(inner.calls) == 1
    assert_same(inner["hidden_states"], outer.calls[0]["hidden_states"][3:])
    assert len(inner["linear"]) == 3


def test_captures_can_be_left_in_any_order():
    model, x = Stack(), torch.randn(2, 4)
    before = traces(model)
    first, second = capture(model, {"hidden_states": Layer}), capture(model, {"linear": nn.Linear})
    a, b = first.__enter__(), second.__enter__()
    model(x)
    first.__exit__(None, None, None)
    model(x)
    second.__exit__(None, None, None)
    model(x)
    assert (len(a.calls), len(b.calls)) == (1, 2)
    assert traces(model) == before


def test_a_block_can_be_left_in_another_thread():
    model, x = Stack(), torch.randn(2, 4)
    before = traces(model)
    context = capture(model, {"hidden_states": Layer})
    captured = context.__enter__()
    model(x)
    thread = threading.Thread(target=context.__exit__, args=(None, None, None))
    thread.start()
    thread.join()
    assert traces(model) == before
    with capture(model, {"linear": nn.Linear}) as again:
        model(x)
    assert (len(captured.calls), len(again.calls)) == (1, 1)
    assert len(scope.frames()) == 0


def test_checkpointed_layers_are_captured_once_although_they_run_again():
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(Stack):
        def run(self, x):
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=self.reentrant)
            return x

    for reentrant in (False, True):
        model, x = Checkpointed(), torch.randn(2, 4, requires_grad=True)
        model.reentrant = reentrant
        with capture(model, {"hidden_states": Layer}) as captured:
            model(x).sum().backward()
        assert len(captured.calls) == 1
        assert_same(captured["hidden_states"], states_of(model, x))


def test_tasks_have_captures_of_their_own():
    model = Stack()

    async def request(size):
        with capture(model, {"hidden_states": Layer} if size % 2 else {"linear": nn.Linear}) as captured:
            for _ in range(5):
                await asyncio.sleep(random.random() / 1000)
                await asyncio.to_thread(model, torch.randn(size, 4))
        return captured

    async def requests():
        return await asyncio.gather(*(request(size) for size in range(1, 9)))

    for size, captured in enumerate(asyncio.run(requests()), 1):
        assert len(captured.calls) == 5
        assert all(len(value) == size for call in captured.calls for values in call.values() for value in values)


def test_nothing_stays_on_the_model():
    model, x = Stack(), torch.randn(2, 4)
    before = traces(model)
    with contextlib.suppress(ZeroDivisionError), capture(model, {"hidden_states": Layer, "root": Stack}) as captured:
        model(x)
        raise ZeroDivisionError
    assert len(captured["root"]) == 1
    assert traces(model) == before
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), model(x))
    assert torch.equal(copy.deepcopy(model)(x), model(x))


def test_a_thousand_blocks_with_random_exceptions_leave_nothing():
    model, x = Stack(), torch.randn(1, 4)
    before, dice = traces(model), random.Random(0)
    for _ in range(1000):
        try:
            with capture(model, {"hidden_states": Layer, "linear": "linear"}):
                model(x if dice.random() < 0.5 else torch.randn(1, 5))
                if dice.random() < 0.5:
                    raise KeyError
        except (KeyError, RuntimeError):
            pass
    assert traces(model) == before


def test_values_live_as_long_as_what_was_captured():
    model = Stack()
    with capture(model, {"linear": nn.Linear}) as captured:
        model(torch.randn(2, 4))
    value = weakref.ref(captured["linear"][0])
    del captured
    gc.collect()
    assert value() is None


def test_a_compiled_model_may_be_given():
    model = Stack()
    with capture(torch.compile(model, backend="eager"), {"hidden_states": Layer}) as captured:
        model(torch.ones(1, 4))
    assert len(captured["hidden_states"]) == 4


def test_what_matches_nothing_names_what_is_near_and_changes_nothing():
    model = Stack()
    before = traces(model)
    with pytest.raises(InvalidRequestError) as error, capture(model, {"hidden_states": Layer, "mlp": "lineer"}):
        pass
    assert str(error.value) == (
        "No module matches the spec for 'mlp'.\n"
        "  where: Stack\n"
        "  got: name 'lineer'\n"
        "  hint: nearest: linear, Layer, layers."
    )
    assert traces(model) == before


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (nn.Conv2d, "got: class Conv2d"),
        (re.compile(r"layer\.\d+$"), "got: the regular expression"),
        (OutputRecorder(Layer, layer_name="encoder"), "got: class Layer below 'encoder'"),
    ],
)
def test_every_kind_of_spec_is_named_when_it_matches_nothing(spec, text):
    with pytest.raises(InvalidRequestError) as error, capture(Stack(), {"x": spec}):
        pass
    assert text in str(error.value)
    assert "nearest: " in str(error.value)


def test_what_is_no_spec_is_refused():
    for specs in ({"x": 3}, {"x": int}, {"x": ""}, [Layer]):
        with pytest.raises(InvalidTypeError), capture(Stack(), specs):
            pass
    with pytest.raises(InvalidTypeError, match="Only modules"), capture(lambda x: x, {"x": Layer}):
        pass
    with pytest.raises(InvalidRequestError, match="selects no module"), capture(Stack(), {"x": OutputRecorder()}):
        pass
    with pytest.raises(InvalidRequestError, match="does not declare"), capture(nn.Linear(1, 1)):
        pass


def test_an_output_that_is_not_there_is_an_error_of_the_call():
    model = Stack(Returning(lambda *o: o))
    with capture(model, {"third": OutputRecorder(Returning, index=2)}), pytest.raises(CaptureError) as error:
        model(torch.ones(1, 4))
    assert str(error.value) == (
        "A module has no output 2 to capture as 'third'.\n"
        "  where: layers.0\n"
        "  got: tuple with 2: 0, 1\n"
        "  hint: say which one: OutputRecorder(Returning, index=0)."
    )


def test_outputs_that_are_all_none_are_an_error_and_never_an_empty_tuple():
    model = Stack(Returning(lambda hidden, _mean: (hidden, None)))
    model.run = lambda x: model.layers[0](x)[0]
    with capture(model, {"weights": Returning}), pytest.raises(CaptureError, match="return None there"):
        model(torch.ones(1, 4))


def test_asking_without_a_call_is_an_error():
    with capture(Stack(), {"hidden_states": Layer}) as captured:
        pass
    with pytest.raises(CaptureError, match="none of the modules was called"):
        captured["hidden_states"]
    with pytest.raises(KeyError):
        captured["other"]
    assert (list(captured), len(captured), captured.calls) == (["hidden_states"], 1, [])
    assert repr(captured) == "Captured(hidden_states; calls: 0)"
