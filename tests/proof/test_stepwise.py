"""Several tokens on a state: a graph that goes on from it is right where the model itself starts anew."""

import pytest
import torch

import exportkit
from exportkit.overrides import replaced_attributes
from exportkit.proof.prove import STEPWISE
from exportkit.rewrites import table
from exportkit.rewrites.table import Rewrite


class Sum(torch.nn.Module):
    """Goes on from its state with a single token, and forgets it with several."""

    def forward(self, values, state):
        kept = state if state is not None and values.shape[1] == 1 else torch.zeros_like(values[:, 0])
        return kept[:, None] + values.cumsum(1)


class Forgetful(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.sum = torch.nn.Embedding(9, 3), Sum()

    def forward(self, ids, state=None):
        total = self.sum(self.embed(ids), state)
        return {"total": total, "state": total[:, -1]}


def remembering(_self, values, state):
    return values.cumsum(1) if state is None else state[:, None] + values.cumsum(1)


@pytest.fixture
def model_and_observer():
    model, observer = Forgetful().eval(), exportkit.InputObserver()
    with observer(model):
        state = model(torch.randint(9, (2, 5)))["state"]
        model(torch.randint(9, (2, 1)), state=state)
    return model, observer


def test_a_graph_that_goes_on_from_the_state_is_proven_token_by_token(model_and_observer, monkeypatch, tmp_path):
    model, observer = model_and_observer
    rewrite = Rewrite("goes on", lambda _model: replaced_attributes(Sum, {"forward": remembering}))
    monkeypatch.setattr(table, "REWRITES", (rewrite,))
    report = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx").verify()
    assert report.ok, str(report)
    several = [row for row in report.rows if row.kind == "unseen" and row.sizes["sequence"] > 1 and row.sizes["batch"]]
    assert {row.where for row in several} == {STEPWISE}


def test_a_graph_that_is_wrong_token_by_token_too_is_not_proven(model_and_observer, monkeypatch, tmp_path):
    def doubled(_self, values, state):
        return 2 * remembering(_self, values, state)

    model, observer = model_and_observer
    rewrite = Rewrite("wrong", lambda _model: replaced_attributes(Sum, {"forward": doubled}))
    monkeypatch.setattr(table, "REWRITES", (rewrite,))
    report = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx").verify()
    assert {row.status for row in report.rows if min(row.sizes.values()) > 1 or row.kind == "recorded"} == {"differs"}
