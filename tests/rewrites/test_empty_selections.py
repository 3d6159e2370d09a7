"""Branches for selections that may be empty: skipped where that changes nothing, and refused where it does."""

import sys

import pytest
import torch

import exportkit
from exportkit.errors import RuntimeFailure

functional = torch.nn.functional


class Experts(torch.nn.Module):
    """Each token goes through two of four experts; subclasses say how."""

    def __init__(self):
        super().__init__()
        self.gate = torch.nn.Linear(8, 4, bias=False)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        tokens = x.flatten(0, 1)
        weights, chosen = self.gate(tokens).softmax(-1).topk(2)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            self.add(out, tokens, weights, chosen == number, expert)
        return out.view_as(x)


class Rows(Experts):
    def add(self, out, tokens, weights, mask, expert):
        rows, places = torch.where(mask)
        if rows.shape[0] == 0:
            return
        out.index_add_(0, rows, expert(tokens[rows]) * weights[rows, places, None])


class Sums(Experts):
    def add(self, out, tokens, weights, mask, expert):
        rows = mask.any(-1)
        if rows.sum() == 0:
            return
        out[rows] += expert(tokens[rows]) * (weights * mask).sum(-1)[rows, None]


class Counts(Experts):
    def add(self, out, tokens, weights, mask, expert):
        rows, places = mask.nonzero(as_tuple=True)
        if rows.numel() > 0:
            out[rows] += expert(tokens[rows]) * weights[rows, places, None]


class Counted(Experts):
    def forward(self, x):
        tokens = x.flatten(0, 1)
        weights, chosen = self.gate(tokens).softmax(-1).topk(2)
        out = torch.zeros_like(tokens)
        counts = torch.bincount(chosen.flatten(), minlength=4).tolist()
        for number, expert in enumerate(self.experts):
            if counts[number] == 0:
                continue
            rows, places = torch.where(chosen == number)
            out[rows] += expert(tokens[rows]) * weights[rows, places, None]
        return out.view_as(x)


class Sorted(Experts):
    """Tokens in the order of their experts, with the numbers of tokens as an array of NumPy."""

    def forward(self, x):
        tokens = x.flatten(0, 1)
        weights, chosen = self.gate(tokens).softmax(-1).topk(2)
        order = chosen.view(-1).argsort(stable=True)
        counts = chosen.new_zeros(len(chosen), 4).scatter_(1, chosen, 1).sum(0).cpu().numpy()
        outputs, start = [], 0
        for number, count in enumerate(counts):
            end = start + count
            if count == 0:
                continue
            outputs.append(self.experts[number](tokens[order[start:end] // 2]))
            start = end
        outputs = torch.cat(outputs)
        restored = torch.empty_like(outputs)
        restored[order] = outputs
        return (restored.view(*chosen.shape, -1) * weights[..., None]).sum(1).view_as(x)


@pytest.mark.parametrize("kind", [Rows, Sums, Counts, Counted, Sorted])
def test_experts_without_tokens_add_nothing(kind, tmp_path):
    model, observer, tracing = kind(), exportkit.InputObserver(), sys.gettrace()
    with observer(model):
        for batch, length in ((2, 5), (3, 7)):
            model(torch.randn(batch, length, 8))
    graph = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    assert sys.gettrace() is tracing
    assert graph.verify().ok
    for x in (torch.randn(1, 1, 8), torch.randn(2, 1, 8), torch.randn(1, 30, 8)):
        torch.testing.assert_close(graph(x), model(x).detach())


def summed(x):
    selected = x[x > 0]
    if not len(selected):
        return torch.zeros(())
    return selected.sum()


def averaged(x):
    selected = x[x > 0]
    if not len(selected):
        return torch.zeros(())
    return selected.mean()


def counted(x):
    if (x > 0).sum().item() == 0:
        return x.sum() * 0
    return x.relu().sum() / (x > 0).sum()


class Of(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def observed(function):
    model, observer = Of(function), exportkit.InputObserver()
    with observer(model):
        for shape in ((3, 5), (4, 6)):
            model(torch.randn(*shape))
    return model, observer


def test_a_sum_of_nothing_is_zero_in_any_case(tmp_path):
    model, observer = observed(summed)
    graph = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    assert graph.verify().ok
    for x in (-torch.rand(2, 4), torch.rand(2, 4)):
        torch.testing.assert_close(graph(x), model(x))


@pytest.mark.parametrize("function", [averaged, counted])
def test_what_is_something_else_for_nothing_is_refused(function, tmp_path):
    model, observer = observed(function)
    graph = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    x = torch.randn(5, 7)
    torch.testing.assert_close(graph(x), model(x))
    with pytest.raises(RuntimeFailure, match="refused"):
        graph(-torch.rand(2, 4))
