"""Graphs in float16: what would overflow stays in float32, and the result is measured."""

import onnx
import pytest
import torch

import exportkit
from exportkit.errors import InvalidRequestError, InvalidTypeError
from exportkit.onnx_files.quantisers import overflowing_nodes


class Large(torch.nn.Module):
    """A layer with values that float16 does not have, between two that are harmless; a mask hides by a low value."""

    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(64, 64), torch.nn.Linear(64, 40)

    def forward(self, x, mask):
        x = self.first(x)
        x = (x * 3000.0).pow(2).sqrt() / 3000.0
        scores = x @ x.transpose(-1, -2)
        scores = scores.masked_fill(~mask[:, None, :], torch.finfo(x.dtype).min)
        return {"logits": self.last(scores.softmax(-1) @ x)}


@pytest.fixture(scope="module")
def exported():
    torch.manual_seed(0)
    model, observer = Large().eval(), exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for batch, length in ((2, 6), (3, 9)):
            mask = torch.ones(batch, length, dtype=torch.bool)
            mask[0, -2:] = False
            model(torch.randn(batch, length, 64), mask)
    return exportkit.export(model, observer)


@pytest.mark.parametrize("weights", [None, "int4"])
def test_a_graph_in_float16_keeps_what_overflows_in_float32(exported, weights, tmp_path):
    onnx_model = exported.to_onnx(tmp_path / "model.onnx", dtype="float16", weights=weights)
    assert {value.type.tensor_type.elem_type for value in onnx.load(onnx_model.path).graph.output} == {1}
    report = onnx_model.verify()
    figures = report.figures["recorded"]["logits"]
    assert report.ok
    assert str(report).startswith("measured: top-1 agreement ")
    assert "computes in float16; not converted because of large values: parts of " in str(report)
    assert figures.error < (2e-3 if weights is None else 0.1)
    if weights is None:
        matrices = [t for t in onnx.load(onnx_model.path).graph.initializer if len(t.dims) == 2]
        assert {tensor.data_type for tensor in matrices} == {onnx.TensorProto.FLOAT16}


class Squared(torch.nn.Module):
    """Two nodes take the same value, one of them twice, and both overflow in float16."""

    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)

    def forward(self, x):
        y = self.first(x) * 2000.0
        return self.last(y * y / 4e6 + y * 500.0 / 1e6)


def test_a_value_that_several_nodes_take_in_float32_is_cast_once(tmp_path):
    torch.manual_seed(0)
    model, observer = Squared().eval(), exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for size in (4, 6):
            model(torch.randn(2, size, 16))
    onnx_model = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx", dtype="float16")
    report = onnx_model.verify()
    assert report.ok, str(report)
    assert report.figures["recorded"][""].error < 2e-3
    assert "not converted because of large values: parts of the model itself." in str(report)
    outputs = [name for node in onnx.load(onnx_model.path).graph.node for name in node.output]
    assert len(outputs) == len(set(outputs))


class Turned(torch.nn.Module):
    """Turns pairs of values by an angle for each position, and counts them."""

    def forward(self, x, mask):
        positions = (mask.cumsum(1) - 1)[..., None] * torch.tensor([1.0, 0.1]) + torch.arange(x.shape[1])[:, None] * 0.5
        real, imaginary = x.chunk(2, -1)
        turned = real * positions.cos() - imaginary * positions.sin()
        return turned, mask.sum(1).float(), positions.long()[..., 0]


@pytest.mark.parametrize("runtime", [None, "onnxruntime"])
def test_angles_of_positions_and_counts_keep_their_digits(runtime, tmp_path):
    model, observer = Turned(), exportkit.InputObserver()
    with observer(model):
        for batch, length in ((2, 6), (3, 9)):
            model(torch.randn(batch, length, 4), torch.ones(batch, length, dtype=torch.int64))
    onnx_model = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx", dtype="float16", runtime=runtime)
    assert onnx_model.verify().ok
    args = torch.randn(1, 5001, 4), torch.ones(1, 5001, dtype=torch.int64)
    for got, expected in zip(onnx_model(*args), model(*args), strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-3, atol=2e-3)


def test_a_saved_graph_in_float16_is_measured_again(exported, tmp_path):
    exported.save(tmp_path / "out", dtype=torch.float16, accuracy={"error": 0.01})
    loaded = exportkit.load(tmp_path / "out")
    assert loaded.file.quantised.dtype == "float16"
    assert loaded.verify().verdict().startswith("measured: ")


def test_a_model_in_half_precision_is_proven_and_its_distance_from_float32_is_said(tmp_path):
    torch.manual_seed(0)
    model, observer = torch.nn.Linear(64, 40).to(torch.bfloat16), exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for size in (4, 6):
            model(torch.randn(size, 64, dtype=torch.bfloat16))
    exported = exportkit.export(model, observer)
    report = exported.to_onnx(tmp_path / "model.onnx").verify()
    assert report.ok
    (note,) = (text for text in report.findings if "computes in bfloat16" in text)
    error = float(note.partition("recorded calls are ")[2].split()[0])
    assert 1e-4 < error < 1e-2
    assert model.weight.dtype is torch.bfloat16
    assert exported.to_onnx(tmp_path / "int4.onnx", weights="int4").verify().verdict().startswith("measured: ")
    with pytest.raises(InvalidRequestError, match="most weights in bfloat16"):
        exported.to_onnx(tmp_path / "model.onnx", dtype="float16")


class Iterated(torch.nn.Module):
    """A loop that ends by values, in which an operator stays in float32."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x):
        state, error = torch.zeros_like(x), float("inf")
        while error > 1e-2:
            new = torch.minimum(torch.tanh(self.layer(state) * 0.3 + x), x.abs())
            error = (new - state).norm().item()
            state = new
        return {"state": state}


def test_the_body_of_a_loop_computes_in_float16(tmp_path):
    torch.manual_seed(0)
    model, observer = Iterated().eval(), exportkit.InputObserver()
    with observer(model), torch.no_grad():
        model(torch.randn(2, 8))
        model(torch.randn(3, 8))
    report = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx", dtype="float16").verify()
    assert report.ok, str(report)
    assert report.figures["recorded"]["state"].error < 5e-3


def test_another_dtype_is_refused(exported, tmp_path):
    with pytest.raises(InvalidRequestError, match="expected: 'float16'"):
        exported.to_onnx(tmp_path / "model.onnx", dtype="float8")
    with pytest.raises(InvalidTypeError, match="an InputObserver or its observation"):
        exported.to_onnx(tmp_path / "model.onnx", dtype="float16", data=[])


@pytest.mark.parametrize("options", [{"opset": "18"}, {"opset": True}, {"accuracy": True}, {"accuracy": {"kl": False}}])
def test_options_of_the_wrong_type_are_refused(exported, options, tmp_path):
    with pytest.raises(InvalidTypeError, match=f"where: {next(iter(options))}"):
        exported.to_onnx(tmp_path / "model.onnx", dtype="float16", **options)


def test_values_that_hide_do_not_overflow():
    text = """<ir_version: 10, opset_import: ["" : 18]> g (float[N] x, bool[N] mask) => (float[N] y)
    <float low = {-3.4e38}> {
        [large] square = Mul (x, x)
        [root] small = Sqrt (square)
        [hide] y = Where (mask, small, low)
    }"""
    model = onnx.parser.parse_model(text)
    feeds = {"x": torch.tensor([3.0, 4.0]), "mask": torch.tensor([True, False])}
    assert overflowing_nodes(model, [feeds]) == frozenset()
    assert overflowing_nodes(model, [feeds | {"x": torch.tensor([300.0, 4.0])}]) == {"large", "root"}


class Applied(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.layer, self.function = torch.nn.Linear(6, 6), function

    def forward(self, x):
        return self.function(self.layer(x))


def placed(x):
    return torch.zeros_like(x).index_put((torch.zeros(x.shape[0], dtype=torch.int64),), x, accumulate=True)


RETURNED = {
    "a sum": lambda x: x.sum(-1),
    "a product and all of it": lambda x: (x.prod(-1), x.square().sum()),
    "the largest": lambda x: x.amax(-1),
    "a variance": lambda x: x.var(-1),
    "an angle": lambda x: torch.nn.functional.cosine_similarity(x, x.flip(-1), -1),
    "a sum that is used as well": lambda x: (total := x.sum(-1, keepdim=True), x / total.abs().clamp_min(0.5)),
    "scattered numbers": lambda x: torch.zeros_like(x).scatter_add(1, torch.zeros_like(x, dtype=torch.int64), x),
    "numbers in one place": placed,
    "a choice": lambda x: torch.where(x > 0, x, -1.0),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", RETURNED)
def test_what_a_model_in_half_precision_returns_has_its_dtype(name, dtype, tmp_path):
    torch.manual_seed(0)
    model, observer = Applied(RETURNED[name]).eval().to(dtype), exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for size in (4, 5):
            model(torch.randn(size, 3, 6, dtype=dtype))
    report = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx").verify()
    assert report.ok, str(report)
