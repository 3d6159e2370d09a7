"""First captures inside torch.compile and torch.export, and captures around compiled models."""

import warnings

import pytest
import torch
from torch import nn

from exportkit import capture
from exportkit.errors import CaptureError, InvalidRequestError
from exportkit.module_outputs.context import with_captured
from tests.module_outputs.models import InPlace, Layer, Stack, assert_same, states_of, traces


@pytest.fixture(autouse=True)
def _compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def hook_tables(model):
    return [vars(module)[name] for module in model.modules() for name in sorted(vars(module)) if "hooks" in name]


def same_objects(a, b):
    return len(a) == len(b) and all(one is other for one, other in zip(a, b, strict=True))


def test_the_first_capture_may_be_inside_a_compiled_function():
    model, x = Stack(), torch.randn(2, 4)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    before, tables = traces(model), hook_tables(model)
    for _ in range(3):
        assert_same(compiled(x, output_hidden_states=True).hidden_states, states_of(model, x))
    assert torch.equal(compiled(x), states_of(model, x)[-1])
    assert traces(model) == before
    assert same_objects(hook_tables(model), tables)


def test_a_compiled_capture_keeps_hooks_of_others_and_sees_new_ones():
    model, x = Stack(), torch.randn(2, 4)
    model.layers[1].register_forward_hook(lambda _module, _args, output: output * 2)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_same(compiled(x, output_hidden_states=True).hidden_states, states_of(model, x))
    handle = model.layers[0].register_forward_hook(lambda _module, _args, output: output + 1)
    assert_same(compiled(x, output_hidden_states=True).hidden_states, states_of(model, x))
    handle.remove()
    assert_same(compiled(x, output_hidden_states=True).hidden_states, states_of(model, x))


def test_in_place_layers_are_captured_as_they_were_in_a_compiled_function():
    model = Stack(InPlace(), InPlace())
    model._can_record_outputs = {"hidden_states": InPlace}
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    states = compiled(torch.zeros(1), output_hidden_states=True).hidden_states
    assert [state.item() for state in states] == [0, 1, 2]


def test_a_model_compiled_inside_a_capture_is_captured_at_every_call():
    model = Stack()
    compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=True)
    inputs = [torch.randn(rows, 4) for rows in range(2, 14)]
    expected = [states_of(model, x) for x in inputs]
    with capture(model, {"hidden_states": Layer, "linear": nn.Linear}) as captured:
        for x, states in zip(inputs, expected, strict=True):
            compiled(x)
            assert_same(captured["hidden_states"], states)
            assert len(captured["linear"]) == 3
    compiled(torch.randn(5, 4))
    assert len(captured["hidden_states"][0]) == 13
    assert len(captured.calls) == 1


def test_layers_that_are_compiled_one_by_one_are_captured():
    model, x = Stack(*(Layer() for _ in range(12))), torch.randn(2, 4)
    expected = states_of(model, x)
    for layer in model.layers:
        layer.compile(backend="eager")
    with capture(model, {"hidden_states": Layer, "linear": nn.Linear}) as captured:
        for _ in range(3):
            model(x)
    assert len(captured.calls) == 3
    for call in captured.calls:
        assert_same(call["hidden_states"], expected)
        assert len(call["linear"]) == 12


def test_a_model_compiled_before_the_capture_is_an_error_and_not_an_empty_tuple():
    model, x = Stack(), torch.randn(2, 4)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    compiled(x)
    with capture(model, {"hidden_states": Layer}) as captured:
        compiled(x)
    with pytest.raises(CaptureError, match=r"torch\.compiler\.reset"):
        captured["hidden_states"]


class Capturing(nn.Module):
    def __init__(self, model, specs):
        super().__init__()
        self.model = model
        self.run = with_captured(model, specs)

    def forward(self, x):
        return self.run(x)


def test_values_and_result_can_be_had_from_one_function():
    model, x = Stack(), torch.randn(2, 4)
    result, values = with_captured(model, {"hidden_states": Layer, "linear": "linear"})(x)
    assert torch.equal(result, model(x))
    assert_same(values["hidden_states"], states_of(model, x))
    assert len(values["linear"]) == 3
    with pytest.raises(InvalidRequestError, match="No module matches"):
        with_captured(model, {"x": nn.Conv1d})


@pytest.mark.parametrize("strict", [False, True])
def test_values_become_outputs_of_an_exported_program(strict):
    model, x = Stack(), torch.randn(3, 4)
    before, tables = traces(model), hook_tables(model)
    rows = torch.export.Dim.DYNAMIC
    specs = {"hidden_states": Layer, "linear": nn.Linear}
    program = torch.export.export(Capturing(model, specs), (x,), dynamic_shapes=({0: rows},), strict=strict)
    for count in (1, 2, 7):
        x = torch.randn(count, 4)
        result, values = program.module()(x)
        torch.testing.assert_close(result, model(x))
        assert len(values["linear"]) == 3
        for got, want in zip(values["hidden_states"], states_of(model, x), strict=True):
            torch.testing.assert_close(got, want)
    assert traces(model) == before
    assert same_objects(hook_tables(model), tables)


@pytest.mark.parametrize("strict", [False, True])
def test_a_decorated_model_is_exported_with_what_it_is_asked_for(strict):
    model, x = Stack(), torch.randn(3, 4)
    program = torch.export.export(model, (x,), {"output_hidden_states": True}, strict=strict)
    states = program.module()(x, output_hidden_states=True).hidden_states
    assert_same(states, states_of(model, x))


@pytest.mark.parametrize("strict", [False, True])
def test_in_place_layers_are_exported_as_they_were(strict):
    class Copying(Stack):
        def run(self, x):
            return super().run(x.clone())

    model = Capturing(Copying(InPlace(), InPlace()), {"hidden_states": InPlace})
    program = torch.export.export(model, (torch.zeros(2),), strict=strict)
    states = program.module()(torch.zeros(2))[1]["hidden_states"]
    assert [state[0].item() for state in states] == [0, 1, 2]


def test_layers_that_a_model_calls_under_torch_func_are_captured():
    class Mapped(Stack):
        def run(self, x):
            return torch.func.vmap(super().run)(x)

    model, x = Mapped(), torch.randn(2, 4)
    before = traces(model)
    with warnings.catch_warnings(action="error"), capture(model, {"layers": Layer}) as captured:
        result = model(x)
    assert len(captured["layers"]) == 3
    torch.testing.assert_close(result, Stack.run(model, x))
    assert traces(model) == before
