"""Dictionaries and sets in which models look lengths up, such as tables of positions by length."""

import collections

import pytest
import torch

import exportkit
from exportkit import InputObserver
from exportkit.errors import ArgumentError, ExportError

LENGTHS = (1, 3, 4, 5, 7, 8, 9, 12, 13)
shared = {}


def positions(length):
    return torch.arange(length) * 0.5


class OnTheModule(torch.nn.Module):
    def __init__(self, tables=()):
        super().__init__()
        self.tables = dict(tables)

    def forward(self, x):
        length = x.shape[1]
        if length not in self.tables:
            self.tables[length] = positions(length)
        return x + self.tables[length]


class LastTwo(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = collections.OrderedDict()

    def forward(self, x):
        length = x.shape[1]
        if length in self.tables:
            self.tables.move_to_end(length)
        else:
            self.tables[length] = positions(length)
            if len(self.tables) > 2:
                self.tables.popitem(last=False)
        return x + self.tables[length]


class WithGet(OnTheModule):
    def forward(self, x, **options):
        table = self.tables.get(x.shape[1])
        return x + (positions(x.shape[1]) if table is None else table)


class InAList(OnTheModule):
    def __init__(self, tables=()):
        super().__init__(tables)
        self.inner = torch.nn.Module()
        self.inner.lists = [{}, dict(tables)]

    def forward(self, x):
        made = {}
        made[x.shape[1]] = positions(x.shape[1])
        return x + self.inner.lists[1].get(x.shape[1], made[x.shape[1]])


class Shared(torch.nn.Module):
    def forward(self, x):
        key = (x.shape[1], x.device)
        if key not in shared:
            shared[key] = positions(x.shape[1])
        return x + shared[key]


class InASet(torch.nn.Module):
    def forward(self, x):
        return x * (2 if x.shape[1] in {5, 9, 40} else 1)


class Hidden(OnTheModule):
    def entries(self):
        return self.tables

    def forward(self, x):
        return x * self.entries().get(x.shape[1], 1)


class CountsSizes(torch.nn.Module):
    def forward(self, x):
        seen = {}
        for size in x.shape:
            seen[size] = True
        return x * len(seen)


def exported(model):
    observer = InputObserver()
    with observer(model):
        for rows, length in ((2, 4), (3, 7)):
            model(torch.randn(rows, length))
    return exportkit.export(model, observer)


def served(model, tmp_path):
    """Returns the lengths that the graph serves, rightly, of those that were recorded and others."""
    onnx_model, found = exported(model).to_onnx(tmp_path / "model.onnx"), set()
    assert onnx_model.verify().ok
    for length in LENGTHS:
        x = torch.randn(3, length)
        try:
            torch.testing.assert_close(onnx_model(x), model(x))
            found.add(length)
        except ArgumentError:
            pass
    return found


@pytest.mark.parametrize("cls", [OnTheModule, WithGet, Shared, LastTwo])
def test_tables_by_length_are_computed_in_the_graph(cls, tmp_path):
    assert served(cls(), tmp_path) == set(LENGTHS)


@pytest.mark.parametrize("cls", [OnTheModule, WithGet, InAList])
def test_a_length_with_an_entry_of_its_own_is_refused(cls, tmp_path):
    entries = {length: torch.ones(length) for length in (5, 8, 12)}
    assert served(cls(entries), tmp_path) == set(LENGTHS) - entries.keys()


def test_lengths_in_a_set_are_refused_where_they_matter(tmp_path):
    assert served(InASet(), tmp_path) == set(LENGTHS) - {5, 9}


def test_sizes_that_would_be_one_key_are_refused(tmp_path):
    onnx_model = exported(CountsSizes()).to_onnx(tmp_path / "model.onnx")
    assert onnx_model.verify().ok
    assert onnx_model(torch.ones(2, 5)).max() == 2
    with pytest.raises(ArgumentError):
        onnx_model(torch.ones(5, 5))


def test_the_error_about_an_entry_names_no_line_of_exportkit(tmp_path):
    onnx_model = exported(WithGet({5: torch.ones(5)})).to_onnx(tmp_path / "model.onnx")
    with pytest.raises(ArgumentError, match="x_axis_1 != 5, got 5") as caught:
        onnx_model(torch.ones(2, 5))
    assert "size_keys.py" not in str(caught.value)


def test_a_dictionary_that_is_out_of_sight_is_no_key_by_length():
    with pytest.raises(ExportError, match="unhashable"):
        exported(Hidden({5: 2}))


def test_no_symbolic_size_stays_behind():
    model = OnTheModule()
    exported(model)
    exported(Shared())
    assert all(isinstance(length, int) for length in (*model.tables, *(length for length, _ in shared)))
