"""Fingerprints are equal for values that are the same by type and value, and for no others."""

import collections
import dataclasses
import enum
import functools
import json
import math
import threading

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.cache_utils import DynamicSlidingWindowLayer

from exportkit.trees import fingerprint
from exportkit.trees.constants import constants_in, difference, from_json, has_tensors, tensor_inside, text_of


@dataclasses.dataclass(eq=False)
class Config:
    first: object = 1
    second: object = 2

    @functools.cached_property
    def computed(self):
        return self.first


ATOMS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.complex_numbers() | st.text(max_size=3)
    | st.binary(max_size=3) | st.sampled_from([torch.float16, torch.int64, torch.device("cpu"), torch.strided])
)  # fmt: skip
VALUES = st.recursive(
    ATOMS | st.builds(slice, st.none() | st.integers()) | st.builds(range, st.integers(0, 9)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2) | st.integers(), inner, max_size=3)
        | st.builds(Config, inner, inner)
    ),
    max_leaves=6,
)


class Colour(enum.Enum):
    RED = 1
    ROSE = 2


def rebuilt(value):
    """An equal value, whose containers and objects are new."""
    if isinstance(value, list | tuple):
        return type(value)(map(rebuilt, value))
    if isinstance(value, dict):
        return {key: rebuilt(item) for key, item in reversed(value.items())}
    if isinstance(value, Config):
        return Config(rebuilt(value.first), rebuilt(value.second))
    return value


def plainly_same(a, b):
    """The same by type and value, said without fingerprints."""
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(plainly_same, a, b))
    if isinstance(a, dict):
        same_keys = sorted(map(repr, a)) == sorted(map(repr, b))
        return same_keys and all(plainly_same(a[key], b[key]) for key in a)
    if isinstance(a, Config):
        return plainly_same(a.first, b.first) and plainly_same(a.second, b.second)
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    if isinstance(a, complex):
        return plainly_same(a.real, b.real) and plainly_same(a.imag, b.imag)
    return a == b


@given(VALUES)
def test_an_equal_value_has_the_same_fingerprint_also_after_json(value):
    described = fingerprint(value)
    assert described == fingerprint(rebuilt(value))
    assert from_json(json.loads(json.dumps(described))) == described
    assert hash(described) is not None
    assert isinstance(text_of(described), str)


@given(VALUES, VALUES)
def test_values_have_the_same_fingerprint_if_and_only_if_they_are_the_same(a, b):
    assert (fingerprint(a) == fingerprint(b)) == plainly_same(a, b)
    found = difference(fingerprint(a), fingerprint(b))
    assert (found is None) == plainly_same(a, b)


def add(number, *, scale=1):
    return lambda x: (x + number) * scale


def _scaled(factor):
    return lambda x: x * factor


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (True, 1), (1, 1.0), (0.0, -0.0), (None, []), ([], ()), ([1], [1, 2]), ({"a": 1}, {"a": 1, "b": 1}),
        (torch.float32, "torch.float32"), (torch.float32, torch.float64), (2j, -2j), (Colour.RED, Colour.ROSE),
        (torch.relu, torch.tanh), (torch.nn.functional.relu, torch.nn.functional.gelu), (torch.Tensor.sin, torch.sin),
        (lambda x: x + 1, lambda x: x + 2), (_scaled(2), _scaled(3)), (add(1), add(1, scale=2)),
        (functools.partial(torch.mul, other=2), functools.partial(torch.mul, other=3)),
        (torch.nn.GELU(), torch.nn.GELU("tanh")), (torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)),
        ({1, 2}, {1, 3}), ({1}, frozenset({1})), (slice(1), slice(2)), (range(3), range(4)),
        (numpy.float32(1), numpy.float64(1)), (numpy.ones(2), numpy.zeros(2)), (Config(1), Config(2)),
        (collections.OrderedDict(a=1, b=2), collections.OrderedDict(b=2, a=1)), (torch.Size([2]), (2,)),
        (threading.Lock(), threading.Lock()), (object(), object()), (Config, Colour), (iter([1]), iter([2])),
    ],
)  # fmt: skip
def test_values_that_differ_have_different_fingerprints(first, second):
    assert fingerprint(first) == fingerprint(first)
    assert fingerprint(first) != fingerprint(second)
    assert difference(fingerprint(first), fingerprint(second)) is not None


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (float("nan"), -float("nan")), (lambda x: x + 1, lambda x: x + 1), (_scaled(2), _scaled(2)),
        (torch.nn.ReLU(), torch.nn.ReLU()), (Config([1]).__init__.__func__, Config.__init__),
        (functools.partial(torch.mul, other=2), functools.partial(torch.mul, other=2)), (Config([1]), Config([1])),
        (numpy.ones(2), numpy.ones(2)), ({"a": 1, "b": 2}, {"b": 2, "a": 1}), (torch.ops.aten.sin, torch.ops.aten.sin),
    ],
)  # fmt: skip
def test_values_that_do_the_same_have_the_same_fingerprint(first, second):
    assert fingerprint(first) == fingerprint(second)


def test_what_an_object_remembers_of_itself_does_not_count():
    config = Config()
    before = fingerprint(config)
    assert config.computed == 1
    assert fingerprint(config) == before
    config.first = 3
    assert fingerprint(config) != before


def test_objects_that_hold_each_other_are_described():
    first, second = Config(), Config()
    first.first, second.first = second, first
    assert fingerprint(first) == fingerprint(second)
    assert fingerprint(first) != fingerprint(Config(Config()))


def test_an_object_that_raises_when_it_is_looked_at_is_equal_to_itself_alone():
    class Broken:
        def __getattribute__(self, name):
            raise RuntimeError(name)

    one, other = Broken(), Broken()
    described = fingerprint(Config(one))  # pytest cannot show the object itself
    assert described == fingerprint(Config(one))
    assert described != fingerprint(Config(other))


def test_a_tensor_in_an_object_is_the_same_until_it_is_written():
    weight = torch.ones(2)
    scaled = _scaled(weight)
    before = fingerprint(scaled)
    assert fingerprint(scaled) == before
    weight.add_(1)
    assert fingerprint(scaled) != before
    assert fingerprint(_scaled(torch.ones(2))) != fingerprint(_scaled(torch.ones(2)))


def test_a_global_number_belongs_to_a_function():
    space = {"scale": 2}
    function = eval("lambda x: x * scale", space)
    before = fingerprint(function)
    space["scale"] = 3
    assert fingerprint(function) != before


def test_a_difference_is_named_by_its_path():
    found = difference(fingerprint({"a": Config([1, 2])}), fingerprint({"a": Config([1, True])}), "options")
    assert found == ("options.a.first[1]", "2", "True")


def test_tensors_are_alike_and_may_be_absent():
    tensor = torch.ones(1)
    assert difference(fingerprint([tensor, 1]), fingerprint([torch.zeros(2), 1])) is None
    assert difference(fingerprint([tensor, 1]), fingerprint([None, 1])) is None
    assert difference(fingerprint({"a": tensor}), fingerprint(None)) is None
    assert difference(fingerprint([tensor]), fingerprint([])) == ("[0]", "a tensor", "nothing")
    assert difference(fingerprint([tensor]), fingerprint([]), recorded=True) is None
    assert difference(fingerprint([tensor]), fingerprint([tensor, tensor]), "x", lists=["x"]) is None
    assert difference(fingerprint([tensor]), fingerprint([2.0])) == ("[0]", "a tensor", "2.0")


def test_parts_without_tensors_are_found_as_large_as_they_are():
    described = fingerprint({"x": torch.ones(1), "sizes": [1, 2], "none": None, "empty": []})
    assert has_tensors(described)
    assert {path: text_of(part) for path, part in constants_in(described, "data").items()} == {
        "data.sizes": "[1, 2]",
        "data.empty": "[]",
    }


def test_tensors_deep_inside_an_object_are_found():
    hidden = Config(Config({"edges": [torch.ones(1)]}), threading.Lock())  # an object with a lock is not opened
    assert tensor_inside(fingerprint(hidden)) == "first.first.edges[0]"
    assert tensor_inside(fingerprint(Config(torch.nn.Linear(1, 1)))) is None
    assert tensor_inside(fingerprint([torch.ones(1)])) is None


def test_what_a_cache_does_otherwise_is_named():
    layer = DynamicSlidingWindowLayer(sliding_window=4)
    layer.activate_past_recording()
    assert text_of(fingerprint([layer])) == "[DynamicSlidingWindowLayer(record_past=True)]"
