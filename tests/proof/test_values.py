"""Python values among the outputs: they follow sizes and values, and the proof compares them."""

import builtins
import collections

import pytest
import torch

import exportkit
from exportkit.errors import ExportError
from exportkit.trees import flatten
from tests.proof.test_random_numbers import Recurrent

pytestmark = pytest.mark.runtime
Patches = collections.namedtuple("Patches", "tokens height width")


class Returns(torch.nn.Module):
    """Returns what a function makes of its input."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def exported(function, *shapes):
    model, observer = Returns(function).eval(), exportkit.InputObserver()
    torch.manual_seed(0)
    with observer(model):
        for shape in shapes or ((2, 5), (3, 7)):
            model(torch.randn(shape))
    return model, exportkit.export(model, observer)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x * 2, x.shape[0]),
        lambda x: Patches(x.flatten()[None], x.shape[0] // 2, x.shape[1] % 4),
        lambda x: {"x": x * 2, "shape": x.shape, "half": x.shape[1] / 2, "long": x.shape[1] > 6, "count": 3},
        lambda x: (x * 2, [max(x.shape[0], 4), -x.shape[1] % 4, None], "text", torch.float16),
        lambda x: (x * 2, x.sum().item(), x.argmax().item(), (x > 0).any().item()),
        lambda x: (x * 2, (x > 0).sum().item() + x.shape[0]),
    ],
)
def test_they_follow_sizes_and_values_also_in_a_loaded_graph(function, tmp_path):
    model, traced = exported(function)
    onnx_model = traced.save(tmp_path / "out")
    for graph in (onnx_model, exportkit.load(tmp_path / "out")):
        for shape in ((2, 5), (6, 4), (4, 9)):
            x = torch.randn(shape)
            got, expected = graph(x), model(x)
            assert type(got) is type(expected)
            for leaf, wanted in zip(flatten(got).leaves, flatten(expected).leaves, strict=True):
                assert type(leaf) is type(wanted)
                if isinstance(leaf, torch.Tensor):
                    torch.testing.assert_close(leaf, wanted)
                else:
                    assert leaf == (pytest.approx(wanted, abs=1e-5) if isinstance(wanted, float) else wanted)
        assert graph.verify().ok


def test_the_domain_says_what_they_depend_on():
    _, traced = exported(lambda x: (x * 2, x.shape[0] // 2))
    assert traced.domain.returned == {"[1]": "batch // 2"}
    assert "returns: [1] = batch // 2" in str(traced.domain)


def test_a_number_that_strict_tracing_alone_can_follow(tmp_path):
    model, traced = exported(lambda x: (x * 2, builtins.int((x > 0).sum()), x.shape[0]))
    assert "strict" in " ".join(traced.rules)
    x = torch.randn(4, 9)
    assert traced.to_onnx(tmp_path / "model.onnx")(x)[1:] == model(x)[1:]


def test_strict_tracing_after_the_export_of_a_loop():
    model, observer = Recurrent().eval(), exportkit.InputObserver()
    with observer(model):
        for shape in (1, 6, 4), (2, 9, 4):
            model(torch.randn(shape))
    exportkit.export(model, observer, random_numbers=True)
    _, traced = exported(lambda x: (x * 2, builtins.int((x > 0).sum()), x.shape[0]))
    assert "strict" in " ".join(traced.rules)


def test_a_text_made_of_a_size_cannot_be_exported():
    with pytest.raises(ExportError, match=r"in a way that a graph cannot follow[\s\S]*where: \[1\]"):
        exported(lambda x: (x * 2, f"{x.shape[0]} rows"))


@pytest.mark.parametrize(
    ("function", "where"),
    [
        (lambda x: (x * 2, "wide" if x.shape[1] > 6 else "high"), "[1]"),
        (lambda x: (x * 2, [1] if x.shape[1] > 6 else [1, 2]), "[1][1]"),
        (lambda x: (x * 2, [] if x.shape[1] > 6 else None), "[1]"),
        (lambda x: (x * 2, 1 if x.shape[1] > 6 else True), "[1]"),
    ],
)
def test_a_value_that_the_graph_does_not_follow_is_not_proven(function, where, tmp_path):
    try:
        _, traced = exported(function)
    except ExportError:
        return  # the graph would leave out a recorded call
    report = traced.to_onnx(tmp_path / "model.onnx").verify()
    assert not report.ok
    assert any(row.status != "proven" for row in report.rows if row.kind == "recorded"), where
