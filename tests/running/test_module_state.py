"""What modules hold is as it was after exportkit has run, traced and proven a model, whatever it does with it."""

import types

import pytest
import torch
from torch import nn

import exportkit
from exportkit.running.module_state import ModuleState, modules_kept


class Keeps(nn.Module):
    """Keeps something in all the places that models keep things in."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))
        self.calls, self.seen, self.table = 0, [], {}
        self.cache = types.SimpleNamespace(last=None, window=torch.zeros(3))
        self.writes = True

    def forward(self, x):
        self.steps += 1
        self.calls += 1
        self.seen.append(x)
        self.table["sum"] = x.sum()
        self.cache.last = x
        if self.writes:
            self.cache.window[0] += 1
        return x * 2


def held(model):
    cache = model.cache
    plain = model.calls, len(model.seen), model.table.get("sum"), cache.last
    return *plain, model.steps.item(), cache.window.tolist(), [type(each) for each in model.seen]


def test_everything_that_a_call_changes_is_named_and_restored():
    model = Keeps()
    before = held(model)
    with modules_kept(model):
        state = ModuleState(model)
        model(torch.ones(2))
        changed = ["calls", "cache.last", "seen", "table.sum", "steps", "cache.window"]
        assert sorted(state.changed()) == sorted(changed)
    assert held(model) == before


def test_a_large_tensor_is_restored_too():
    model = Keeps()
    model.cache.window = torch.zeros(2**17)
    with modules_kept(model):
        model(torch.ones(2))
    assert model.cache.window[0] == 0


def test_nothing_is_restored_that_is_replaced_by_its_equal():
    model = Keeps()
    state = ModuleState(model)
    model.steps = model.steps.clone()
    model.table = {}
    assert state.changed() == []


@pytest.mark.runtime
def test_export_and_proof_leave_a_model_as_it_was(tmp_path):
    model, observer = Keeps(), exportkit.InputObserver()
    model.writes = False  # torch cannot export that
    with observer(model):
        for rows in (2, 3):
            model(torch.rand(rows, 4))
    before = held(model)
    report = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx").verify()
    assert report.ok
    assert held(model) == before
    (note,) = (note for note in report.findings if "changes" in note)
    assert all(name in note for name in ("steps", "calls", "seen", "table.sum", "cache.last"))
