"""flex_attention: the graph has its masks and modifications of scores, and torch stays as it was."""

import pytest
import torch
from torch.nn.attention import flex_attention as module
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

import exportkit
from exportkit.running.eager import nothing_compiled

compiled = torch.compile(flex_attention, backend="eager")


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(16, 48)
        self.distances = torch.nn.Embedding(9, 4)
        self.features = torch.nn.Parameter(torch.randn(8, 3))

    def heads(self, x):
        return self.project(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4).unbind(0)


class Documents(Attention):
    """Causal attention inside of documents, with a window; token 0 sees nothing."""

    def forward(self, x, document):
        def sees(b, h, i, j):
            return (i >= j) & (i - j < 5) & (document[b, i] == document[b, j]) & (document[b, j] > 0)

        mask = create_block_mask(sees, x.shape[0], None, x.shape[1], x.shape[1], device=x.device)
        return compiled(*self.heads(x), block_mask=mask)


class Biases(Attention):
    """Scores with a table of distances, a product of learned features, and a soft cap; rows have lengths."""

    def forward(self, x, lengths):
        def score(value, b, h, i, j):
            value = value + self.distances.weight[(i - j + 4).clamp(0, 8), h]
            return 10 * torch.tanh((value + (self.features[i % 8] * self.features[j % 8]).sum(-1)) / 10)

        mask = create_block_mask(lambda b, h, i, j: j < lengths[b], x.shape[0], None, x.shape[1], x.shape[1], "cpu")
        return flex_attention(*self.heads(x), score_mod=score, block_mask=mask)


class Statistics(Attention):
    """Few heads of keys, and what else flex_attention returns."""

    def forward(self, x, scale):
        query, key, value = self.heads(x)
        output, others = flex_attention(
            query * scale, key[:, :2], value[:, :2], enable_gqa=True, return_aux=AuxRequest(lse=True)
        )
        return output, others.lse


CASES = [
    (Documents, lambda rows, length: torch.randint(0, 3, (rows, length))),
    (Biases, lambda rows, length: torch.randint(1, length + 1, (rows,))),
    (Statistics, lambda rows, length: torch.rand(rows, 1, 1, 1)),
]


@pytest.mark.parametrize(("cls", "other"), CASES)
def test_flex_attention_is_exported(cls, other, tmp_path):
    torch.manual_seed(0)
    model, observer = cls().eval(), exportkit.InputObserver()
    with torch.no_grad(), observer(model):
        for rows, length in ((2, 7), (3, 9)):
            model(torch.randn(rows, length, 16), other(rows, length))
    before = dict(vars(module))
    graph = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    report = graph.verify()
    assert report.ok, report
    assert vars(module) == before
    for rows, length in ((1, 130), (4, 1)):  # more than a block; one token
        inputs = torch.randn(rows, length, 16), other(rows, length)
        with torch.no_grad():
            expected = model(*inputs)
        torch.testing.assert_close(graph(*inputs), expected, rtol=1e-4, atol=1e-5)


def test_functions_are_compiled_again_after_runs_that_overlap():
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    function = torch.compile(lambda x: x * 2 + 1, backend=backend)
    first, second = nothing_compiled(), nothing_compiled()
    first.__enter__()
    second.__enter__()
    function(torch.ones(3))
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert not graphs
    function(torch.ones(3))
    assert len(graphs) == 1
