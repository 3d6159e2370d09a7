"""Models and graphs on a CUDA device: recorded, exported, run and proven there. Run on the CPU, these are skipped."""

import pytest
import torch

import exportkit
from exportkit.errors import InvalidRequestError
from exportkit.running.eager import run_eager
from exportkit.running.placement import placed
from exportkit.running.session import Session
from tests.models import tiny_llama

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.runtime,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Attending(torch.nn.Module):
    """A convolution, tables made in forward, and a mask: what tends to be made on the wrong device."""

    def __init__(self):
        super().__init__()
        self.convolution, self.linear = torch.nn.Conv1d(8, 8, 3, padding=1), torch.nn.Linear(8, 8)

    def forward(self, x, lengths=None):
        x = self.convolution(x.transpose(1, 2)).transpose(1, 2)
        x = x + torch.arange(x.shape[1], device=x.device)[:, None] / 10
        scores = self.linear(x) @ x.transpose(1, 2)
        if lengths is not None:
            scores = scores.masked_fill(torch.arange(x.shape[1], device=x.device) >= lengths[:, None, None], -1e9)
        return scores.softmax(-1) @ x


def recorded(model, device):
    observer = exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for batch, length in ((2, 5), (3, 7)):
            model(torch.randn(batch, length, 8, device=device), lengths=torch.full((batch,), length - 1, device=device))
    return observer


def decoded(model, device):
    """An observer of two prompts, each with two tokens more."""
    observer = exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for batch, length in ((2, 5), (3, 7)):
            ids = torch.randint(1, 60, (batch, length), device=device)
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)
    return observer


@pytest.mark.parametrize("name", ["float", "double", "float16", "bfloat16", "int8", "int64", "uint16", "bool"])
def test_every_dtype_comes_back_on_the_device(name):
    import onnx

    text = f'<ir_version: 10, opset_import: ["" : 18]> g ({name}[N, M] x) => ({name}[N, M] y) {{ y = Identity(x) }}'
    dtype = {"float": torch.float32, "double": torch.float64}.get(name) or getattr(torch, name)
    tensor = torch.tensor([[0, 1, 2], [3, 4, 5]]).to(dtype)
    session = Session(onnx.parser.parse_model(text).SerializeToString(), placement=placed("cuda"))

    for given in (tensor, tensor.cuda(), tensor.T.cuda(), tensor[:, :0].cuda()):
        returned = session.run({"x": given})["y"]
        assert returned.device == torch.device("cuda", torch.cuda.current_device())
        assert returned.dtype is dtype
        assert torch.equal(returned, given.cuda())


def test_the_device_can_be_used_after_a_model_refused_a_call():
    model, observer = torch.nn.Embedding(8, 4).cuda(), exportkit.InputObserver()
    with observer(model):
        model(torch.tensor([[1, 2, 7]], device="cuda"))
    (call,) = observer.observation.calls

    with pytest.raises(IndexError, match="index 9 is out of bounds"):
        run_eager(model, "forward", call.with_tensors({"input": torch.tensor([[9]], device="cuda")}))
    assert torch.equal(model(torch.tensor([3], device="cuda")), model.weight[3:4])


def test_what_was_rounded_to_tf32_is_proven_in_float32(tmp_path):
    torch.backends.cudnn.allow_tf32 = True
    model, observer = torch.nn.Conv1d(64, 64, 3, padding=1).cuda(), exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for batch, length in ((2, 40), (3, 60)):
            model(torch.randn(batch, 64, length, device="cuda"))

    onnx_model = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")

    assert onnx_model.verify().ok
    assert onnx_model.to("cuda").verify().ok
    assert torch.backends.cudnn.allow_tf32


def test_what_another_stream_computes_is_waited_for():
    import onnx

    text = '<ir_version: 10, opset_import: ["" : 18]> g (float[N, M] x) => (float[N, M] y) { y = Neg(x) }'
    session = Session(onnx.parser.parse_model(text).SerializeToString(), placement=placed("cuda"))
    x, stream = torch.eye(4096, device="cuda"), torch.cuda.Stream()
    session.run({"x": x})
    torch.cuda.synchronize()

    with torch.cuda.stream(stream):
        y = torch.eye(4096, device="cuda")
        for _ in range(20):
            y = y @ x
        returned = session.run({"x": y})["y"]

    assert torch.equal(returned, -x)


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_a_model_is_exported_and_proven_where_it_is(where, tmp_path):
    model = Attending().eval().to(where)
    exported = exportkit.export(model, recorded(model, where))
    onnx_model = exported.to_onnx(tmp_path / "model.onnx")

    assert onnx_model.verify().ok
    x, lengths = torch.randn(4, 9, 8, device=where), torch.tensor([9, 8, 3, 1], device=where)
    expected = model(x, lengths=lengths)
    assert torch.allclose(onnx_model(x, lengths=lengths), expected.cpu(), atol=1e-5)

    report = onnx_model.to("cuda").verify()
    assert report.ok, report
    assert any("CUDAExecutionProvider on cuda:0" in finding for finding in report.findings)
    returned = onnx_model(x, lengths=lengths)
    assert returned.device.type == "cuda"
    assert torch.allclose(returned, expected.cuda(), atol=1e-4)
    assert onnx_model.to("cpu")(x, lengths=lengths).device.type == "cpu"


def test_a_folder_of_a_model_on_the_device_is_proven_without_it(tmp_path):
    model = Attending().eval().cuda()
    exportkit.export(model, recorded(model, "cuda")).save(tmp_path / "out")

    loaded = exportkit.load(tmp_path / "out")
    assert loaded.verify().ok
    report = loaded.to("cuda").verify()
    assert report.ok, report


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("runtime", [None, "onnxruntime"])
def test_decoder_generates_on_the_device(dtype, runtime, tmp_path):
    model = tiny_llama().to("cuda", dtype)
    exported = exportkit.export(model, decoded(model, "cuda"))
    onnx_model = exported.to_onnx(tmp_path / "model.onnx", runtime=runtime).to("cuda")

    report = onnx_model.verify()
    assert report.ok, report
    ids = torch.randint(1, 60, (2, 6), device="cuda")
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "do_sample": False}
    expected = model.generate(ids, **options)
    with onnx_model.in_place_of(model) as calls:
        found = model.generate(ids, **options)
    assert calls.inside == 5
    if dtype is torch.float32:
        assert torch.equal(found, expected)
    assert found.device == expected.device


def test_a_cache_stays_on_the_device(tmp_path):
    model = tiny_llama().cuda()
    onnx_model = exportkit.export(model, decoded(model, "cuda")).to_onnx(tmp_path / "model.onnx").to("cuda")
    ids = torch.randint(1, 60, (2, 6), device="cuda")

    positions, mask = torch.arange(7, device="cuda").expand(2, 7), torch.ones(2, 7, dtype=torch.int64, device="cuda")
    first = onnx_model(ids, attention_mask=mask[:, :6], position_ids=positions[:, :6], logits_to_keep=1)
    cache, options = first.past_key_values, {"attention_mask": mask, "logits_to_keep": 1}
    assert {layer.keys.device.type for layer in cache.layers} == {"cuda"}
    second = onnx_model(ids[:, :1], position_ids=positions[:, 6:], past_key_values=cache, **options)

    assert second.logits.device.type == "cuda"
    assert {layer.keys.device.type for layer in second.past_key_values.layers} == {"cuda"}


def test_weights_in_int4_are_measured_on_the_device(tmp_path):
    model = tiny_llama(hidden_size=64, intermediate_size=128).cuda()
    exported = exportkit.export(model, decoded(model, "cuda"))

    report = exported.to_onnx(tmp_path / "model.onnx", runtime="onnxruntime", weights="int4").to("cuda").verify()

    assert report.ok, report


def test_a_graph_that_is_wrong_on_the_device_is_located_there(tmp_path):
    model = Attending().eval().cuda()
    onnx_model = exportkit.export(model, recorded(model, "cuda")).to_onnx(tmp_path / "model.onnx").to("cuda")
    with torch.no_grad():
        model.linear.weight.mul_(1.5)

    divergence = exportkit.locate_divergence(model, onnx_model, next(iter(recorded(model, "cuda").observation.calls)))

    assert divergence.module == "linear"


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(InvalidRequestError, match="CUDA devices that torch finds"):
        placed("cuda:99")
