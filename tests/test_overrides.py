"""Overridden attributes, items, classes and children: they are restored in any order, after errors, across threads."""

import cProfile
import json
import sys
import types
from json import loads as loaded

import pytest
import torch

from exportkit.overrides import (
    Attribute,
    ChildOf,
    ClassOf,
    Item,
    called_namespaces,
    is_replaced,
    original_attribute,
    original_class,
    replace,
    replaced,
    replaced_attributes,
    replaced_functions,
    with_imports,
)


class Target:
    value = 1


def test_replaced_attributes_can_be_left_in_any_order():
    first, second = replaced_attributes(Target, {"value": 2, "new": 3}), replaced_attributes(Target, {"value": 4})
    first.__enter__()
    second.__enter__()
    assert (Target.value, Target.new) == (4, 3)
    first.__exit__(None, None, None)
    assert Target.value == 4
    second.__exit__(None, None, None)
    assert Target.value == 1
    assert not hasattr(Target, "new")


class Inheriting(Target):
    pass


def test_an_inherited_attribute_is_restored_by_removing_the_override():
    with replaced_attributes(Inheriting, {"value": 5}):
        assert (Inheriting.value, Target.value) == (5, 1)
        assert original_attribute(Inheriting, "value") == 1
        assert is_replaced(Inheriting, "value")
    assert "value" not in vars(Inheriting)
    assert not is_replaced(Inheriting, "value")


def test_a_slot_may_be_replaced_twice_in_one_block():
    with replaced([(Attribute(Target, "value"), 2), (Attribute(Target, "value"), 3)]):
        assert Target.value == 3
        assert original_attribute(Target, "value") == 1
    assert Target.value == 1


class Fixed:
    """Raises when an attribute is set, and has no hash."""

    __hash__ = None

    def __setattr__(self, name, value):
        raise AttributeError(name)


def test_what_was_replaced_before_an_error_is_restored():
    with (
        pytest.raises(AttributeError, match="anything"),
        replaced([(Attribute(Target, "value"), 2), (Attribute(Fixed(), "anything"), 3)]),
    ):
        pass
    assert Target.value == 1


def test_items_of_a_mapping_are_replaced_and_removed_again():
    mapping = {"a": 1}
    with replaced([(Item(mapping, "a"), 2), (Item(mapping, "b"), 3)]):
        assert mapping == {"a": 2, "b": 3}
    assert mapping == {"a": 1}


def test_classes_and_children_of_modules_are_replaced():
    class Other(torch.nn.Linear):
        pass

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    first, activation = model
    with replaced([(ClassOf(first), Other), (ChildOf(model, "1"), torch.nn.Tanh())]):
        assert (type(model[0]), type(model[1])) == (Other, torch.nn.Tanh)
        assert original_class(first) is torch.nn.Linear
    assert (type(model[0]), model[1]) == (torch.nn.Linear, activation)


def test_replacing_without_a_block_lasts_until_it_is_closed():
    undo = replace([(Attribute(Target, "value"), 7)])
    assert Target.value == 7
    undo.close()
    undo.close()
    assert Target.value == 1


def kernel(x):
    return x


class UsesKernel(torch.nn.Module):
    def forward(self, x):
        return kernel(x)


def test_functions_are_replaced_where_the_classes_of_a_model_find_them():
    with replaced_functions(torch.nn.Sequential(UsesKernel()), {"kernel": lambda x: x + 1, "missing": len}):
        assert UsesKernel()(1) == 2
    assert UsesKernel()(1) == 1
    assert "missing" not in globals()


def test_functions_are_replaced_under_the_names_by_which_they_were_imported():
    slot = Attribute(json, "loads")
    with replaced(with_imports([(slot, len), (Attribute(json.JSONDecoder, "decode"), len)])):
        assert (json.loads("[1]"), loaded("[1]"), json.JSONDecoder.decode) == (3, 3, len)
    assert json.loads("[1]") == loaded("[1]") == [1]


def test_functions_that_are_imported_later_are_replaced_as_well(monkeypatch):
    later = types.ModuleType("later")
    monkeypatch.setitem(sys.modules, "later", later)
    for _ in range(2):
        with replaced(with_imports([(Attribute(json, "loads"), len)])):
            assert getattr(later, "read", len) is len
        later.read = json.loads
    with replaced(with_imports([(Attribute(json, "loads"), len)])):
        with replaced(with_imports([(Attribute(json, "loads"), max)])):
            assert later.read is max
        assert later.read is len
    assert later.read is json.loads


def test_called_namespaces_go_along_with_a_profiler():
    def run():
        json.loads("[1]")

    with cProfile.Profile() as profile:
        assert json in called_namespaces(run)
        after = json.dumps([1])
    assert after == "[1]"
    assert any(entry.code is json.dumps.__code__ for entry in profile.getstats())
