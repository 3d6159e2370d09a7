"""An attention mask that generate dropped, and other things a person should know."""

import dataclasses

import pytest
import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

import exportkit
from exportkit.errors import ArgumentError
from tests.models import random_ids, tiny_llama, tiny_mamba, tiny_mistral, tiny_t5

GREEDY = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}


@dataclasses.dataclass
class WithMask(CausalLMOutputWithPast):
    mask: torch.Tensor | None = None


def generated(prompt=7, **options):
    model, observer = tiny_llama(), exportkit.InputObserver()
    ids = torch.randint(3, 60, (1, prompt))
    with observer(model):
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False, **options)
    return model, observer


def findings(plan):
    return {finding.kind: finding.text for finding in plan.findings}


@pytest.fixture(scope="module")
def restored(tmp_path_factory):
    torch.manual_seed(0)
    model, observer = generated()
    assert not any(call.has("attention_mask") for call in observer.observation.calls)
    return model, exportkit.export(model, observer).to_onnx(tmp_path_factory.mktemp("restored") / "model.onnx")


def test_a_mask_of_ones_that_generate_dropped_is_an_input_of_the_graph(restored):
    _, onnx_model = restored
    plan = onnx_model.exported.plan
    assert str(plan.by_path["attention_mask"].sizes[1]) == "past_sequence + sequence"
    assert "attention_mask" in onnx_model.session.inputs
    assert "padded batches" in findings(plan)["restored input"]


def test_the_graph_serves_padded_batches(restored):
    model, onnx_model = restored
    ids, mask = torch.randint(3, 60, (3, 5)), torch.ones(3, 5, dtype=torch.int64)
    mask[0, :2] = 0
    positions = torch.arange(5).expand(3, 5)
    kwargs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "logits_to_keep": 1}
    expected, got = model(**kwargs).logits, onnx_model(**kwargs).logits
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)
    assert not torch.allclose(got, onnx_model(**{**kwargs, "attention_mask": torch.ones_like(mask)}).logits)


def test_a_mask_that_is_left_out_is_all_ones(restored):
    model, onnx_model = restored
    kwargs = {
        "input_ids": torch.randint(3, 60, (2, 5)),
        "position_ids": torch.arange(5).expand(2, 5),
        "logits_to_keep": 1,
    }
    torch.testing.assert_close(onnx_model(**kwargs).logits, model(**kwargs).logits, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("make", [tiny_llama, tiny_mistral])
def test_calls_that_are_not_stored_get_masks_too(make):
    model, observer = make(), exportkit.InputObserver()
    with observer(model), torch.no_grad():  # the first three calls are stored, all of them with two rows
        for rows, length in ((2, 7), (3, 9)):
            cache = model(random_ids(rows, length)).past_key_values
            for _ in range(4):
                model(random_ids(rows, 1), past_key_values=cache)
    plan = observer.plan()
    assert [str(size) for size in plan.by_path["attention_mask"].sizes] == ["batch", "past_sequence + sequence"]
    assert not any("was not found" in finding.text for finding in plan.findings)


@pytest.mark.runtime
def test_a_graph_refuses_caches_that_do_not_show_how_many_tokens_came_before(tmp_path):
    class WithoutMask(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = tiny_mistral(sliding_window=4)

        def forward(self, ids, cache=None):
            result = self.inner(ids, past_key_values=cache)
            return result.logits, result.past_key_values

    def run(model, rows, steps):
        found, cache = [], None
        for length in (2, *[1] * steps):
            logits, cache = model(random_ids(rows, length), cache)
            found.append(logits)
        return found

    model, observer = WithoutMask().eval(), exportkit.InputObserver()
    with observer(model), torch.no_grad():
        run(model, 2, 2), run(model, 3, 2)
    onnx_model = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    assert onnx_model.verify().ok
    assert len(run(onnx_model, 2, 2)) == 3
    with pytest.raises(ArgumentError, match="counted more tokens") as raised:
        run(onnx_model, 2, 3)
    assert "expected: 3 tokens" in str(raised.value)


def test_an_encoder_decoder_serves_padded_batches(tmp_path):
    model, observer = tiny_t5(), exportkit.InputObserver()
    with observer(model, parts=["encoder"]):
        for length in (7, 9):
            model.generate(torch.randint(3, 60, (1, length)), max_new_tokens=3, do_sample=False)
    assert not any(call.has("attention_mask") for call in observer.observation.calls)
    graph = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")

    ids, mask = torch.randint(3, 60, (3, 5)), torch.ones(3, 5, dtype=torch.int64)
    mask[0, 2:], mask[2, 4:] = 0, 0
    options = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    expected = model.generate(ids, attention_mask=mask, **options)
    with graph.in_place_of(model) as calls:
        got = model.generate(ids, attention_mask=mask, **options)
    assert calls.inside == 5
    torch.testing.assert_close(got.logits, expected.logits, rtol=1e-3, atol=1e-4)


def test_the_proof_covers_padded_calls(restored):
    _, onnx_model = restored
    assert onnx_model.verify().ok


def test_a_mask_that_the_model_returns_is_returned_if_it_is_given(tmp_path):
    class ReturnsItsMask(type(tiny_llama())):
        def forward(self, attention_mask=None, **kwargs):
            result = super().forward(attention_mask=attention_mask, **kwargs)
            return WithMask(**result, mask=None if attention_mask is None else attention_mask * 2)

    model, observer = tiny_llama(), exportkit.InputObserver()
    model.__class__ = ReturnsItsMask
    ids = torch.randint(3, 60, (1, 7))
    with observer(model):
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)
    onnx_model = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    assert onnx_model.verify().ok
    call, mask = observer.observation.calls[0], torch.ones_like(ids)
    assert "mask" not in onnx_model(**call.args_kwargs()[1])
    assert torch.equal(onnx_model(**call.args_kwargs()[1], attention_mask=mask)["mask"], mask * 2)


def test_an_input_that_the_user_removed_is_not_restored():
    _, observer = generated()
    observer.remove_inputs(["attention_mask"])
    assert "attention_mask" not in observer.plan().by_path


def test_a_mask_that_was_given_is_left_as_it_is():
    model, observer = tiny_llama(), exportkit.InputObserver()
    ids = torch.randint(3, 60, (1, 7))
    mask = torch.tensor([[0, 1, 1, 1, 1, 1, 1]])
    with observer(model):
        model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False)
    plan = observer.plan()
    assert "restored input" not in findings(plan)


def padded_and_plain(model, plain_calls, **options):
    observer = exportkit.InputObserver()
    ids = torch.tensor([[5, 6, 7, 8, 9, 10], [0, 0, 5, 6, 7, 9]])
    with observer(model, **options):
        model.generate(ids, attention_mask=(ids > 0).long(), **GREEDY)
        for _ in range(plain_calls):
            model.generate(torch.tensor([[5, 6, 7]]), **GREEDY)
    return observer


@pytest.mark.parametrize(("plain_calls", "stored"), [(0, 3), (1, 3), (1, 5)])
def test_a_graph_recorded_with_padding_serves_calls_without_a_mask(plain_calls, stored, tmp_path):
    model = tiny_llama()
    exported = exportkit.export(model, padded_and_plain(model, plain_calls, store_n_calls=stored))
    assert exported.split is None
    graph = exported.to_onnx(tmp_path / "model.onnx")
    report = graph.verify()
    assert report.ok
    without = "without attention_mask, past_key_values"
    assert stored > 3 or [row.status for row in report.rows if row.label == without] == ["proven"]
    ids = torch.tensor([[5, 6, 7, 8], [9, 4, 5, 6]])
    expected = model.generate(ids, **GREEDY)
    with graph.in_place_of(model) as calls:
        assert torch.equal(model.generate(ids, **GREEDY), expected)
    assert calls.inside == 3


def test_a_mask_is_required_if_ones_do_not_stand_for_none():
    class AddsOne(type(tiny_llama())):
        def forward(self, attention_mask=None, **kwargs):
            result = super().forward(attention_mask=attention_mask, **kwargs)
            result.logits = result.logits + (attention_mask is None)
            return result

    model = tiny_llama()
    model.__class__ = AddsOne
    assert not padded_and_plain(model, 0).plan(model).by_path["attention_mask"].is_optional


def test_what_recorded_calls_infer_has_no_restored_mask():
    _, observer = generated()
    assert "attention_mask" not in observer.infer_dynamic_shapes()
    assert "attention_mask" not in observer.infer_arguments(exportable=True)


class Many(torch.nn.Module):
    def forward(self, x, labels=None, weights=None, *, scale=1.0):
        return x * scale


def test_inputs_that_no_call_gave_and_sizes_seen_once_are_findings():
    model, observer = Many(), exportkit.InputObserver()
    with observer(model):
        for rows in (2, 3):
            model(torch.randn(rows, 5), weights=None, scale=2.0)
    found = findings(observer.plan())
    assert found["never given"] == "never passed, so not a graph input: labels, weights."
    assert found["one size"] == "seen with one size only, so static: x axis 1."
    assert found["constant"] == "scale=2.0 is baked into the graph."


@pytest.mark.parametrize("batch", [1, 2])
def test_a_model_with_a_state_gets_a_mask_over_the_new_tokens(batch, tmp_path):
    torch.manual_seed(0)
    model, observer = tiny_mamba(), exportkit.InputObserver()
    ids = torch.randint(3, 60, (batch, 7))
    with observer(model):
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)
    onnx_model = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    assert [str(size) for size in onnx_model.exported.plan.by_path["attention_mask"].sizes] == ["batch", "sequence"]
    assert onnx_model.verify().ok
    ids, mask = torch.randint(3, 60, (3, 5)), torch.ones(3, 5, dtype=torch.int64)
    mask[0, :2] = 0
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask, use_cache=True, logits_to_keep=1).logits
    got = onnx_model(input_ids=ids, attention_mask=mask, use_cache=True, logits_to_keep=1).logits
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)
    assert not torch.allclose(got, onnx_model(input_ids=ids, use_cache=True, logits_to_keep=1).logits)


def test_past_a_window_the_mask_is_over_all_tokens_that_were_stored(tmp_path):
    torch.manual_seed(0)
    model, observer = tiny_mistral(sliding_window=6), exportkit.InputObserver()
    ids = torch.randint(3, 60, (2, 9))
    with observer(model):
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)
    onnx_model = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    assert str(onnx_model.exported.plan.by_path["attention_mask"].sizes[1]) == "past_sequence + sequence"
    report = onnx_model.verify()
    assert report.ok, report
    ids, mask = torch.randint(3, 60, (3, 8)), torch.ones(3, 8, dtype=torch.int64)
    mask[0, :4] = 0
    kwargs = {"input_ids": ids, "attention_mask": mask, "position_ids": torch.arange(8).expand(3, 8)}
    kwargs["logits_to_keep"] = 1
    with torch.no_grad():
        expected = model(**kwargs).logits
    torch.testing.assert_close(onnx_model(**kwargs).logits, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("prompt", [4, 9])
def test_calls_over_a_full_window_are_proven_as_they_were_made(prompt, tmp_path):
    torch.manual_seed(0)
    model, observer = tiny_mistral(sliding_window=6), exportkit.InputObserver()
    ids = torch.randint(3, 60, (2, prompt))
    with observer(model, store_n_calls=5):
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False)
    onnx_model = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    assert not [condition for condition in onnx_model.domain.conditions if condition.own]
    assert onnx_model.verify().ok
    for call in observer.observation.calls:
        assert "attention_mask" not in call.arguments
        args, kwargs = call.signature.unbind(call.copies(), call.named)
        expected = call.outputs.tensors()["logits"]
        torch.testing.assert_close(onnx_model(*args, **kwargs).logits, expected, rtol=1e-3, atol=1e-4)


def test_without_a_mask_or_a_count_a_full_window_is_refused(tmp_path):
    torch.manual_seed(0)
    model, observer = tiny_mistral(sliding_window=6), exportkit.InputObserver()
    ids = torch.randint(3, 60, (2, 9))
    with observer(model):
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)
    onnx_model = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    args, kwargs = observer.observation.calls[2].args_kwargs()
    expected = model(*args, **kwargs).logits
    args, kwargs = observer.observation.calls[2].args_kwargs()
    for layer in kwargs["past_key_values"].layers:
        layer.cumulative_length = 0
    torch.testing.assert_close(onnx_model(*args, **kwargs).logits, expected, rtol=1e-3, atol=1e-4)  # from the positions
    del kwargs["position_ids"]
    with pytest.raises(exportkit.errors.ArgumentError):
        onnx_model(*args, **kwargs)
