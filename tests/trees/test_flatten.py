"""Nested values become leaves with paths, and become the same values again."""

import collections
import dataclasses
import sys
import threading
import typing

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exportkit._torch_compat.pytree import deregister_node
from exportkit.errors import UnregisteredClassError
from exportkit.trees import check_opened, flatten, join

Pair = collections.namedtuple("Pair", ["first", "second"])

CONSTANTS = st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.sampled_from([1.5, torch.float16])
TENSORS = st.integers(0, 3).map(torch.arange)
KEYS = st.text(max_size=3) | st.integers() | st.sampled_from(["x", "keys", "a.b", "x[0]", ""])


def _containers(children):
    return (
        st.lists(children, max_size=3)
        | st.lists(children, max_size=3).map(tuple)
        | st.dictionaries(KEYS, children, max_size=3)
        | st.dictionaries(KEYS, children, max_size=3).map(collections.OrderedDict)
        | st.tuples(children, children).map(lambda values: Pair(*values))
    )


NESTED = st.recursive(CONSTANTS | TENSORS, _containers, max_leaves=12)


def _assert_identical(expected, got):
    """Same types all the way down, and the very same leaves."""
    assert type(got) is type(expected)
    if isinstance(expected, list | tuple):
        assert len(got) == len(expected)
        for a, b in zip(expected, got, strict=True):
            _assert_identical(a, b)
    elif isinstance(expected, dict):
        assert list(got) == list(expected)
        for key, value in expected.items():
            _assert_identical(value, got[key])
    elif isinstance(expected, torch.Tensor):
        assert got is expected
    else:
        assert got == expected


@given(NESTED)
def test_building_gives_the_value_back(value):
    _assert_identical(value, flatten(value).build())


@given(NESTED)
def test_building_gives_new_containers_each_time(value):
    tree = flatten(value)
    built = tree.build()
    if isinstance(built, list):
        built.append("changed")
    elif isinstance(built, dict):
        built["changed"] = True

    _assert_identical(value, tree.build())


@given(NESTED)
def test_every_leaf_has_a_path_of_its_own(value):
    tree = flatten(value)

    assert len(set(tree.paths)) == len(tree.paths) == len(tree.leaves)
    assert len(tree.tensors()) + len(tree.constants()) == len(tree.leaves)


@given(NESTED)
def test_paths_are_found_again_in_the_built_value(value):
    again = flatten(flatten(value).build())

    assert again.paths == flatten(value).paths


@given(NESTED)
def test_mapping_leaves_keeps_paths_and_structure(value):
    tree = flatten(value).map(lambda leaf: (leaf,))

    assert tree.paths == flatten(value).paths
    _assert_identical(value, tree.map(lambda leaf: leaf[0]).build())


@given(NESTED, st.randoms(use_true_random=False))
def test_leaves_are_replaced_by_path(value, random):
    tree = flatten(value)
    replaced = {path: object() for path in tree.paths if random.random() < 0.5}

    changed = tree.with_leaves(replaced)

    for path, before, after in zip(tree.paths, tree.leaves, changed.leaves, strict=True):
        assert after is replaced.get(path, before)


@given(st.dictionaries(KEYS, NESTED, min_size=2, max_size=4), st.randoms(use_true_random=False))
def test_order_of_keys_does_not_change_which_leaf_is_which(value, random):
    items = list(value.items())
    random.shuffle(items)
    shuffled = flatten(dict(items))
    tree = flatten(value)

    assert dict(zip(shuffled.paths, map(id, shuffled.leaves), strict=True)) == dict(
        zip(tree.paths, map(id, tree.leaves), strict=True)
    )


@pytest.mark.parametrize(
    ("value", "paths"),
    [
        (1, [""]),
        (None, [""]),
        ([], []),
        ({}, []),
        ([1, [2]], ["[0]", "[1][0]"]),
        ({"inner": {"scale": 1}}, ["inner.scale"]),
        ({"two words": 1, "": 2, 3: 4, "3": 5}, ["['two words']", "['']", "[3]", "['3']"]),
        ({"items": [{"x": 1}]}, ["items[0].x"]),
        (Pair(1, 2), ["[0]", "[1]"]),
    ],
)
def test_paths_read_like_python(value, paths):
    assert list(flatten(value).paths) == paths


@pytest.mark.parametrize(
    ("name", "path", "joined"),
    [("x", "", "x"), ("", "y", "y"), ("x", "[0]", "x[0]"), ("x", "inner.y", "x.inner.y"), ("x", "['a b']", "x['a b']")],
)
def test_join_continues_a_path(name, path, joined):
    assert join(name, path) == joined


def test_value_that_is_one_tensor_is_its_own_leaf():
    tensor = torch.ones(2)

    assert flatten(tensor).tensors() == {"": tensor}
    assert flatten(tensor).build() is tensor


def test_default_dict_and_deque_stay_what_they_are():
    default = flatten(collections.defaultdict(list, {"a": 1})).build()
    queue = flatten(collections.deque([1], maxlen=2)).build()

    assert default["missing"] == []
    assert (list(queue), queue.maxlen) == ([1], 2)


def test_results_of_torch_functions_are_opened():
    result = torch.max(torch.tensor([[1.0, 3.0]]), dim=1)

    assert [leaf.item() for leaf in flatten(result).leaves] == [3.0, 1]
    assert flatten(result).build().indices.item() == 1


def test_parameters_are_leaves():
    parameter = torch.nn.Parameter(torch.ones(2))

    assert flatten([parameter]).tensors()["[0]"] is parameter


def test_modules_are_leaves():
    module = torch.nn.Linear(2, 2)

    assert flatten({"module": module}).constants() == {"module": module}


def test_values_of_other_classes_are_leaves():
    values = [{1, 2}, range(3), print, torch.float32, torch.device("cpu"), slice(1), b"bytes"]

    assert list(flatten(values).leaves) == values


def test_class_registered_with_torch_is_opened_by_its_own_names():
    @dataclasses.dataclass
    class Inputs:
        ids: torch.Tensor
        mask: torch.Tensor

    torch.export.register_dataclass(Inputs)
    try:
        value = Inputs(torch.ones(2), torch.zeros(2))
        tree = flatten({"inputs": value})

        assert tree.paths == ("inputs.ids", "inputs.mask")
        assert type(tree.build()["inputs"]) is Inputs
        assert tree.build()["inputs"].mask is value.mask
    finally:
        deregister_node(Inputs)


def test_class_registered_without_names_is_opened_by_position():
    class Bag:
        def __init__(self, items):
            self.items = items

    torch.utils._pytree.register_pytree_node(Bag, lambda bag: (bag.items, None), lambda items, _: Bag(list(items)))
    try:
        tree = flatten(Bag([1, torch.ones(1)]))

        assert tree.paths == ("[0]", "[1]")
        assert tree.build().items[0] == 1
    finally:
        deregister_node(Bag)


def test_class_registered_after_it_was_seen_is_opened_from_then_on():
    class Late:
        def __init__(self, x):
            self.x = x

    value = Late(torch.ones(1))
    assert flatten([value]).paths == ("[0].x",)

    torch.utils._pytree.register_pytree_node(Late, lambda late: ([late.x], None), lambda leaves, _: Late(*leaves))
    try:
        assert flatten([value]).paths == ("[0][0]",)
    finally:
        deregister_node(Late)


def test_class_whose_registration_was_taken_back_is_named():
    class Gone:
        def __init__(self, x):
            self.x = x

    torch.utils._pytree.register_pytree_node(Gone, lambda gone: ([gone.x], None), lambda leaves, _: Gone(*leaves))
    flatten(Gone(torch.ones(1)))
    deregister_node(Gone)

    with pytest.raises(UnregisteredClassError, match=r"Class Gone was registered .* and no longer is"):
        flatten(Gone(torch.ones(1)))


def test_model_outputs_are_opened_by_field():
    from transformers.modeling_outputs import BaseModelOutput

    output = BaseModelOutput(last_hidden_state=torch.ones(1), hidden_states=(torch.ones(2), None))
    tree = flatten(output)

    assert tree.paths == ("last_hidden_state", "hidden_states[0]", "hidden_states[1]")
    rebuilt = tree.build()
    assert type(rebuilt) is BaseModelOutput
    assert rebuilt.hidden_states[0] is output.hidden_states[0]
    assert rebuilt["last_hidden_state"] is output.last_hidden_state


class Holder:
    def __init__(self, **attributes):
        vars(self).update(attributes)


@dataclasses.dataclass(slots=True)
class Slots:
    x: typing.Any


class Closes:
    def __init__(self, x):
        self.x = x

    def __del__(self): ...


@pytest.mark.parametrize(
    "value",
    [
        Holder(x=torch.ones(1), lock=threading.Lock()),
        Holder(x=[torch.ones(1)], inner=Holder(lock=threading.Lock())),
        Holder(x={"a": (1, torch.ones(1))}, file=sys.__stdout__),
        Closes(torch.ones(1)),
    ],
)
def test_object_that_cannot_be_built_again_and_holds_tensors_is_refused_with_its_name_and_place(value):
    with pytest.raises(UnregisteredClassError) as raised:
        check_opened("batch", flatten([value]))

    message = str(raised.value)
    assert "where: batch[0]" in message
    assert f".{type(value).__name__} with tensors in x" in message
    assert "register_pytree_node" in message


@pytest.mark.parametrize("value", [Holder(x=1), Slots(2), torch.nn.Linear(2, 2), Holder, {1}, None, "text"])
def test_object_without_tensors_is_no_problem(value):
    check_opened("batch", flatten([value]))


def test_class_named_cache_that_has_no_attributes_to_look_into_is_a_leaf():
    class LookupCache:
        __slots__ = ("table",)

    cache = LookupCache()

    assert flatten([cache]).leaves == (cache,)
