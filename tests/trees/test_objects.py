"""Objects that nobody registered are opened by their attributes, and built again so that nothing tells them apart."""

import argparse
import collections
import dataclasses
import functools
import json
import threading
import types
import typing
import weakref

import pytest
import torch

from exportkit.errors import TreeError
from exportkit.trees import fingerprint, flatten
from exportkit.trees.json_form import dump_tree, load_value


class Holder:
    def __init__(self, **attributes):
        vars(self).update(attributes)

    @property
    def doubled(self):
        return self.x * 2

    @functools.cached_property
    def tripled(self):
        return self.x * 3


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: typing.Any
    scale: float = 0.5


class Pair(typing.NamedTuple):
    first: typing.Any
    second: typing.Any


class Features(collections.UserDict):
    """As of a tokenizer."""


class Table(dict):
    """With attributes besides its keys."""


class Rows(list):
    """With attributes besides its items."""


def graph():
    """As graph libraries do: attributes in a store that refers back to the graph."""
    x = torch.arange(3.0)
    store = Holder(x=x, table={"edges": [x, torch.ones(1)]}, pair=Pair(1, (torch.zeros(1),)))
    whole = Holder(store=store, edges=store.table["edges"])
    store.parent, store.weak = whole, weakref.ref(whole)
    return whole


def written(tree):
    return load_value(json.loads(json.dumps(dump_tree(tree))), list(tree.tensors().values()))


@pytest.mark.parametrize("again", [lambda tree: tree.build(), written], ids=["built", "written"])
def test_references_between_the_parts_of_an_object_are_kept(again):
    tree = flatten(graph())
    assert tree.tensor_paths == ("store.x", "store.table.edges[1]", "store.pair[1][0]")
    built = again(tree.map(lambda leaf: leaf + 1))

    assert built.store.parent is built
    assert built.store.weak() is built
    assert built.edges is built.store.table["edges"]
    assert built.edges[0] is built.store.x
    assert built.store.x.tolist() == [1, 2, 3]
    assert type(built.store.pair) is Pair
    assert built.store.pair.first == 2


@pytest.mark.parametrize("again", [lambda tree: tree.build(), written], ids=["built", "written"])
def test_class_attributes_and_content_are_kept(again):
    x, table, rows = torch.ones(2), Table(x=torch.ones(1)), Rows([torch.ones(3)])
    table.name = rows.name = "kept"
    holder = Holder(x=x, empty=None, flag=True, dtype=torch.int8)
    assert holder.tripled.sum() == 6  # now among the attributes, although it follows from x
    values = [holder, Frozen(x), Features(x=x), table, rows, types.SimpleNamespace(x=x), argparse.Namespace(x=x)]
    values.append(torch.distributions.Normal(torch.zeros(2), torch.ones(2)))
    tree = flatten(values)
    built = again(tree.map(lambda leaf: leaf * 4 if isinstance(leaf, torch.Tensor) else leaf))

    assert list(map(type, built)) == list(map(type, values))
    assert built[0].doubled.tolist() == [8, 8]
    assert built[0].tripled.tolist() == [12, 12]
    assert (built[0].empty, built[0].flag, built[0].dtype) == (None, True, torch.int8)
    assert built[1].scale == 0.5
    assert list(built[2]) == ["x"]
    assert (built[3].name, built[3]["x"].item()) == ("kept", 4)
    assert (built[4].name, built[4][0].tolist()) == ("kept", [4, 4, 4])
    assert built[7].scale.tolist() == [4, 4]
    assert built[7].batch_shape == torch.Size([2])


@pytest.mark.parametrize(
    "other",
    [
        Holder(x=torch.ones(1), scale=2),
        Holder(x=torch.ones(1), scale=True),
        Holder(x=torch.ones(1), scale=1, more=None),
        Holder(x=torch.ones(1)),
        argparse.Namespace(x=torch.ones(1), scale=1),
    ],
)
def test_attributes_that_are_no_tensors_are_compared(other):
    value = Holder(x=torch.ones(1), scale=1)
    assert fingerprint(value) == fingerprint(Holder(x=torch.zeros(3), scale=1))
    assert fingerprint(value) != fingerprint(other)


def test_which_references_are_the_same_is_compared():
    x = torch.ones(1)
    assert fingerprint(Holder(x=x, y=x)) != fingerprint(Holder(x=x, y=torch.ones(1)))


@pytest.mark.parametrize(
    ("cls", "names"), [("threading:Thread", ["x"]), ("tempfile:_TemporaryFileCloser", ["name"]), ("os:_wrap_close", [])]
)
def test_file_cannot_name_any_class(cls, names):
    part = {"cls": cls, "names": names, "keys": [], "refs": [["leaf", 0]] * len(names)}
    with pytest.raises(TreeError):
        load_value({"instance": [part], "items": ["text"]})


def test_object_of_a_class_that_is_not_found_is_not_loaded():
    data = json.loads(json.dumps(dump_tree(flatten(Frozen(torch.ones(1))))).replace("Frozen", "Thawed"))
    with pytest.raises(TreeError, match="No class was found with the name Thawed"):
        load_value(data, [torch.ones(1)])


def test_object_without_tensors_is_a_constant():
    options = Holder(scale=1, inner=Holder(lock=threading.Lock()))
    assert flatten([options]).leaves == (options,)
