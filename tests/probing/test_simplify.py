"""Calls in the form that a graph can take: lists joined, unread tensors and outputs that are inputs left out."""

import pytest
import torch

import exportkit
from exportkit.probing.simplify import as_simplified, simplify_calls, value_at
from tests.models import Captioner

TOKENS = torch.tensor([[1, 7, 7, 3, 4], [1, 7, 7, 5, 6]])


def features(*counts):
    return {"pooled": [torch.randn(count, 4) for count in counts], "raw": torch.randn(2, 3)}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Captioner().eval()


@pytest.fixture
def observation(model):
    observer = exportkit.InputObserver()
    with observer(model), torch.no_grad():
        model(TOKENS, features=features(2, 2))
        model(TOKENS[:, :1])
    return observer.observation


def test_a_list_that_the_model_reads_as_one_is_one_tensor(model, observation):
    simple = simplify_calls(observation, model, "forward")
    assert simple.joined == ("features.pooled",)
    assert {p: tuple(t.shape) for p, t in simple.observation.calls[0].tensors().items()} == {
        "tokens": (2, 5), "features.pooled[0]": (4, 4)
    }  # fmt: skip


def test_a_list_of_one_is_recognised_by_dividing_it(model):
    observer = exportkit.InputObserver()
    with observer(model), torch.no_grad():
        model(TOKENS[:1], features=features(2))
        model(TOKENS[:1, :1])
    assert simplify_calls(observer.observation, model, "forward").joined == ("features.pooled",)


def test_what_is_never_read_is_no_input(model, observation):
    assert simplify_calls(observation, model, "forward").unused == ("features.raw",)


def test_outputs_of_simplified_calls_are_those_of_their_inputs(model, observation):
    call = simplify_calls(observation, model, "forward").observation.calls[0]
    assert set(call.outputs.tensors()) == {"logits", "features.pooled[0]"}
    assert torch.equal(call.outputs.tensors()["logits"], observation.calls[0].outputs.tensors()["logits"])


def test_a_structure_that_is_handed_back_is_passed_through(model, observation):
    assert simplify_calls(observation, model, "forward").passed_through == {"features": "features"}


def test_a_list_whose_order_matters_is_left_as_it_is():
    class Levels(torch.nn.Module):
        def forward(self, x, levels=None):
            return x if levels is None else x + levels[0].sum() - 2 * levels[-1].sum()

    observer, model = exportkit.InputObserver(), Levels()
    with observer(model):
        model(torch.ones(3), levels=[torch.ones(2, 3), torch.ones(2, 3)])
        model(torch.ones(3))
    assert simplify_calls(observer.observation, model, "forward").joined == ()


def test_a_list_of_tensors_of_several_shapes_is_left_as_it_is():
    class Sizes(torch.nn.Module):
        def forward(self, images):
            return torch.stack([image.mean() for image in images])

    observer, model = exportkit.InputObserver(), Sizes()
    with observer(model):
        model([torch.ones(3, 4, 4), torch.ones(3, 5, 2)])
        model([torch.ones(3, 4, 4)])
    assert simplify_calls(observer.observation, model, "forward").joined == ()


def test_arguments_that_every_call_gives_alike_are_not_looked_at():
    class Ignoring(torch.nn.Module):
        def forward(self, x, data):
            return x + data["used"]

    observer, model = exportkit.InputObserver(), Ignoring()
    with observer(model):
        model(torch.ones(2), {"used": torch.ones(2), "other": torch.ones(2)})
    simple = simplify_calls(observer.observation, model, "forward")
    assert simple.observation is observer.observation
    assert not simple.unused


def test_optional_inputs_are_used_even_if_the_model_has_a_default_for_them():
    class Positions(torch.nn.Module):
        def forward(self, x, extra=None):
            positions = torch.arange(len(x)) if extra is None else extra["positions"]
            return x + positions

    observer, model = exportkit.InputObserver(), Positions()
    with observer(model):
        model(torch.ones(3), extra={"positions": torch.arange(3)})
        model(torch.ones(3))
    assert simplify_calls(observer.observation, model, "forward").unused == ()


def test_as_simplified_joins_lists_of_any_length():
    given = {"x": torch.ones(1), "f[0]": torch.ones(2, 3), "f[1]": torch.zeros(1, 3), "h[4]": torch.ones(9)}
    simple = as_simplified(given, joined=("f",), unused=("h[1]",))
    assert {path: tuple(tensor.shape) for path, tensor in simple.items()} == {"x": (1,), "f[0]": (3, 3)}


def test_value_at_follows_names_keys_and_numbers():
    arguments = {"data": {"items": [1, {"x": 2}]}, "plain": 3}
    assert value_at(arguments, "data.items[1].x") == 2
    assert value_at(arguments, "plain") == 3
    assert value_at(arguments, "data.items[7]") is None
    assert value_at(arguments, "other.x") is None
