"""What a proof allows for: rounding as the model has it, ties, and padding; and what it does not."""

import pytest
import torch

import exportkit
from exportkit import load
from exportkit.proof import leeway
from tests.proof.test_prove import exported


class Function(torch.nn.Module):
    """Calls a function of one tensor, times a factor that can be changed after the export."""

    def __init__(self, function):
        super().__init__()
        self.function, self.factor = function, 1.0

    def forward(self, x):
        return self.function(x) * self.factor


class WithMask(torch.nn.Module):
    """Calls a function of a tensor and a mask."""

    def __init__(self, function):
        super().__init__()
        self.function, self.factor = function, 1.0

    def forward(self, x, attention_mask):
        return self.function(self, x, attention_mask)


def inputs(scale=1.0):
    return [(torch.randn(2, 5, 6) * scale,), (torch.randn(3, 7, 6) * scale,)]


def masked(mask, hidden=0):
    calls = []
    for length, padding in ((5, [[2], [0]]), (7, [[3], [0], [1]])):
        is_hidden = torch.arange(length) < torch.tensor(padding)
        kept = mask.new_ones(is_hidden.shape) if hidden == 0 else mask.new_zeros(is_hidden.shape)
        calls.append((torch.randn(*is_hidden.shape, 6), kept.masked_fill(is_hidden, hidden)))
    return calls


SMOOTH = {
    "linear": lambda x: torch.nn.functional.linear(x, torch.arange(24.0).reshape(4, 6) / 7 - 1),
    "softmax": lambda x: x.softmax(-1),
    "standardised": lambda x: torch.nn.functional.layer_norm(x, (6,)),
    "sum of all": lambda x: x.sum((1, 2)),
}


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e3, 1e6])
@pytest.mark.parametrize("name", SMOOTH)
def test_no_false_alarm_and_nothing_missed_at_any_scale(name, scale, tmp_path):
    model = Function(SMOOTH[name])
    onnx_model = exported(model, inputs(scale), tmp_path / "model.onnx")

    assert onnx_model.verify().ok
    model.factor = 1.0005
    assert not onnx_model.verify().ok


class WrongForOneRow(torch.nn.Module):
    """What the trace sees differs from what a single row gets, by something small."""

    def forward(self, x):
        return (x * 3 if x.shape[0] == 1 else x - 1) * 1e-5


def test_a_small_output_that_is_wrong_for_one_row_is_not_proven(tmp_path):
    calls = [(torch.randn(2, 5),), (torch.randn(3, 7),)]
    try:
        onnx_model = exported(WrongForOneRow(), calls, tmp_path / "model.onnx")
    except exportkit.ExportkitError:  # a batch of 1 can be found to be outside of the domain before
        return
    report = onnx_model.verify()

    wrong = [row for row in report.rows if row.sizes.get("batch") == 1 and row.status == "proven"]
    assert not wrong


AMPLIFIED = {
    "cancellation": lambda x: (x.cumsum(1) + 1e4).mean(1) - 1e4,
    "rows that are almost constant": lambda x: torch.nn.functional.layer_norm(x * 1e-4 + 300, (6,), eps=1e-9),
    "differences": lambda x: x.softmax(-1).sum(-1) * 0.5 + x.logsumexp(-1),
}


@pytest.mark.parametrize("name", AMPLIFIED)
def test_rounding_that_a_model_amplifies_is_no_difference(name, tmp_path):
    assert exported(Function(AMPLIFIED[name]), inputs(), tmp_path / "model.onnx").verify().ok


def test_a_large_element_that_no_run_moved_may_be_off_as_others_relative_to_them():
    base = torch.rand(40, 40, dtype=torch.float32) + 0.5
    base[3, 4] = 1000.0
    moved = base.double() * 1e-5
    moved[3, 4] = 0.0
    allowed = leeway._allowed(base, moved, None)
    assert 10 * 1e-5 < allowed[3, 4] / base[3, 4] < 17 * 1e-5
    assert bool((leeway._allowed(base, torch.zeros_like(moved), None) == 0).all())


@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_indices_of_equal_values_are_equal(scale, tmp_path):
    class TopK(torch.nn.Module):
        def forward(self, x):
            values, indices = (x * scale).round().topk(3)
            return values, indices

    calls = [(torch.randint(0, 3, (2, 40)).float(),), (torch.randint(0, 3, (3, 40)).float(),)]
    report = exported(TopK(), calls, tmp_path / "model.onnx").verify()

    assert report.ok, str(report)
    assert not any("not compared" in row.where for row in report.rows)  # the order that ONNX has is known
    assert any("chooses among equal values" in row.where for row in report.rows)


def test_wrong_indices_are_a_difference_even_where_values_are_equal(tmp_path):
    class TopK(torch.nn.Module):
        offset = 0

        def forward(self, x):
            return x.round().topk(3).indices + self.offset

    model = TopK()
    calls = [(torch.randint(0, 3, (2, 40)).float(),), (torch.randint(0, 3, (3, 40)).float(),)]
    onnx_model = exported(model, calls, tmp_path / "model.onnx")
    model.offset = 1

    assert not onnx_model.verify().ok


def attended(model, x, mask):
    """A causal average; rows in which nothing is visible average over everything."""
    scores = torch.zeros(x.shape[0], x.shape[1], x.shape[1]).masked_fill(mask[:, None, :] == 0, -1e30)
    causal = torch.ones(x.shape[1], x.shape[1]).tril() == 0
    weights = scores.masked_fill(causal, -1e30).softmax(-1)
    hidden = torch.where(mask[..., None] == 0, x.mean(1, keepdim=True) * model.factor, x)
    return hidden + weights @ torch.where(mask[..., None] == 0, 0.0, x)


ONES = torch.ones(1, dtype=torch.int64)


def test_padding_is_left_out_where_it_depends_on_padding(tmp_path):
    model = WithMask(attended)
    onnx_model = exported(model, masked(ONES), tmp_path / "model.onnx")
    model.factor = 3.0

    report = onnx_model.verify()

    assert report.ok, str(report)
    assert any("are arbitrary in the model" in row.where for row in report.rows)


class WithTwoMasks(torch.nn.Module):
    """Returns what nobody defined at the positions that either mask hides."""

    factor = 1.0

    def forward(self, x, attention_mask, token_mask):
        first, second = attention_mask[..., None] == 0, token_mask[..., None] == 0
        for hidden in (first & ~second, second & ~first, first & second):
            x = torch.where(hidden, torch.where(hidden, x, 0.0).sum(1, keepdim=True) * self.factor, x)
        return x


def test_padding_of_two_masks_is_left_out(tmp_path):
    model = WithTwoMasks()
    calls = [(x, mask, mask.flip(1)) for x, mask in masked(ONES)]
    onnx_model = exported(model, calls, tmp_path / "model.onnx")
    model.factor = 3.0

    report = onnx_model.verify()

    assert report.ok, str(report)


def test_hidden_positions_that_are_well_defined_are_compared(tmp_path):
    model = WithMask(lambda model, x, mask: torch.where(mask[..., None] == 0, model.factor, x))
    onnx_model = exported(model, masked(ONES), tmp_path / "model.onnx")
    assert onnx_model.verify().ok
    model.factor = 0.0

    assert not onnx_model.verify().ok


def test_a_mask_that_hides_nothing_leaves_nothing_out(tmp_path):
    model = WithMask(lambda model, x, mask: (x * model.factor).cumsum(1) + mask[..., None])
    onnx_model = exported(model, masked(ONES), tmp_path / "model.onnx")
    model.factor = 2.0

    assert not onnx_model.verify().ok


@pytest.mark.parametrize("hidden", [-torch.inf, torch.finfo(torch.float32).min, -1e9])
def test_a_mask_that_is_added_to_scores_does_not_hide_everything(hidden, tmp_path):
    model = WithMask(lambda model, x, mask: x * model.factor + mask[..., None].clamp_min(-5))
    onnx_model = exported(model, masked(torch.ones(1), hidden), tmp_path / "model.onnx")
    assert onnx_model.verify().ok
    model.factor = 2.0

    assert not onnx_model.verify().ok


def test_a_result_that_is_rounding_alone_is_not_proven(tmp_path):
    def noise(x):
        y = torch.nn.functional.linear(x, torch.arange(36.0).reshape(6, 6) / 7)
        return (y.exp() + 1e6).log().mul(1e9).sin()

    model = Function(noise)
    onnx_model = exported(model, inputs(), tmp_path / "model.onnx")
    model.factor = 2.0
    report = onnx_model.verify()

    assert not report.ok
    assert any("nothing can be compared" in problem or "became" in problem for problem in report.problems())


@pytest.mark.parametrize("verify", [True, False])
def test_what_was_measured_is_saved_with_the_folder(verify, tmp_path):
    class TopK(torch.nn.Module):
        def forward(self, x):
            return x.round().topk(3).indices

    observer, model = exportkit.InputObserver(), TopK()
    with observer(model):
        for rows in (2, 3):
            model(torch.randint(0, 3, (rows, 40)).float())
    saved = exportkit.export(model, observer).save(tmp_path / "folder", verify=verify)

    assert saved.verify().ok
    assert load(tmp_path / "folder").verify().ok
    assert (tmp_path / "folder" / "measured.safetensors").exists()
