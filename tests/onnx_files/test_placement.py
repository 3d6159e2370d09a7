"""Graphs run with the execution providers and the options that were asked for; what is not there is refused."""

import onnxruntime
import pytest
import torch

import exportkit
from exportkit.errors import InvalidRequestError, InvalidTypeError, MissingPackageError, RuntimeFailure
from tests.models import Add, tiny_llama

pytestmark = pytest.mark.runtime


@pytest.fixture
def onnx_model(tmp_path):
    model, observer = torch.nn.Linear(4, 2), exportkit.InputObserver()
    with observer(model):
        for rows in (2, 3):
            model(torch.randn(rows, 4))
    return exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")


def options_of(onnx_model):
    return onnx_model.session._session.get_session_options()


def test_it_runs_with_the_options_that_were_given(onnx_model, tmp_path):
    expected = onnx_model(torch.ones(5, 4))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.enable_profiling = 3, True
    options.profile_file_prefix = str(tmp_path / "profile")

    assert onnx_model.to("cpu", session_options=options) is onnx_model
    assert torch.equal(onnx_model(torch.ones(5, 4)), expected)
    assert options_of(onnx_model).intra_op_num_threads == 3
    assert onnx_model.verify().ok
    onnx_model.session._session.end_profiling()
    assert [*tmp_path.glob("profile*.json")]

    onnx_model.to(torch.device("cpu"))
    assert options_of(onnx_model).intra_op_num_threads == 0


def test_the_parts_move_along(tmp_path):
    models = {"first": Add(), "second": torch.nn.Linear(4, 2)}
    observer = exportkit.InputObserver()
    with observer(models), torch.no_grad():
        for rows in (2, 3):
            models["second"](models["first"](torch.randn(rows, 4), torch.randn(4)))
    runner = exportkit.load(exportkit.export(models, observer).save(tmp_path / "out").path)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 3

    runner.to("cpu", session_options=options)

    assert [options_of(part).intra_op_num_threads for part in runner.parts.values()] == [3, 3]
    assert runner.verify().ok


def test_what_is_not_there_is_refused_before_anything_changes(onnx_model, monkeypatch):
    session = onnx_model.session
    with pytest.raises(InvalidRequestError, match=r"No such device.\n  where: device\n  got: 'gpu'"):
        onnx_model.to("gpu")
    with pytest.raises(InvalidRequestError, match="Tensors cannot be given to onnxruntime on this device"):
        onnx_model.to("meta")
    with pytest.raises(InvalidTypeError, match=r"expected: an onnxruntime.SessionOptions\n  got: dict"):
        onnx_model.to("cpu", session_options={"intra_op_num_threads": 1})
    with pytest.raises(MissingPackageError, match=r"expected: NoSuchProvider\n  got: .*CPUExecutionProvider"):
        onnx_model.to("cpu", providers=["NoSuchProvider", "CPUExecutionProvider"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidRequestError, match=r"torch finds no CUDA\n  got: cuda:0"):
        onnx_model.to("cuda")
    assert onnx_model.session is session


def test_a_provider_that_does_not_start_is_an_error(onnx_model, monkeypatch):
    names = [*onnxruntime.get_available_providers(), "AzureExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: names)
    monkeypatch.setattr(onnxruntime.InferenceSession, "get_providers", lambda self: ["CPUExecutionProvider"])
    onnx_model.to("cpu", providers=["AzureExecutionProvider", "CPUExecutionProvider"])
    with pytest.raises(RuntimeFailure, match=r"could not start AzureExecutionProvider"):
        onnx_model(torch.ones(5, 4))


def test_a_model_in_bfloat16_returns_tensors_of_its_own(tmp_path):
    model, observer = tiny_llama().to(torch.bfloat16), exportkit.InputObserver()
    ids = torch.randint(1, 60, (2, 5))
    with observer(model), torch.no_grad():
        for length in (5, 4):
            model(ids[:, :length], attention_mask=torch.ones_like(ids[:, :length]))
    onnx_model = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    first = onnx_model(ids, attention_mask=torch.ones_like(ids))
    kept = first.logits.clone()
    first.past_key_values.layers[0].keys.zero_()
    again = onnx_model(ids, attention_mask=torch.ones_like(ids))

    assert torch.equal(first.logits, kept)
    assert torch.equal(again.logits, kept)
    assert again.past_key_values.layers[0].keys.any()


def test_one_provider_may_be_given_by_its_name(onnx_model):
    assert onnx_model.to("cpu", providers="CPUExecutionProvider").session.placement.names == ("CPUExecutionProvider",)
    with pytest.raises(MissingPackageError, match="expected: NoSuchProvider\n"):
        onnx_model.to("cpu", providers="NoSuchProvider")
