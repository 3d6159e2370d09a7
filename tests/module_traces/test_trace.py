"""What a trace holds of calls: order, paths, arguments, methods, generation, and what was asked for."""

import contextlib
import copy
import dataclasses
import json
import os
import pickle
import re
import tempfile
from collections import UserDict

import pytest
import torch
from safetensors import safe_open
from torch import nn

from exportkit import Trace, trace_model
from exportkit.errors import DestinationError, InvalidRequestError, InvalidTypeError, TraceError
from exportkit.module_traces import files
from tests.models import (
    AddsInPlace,
    Classifier,
    Countdown,
    random_cache,
    random_ids,
    tiny_bert,
    tiny_llama,
    tiny_mamba,
    tiny_t5,
)
from tests.module_traces.models import Block, Pair, Passes, Stack, Wraps


def paths(trace):
    return [call.path for call in trace.calls]


def test_every_call_of_every_module_is_there_in_order():
    model = Stack(2)
    with trace_model(model) as trace:
        model(torch.ones(3, 4))

    assert paths(trace) == [
        "",
        "blocks.0",
        "blocks.0.first",
        "blocks.0.second",
        "blocks.1",
        "blocks.1.first",
        "blocks.1.second",
    ]
    assert [call.parent for call in trace.calls] == [None, 0, 1, 1, 0, 4, 4]
    assert [call.class_name for call in trace.calls][:3] == ["Stack", "Block", "Linear"]
    assert [call.index for call in trace.calls] == list(range(7))
    assert {call.thread for call in trace.calls} == {0}
    assert trace.complete
    assert repr(trace) == "Trace(Stack: 7 calls)"


def test_tensors_are_named_by_their_path_and_other_values_are_kept():
    model = Block()
    x = torch.ones(3, 4)
    with trace_model(model) as trace:
        model(x, scale=2.0)

    call = trace.calls[0]
    assert [record.path for record in (*call.inputs, *call.outputs)] == ["args[0]", "outputs"]
    assert call.other_inputs == {"kwargs.scale": 2.0}
    record = call.inputs[0]
    assert (record.shape, record.dtype, record.device) == ((3, 4), "float32", "cpu")
    assert (record.mean, record.std, record.min, record.max) == (1.0, 0.0, 1.0, 1.0)
    assert (record.nan, record.inf, record.key) == (0, 0, None)


@pytest.mark.parametrize("call", [lambda m, x: m(x), lambda m, x: m.forward(x), lambda m, x: m.forward(x=x)])
def test_the_model_is_called_in_any_way(call):
    model = Stack(1)
    with trace_model(model) as trace:
        call(model, torch.ones(3, 4))

    assert paths(trace) == ["", "blocks.0", "blocks.0.first", "blocks.0.second"]


def test_a_method_that_is_not_forward():
    model = Stack(2)
    with trace_model(model) as trace:
        model.twice(torch.ones(3, 4))

    assert paths(trace)[0] == "blocks.1"
    assert [call.path for call in trace.calls if call.parent is None] == ["blocks.1", "blocks.0"]


def test_a_forward_that_calls_that_of_its_base_class_is_one_call():
    class Louder(Block):
        def forward(self, x, scale=None):
            return super().forward(x, scale) * 2

    model = Louder()
    with trace_model(model) as trace:
        model(torch.ones(3, 4))
        model.forward(torch.ones(3, 4))

    assert paths(trace) == ["", "first", "second"] * 2


def test_a_module_that_calls_itself():
    model = Countdown()
    with trace_model(model) as trace:
        model(torch.ones(3, 2))

    assert [(call.number, call.parent) for call in trace.calls] == [(0, None), (1, 0), (2, 1)]
    assert [call.outputs[0].shape for call in trace.calls] == [(1, 2)] * 3


def test_a_forward_that_the_model_has_in_its_vars():
    model = Stack(1)
    original = model.forward
    model.forward = wrapped = lambda x: original(x) * 2
    with trace_model(model) as trace:
        model.forward(torch.ones(3, 4))
        model(torch.ones(3, 4))

    assert paths(trace) == ["", "blocks.0", "blocks.0.first", "blocks.0.second"] * 2
    assert vars(model)["forward"] is wrapped


def test_a_module_that_is_put_in_while_recording():
    model = Stack(2)
    with trace_model(model) as trace:
        model.blocks[1] = Block()
        model(torch.ones(3, 4))

    assert "blocks.1.second" in paths(trace)


def test_modules_of_other_models_are_left_alone():
    model, other = Stack(1), Block()
    with trace_model(model) as trace:
        other(torch.ones(3, 4))

    assert trace.calls == ()
    assert trace.complete


def test_a_value_that_is_changed_in_place_is_recorded_as_it_was_each_time():
    model = AddsInPlace()
    x = torch.zeros(3)
    with trace_model(model, values="all") as trace:
        model(x)
        model(x)

    given = [trace.tensor(call.inputs[0]).tolist() for call in trace.calls]
    returned = [trace.tensor(call.outputs[0]).tolist() for call in trace.calls]
    assert given == [[0, 0, 0], [1, 1, 1]]
    assert returned == [[1, 1, 1], [2, 2, 2]]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_in_place_changes_without_gradients(mode):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    with mode(), trace_model(model, values="all") as trace:
        model(torch.ones(3, 4))

    linear, relu = trace.calls[1], trace.calls[2]
    assert torch.equal(trace.tensor(linear.outputs[0]).relu(), trace.tensor(relu.outputs[0]))
    assert trace.tensor(linear.outputs[0]).min() < 0


def test_a_tensor_is_stored_once_however_often_it_is_seen(tmp_path):
    model = Wraps()
    x = torch.randn(100)
    with trace_model(model, tmp_path, values="all") as trace:
        model(x)
        model(x.view(10, 10))

    with safe_open(tmp_path / "tensors.safetensors", "pt") as file:
        assert list(file.keys()) == ["Wraps[0].args[0]"]
    records = [record for call in trace.calls for record in (*call.inputs, *call.outputs)]
    assert len(records) == 8
    assert {trace.tensor(record).shape for record in records} == {(100,), (10, 10)}


def test_memory_that_is_used_again_is_another_tensor():
    model = Passes()
    with trace_model(model, values="all") as trace:
        for number in range(50):
            model(torch.full((1000,), float(number)))

    assert [trace.tensor(call.outputs[0])[0].item() for call in trace.calls] == list(range(50))


def test_one_element_that_changes_shows_and_so_do_elements_that_change_places():
    model = Passes()
    x = torch.randn(1, 7, 2000)
    permuted = x.clone()
    permuted[..., :100] = x[..., torch.arange(100).flip(0)]
    integers, others = torch.arange(2000), torch.arange(2000)
    others[1234] += 777
    with trace_model(model) as trace:
        for tensor in (x, permuted, integers, others, integers.double(), others.double()):
            model(tensor)

    hashes = [call.outputs[0].hash for call in trace.calls]
    assert len(set(hashes)) == 6


@pytest.mark.parametrize(
    ("values", "stored"),
    [
        (None, set()),
        ("all", {"", *(f"blocks.{i}{end}" for i in range(4) for end in ("", ".first", ".second"))}),
        ("ends", {"", *(f"blocks.{i}{end}" for i in (0, 3) for end in ("", ".first", ".second"))}),
        ("blocks.1.*", {"blocks.1.first", "blocks.1.second"}),
        (re.compile(r"^blocks\.\d$"), {f"blocks.{i}" for i in range(4)}),
        (["blocks.0", "blocks.2.first"], {"blocks.0", "blocks.2.first"}),
    ],
)
def test_which_values_are_stored(values, stored):
    model = Stack(4)
    with trace_model(model, values=values) as trace:
        model(torch.ones(3, 4))

    # A result is also what the next module is given: it is stored if either is asked for.
    outputs = {call.path for call in trace.calls if call.outputs[0].key is not None}
    assert stored <= outputs or not stored
    assert all(record.hash for call in trace.calls for record in (*call.inputs, *call.outputs))
    for call in trace.calls:
        if call.path in stored:
            assert all(record.key for record in (*call.inputs, *call.outputs))
    if values is None:
        assert not outputs


def test_values_of_a_sample_of_the_calls():
    model = Passes()
    with trace_model(model, values="all", every=3) as trace:
        for number in range(7):
            model(torch.full((2,), float(number)))

    assert [call.number for call in trace.calls if call.outputs[0].key] == [0, 3, 6]


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"values": "blocks.9"}, InvalidRequestError, "No module has such a path"),
        ({"values": re.compile("nothing")}, InvalidRequestError, "No module has such a path"),
        ({"values": 3}, InvalidTypeError, "selection of values to store"),
        ({"values": "all", "every": 0}, InvalidRequestError, "number of calls between stored ones"),
    ],
)
def test_what_makes_no_sense_is_an_error_before_anything_is_written(options, error, text, tmp_path):
    with pytest.raises(error, match=text), trace_model(Stack(1), tmp_path / "trace", **options):
        raise AssertionError
    assert not (tmp_path / "trace").exists()
    assert torch.nn.Module.__call__.__qualname__ == "Module._wrapped_call_impl"


def test_only_modules_can_be_traced():
    with pytest.raises(InvalidTypeError, match="Only modules"), trace_model(len):
        raise AssertionError


def test_other_files_are_not_written_over(tmp_path):
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(DestinationError, match="cannot be written over other files"), trace_model(Stack(1), tmp_path):
        raise AssertionError
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


def test_a_recording_that_cannot_begin_leaves_no_folder(tmp_path, monkeypatch):
    def full(path):
        raise OSError("No space left on device")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(files, "_new_file", full)
    with pytest.raises(DestinationError, match="No space left"), trace_model(Stack(1)):
        raise AssertionError
    assert [*tmp_path.iterdir()] == []


def test_a_trace_is_replaced(tmp_path):
    model = Stack(1)
    for rows in (3, 5):
        with trace_model(model, tmp_path, values="all"):
            model(torch.ones(rows, 4))

    trace = Trace.load(tmp_path)
    assert trace.calls[0].outputs[0].shape == (5, 4)
    assert trace.tensor(trace.calls[0].outputs[0]).shape == (5, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["calls.jsonl", "tensors.safetensors"]


def recorded(model, value, folder):
    with trace_model(model, folder, values="all"):
        model(torch.full((3, 4), value))
    return Trace.load(folder)


def test_a_trace_that_is_in_use_is_replaced_and_keeps_its_values(tmp_path):
    model = Stack(1)
    first = recorded(model, 1.0, tmp_path)
    before = first.tensor(first.calls[0].inputs[0])

    second = recorded(model, 2.0, tmp_path)
    assert second.tensor(second.calls[0].inputs[0]).eq(2).all()
    assert first.tensor(first.calls[0].inputs[0]).eq(1).all()
    assert before.eq(1).all()


def test_a_replaced_trace_is_kept_under_its_other_names(tmp_path):
    model = Stack(1)
    data = tmp_path / "trace" / "tensors.safetensors"
    recorded(model, 1.0, data.parent)
    kept = data.read_bytes()
    os.link(data, tmp_path / "second name")
    recorded(model, 2.0, data.parent)
    assert (tmp_path / "second name").read_bytes() == kept

    data.unlink()
    data.symlink_to(tmp_path / "second name")
    recorded(model, 2.0, data.parent)
    assert (tmp_path / "second name").read_bytes() == kept
    assert not data.is_symlink()


def test_the_data_of_a_smaller_trace_over_a_larger_one_end_where_they_should(tmp_path):
    model = Stack(1)
    for rows in (5000, 3):
        with trace_model(model, tmp_path, values="all"):
            model(torch.ones(rows, 4))
    with safe_open(tmp_path / "tensors.safetensors", "pt") as file:
        assert {file.get_tensor(key).shape[0] for key in file.keys()} == {3}  # noqa: SIM118


def test_a_trace_without_a_folder_goes_with_its_object(tmp_path):
    model = Stack(1)
    with trace_model(model, values="all") as trace:
        model(torch.ones(3, 4))
    folder = trace.folder
    trace.save(tmp_path / "kept")
    calls = trace.calls

    del trace
    assert not folder.exists()
    kept = Trace.load(tmp_path / "kept")
    assert kept.calls == calls
    assert kept.tensor(kept.calls[0].inputs[0]).shape == (3, 4)


def test_a_trace_is_read_while_it_grows():
    model = Stack(1)
    with trace_model(model, values="all") as trace:
        model(torch.ones(3, 4))
        assert len(trace.calls) == 4
        assert not trace.complete
        assert trace.tensor(trace.calls[0].outputs[0]).shape == (3, 4)
        model(torch.ones(3, 4))
        assert len(trace.calls) == 8
    assert trace.complete


@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.inference_mode])
def test_statistics_and_hashes_do_not_depend_on_whether_values_are_stored(mode, tmp_path):
    model = tiny_llama()
    ids = random_ids(2, 5)
    with mode():
        with trace_model(model) as without:
            model(ids)
        with trace_model(model, tmp_path, values="all") as stored:
            model(ids)

    for one, other in zip(without.calls, stored.calls, strict=True):
        assert [dataclasses.replace(record, key=None) for record in other.outputs] == list(one.outputs)
    again = Trace.load(tmp_path)
    assert again.calls == stored.calls
    assert copy.deepcopy(again.calls) == pickle.loads(pickle.dumps(again.calls)) == stored.calls


def test_values_that_were_not_stored_are_asked_for_in_vain():
    model = Stack(1)
    with trace_model(model) as trace:
        model(torch.ones(3, 4))
    with pytest.raises(TraceError, match=r"were not stored.\n  where: args\[0\]\n  hint: record them"):
        trace.tensor(trace.calls[0].inputs[0])


def test_what_is_read_can_be_changed_and_the_file_does_not(tmp_path):
    model = Stack(1)
    with trace_model(model, tmp_path, values="all") as trace:
        model(torch.ones(3, 4))
    record = trace.calls[0].inputs[0]
    trace.tensor(record).zero_()
    assert Trace.load(tmp_path).tensor(record).sum() == 12


def test_nested_values_caches_dataclasses_and_mappings_are_opened():
    model = Passes()
    x = torch.ones(2)
    cases = {
        "outputs[0].a[1]": ({"a": (None, x)}, 3),
        "outputs['a/b']": {"a/b": x},
        "outputs.left": Pair(x, x),
        "outputs.layers[1].values": random_cache(3),
        "outputs.data": UserDict(data=x),
        "outputs.inner.right": {"inner": Pair(x, x)},
    }
    for path, value in cases.items():
        with trace_model(model) as trace:
            model(value)
        assert trace.complete, trace.problems
        assert path in [record.path for record in trace.calls[0].outputs]


def test_names_that_look_alike_are_told_apart():
    class Takes(nn.Module):
        def forward(self, x, x_0):
            return x[0] + x_0

    model = Takes()
    with trace_model(model, values="all") as trace:
        model(x=[torch.zeros(2)], x_0=torch.ones(2))

    values = {record.path: trace.tensor(record).tolist() for record in trace.calls[0].inputs}
    assert values == {"kwargs.x[0]": [0, 0], "kwargs.x_0": [1, 1]}


def test_an_argument_that_holds_nothing_is_there_all_the_same():
    from transformers import DynamicCache

    model = Passes()
    with trace_model(model) as trace:
        model(DynamicCache())
        model([])

    first, second = trace.calls
    assert first.other_inputs == {"args[0]": "<transformers.cache_utils.DynamicCache>"}
    assert second.other_inputs == {"args[0]": "[]"}


def test_texts_stand_for_what_json_cannot_hold():
    model = Passes()
    with trace_model(model) as trace:
        model([torch.float16, float("nan"), object(), len, 1 + 2j, "name", b"bytes"])

    assert list(trace.calls[0].other_outputs.values()) == [
        "torch.float16",
        "nan",
        "<builtins.object>",
        "<builtins.builtin_function_or_method>",
        "(1+2j)",
        "name",
        "b'bytes'",
    ]


def test_generate():
    model = tiny_llama()
    with trace_model(model, values="all") as trace:
        tokens = model.generate(random_ids(2, 5), max_new_tokens=3, do_sample=False)

    roots = [call for call in trace.calls if not call.path]
    assert [call.number for call in roots] == [0, 1, 2]
    assert [call.inputs[0].shape for call in roots] == [(2, 5), (2, 1), (2, 1)]
    caches = [record for record in roots[2].inputs if "past_key_values" in record.path]
    assert [record.path for record in caches][:2] == [
        "kwargs.past_key_values.layers[0].keys",
        "kwargs.past_key_values.layers[0].values",
    ]
    logits = [next(r for r in call.outputs if r.path == "outputs.logits") for call in roots]
    chosen = [trace.tensor(record)[:, -1].argmax(-1) for record in logits]
    assert torch.equal(torch.stack(chosen, 1), tokens[:, 5:])


@pytest.mark.parametrize("make", [tiny_bert, tiny_t5, tiny_mamba])
def test_other_families(make):
    model = make()
    arguments = {"decoder_input_ids": random_ids(2, 3)} if make is tiny_t5 else {}
    with trace_model(model, values="all") as trace:
        model(input_ids=random_ids(2, 5), **arguments)

    assert trace.complete, trace.problems
    assert set(paths(trace)) <= {path for path, _ in model.named_modules()}
    assert all(record.key for call in trace.calls for record in (*call.inputs, *call.outputs))


def test_the_header_of_the_data_is_as_long_as_it_needs_to_be(tmp_path):
    model = Passes()
    with trace_model(model, tmp_path, values="all") as trace:
        for number in range(200):
            model(torch.full((3,), float(number)))

    with safe_open(tmp_path / "tensors.safetensors", "pt") as file:
        assert len(file.keys()) == 200
        assert file.get_tensor("Passes[7].args[0]").tolist() == [7, 7, 7]
    assert trace.tensor(trace.calls[7].inputs[0]).tolist() == [7, 7, 7]
    assert len(list(tmp_path.iterdir())) == 2


def test_the_index_is_lines_of_json(tmp_path):
    model = Classifier()
    with trace_model(model, tmp_path, values="all"):
        model(torch.full((2, 6), float("nan")))

    lines = [
        json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / "calls.jsonl").read_text().splitlines()
    ]
    assert lines[0]["format"] == "exportkit-trace"
    assert lines[0]["model"] == "Classifier"
    assert lines[-1] == {"finished": True, "problems": []}
