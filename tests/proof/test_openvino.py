"""The proof in OpenVINO: the same rows, computed by another runtime, and nothing of it changes the file."""

import builtins

import onnx
import pytest
import torch

import exportkit
from exportkit.errors import InvalidRequestError, MissingPackageError
from tests.models import tiny_llama


class Doubled(torch.nn.Module):
    def forward(self, x):
        return x * 2


def onnx_model_of(model, path, *calls, **options):
    observer = exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for call in calls:
            model(call)
    return exportkit.export(model, observer).to_onnx(path, **options)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    torch.manual_seed(0)
    model, observer = tiny_llama(), exportkit.InputObserver()
    ids = torch.randint(3, 50, (2, 7))
    with observer(model), torch.no_grad():
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False, pad_token_id=0)
    exported = exportkit.export(model, observer)
    folder = tmp_path_factory.mktemp("decoder")
    exported.save(folder)
    return folder


@pytest.mark.runtime
def test_a_decoder_is_proven_from_its_folder(decoder):
    loaded = exportkit.load(decoder)
    report, other = loaded.verify(runtime="openvino"), loaded.verify()
    assert report.ok, str(report)
    assert [(row.kind, row.label) for row in report.rows] == [(row.kind, row.label) for row in other.rows]
    assert any("OpenVINO" in finding for finding in report.findings)


@pytest.mark.runtime
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_dtypes_are_proven(dtype, tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.GELU()).to(dtype)
    onnx_model = onnx_model_of(model, tmp_path / "model.onnx", torch.rand(2, 4).to(dtype), torch.rand(3, 4).to(dtype))
    report = onnx_model.verify(runtime="openvino")
    assert report.ok, str(report)


@pytest.mark.runtime
@pytest.mark.parametrize(
    "values", [torch.tensor([2**40, 3]), torch.tensor([200, 3], dtype=torch.uint8)], ids=["64 bits", "overflow"]
)
def test_what_openvino_computes_otherwise_is_found_and_leaves_the_file_as_it_is(values, tmp_path):
    onnx_model = onnx_model_of(Doubled(), tmp_path / "model.onnx", values, values.repeat(2))
    before = onnx_model.domain, (tmp_path / "model.onnx").read_bytes()

    report = onnx_model.verify(runtime="openvino")

    assert not report.ok
    assert "became" in report.verdict()
    assert report.locate() is None
    assert (onnx_model.domain, (tmp_path / "model.onnx").read_bytes()) == before
    assert onnx_model.verify().ok


@pytest.mark.runtime
def test_a_graph_with_operators_of_onnxruntime_is_refused(tmp_path):
    onnx_model = onnx_model_of(torch.nn.Linear(64, 64), tmp_path / "model.onnx", torch.rand(2, 64), torch.rand(3, 64))
    proto = onnx.load(tmp_path / "model.onnx")
    proto.graph.node[0].domain = "com.microsoft"
    onnx.save(proto, tmp_path / "model.onnx")
    report = onnx_model.verify(runtime="openvino")
    assert {row.status for row in report.rows} == {"refused"}
    assert "OpenVINO cannot load the model" in report.rows[0].where


def test_an_unknown_runtime_and_a_missing_package_are_errors(tmp_path, monkeypatch):
    onnx_model = onnx_model_of(Doubled(), tmp_path / "model.onnx", torch.rand(2, 4), torch.rand(3, 4))
    with pytest.raises(InvalidRequestError, match="openvino"):
        onnx_model.verify(runtime="tensorrt")

    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "openvino":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingPackageError, match=r"exportkit\[openvino\]"):
        onnx_model.verify(runtime="openvino")
