"""What leaves the domain in a proof, because it comes of sizes; and what does not, because it comes of values."""

import pytest
import torch

from exportkit.running.program import ProgramRunner
from exportkit.running.session import SessionRunner
from tests.proof.test_prove import Doubled, exported


@pytest.fixture
def faulty(monkeypatch):
    """Returns a function that adds one to the results of all graphs of a kind where a condition holds."""

    def changed(runner, is_wrong):
        name = "run" if runner is SessionRunner else "__call__"
        right = getattr(runner, name)

        def run(self, given):
            return {path: tensor + bool(is_wrong(tensor)) for path, tensor in right(self, given).items()}

        monkeypatch.setattr(runner, name, run)

    return changed


def small_in_the_first_row():
    """Calls in which the first row, which a call with one row gets, has smaller values than all others."""
    return [(torch.rand(n, length) + (torch.arange(n) > 0)[:, None] * 5.0,) for n, length in ((2, 5), (3, 7))]


@pytest.mark.parametrize("stages", [[SessionRunner], [SessionRunner, ProgramRunner]])
def test_values_that_show_at_a_small_size_first_are_not_a_matter_of_that_size(stages, tmp_path, faulty):
    for stage in stages:
        faulty(stage, lambda result: result.mean() < 2.5)
    report = exported(Doubled(), small_in_the_first_row(), tmp_path / "model.onnx").verify()

    assert not report.ok
    wrong = next(row for row in report.rows if row.label == "values of batch = 1")
    assert (wrong.status, wrong.sizes["batch"]) == ("differs", 2)


def test_of_two_small_sizes_the_one_that_differs_leaves_the_domain(tmp_path, faulty):
    faulty(SessionRunner, lambda result: result.shape[1] == 1 and result.max() < 2.5)
    onnx_model = exported(Doubled(), small_in_the_first_row(), tmp_path / "model.onnx")

    assert onnx_model.verify().ok
    assert [pattern.sizes for pattern in onnx_model.domain.patterns] == [{"batch": 1}]


class Probability(torch.nn.Module):
    def forward(self, x):
        return x[:, 0].sigmoid()


def test_the_error_of_a_small_probability_does_not_exclude_a_single_row(tmp_path):
    calls = [(torch.tensor([[-5.0], [4.0], [3.0]])[:n],) for n in (2, 3)]
    onnx_model = exported(Probability(), calls, tmp_path / "model.onnx")

    assert onnx_model.verify().ok
    assert [pattern.sizes for pattern in onnx_model.domain.patterns] == [{"batch": 1}]


class Distances(torch.nn.Module):
    def forward(self, x, factor):
        return torch.cdist(x, x) * factor


def test_distances_of_many_rows_are_proven_within_the_rounding_of_the_model(tmp_path):
    torch.manual_seed(2)
    calls = [(torch.randn(2, n, 8), torch.ones(1)) for n in (40, 30)]
    assert exported(Distances(), calls, tmp_path / "model.onnx").verify().ok
