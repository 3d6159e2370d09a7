"""Layers that are alike are translated once, and the file is the one that translating all of them gives."""

from __future__ import annotations

from collections import Counter

import onnx
import pytest
import torch
from torch.utils._pytree import tree_leaves

import exportkit
from exportkit.onnx_files import repeated_layers


class Block(torch.nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = (
            torch.nn.LayerNorm(size),
            torch.nn.Linear(size, 12),
            torch.nn.Linear(12, size),
        )

    def forward(self, hidden, past, scale=1.0):
        keys = torch.cat([past, self.norm(hidden)], 1)
        mask = torch.ones(keys.shape[1], hidden.shape[1], dtype=torch.bool).tril(keys.shape[1] - hidden.shape[1])
        scores = (hidden @ keys.mT * scale).masked_fill(~mask.T, -1e4).softmax(-1)
        return hidden + self.outer(torch.relu(self.inner(scores @ keys))), keys


class Deep(torch.nn.Module):
    """Two kinds of layers, each with a cache of its own length, and all hidden states as outputs."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Block(8) for _ in range(layers)])

    def forward(self, hidden, caches):
        states, kept = [], []
        for number, (layer, past) in enumerate(zip(self.layers, caches, strict=True)):
            hidden, keys = layer(hidden, past, 0.5 if number % 2 else 1.0)
            states.append(hidden)
            kept.append(keys)
        return hidden.tanh() + states[0], states, kept


class Writer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, hidden, total):
        hidden = self.linear(hidden) + total.mean()
        total.add_(hidden)
        return hidden


class Writing(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([Writer() for _ in range(3)])

    def forward(self, hidden):
        total = torch.zeros_like(hidden)
        for layer in self.layers:
            hidden = layer(hidden, total)
        return total * hidden


def exported(model, *calls):
    observer = exportkit.InputObserver()
    with torch.no_grad(), observer(model):
        for call in calls:
            model(*call)
    return exportkit.export(model, observer)


def deep(layers):
    calls = [
        (torch.randn(b, s, 8), [torch.randn(b, p + i, 8) for i in range(layers)]) for b, s, p in ((2, 3, 4), (3, 5, 2))
    ]
    return exported(Deep(layers).eval(), *calls)


@pytest.fixture
def translated(monkeypatch):
    """How many nodes torch.onnx was given, one entry for each translation."""
    counts = []
    export = torch.onnx.export

    def counting(program, *args, **kwargs):
        counts.append(len(program.graph.nodes))
        return export(program, *args, **kwargs)

    monkeypatch.setattr(torch.onnx, "export", counting)
    return counts


def operators(path):
    graph = onnx.load(path).graph
    return Counter(node.op_type for node in graph.node), {value.name for value in graph.initializer}


def test_a_deeper_model_gives_the_translation_no_more_nodes(translated, tmp_path):
    proven = [deep(layers).to_onnx(tmp_path / f"{layers}.onnx").verify().ok for layers in (4, 8)]
    assert proven == [True, True]
    shallow, deeper = translated
    assert deeper - shallow <= 12  # the inputs of the other layers; a layer has more nodes than that
    assert {f"layers.{number}.inner.bias" for number in range(8)} <= operators(tmp_path / "8.onnx")[1]


def test_the_file_is_that_of_a_translation_of_all_layers(monkeypatch, tmp_path):
    export = deep(4)
    quick = export.to_onnx(tmp_path / "quick.onnx")
    monkeypatch.setattr(repeated_layers, "LikeLayers", lambda *_: (_ for _ in ()).throw(repeated_layers.NotRepeated))
    slow = export.to_onnx(tmp_path / "slow.onnx")
    assert operators(quick.path)[0] == operators(slow.path)[0]
    assert quick.inputs == slow.inputs
    assert quick.outputs == slow.outputs
    call = (torch.randn(4, 2, 8), [torch.randn(4, 6 + i, 8) for i in range(4)])
    for one, other in zip(tree_leaves(quick(*call)), tree_leaves(slow(*call)), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


class Batched(torch.nn.Module):
    """Takes a dict in which some values are None, as the batches of a data loader are."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([Block(8) for _ in range(4)])

    def forward(self, batch):
        hidden = batch["hidden"]
        for layer in self.layers:
            hidden, _ = layer(hidden, hidden if batch["past"] is None else batch["past"])
        return hidden


def test_inputs_that_are_none_are_not_in_the_graph(translated, tmp_path):
    batches = [{"hidden": torch.randn(batch, length, 8), "past": None} for batch, length in ((2, 3), (3, 5))]
    onnx_model = exported(Batched().eval(), *((batch,) for batch in batches)).to_onnx(tmp_path / "model.onnx")
    assert onnx_model.verify().ok
    assert len(translated) == 1


def test_layers_that_write_to_one_tensor_are_all_translated(tmp_path):
    onnx_model = exported(Writing().eval(), (torch.randn(2, 4),), (torch.randn(3, 4),)).to_onnx(tmp_path / "w.onnx")
    assert onnx_model.verify().ok
