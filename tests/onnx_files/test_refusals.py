"""A graph fails for the values that its model raises for, wherever in the model that is, and only for these."""

import math

import pytest
import torch
from torch.nn import functional as F

import exportkit
from exportkit.errors import ExportError, RuntimeFailure
from exportkit.onnx_files.refusals import with_refusals

X, ROWS = torch.randn, torch.arange


class Function(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x, index):
        return self.function(x, index)


def checked_late(x, index):
    result = x * 2
    torch._assert_async((index < 5).all(), "fewer than five")
    return result, result.sum(0)  # what is checked first is computed before


def checked_size(x, index):
    count = index.max().item()
    torch._check(count < 5)
    return x * count


def passed_on(x, index):
    torch._check(index.max().item() < 5)
    return {"first": x, "second": x + 1}  # the first result is an input


def counted(x, index):
    marked = index[index < 5]
    torch._check(marked.shape[0] == x.shape[0])
    return x + marked.sum()


def equal_sizes(x, index):
    rows = x[index < 5]
    torch._check(rows.numel() == x.numel())  # from here on, torch takes both sizes for the same
    return x + rows.sum()


def equal_number(x, index):
    count = index.max().item() + 1
    torch._check(count == x.shape[0])
    return x + torch.zeros(count, 1)


def booleans(x, index):
    torch._check(index.max().item() < 5)
    return x > 0


def limited_float(x, index):
    torch._check((index / 8).max().item() <= math.sqrt(x.shape[0]) / 3)
    return x * 2


def checked_tensor(x, index):
    torch._check_tensor_all(index < 5, lambda: "fewer than five")
    return x * 2


def written(x, index):
    torch._check(index.max().item() < 5)
    result = x.clone()
    view = result[:, 0]
    result += 1
    return view, result


def checked_in_a_loop(x, index):
    state = x[0]
    for i in range(x.shape[0]):
        assert index[i] < 5
        state = state * 0.5 + x[i]
    return state


def only_checked_in_a_loop(x, index):
    for place in index:
        assert place < 5
    return x * 2


def checked_in_an_inner_loop(x, index):
    states = []
    for row in x:
        state = row * 0
        for place in index:
            if place > 4:
                raise ValueError("out of range")
            state = state * 0.5 + row * place
        states.append(state)
    return torch.stack(states)


def raised_in_a_loop(x, index):
    before, state = math.inf, x[0]
    for row, place in zip(x, index, strict=True):
        if place - before > 3 or place < 0:
            raise ValueError("a place is too far from the one before")
        before = place
        state = state * 0.5 + row
    return state


def raised_beside_a_branch(x, index):
    states = []
    for number, row in enumerate(x):
        if index[number] > 4:
            raise ValueError(f"place {index[number]} is out of range")
        elif number > 1:  # noqa: RET506
            states.append(row * 2)
        else:
            states.append(row + index[number])
    return torch.stack(states)


def looked_up_in_a_loop(x, index):
    state = x[0]
    for row, place in zip(x, index, strict=True):
        state = state + F.embedding(place.where(place < 5, -1), x).sum(0) + row
    return state


FUNCTIONS = {
    function.__name__: function
    for function in (
        checked_late,
        checked_size,
        passed_on,
        counted,
        equal_sizes,
        equal_number,
        booleans,
        limited_float,
        checked_tensor,
        written,
        checked_in_a_loop,
        only_checked_in_a_loop,
        checked_in_an_inner_loop,
        raised_in_a_loop,
        raised_beside_a_branch,
        looked_up_in_a_loop,
    )
} | {
    "scattered in place": lambda x, index: x[:, 0].clone().index_copy_(0, index.where(index < 5, -1), x[:, 1]),
    "index_add": lambda x, index: x.index_add(0, torch.where(index > 4, -1, index.remainder(len(x))), x),
    "multi_margin_loss": lambda x, index: F.multi_margin_loss(x, index.where(index > 4, index.remainder(4))),
    "quantile": lambda x, index: x.quantile(index.max() / 4.0),
    "cholesky": lambda x, index: torch.linalg.cholesky(torch.eye(3) * (4.5 - index.max())),
    "max_unpool1d": lambda x, index: F.max_unpool1d(x.mT[:, : len(index)], index.where(index > 4, 0).expand(4, -1), 1),
    "bincount": lambda x, index: torch.bincount(4 - index, minlength=3) + x.sum(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_graph_fails_where_the_model_raises(name, tmp_path):
    torch.manual_seed(0)
    model, observer = Function(FUNCTIONS[name]), exportkit.InputObserver()
    calls = [(X(size, 4), ROWS(size)) for size in (2, 3)]
    with observer(model):
        for call in calls:
            model(*call)
    graph = exportkit.export(model, observer).to_onnx(tmp_path / "graph.onnx")
    assert graph.verify().ok
    for size in (1, 2, 4):
        expected, got = model(*(call := (X(size, 4), ROWS(size)))), graph(*call)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    invalid = X(4, 4), torch.tensor([0, 1, 2, 6])
    with pytest.raises((RuntimeError, IndexError, AssertionError, ValueError)):
        model(*invalid)
    with pytest.raises(RuntimeFailure):
        graph(*invalid)


def caught_around_a_loop(x, index):
    state = x[0]
    try:
        for row, place in zip(x, index, strict=True):
            if place == 77:
                raise ValueError("another way")
            state = state * 0.5 + row
    except ValueError:
        return x[0] * 7
    return state


def caught_around_an_inner_loop(x, index):
    try:
        return checked_in_an_inner_loop(x, index)
    except ValueError:
        return x * 7


@pytest.mark.parametrize("function", [caught_around_a_loop, caught_around_an_inner_loop])
def test_an_error_that_is_caught_around_a_loop_is_no_check(function, tmp_path):
    model, observer = Function(function), exportkit.InputObserver()
    with observer(model):
        for size in (2, 3):
            model(X(size, 4), ROWS(size))
    with pytest.raises(ExportError):
        exportkit.export(model, observer)


def test_numbers_of_experts_need_no_check():
    """Routers count in one_hot what topk has chosen; the check would cost a copy of the result."""

    class Router(torch.nn.Module):
        def forward(self, scores):
            return F.one_hot(scores.topk(2).indices.transpose(0, 1), 8)

    class Ids(torch.nn.Module):
        def forward(self, scores):
            return F.one_hot(scores.argmax(0), 8)

    program = torch.export.export(Router(), (X(3, 8),))
    assert with_refusals(program) is program
    shapes = {"scores": {0: torch.export.Dim.DYNAMIC}}
    assert with_refusals(other := torch.export.export(Ids(), (X(3, 8),), dynamic_shapes=shapes)) is not other


def test_a_condition_without_a_form_in_onnx_is_a_finding(tmp_path):
    def condition(x, index):
        torch._assert_async((torch.special.airy_ai(x) < 9).all(), "small")
        return x * len(index)

    model, observer = Function(condition), exportkit.InputObserver()
    with observer(model):
        for size in (2, 3):
            model(X(size, 4), ROWS(size))
    report = exportkit.export(model, observer).to_onnx(tmp_path / "graph.onnx").verify()
    assert report.ok
    (finding,) = [text for text in report.findings if "does not check" in text]
    assert "test_refusals.py:" in finding


def test_rows_without_columns_are_counted(tmp_path):
    model, observer = Function(lambda x, index: (index.max() - 2).nonzero()), exportkit.InputObserver()  # (rows, 0)
    with observer(model):
        for size in (2, 3):
            model(X(size, 4), ROWS(size))
    graph = exportkit.export(model, observer).to_onnx(tmp_path / "graph.onnx")
    report = graph.verify()
    assert report.ok
    assert not [text for text in report.findings if "does not check" in text]
    assert graph(X(3, 4), ROWS(3)).shape == (0, 0)


def test_saved_program_raises_as_well(tmp_path):
    model, observer = Function(checked_size), exportkit.InputObserver()
    with observer(model):
        for size in (2, 3):
            model(X(size, 4), ROWS(size))
    exportkit.export(model, observer).save_program(tmp_path / "model.pt2")
    program = torch.export.load(tmp_path / "model.pt2").module()
    assert program(X(4, 4), ROWS(4))[0].shape == (4, 4)
    with pytest.raises(RuntimeError):
        program(X(4, 4), ROWS(4) + 3)


class LargestOfSelected(torch.nn.Module):
    def forward(self, x):
        selected = x[x[:, 0] > 0.5]
        return selected.amax(0), selected.max(0).indices, selected.argmin(), selected.argmax(1).sum()


def test_a_graph_fails_where_no_element_is_left_to_reduce(tmp_path):
    model, observer = LargestOfSelected(), exportkit.InputObserver()
    with observer(model):
        model(torch.rand(20, 4))
        model(torch.rand(30, 4))
    graph = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    assert graph.verify().ok
    x = torch.rand(3, 4) / 4 + torch.eye(3, 4)
    assert [torch.equal(*pair) for pair in zip(graph(x), model(x), strict=True)] == [True] * 4
    with pytest.raises(exportkit.errors.RuntimeFailure):
        graph(torch.rand(3, 4) / 4)
