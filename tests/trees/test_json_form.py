"""Values written as JSON come back the same: classes by name, constants exactly, all other values marked."""

import collections
import dataclasses
import enum
import json
import math
import sys
import types
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exportkit._torch_compat.pytree import deregister_node, registered_node
from exportkit.errors import TreeError
from exportkit.trees import flatten
from exportkit.trees.json_form import (
    Unwritten,
    class_name,
    dump_constant,
    dump_tree,
    find_class,
    load_structure,
    load_value,
)
from tests.trees.caches import advance, assert_same, filled, kinds

Pair = collections.namedtuple("Pair", ["first", "second"])
HERE = __name__


class Colour(enum.Enum):
    RED = 1
    GREEN = "green"


class Bits(enum.Flag):
    LOW = 1
    HIGH = 2


@dataclasses.dataclass
class Point:
    x: torch.Tensor
    y: torch.Tensor | None = None


class Box:
    def __init__(self, content, label):
        self.content, self.label = content, label


@pytest.fixture
def registered():
    """Registers a class with torch's pytree for the time of one test."""
    pytree, classes = torch.utils._pytree, []

    def register(cls, flatten_fn=None, unflatten_fn=None):
        classes.append(cls)
        if flatten_fn is None:
            pytree.register_dataclass(cls)
        else:
            pytree.register_pytree_node(cls, flatten_fn, unflatten_fn)
        return cls

    yield register
    for cls in classes:
        if registered_node(cls) is not None:
            deregister_node(cls)


def _register_box(register, context=lambda box: box.label):
    return register(Box, lambda box: ([box.content], context(box)), lambda items, label: Box(items[0], label))


def _through_text(value):
    """Returns the value after a way through JSON text, around the same tensors."""
    tree = flatten(value)
    text = json.dumps(dump_tree(tree), allow_nan=False)
    return load_value(json.loads(text), list(tree.tensors().values()))


CONSTANTS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text(max_size=4)
    | st.sampled_from([torch.float16, torch.strided, torch.channels_last, torch.device("cuda", 1), torch.device("cpu")])
    | st.sampled_from([Colour.RED, Colour.GREEN, Bits.HIGH, torch.Tensor, Colour, dict])
)
KEYS = st.text(max_size=3) | st.integers() | st.booleans() | st.none() | st.tuples(st.integers(), st.text(max_size=2))


def _containers(children):
    lists = st.lists(children, max_size=3)
    return (
        lists
        | lists.map(tuple)
        | st.dictionaries(KEYS, children, max_size=3)
        | st.dictionaries(KEYS, children, max_size=3).map(collections.OrderedDict)
        | lists.map(lambda items: collections.deque(items, maxlen=4))
        | st.dictionaries(KEYS, children, max_size=3).map(lambda items: collections.defaultdict(list, items))
        | st.tuples(children, children).map(lambda values: Pair(*values))
    )


NESTED = st.recursive(CONSTANTS | st.integers(0, 3).map(torch.arange), _containers, max_leaves=12)


def _assert_same(expected, got):
    """Same types, keys and order all the way down, the very same tensors, NaN equal to NaN."""
    assert type(got) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert got is expected
    elif isinstance(expected, dict):
        _assert_same(list(expected.items()), list(got.items()))
        assert getattr(got, "default_factory", None) is getattr(expected, "default_factory", None)
    elif isinstance(expected, list | tuple | collections.deque):
        assert len(got) == len(expected)
        assert getattr(got, "maxlen", None) == getattr(expected, "maxlen", None)
        for a, b in zip(expected, got, strict=True):
            _assert_same(a, b)
    elif isinstance(expected, complex):
        _assert_same([expected.real, expected.imag], [got.real, got.imag])
    elif isinstance(expected, float) and math.isnan(expected):
        assert math.isnan(got)
    else:
        assert got == expected
        assert str(got) == str(expected)  # -0.0 is not 0.0


@given(NESTED)
def test_nested_value_comes_back(value):
    _assert_same(value, _through_text(value))


@given(NESTED)
def test_paths_of_the_leaves_stay(value):
    tree, again = flatten(value), flatten(_through_text(value))

    assert again.paths == tree.paths
    assert again.growing == tree.growing


@pytest.mark.parametrize("kind", sorted(set(kinds()) - {"RoundingLayer"}))
def test_cache_comes_back_and_goes_on_the_same_way(kind):
    cache = filled(kind)
    again = _through_text([{"cache": cache}, torch.ones(1)])[0]["cache"]
    again = flatten(again).map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf).build()

    assert_same(cache, again)
    assert_same(advance(cache, 2, seed=7), advance(again, 2, seed=7))
    assert flatten(again).growing == flatten(cache).growing


@pytest.mark.parametrize("kind", sorted(set(kinds()) - {"RoundingLayer"}))
def test_empty_cache_comes_back(kind):
    cache = kinds()[kind]()

    assert_same(cache, _through_text(cache))


def test_two_caches_side_by_side_keep_their_own_tensors():
    pair = (filled("DynamicLayer"), torch.zeros(2), filled("StaticLayer"))

    assert_same(list(pair), list(_through_text(pair)))


def test_output_of_transformers_comes_back():
    from transformers.modeling_outputs import CausalLMOutputWithPast

    output = CausalLMOutputWithPast(logits=torch.ones(2, 3), past_key_values=filled("DynamicLayer"))
    again = _through_text(output)

    assert type(again) is CausalLMOutputWithPast
    assert list(again) == ["logits", "past_key_values"]
    assert again.loss is None
    assert again.logits is output.logits
    assert_same(output.past_key_values, again.past_key_values)


def test_result_of_a_torch_function_comes_back():
    found = torch.topk(torch.arange(4), 2)
    again = _through_text(found)

    assert type(again) is type(found)
    assert again.indices is found.indices


def test_registered_dataclass_comes_back(registered):
    registered(Point)
    again = _through_text({"point": Point(torch.ones(2))})["point"]

    assert type(again) is Point
    assert again.x.tolist() == [1, 1]
    assert again.y is None


def test_registered_class_comes_back_with_what_torch_keeps_of_it(registered):
    _register_box(registered)
    again = _through_text(Box(torch.ones(1), (Colour.RED, {3: torch.float16})))

    assert type(again) is Box
    assert again.label == (Colour.RED, {3: torch.float16})


def test_numbers_of_numpy_come_back_as_those_of_python():
    _assert_same([0.5, 3, 1j], _through_text([np.float64(0.5), np.int32(3), np.complex128(1j)]))


def test_context_is_written_by_the_functions_that_the_class_was_registered_with():
    torch.utils._pytree.register_pytree_node(
        Box,
        lambda box: ([box.content], box.label),
        lambda items, label: Box(items[0], label),
        serialized_type_name=f"{HERE}.Box",
        to_dumpable_context=lambda label: {"halves": label.numerator * 2 // label.denominator},
        from_dumpable_context=lambda data: Fraction(data["halves"], 2),
    )
    try:
        again = _through_text(Box(torch.ones(1), Fraction(3, 2)))
    finally:
        deregister_node(Box)
    assert again.label == Fraction(3, 2)


class Odd:
    """Its repr fails, as that of an object which is not set up."""

    def __repr__(self):
        raise AttributeError("name")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Fraction(1, 3), "<not restored: Fraction(1, 3), of fractions.Fraction>"),
        ({1}, "<not restored: {1}, of builtins.set>"),
        (Bits.LOW | Bits.HIGH, f"<not restored: {Bits(3)!r}, of {HERE}.Bits>"),
        (type(None), "<not restored: <class 'NoneType'>, of builtins.type>"),
        (enum.Enum("Local", "A").A, f"<not restored: <Local.A: 1>, of {HERE}.Local>"),
    ],
)
def test_anything_else_comes_back_as_a_marked_placeholder(value, text):
    again = _through_text({"value": value})["value"]

    assert repr(again) == text
    assert isinstance(again, Unwritten)
    assert _through_text(again) == again


def test_placeholder_of_a_long_or_broken_text_is_short():
    class Long:
        def __repr__(self):
            return "x" * 10_000

    assert len(_through_text(Long()).text) == 500
    assert "Odd object at" in _through_text(Odd()).text


def test_constants_never_fail():
    assert load_value(dump_constant((1, {2: 0.5}))) == (1, {2: 0.5})
    assert load_value(dump_constant(torch.ones(1))) == Unwritten("torch.Tensor", "tensor([1.])")
    assert load_value(dump_constant({Fraction(1, 2): 1})) == Unwritten("builtins.dict", "{Fraction(1, 2): 1}")


def test_key_that_cannot_be_written_is_refused():
    with pytest.raises(TreeError) as raised:
        dump_tree(flatten({Fraction(1, 2): 1}))
    assert str(raised.value) == (
        "A key of a dict cannot be written as JSON.\n"
        "  expected: numbers, strings, dtypes, enums, and lists, tuples and dicts of these\n"
        "  got: Fraction Fraction(1, 2)"
    )


def test_what_torch_keeps_of_a_class_is_refused_if_it_cannot_be_written(registered):
    _register_box(registered)
    with pytest.raises(TreeError, match="The pytree context of class Box cannot be written as JSON"):
        dump_tree(flatten(Box(torch.ones(1), Fraction(1, 2))))


def test_local_class_is_refused_when_it_is_written():
    with pytest.raises(TreeError) as raised:
        dump_tree(flatten(filled("RoundingLayer")))
    assert str(raised.value) == (
        "No class was found with the name _rounding_layer.<locals>.RoundingLayer.\n"
        "  where: module tests.trees.caches\n"
        "  expected: a cache, a layer of one, or a plain container, defined at the top level of its module"
    )


def test_class_with_the_name_of_another_is_refused_when_it_is_written():
    other = collections.namedtuple("Pair", ["first", "second"])
    with pytest.raises(TreeError, match=f"The name of this class refers to a different class.\n  got: {HERE}.Pair"):
        dump_tree(flatten(other(1, 2)))


def test_class_that_is_not_registered_any_more_is_refused(registered):
    tree = flatten(_register_box(registered)(torch.ones(1), 0))
    deregister_node(Box)
    with pytest.raises(TreeError, match="Class Box was registered with torch's pytree and no longer is"):
        dump_tree(tree)


def _as_module(monkeypatch, cls):
    """Puts the class into a module of its own, which can be taken away."""
    module = types.ModuleType("their_model")
    setattr(module, cls.__name__, cls)
    monkeypatch.setattr(cls, "__module__", "their_model")
    monkeypatch.setitem(sys.modules, "their_model", module)
    return module


def test_module_of_a_class_is_not_imported_from_elsewhere(monkeypatch):
    _as_module(monkeypatch, Pair)
    data = dump_tree(flatten(Pair(1, 2)))
    monkeypatch.delitem(sys.modules, "their_model")
    with pytest.raises(TreeError) as raised:
        load_value(data)
    assert str(raised.value) == (
        "Class Pair belongs to a module that is not available.\n"
        "  where: module their_model\n"
        "  got: not imported, and reading a file does not import other modules\n"
        "  hint: import their_model first, in the version with which the file was written."
    )


def test_module_of_transformers_that_is_gone_is_named():
    with pytest.raises(TreeError) as raised:
        load_value({"type": "transformers.models.gone.modeling_gone:Gone"})
    assert "where: module transformers.models.gone.modeling_gone" in str(raised.value)
    assert "No module named 'transformers.models.gone'" in str(raised.value)


def test_class_that_is_gone_is_named():
    with pytest.raises(TreeError, match=r"No class was found with the name Gone\.\n  where: module torch"):
        load_value({"fields": "torch:Gone", "items": []})


def test_class_that_is_not_registered_here_is_named(registered):
    data = dump_tree(flatten(_register_box(registered)(torch.ones(1), 0)))
    deregister_node(Box)
    with pytest.raises(TreeError) as raised:
        load_value(data, [torch.ones(1)])
    assert str(raised.value) == (
        "Class Box is not registered with torch's pytree.\n"
        f"  expected: {HERE}.Box registered, as when the value was written\n"
        "  hint: torch.utils._pytree.register_pytree_node, or torch.export.register_dataclass, before reading."
    )


def test_class_that_changed_since_is_named(registered):
    data = dump_tree(flatten(registered(Point)(torch.ones(1))))
    data["context"] = [["z"], []]
    with pytest.raises(TreeError, match="Class Point cannot be built from the saved data") as raised:
        load_value(data, [torch.ones(1)])
    assert "got: TypeError: Point.__init__() got an unexpected keyword argument 'z'" in str(raised.value)


@pytest.mark.parametrize(
    ("data", "got"),
    [
        ({}, "KeyError: 'nothing'"),
        ({"python": "print()"}, "KeyError: 'python'"),
        ({"tensor": 3}, "IndexError"),
        ({"tuple": 3}, "TypeError"),
        ({"dict": [[[1], 2]]}, "TypeError: unhashable type: 'list'"),
        ({"torch": "nothing"}, "AttributeError"),
        ({"torch": "load"}, "TypeError: torch.load is not a dtype"),
        ({"float": "many"}, "ValueError"),
        ({"device": "toaster"}, "RuntimeError"),
        ({"enum": f"{HERE}:Colour", "name": "BLUE"}, "KeyError: 'BLUE'"),
        (
            {"object": "transformers:DynamicCache", "state": [["dtype", {"torch": "load"}]]},
            "TypeError: torch.load is not a dtype",
        ),
    ],
)
def test_damaged_layout_is_an_error(data, got):
    with pytest.raises(TreeError, match=r"The layout of a value is damaged\.") as raised:
        load_value(data)
    assert f"got: {got}" in str(raised.value)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"fields": "subprocess:Popen", "items": ["ls"]}, "a named tuple"),
        ({"enum": "subprocess:Popen", "name": "a"}, "an enum"),
        ({"type": "os:system"}, "a class"),
        ({"object": "subprocess:Popen", "state": []}, "a cache, a layer of one"),
        ({"object": "tests.trees.test_json_form:Loud", "state": []}, "a cache, a layer of one"),
    ],
)
def test_class_of_another_kind_is_not_built(data, expected):
    import subprocess  # noqa: F401 (loaded, so that its classes could be found)

    with pytest.raises(TreeError, match="No class was found with the name") as raised:
        load_value(data)
    assert f"expected: {expected}" in str(raised.value)


class Loud(list):
    """Must not be built by reading a file."""

    def __init__(self, *args):
        raise AssertionError("built")


class Outer:
    class Inner:
        pass


def test_class_is_found_by_its_name():
    assert find_class(class_name(Outer.Inner)) is Outer.Inner


def test_module_that_is_not_loaded_stays_so(tmp_path, monkeypatch):
    (tmp_path / "never_loaded.py").write_text("class Cache: ...")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(TreeError) as raised:
        load_structure({"object": "never_loaded:Cache", "state": []})
    assert str(raised.value) == (
        "Class Cache belongs to a module that is not available.\n"
        "  where: module never_loaded\n"
        "  got: not imported, and reading a file does not import other modules\n"
        "  hint: import never_loaded first, in the version with which the file was written."
    )
    assert "never_loaded" not in sys.modules


def test_function_is_not_a_class():
    with pytest.raises(TreeError, match="No class was found with the name class_name"):
        load_structure({"type": "exportkit.trees.json_form:class_name"})


class Layers(list):
    pass


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Layers(), "A cache holds a value of class Layers, which cannot be written as JSON"),
        (torch.nn.Linear, "No class was found with the name Linear"),
        (collections.defaultdict(Layers), "No class was found with the name Layers"),
    ],
)
def test_cache_with_something_that_is_not_read_again_is_refused(value, message):
    cache = filled("DynamicLayer")
    cache.extra = value
    with pytest.raises(TreeError, match=message):
        dump_tree(flatten(cache))


def test_containers_of_a_cache_come_back():
    cache = filled("DynamicLayer")
    cache.extra = {
        "states": collections.OrderedDict({3: torch.ones(1), (1, "a"): None}),
        "queue": collections.deque([torch.ones(2), 0.5], maxlen=3),
        "pair": Pair(torch.ones(3), math.inf),
        "counts": collections.defaultdict(list, {"a": (1, torch.float16)}),
    }
    again = _through_text(cache)

    assert_same(cache, again)
    assert again.extra["queue"].maxlen == 3
    assert again.extra["counts"].default_factory is list
