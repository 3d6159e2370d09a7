"""Recorded calls as values: what they hold, and what is asked of them."""

import dataclasses

import pytest
import torch

from tests.models import IdsDecoder, OptionalAdd, Total, random_cache, random_ids
from tests.peers.test_dynamic_shapes import Ignores, calls, ones


def test_tensors_and_constants_have_full_paths():
    every = ((random_ids(1, 2), None), {"past_key_values": random_cache(3, layers=1)})
    (call,) = calls(IdsDecoder(), every).observation.calls

    assert list(call.tensors()) == [
        "input_ids",
        "past_key_values.layers[0].keys",
        "past_key_values.layers[0].values",
    ]
    assert call.constants() == {"attention_mask": None}


def test_arguments_that_are_caught_have_paths_under_their_parameter():
    (call,) = calls(Total(), ((ones(1), ones(2)), {"y": ones(3)})).observation.calls

    assert list(call.tensors()) == ["x", "args[0]", "kwargs.y"]


@pytest.mark.parametrize(("value", "there"), [(ones(1), True), (0, True), ([], False), (None, False), ([None], False)])
def test_argument_without_a_leaf_is_not_there(value, there):
    (call,) = calls(Ignores(), ((ones(1), value), {})).observation.calls

    assert call.has("y") is there
    assert not call.has("z")


def test_values_are_built_anew_around_the_same_tensors():
    (call,) = calls(Ignores(), (([ones(1)],), {})).observation.calls
    first, second = call.values(), call.values()

    assert first["x"] is not second["x"]
    assert first["x"][0] is second["x"][0]


def test_paths_of_all_calls_come_in_signature_order():
    every = ((), {"z": ones(1), "y": {"b": ones(1)}}), ((), {"x": ones(1), "y": {"a": ones(1), "b": ones(1)}})
    observation = calls(_IgnoresAll(), *every).observation

    assert observation.tensor_paths() == ["x", "y.b", "y.a", "z"]


class _IgnoresAll(torch.nn.Module):
    def forward(self, x=None, y=None, z=None):
        return torch.ones(1)


def test_removing_arguments_makes_a_new_observation():
    observation = calls(OptionalAdd(), ((ones(1), ones(1)), {})).observation
    fewer = observation.without({"y"})

    assert list(fewer.calls[0].arguments) == ["x"]
    assert list(observation.calls[0].arguments) == ["x", "y"]


def test_completing_keeps_signature_order():
    observation = calls(_IgnoresAll(), ((), {"z": ones(1)})).observation
    complete = observation.completed({"y": ones(2), 0: ones(3)})

    assert list(complete.calls[0].arguments) == ["x", "y", "z"]
    assert list(observation.calls[0].arguments) == ["z"]


def test_cache_that_holds_nothing_yet_counts_as_missing():
    from transformers import DynamicCache

    every = ((random_ids(1, 2),), {"past_key_values": DynamicCache()})
    observation = calls(IdsDecoder(), every, value_if_missing={"past_key_values": random_cache(0)}).observation

    assert observation.calls[0].tensors()["past_key_values.layers[1].keys"].shape == (1, 4, 0, 32)


def test_recorded_values_cannot_be_reassigned():
    observation = calls(Ignores(), ((ones(1),), {})).observation
    with pytest.raises(dataclasses.FrozenInstanceError):
        observation.calls = ()
    with pytest.raises(dataclasses.FrozenInstanceError):
        observation.calls[0].index = 3
