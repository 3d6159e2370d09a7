"""Decisions by the values of tensors that a graph need not make, or that it makes, or asserts."""

import contextlib
import math

import pytest
import torch

import exportkit
from exportkit.errors import RuntimeFailure

CALLS = [torch.tensor([[1, 7, 3], [4, 1, 7]]), torch.tensor([[8, 1, 3, 5, 8], [1, 8, 4, 4, 2], [1, 2, 3, 4, 5]])]


class Marked(torch.nn.Module):
    """Gives some tokens a row of their own, if they occur."""

    def __init__(self, shift):
        super().__init__()
        self.embed, self.rows, self.shift = torch.nn.Embedding(10, 4), torch.nn.Parameter(torch.randn(2, 4)), shift

    def forward(self, tokens):
        result = self.embed(tokens)
        for number, value in enumerate((7, 8)):
            mask = tokens == value
            if mask.any():
                result[mask] = self.rows[number]
                result = result + self.shift
        return result


def observed(model):
    torch.manual_seed(0)
    observer = exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for tokens in CALLS:
            model(tokens)
    return observer


def test_an_assignment_to_places_of_a_mask_needs_no_decision(tmp_path):
    model = Marked(0.0).eval()
    exported = exportkit.export(model, observed(model))
    onnx_model = exported.to_onnx(tmp_path / "model.onnx")
    assert onnx_model.verify().ok
    for tokens in (torch.tensor([[1, 2, 3, 4]]), torch.tensor([[7, 8], [8, 1]])):
        torch.testing.assert_close(onnx_model(tokens), model(tokens).detach())
    assert type(model(CALLS[0]).any()) is torch.Tensor
    assert "__bool__" not in vars(torch.Tensor)


def test_a_graph_chooses_where_a_branch_changes_the_result(tmp_path):
    model = Marked(1.0).eval()
    exported = exportkit.export(model, observed(model))
    assert str(exported.attempts[-1]) == "all recorded paths: succeeded"
    assert any("both results of decisions by values (test_branches.py:" in str(item) for item in exported.plan.findings)
    onnx_model = exported.to_onnx(tmp_path / "model.onnx")
    assert onnx_model.verify().ok
    for tokens in ([[1, 2, 3, 4]], [[7, 2], [1, 1]], [[7, 8], [8, 1]], [[8, 8, 8]]):
        torch.testing.assert_close(onnx_model(torch.tensor(tokens)), model(torch.tensor(tokens)).detach())
    assert "__bool__" not in vars(torch.Tensor)


class Deciding(torch.nn.Module):
    """Calls a function with a linear layer and its input."""

    def __init__(self, function):
        super().__init__()
        self.layer, self.function = torch.nn.Linear(4, 4), function

    def forward(self, x):
        return self.function(self.layer, x)


def exported_with_decisions(function):
    torch.manual_seed(0)
    model, observer = Deciding(function).eval(), exportkit.InputObserver()
    with observer(model), torch.no_grad():
        model(torch.randn(2, 4))
        model(torch.randn(3, 4))
    return model, exportkit.export(model, observer)


def with_places_of_a_mask(layer, x):
    result, mask = layer(x), x > 0
    if torch.any(mask):  # in every recorded call
        result[mask] = result[mask] * 2
    return result


def without_a_full_mask(layer, x):
    mask = x > -9
    if mask.all():
        return layer(x)
    return layer(torch.where(mask, x, 0.0))


@pytest.mark.parametrize("function", [with_places_of_a_mask, without_a_full_mask])
def test_a_branch_may_be_taken_if_it_changes_nothing_for_an_emptied_mask(function):
    model, exported = exported_with_decisions(function)
    for x in (torch.randn(4, 4), -torch.rand(2, 4), -20 * torch.rand(5, 4)):
        torch.testing.assert_close(exported.program.module(check_guards=False)(x=x), model(x))


def checked(layer, x):
    if torch.isnan(x).any() or x.min() < -100:
        text = "not a number"
        raise ValueError(text)
    assert (x < 100).all()
    assert x.max() < 100
    return layer(x)


def test_a_check_is_asserted_and_named():
    model, exported = exported_with_decisions(checked)
    x = torch.randn(4, 4)
    program = exported.program.module(check_guards=False)
    torch.testing.assert_close(program(x=x), model(x))
    for outside in (x + 200, torch.full((4, 4), math.nan), x - 300):
        with pytest.raises((ValueError, AssertionError)):
            model(outside)
        with pytest.raises(RuntimeError):
            program(x=outside)
    assert any(
        "checks of values as assertions (test_branches.py:" in str(finding) for finding in exported.plan.findings
    )


def with_an_error_that_is_caught(layer, x):
    try:
        if (x > 20).any():
            raise ValueError("too large")
    except ValueError:
        return x
    return layer(x)


def with_an_error_inside_a_branch(layer, x):
    large = x[x > 20]
    if (x > 20).any():
        if large.numel() == 0:
            raise ValueError("none")
        return layer(x) + large.mean()
    return layer(x)


def with_a_limit_that_no_call_reached(layer, x):
    result = layer(x)
    if torch.isinf(result).any():
        result = result.clamp(-1000, 1000)
    return result


def until_nothing_is_left(layer, x):
    mask, masks = x > 1, []
    while mask.any():
        x = torch.where(mask, x / 2, x)
        mask = x > 1
        masks.append(mask)
    return layer(x)


@pytest.mark.parametrize(
    ("function", "other"),
    [
        (with_an_error_that_is_caught, 30.0),
        (with_an_error_inside_a_branch, 30.0),
        (with_a_limit_that_no_call_reached, math.inf),
        (until_nothing_is_left, 300.0),
    ],
)
def test_a_decision_that_matters_goes_as_in_the_recorded_calls(function, other, tmp_path):
    model, exported = exported_with_decisions(function)
    assert any("asserted to be as in all recorded calls" in str(finding) for finding in exported.plan.findings)
    onnx_model = exported.to_onnx(tmp_path / "model.onnx")
    x = -torch.rand(4, 4) if function is not until_nothing_is_left else torch.full((4, 4), 1.5)
    torch.testing.assert_close(onnx_model(x), model(x).detach())
    x[0, 0] = other
    with pytest.raises(RuntimeFailure, match="refused"):
        onnx_model(x)


MARK = 5


class Scattered(torch.nn.Module):
    """Puts rows in the places of a mark, after a check that there is one row for each mark."""

    def __init__(self, check):
        super().__init__()
        self.layer, self.check = torch.nn.Linear(8, 8), check

    def forward(self, tokens, embedded, rows):
        mask = tokens == MARK
        self.check(mask, embedded, rows)
        return self.layer(embedded).masked_scatter(mask[..., None].expand_as(embedded), rows)


def counted(mask, _embedded, rows):
    if mask.sum().item() != rows.shape[0]:
        raise ValueError("as many rows as marks are needed")


def selected(mask, embedded, rows):
    if rows is not None and embedded[mask].numel() != rows.numel():
        count = mask.sum()
        raise ValueError(f"{count} marks")


def one_of_several(mask, embedded, rows):
    if not (int(mask.sum()) == len(rows) and rows.shape[1] == embedded.shape[2]):
        raise ValueError("as many rows as marks are needed")


def asked_for_zero(mask, _embedded, rows):
    left_over = mask.sum().item() - rows.shape[0]
    if left_over:
        raise ValueError("as many rows as marks are needed")


def refused_otherwise(mask, _embedded, rows):
    if mask.sum().item() == rows.shape[0]:
        pass
    else:
        raise ValueError("as many rows as marks are needed")


def marked_call(batch, length, count):
    tokens = torch.randint(6, 20, (batch, length))
    tokens.view(-1)[torch.randperm(batch * length)[:count]] = MARK
    return tokens, torch.randn(batch, length, 8), torch.randn(count, 8)


def exported_with_marks(check):
    torch.manual_seed(0)
    model, observer = Scattered(check).eval(), exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for sizes in ((2, 6, 3), (3, 8, 5)):
            model(*marked_call(*sizes))
    return model, exportkit.export(model, observer)


@pytest.mark.parametrize("check", [counted, selected, one_of_several, asked_for_zero, refused_otherwise])
def test_a_check_of_a_number_is_asserted(check, tmp_path):
    model, exported = exported_with_marks(check)
    onnx_model = exported.to_onnx(tmp_path / "model.onnx")
    assert onnx_model.verify().ok
    tokens, embedded, rows = marked_call(4, 7, 6)
    torch.testing.assert_close(onnx_model(tokens, embedded, rows), model(tokens, embedded, rows).detach())
    fewer = torch.where(torch.arange(7) < 3, 0, tokens)
    with pytest.raises((ValueError, AssertionError)):
        model(fewer, embedded, rows)
    with pytest.raises(RuntimeFailure):
        onnx_model(fewer, embedded, rows)
    assert torch.SymBool.__bool__.__module__ == "torch"


def caught_inside(mask, _embedded, rows):
    try:
        if mask.sum().item() != rows.shape[0]:
            raise ValueError("as many rows as marks are needed")
    except ValueError:
        mask.fill_(False)


def caught_by_a_caller(mask, embedded, rows):
    with contextlib.suppress(ValueError):
        counted(mask, embedded, rows)


def decided_by_another_number(mask, _embedded, rows):
    if mask.sum().item() > rows.shape[0] and mask.any(1).sum().item() > rows.shape[0]:
        raise ValueError("more rows are needed")


@pytest.mark.parametrize("check", [caught_inside, caught_by_a_caller, decided_by_another_number])
def test_a_check_with_another_way_out_is_a_decision(check, tmp_path):
    model, exported = exported_with_marks(check)
    onnx_model = exported.to_onnx(tmp_path / "model.onnx")
    tokens, embedded, rows = marked_call(4, 7, 6)
    torch.testing.assert_close(onnx_model(tokens, embedded, rows), model(tokens, embedded, rows).detach())
    with pytest.raises(RuntimeFailure):
        onnx_model(torch.full_like(tokens, MARK), embedded, rows)


class Limited(torch.nn.Module):
    """Checks a number, if it is told to, and decides by sizes."""

    def __init__(self, counts):
        super().__init__()
        self.counts = counts

    def forward(self, x, marks):
        if self.counts and marks.sum().item() > x.shape[0]:
            raise ValueError("more rows are needed")
        torch._check(x.shape[1] <= 40)
        return x * 2 if x.shape[0] > 64 else x + marks.any()


@pytest.mark.parametrize("counts", [False, True])
def test_conditions_on_sizes_are_those_of_the_lines_of_the_model(counts):
    model, observer = Limited(counts), exportkit.InputObserver()
    with observer(model):
        for rows in (3, 4):
            model(torch.randn(rows, rows + 2), torch.tensor([True, False, True]))
    conditions = {condition.text: condition for condition in exportkit.export(model, observer).domain.conditions}
    assert conditions.keys() == {"batch <= 64", "x_axis_1 <= 40"}
    for condition in conditions.values():
        assert condition.own
        assert condition.place.startswith(__file__)


def limited(layer, x):
    result = layer(x)
    if (x < -9).any():
        return result + x.clamp(-1e5, 1e30)
    return result + x


def wrapped(layer, x):
    tokens = x.abs().to(torch.int64) if x.is_floating_point() else x
    if (tokens < 0).any():
        tokens = tokens % 8
    return layer(torch.ones(4)) + tokens


@pytest.mark.parametrize(("function", "values"), [(limited, torch.rand(3, 4)), (wrapped, torch.arange(8).view(2, 4))])
def test_a_branch_that_changes_nothing_for_the_recorded_values_is_not_taken_for_others(function, values, tmp_path):
    model, observer = Deciding(function).eval(), exportkit.InputObserver()
    with observer(model):
        model(values)
        model(values[:1].repeat(5, 1))
    onnx_model = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    torch.testing.assert_close(onnx_model(values[:1]), model(values[:1]).detach())
    with pytest.raises(RuntimeFailure, match="refused"):
        onnx_model(values - 20)
