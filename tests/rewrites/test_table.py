"""Rewrites for the export: they compute the same, are chosen by what they rewrite, and are undone."""

import contextlib

import pytest
import torch
from torch.utils._device import _device_constructors as device_constructors

import exportkit
from exportkit.rewrites import table
from exportkit.rewrites.table import REWRITES, Rewrite, applied, matching_rewrites
from tests.arguments.generative import (
    TEXT,
    falcon_h1,
    gemma3_text,
    llama,
    observed,
    padded_left,
    speech_encoder_decoder,
    speech_to_text,
    t5,
    whisper,
)


def mistral(window=6):
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(**TEXT, sliding_window=window)).eval()


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**TEXT, num_local_experts=4, num_experts_per_tok=2)).eval()


def window_layers():
    from transformers import cache_utils

    return cache_utils.DynamicSlidingWindowLayer


def test_every_rewrite_has_a_name_of_its_own_and_a_structure_that_it_is_keyed_by():
    assert len({rewrite.name for rewrite in REWRITES}) == len(REWRITES)
    assert all(rewrite.functions or rewrite.parts or rewrite.matches for rewrite in REWRITES)


def test_a_rewrite_is_chosen_by_functions_attributes_and_arguments(monkeypatch):
    class Layer(torch.nn.Linear):
        kernel_size = 3

    def rewrite(**keys):
        return Rewrite(str(keys), lambda _: contextlib.nullcontext(), **keys)

    chosen = [
        rewrite(parts=("kernel_size", "weight")),
        rewrite(functions=("missing", "mistral")),
        rewrite(argument="sizes"),
        rewrite(argument="image_sizes", matches=lambda model, named: named["image_sizes"] == 3),
    ]
    others = [
        rewrite(parts=("kernel_size", "missing")),
        rewrite(functions=("missing", "TEXT")),
        rewrite(argument="masks"),
        rewrite(argument="sizes", matches=lambda model, named: False),
    ]
    monkeypatch.setattr(table, "REWRITES", (*chosen, *others))
    assert matching_rewrites(torch.nn.Sequential(Layer(2, 2)), {"kwargs": {"image_sizes": 3}}) == chosen


def test_a_plain_decoder_needs_no_rewrite():
    model, inputs = llama()
    observer = observed(model.eval(), inputs)
    assert matching_rewrites(model, observer.observation.calls[1].values()) == []
    assert exportkit.export(model, observer).rules == ()


@pytest.mark.parametrize("past", [0, 3, 5, 9])
@pytest.mark.parametrize("new", [1, 2, 8])
def test_windows_compute_the_same_under_their_rewrite(past, new):
    def run():
        layer = window_layers()(6)
        results = []
        for length in (past, new):
            if length:
                sizes = layer.get_mask_sizes(length)
                keys, values = (torch.randn(1, 2, length, 4, generator=generator) for _ in range(2))
                results += [sizes, *layer.update(keys, values), layer.keys, layer.values, layer.get_seq_length()]
        return results

    generator = torch.Generator().manual_seed(0)
    plain = run()
    generator = torch.Generator().manual_seed(0)
    model = mistral()
    cache = exportkit.make_dynamic_cache([(torch.ones(1, 2, 3, 4),) * 2], sliding_window=6)
    with applied(matching_rewrites(model, {"past_key_values": cache}), model):
        patched = run()
    for a, b in zip(plain, patched, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("window", [6, 64])
def test_one_graph_serves_windows_before_and_after_they_are_full(window, tmp_path):
    model = mistral(window)
    observer = observed(model, padded_left(7))
    exported = exportkit.export(model, observer)
    assert exported.rules == ("sliding windows of symbolic length",)
    assert any(finding.text.startswith("exported with: sliding windows") for finding in exported.plan.findings)
    report = exported.to_onnx(tmp_path / "model.onnx").verify()
    assert report.ok, str(report)


def test_windows_beside_full_caches_are_proven(tmp_path):
    model, inputs = gemma3_text()
    report = exportkit.export(model.eval(), observed(model, inputs)).to_onnx(tmp_path / "model.onnx").verify()
    assert report.ok, str(report)


def test_the_returned_cache_counts_what_the_models_own_would(tmp_path):
    model = mistral()
    observer = observed(model, padded_left(7))
    onnx_model = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    args, kwargs = observer.observation.signature.unbind(observer.observation.calls[2].values())
    cache = onnx_model(*args, **kwargs).past_key_values
    assert cache.get_seq_length() == 9
    assert cache.layers[0].keys.shape[2] == 5


def test_experts_are_exported_and_their_implementation_is_put_back(tmp_path):
    model = mixtral()
    before = model.get_experts_implementation()
    exported = exportkit.export(model, observed(model, padded_left(7)))
    assert exported.rules == ("experts as batched matrix products",)
    assert model.get_experts_implementation() == before
    report = exported.to_onnx(tmp_path / "model.onnx").verify()
    assert report.ok, str(report)


@pytest.mark.parametrize("build", [t5, whisper, speech_to_text, speech_encoder_decoder])
def test_one_decoder_graph_serves_the_first_call_and_later_ones_of_encoder_decoders(build, tmp_path):
    model, inputs = build()
    exported = exportkit.export(model.eval(), observed(model, inputs))
    assert exported.rules == ("only uncached encoder states projected",)
    report = exported.to_onnx(tmp_path / "model.onnx").verify()
    assert report.ok, str(report)
    assert {row.sizes["past_encoder_sequence"] == 0 for row in report.rows} == {True, False}


def test_a_mask_over_frames_may_end_anywhere_within_the_last_state(tmp_path):
    model, inputs = speech_to_text()
    exported = exportkit.export(model.eval(), observed(model, inputs))
    onnx_model = exported.to_onnx(tmp_path / "model.onnx")
    for frames, hidden in ((25, 0), (28, 5), (53, 2)):
        mask = torch.ones(2, frames, dtype=torch.int64)
        mask[0, frames - hidden :] = 0
        states = model.get_encoder()(torch.randn(2, frames, 8), attention_mask=mask)
        call = {"encoder_outputs": states, "attention_mask": mask, "decoder_input_ids": torch.randint(3, 90, (2, 4))}
        expected = model(**call).logits
        torch.testing.assert_close(onnx_model(**call).logits, expected, rtol=1e-4, atol=1e-5)


def test_a_state_space_model_is_traced_with_more_tokens_than_a_chunk(tmp_path):
    model, inputs = falcon_h1(num_hidden_layers=1)
    exported = exportkit.export(model.eval(), observed(model, inputs))
    assert exported.sizes["sequence"] > 8
    assert exported.sizes["sequence"] % 8
    report = exported.to_onnx(tmp_path / "model.onnx").verify()
    assert report.ok, str(report)


class Gate(torch.nn.Module):
    def forward(self, hidden):
        return hidden * 2 if hidden.sum() > 0 else hidden


def test_filled_windows_keep_their_counters_where_every_branch_is_traced(tmp_path):
    torch.manual_seed(0)
    model = mistral()
    model.model.norm = Gate()
    exported = exportkit.export(model, observed(model, padded_left(7)))
    assert exported.attempts[-1].strategy == "all recorded paths"
    assert exported.to_onnx(tmp_path / "model.onnx").verify().ok


def fails_in_a_trace(hidden):
    if torch.compiler.is_exporting():
        raise NotImplementedError("This layer runs in eager mode only.")
    return hidden


def test_rewrites_are_undone_when_the_export_fails():
    model = mistral()
    observer = observed(model, padded_left(7))
    before = dict(vars(window_layers()))
    model.model.norm.forward = fails_in_a_trace
    with pytest.raises(exportkit.ExportkitError):
        exportkit.export(model, observer)
    assert dict(vars(window_layers())) == before


class MadeOnDevice(torch.nn.Module):
    def forward(self, x):
        if not torch.compiler.is_exporting():
            return x + torch.linspace(0, 1, x.shape[1])
        with torch.device("cpu"):
            return x + torch.linspace(0, 1, x.shape[1])


def test_functions_that_are_replaced_in_a_trace_take_the_device_afterwards():
    model, observer = MadeOnDevice(), exportkit.InputObserver()
    with observer(model):
        model(torch.randn(2, 4))
        model(torch.randn(3, 7))
    device_constructors.cache_clear()  # torch lists them once, when a device is first set
    exportkit.export(model, observer)
    with torch.device("meta"):
        assert all(tensor.is_meta for tensor in (torch.rand(2), torch.linspace(0, 1, 3), torch.randperm(4)))


class MovesItsLayers(torch.nn.Module):
    """Moves its layers to where they are, as research code does."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x):
        self.to(x.device)
        return self.second.cpu().float()(self.first.to(device=x.device, dtype=x.dtype)(x))


def test_modules_that_are_moved_to_where_they_are_stay_there():
    model, observer = MovesItsLayers(), exportkit.InputObserver()
    with observer(model):
        model(torch.randn(2, 4))
        model(torch.randn(3, 4))
    program = exportkit.export(model, observer).program
    x = torch.randn(5, 4)
    torch.testing.assert_close(program.module()(x=x), model(x))


def test_encoder_decoder_without_a_mask_serves_other_lengths(tmp_path):
    model, _ = t5()
    model.eval().generation_config.eos_token_id = None
    observer = exportkit.InputObserver()
    with observer(model), torch.no_grad():
        model.generate(torch.randint(3, 99, (1, 4)), max_new_tokens=4, do_sample=False)
    assert not any(call.has("attention_mask") for call in observer.observation.calls)
    exported = exportkit.export(model, observer)
    assert "encoder_sequence" in str(exported.plan)
    report = exported.to_onnx(tmp_path / "model.onnx").verify()
    assert report.ok, str(report)


def test_arguments_may_be_dicts_with_integers_as_keys():
    states = {0: {"state": torch.zeros(1)}}
    assert matching_rewrites(torch.nn.Linear(2, 2), {"states": states}) == []
