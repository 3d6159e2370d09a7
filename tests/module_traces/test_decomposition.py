"""Tensors of every kind: each is recorded, and what was stored is the same when it is read."""

import json

import pytest
import torch
from safetensors import safe_open

from exportkit import Trace, model_addition_debugger_context, trace_model
from tests.module_traces.models import KINDS, MORE_KINDS, Wraps, dense, made


@pytest.fixture
def model():
    return Wraps()


def test_there_are_seventeen_kinds():
    assert len(KINDS) == 17


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", [*KINDS, *MORE_KINDS])
def test_statistics_of_a_kind(model, kind):
    tensor = made(kind)
    with trace_model(model) as trace:
        assert model(tensor) is tensor

    assert trace.complete, trace.problems
    given, returned = trace.calls[1].inputs[0], trace.calls[1].outputs[0]
    assert (given.path, returned.path) == ("args[0]", "outputs")
    assert given.hash == returned.hash
    assert given.key is None
    assert given.dtype == str(tensor.dtype).removeprefix("torch.")
    if not tensor.is_nested:
        assert given.shape == tuple(tensor.shape)
    assert bool(given.hash) is not tensor.is_meta


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", [*KINDS, *MORE_KINDS])
def test_values_of_a_kind(model, kind, tmp_path):
    tensor = made(kind)
    with trace_model(model, tmp_path, values="all") as trace:
        model(tensor)

    assert trace.complete, trace.problems
    record = Trace.load(tmp_path).calls[1].outputs[0]
    if tensor.is_meta:
        assert record.key is None
        return
    found = trace.tensor(record)
    assert found.dtype == tensor.dtype
    assert found.layout == (tensor.layout if kind != "mkldnn" else torch.strided)
    assert torch.equal(dense(found).nan_to_num(7), dense(tensor).nan_to_num(7))
    with safe_open(tmp_path / "tensors.safetensors", "pt") as file:
        assert all(file.get_tensor(key) is not None for key in file.keys())  # noqa: SIM118


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("use_repr", [True, False])
@pytest.mark.parametrize("kind", [*KINDS, *MORE_KINDS])
def test_files_of_the_debugger_for_a_kind(model, kind, use_repr, tmp_path):
    tensor = made(kind)
    with model_addition_debugger_context(model, tmp_path, use_repr=use_repr):
        assert model(tensor) is tensor

    tree = json.loads((tmp_path / "Wraps_debug_tree_FULL_TENSORS.json").read_text())
    described = tree["children"][0]["outputs"]
    assert described["dtype"] == repr(tensor.dtype)
    if use_repr and not tensor.is_nested and tensor.numel() and not tensor.requires_grad and kind != "mkldnn":
        assert described["value"][0].startswith("tensor(")
    elif not use_repr and not tensor.is_meta:
        assert (tmp_path / described["value"]).is_file()
