"""The tree of a recorded value equals the tree of the value itself, although it is made without building the value."""

import collections

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exportkit import make_dynamic_cache, make_encoder_decoder_cache
from exportkit.calls.snapshot import Copying
from exportkit.trees import flatten
from exportkit.trees.flatten import flattened, flattened_call
from tests.trees.caches import filled, kinds

Pair = collections.namedtuple("Pair", ["first", "second"])
KEYS = st.text("ab c", max_size=3) | st.integers(0, 3)


def cache(layers=2, window=None):
    pairs = [(torch.rand(1, 2, 3, 4), torch.rand(1, 2, 3, 4)) for _ in range(layers)]
    return make_dynamic_cache(pairs, sliding_window=window)


LEAVES = (
    st.none()
    | st.booleans()
    | st.floats(allow_nan=False)
    | st.text(max_size=3)
    | st.integers(0, 3).map(torch.arange)
    | st.builds(cache, st.integers(0, 4), st.sampled_from([None, 5, 9]))
    | st.builds(object)
)


def containers(children):
    return (
        st.lists(children, max_size=3)
        | st.lists(children, max_size=3).map(tuple)
        | st.dictionaries(KEYS, children, max_size=3)
        | st.dictionaries(KEYS, children, max_size=3).map(collections.OrderedDict)
        | st.dictionaries(KEYS, children, max_size=3).map(lambda items: collections.defaultdict(list, items))
        | st.lists(children, max_size=3).map(collections.deque)
        | st.tuples(children, children).map(lambda items: Pair(*items))
    )


def assert_alike(value, found=None):
    tree, expected = Copying(found or flattened(value)).snapshot().tree(), flatten(value)
    assert tree.paths == expected.paths
    assert tree.tensor_paths == expected.tensor_paths
    assert tree.growing == expected.growing
    assert tree.constants() == expected.constants()
    assert tree.shapes() == expected.shapes()
    assert tree.structure == expected.structure
    assert tree.cls is expected.cls
    for path, tensor in expected.tensors().items():
        assert torch.equal(tree.tensors()[path], tensor)


@given(st.recursive(LEAVES, containers, max_leaves=8))
def test_nested_values(value):
    assert_alike(value)


VALUES = st.recursive(LEAVES, containers, max_leaves=4)


@given(st.lists(VALUES, max_size=3).map(tuple), st.dictionaries(st.text("ab c", max_size=3), VALUES, max_size=10))
def test_arguments_of_a_call(args, kwargs):
    found = flattened_call(args, kwargs)
    assert_alike((args, kwargs), found)
    assert found.structure.marks == flattened((args, kwargs)).structure.marks


@given(
    st.lists(LEAVES, max_size=10),
    st.sampled_from([list, tuple, lambda items: dict(zip("abcdefghij", items, strict=False))]),
)
def test_marks_tell_a_flat_container_as_they_tell_one_inside_another(items, make):
    value = make(items)
    alone, inside = flattened(value).structure.root, flattened([[value]]).structure.root
    assert alone.spec == inside.spec.child(0).child(0)


@pytest.mark.parametrize("kind", kinds())
def test_layers_of_each_kind(kind):
    assert_alike((1, [filled(kind)]))


def test_two_caches_in_one():
    assert_alike({"cache": make_encoder_decoder_cache(cache(3), cache(2, window=6)), "none": None})


def test_layers_with_windows_of_their_own():
    value = cache(3, window=6)
    value.layers[1].sliding_window = 9
    assert_alike(value)


def test_dict_that_makes_its_missing_values_in_a_cache():
    value = cache()
    value.counts = collections.defaultdict(list, {"a": torch.ones(2)})
    for again in (Copying(flattened(value)).snapshot().tree().build(), flatten(value).build()):
        assert again.counts["missing"] == []
        assert again.counts["a"].tolist() == [1, 1]
