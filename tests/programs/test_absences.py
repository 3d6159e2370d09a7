"""Which optional inputs may be left out together."""

import pytest
import torch

import exportkit
from exportkit import InputObserver
from exportkit.errors import ArgumentError
from tests.models import random_ids, tiny_llama, tiny_mistral


def exported(model, *calls):
    torch.manual_seed(0)
    observer = InputObserver()
    with observer(model, store_n_calls=len(calls)):
        for call in calls:
            model(**call)
    return exportkit.export(model, observer)


def x(*shape):
    return torch.randn(*shape)


class Both(torch.nn.Module):
    """Adds two inputs; if both are absent, the rest counts ``factor`` times."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x, y=None, z=None):
        if y is None and z is None:
            x = x * self.factor
        x = x if y is None else x + y
        return x if z is None else x - z


class Limited(torch.nn.Module):
    def forward(self, x, y=None):
        return x.clamp(max=100) if y is None else x + y


class Causal(torch.nn.Module):
    def forward(self, x, mask=None):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask, is_causal=mask is None)


SINGLE_ABSENCES = (
    {"x": x(2, 5), "y": x(2, 5), "z": x(2, 5)},
    {"x": x(3, 7), "z": x(3, 7)},
    {"x": x(4, 6), "y": x(4, 6)},
)


def test_inputs_that_were_never_left_out_together_may_be_if_the_model_agrees_with_the_program():
    absent = exported(Both(1), *SINGLE_ABSENCES).domain.absent.keys()
    assert absent == {frozenset(), frozenset("y"), frozenset("z"), frozenset("yz")}


def test_a_combination_for_which_the_model_does_something_else_is_refused(tmp_path):
    onnx_model = exported(Both(2), *SINGLE_ABSENCES).to_onnx(tmp_path / "model.onnx")
    assert onnx_model.domain.absent.keys() == {frozenset(), frozenset("y"), frozenset("z")}
    assert "may be left out: y; or z" in str(onnx_model.domain)
    with pytest.raises(ArgumentError, match="leave out these inputs together"):
        onnx_model(x(2, 4))
    assert onnx_model.verify().ok


def test_a_combination_that_was_not_recorded_is_proven(tmp_path):
    report = exported(Both(1), *SINGLE_ABSENCES).to_onnx(tmp_path / "model.onnx").verify()
    assert {row.label: row.status for row in report.rows}["without y, z"] == "proven"


def test_the_combinations_are_saved_and_enforced_after_loading(tmp_path):
    exported(Both(2), *SINGLE_ABSENCES).save(tmp_path)
    loaded = exportkit.load(tmp_path)
    assert loaded.domain.absent.keys() == {frozenset(), frozenset("y"), frozenset("z")}
    assert loaded.verify().ok
    with pytest.raises(ArgumentError, match="leave out these inputs together"):
        loaded(x(2, 4))


def test_a_default_that_is_right_for_the_recorded_values_only_is_not_used(tmp_path):
    model = exported(Limited(), {"x": x(2, 5), "y": x(2, 5)}, {"x": x(3, 7)})
    assert list(model.programs) == ["with_y", "without_y"]
    onnx_model = model.to_onnx(tmp_path / "model.onnx")
    assert onnx_model.verify().ok
    assert onnx_model(torch.full((2, 3), 1000.0)).max() == 100


def test_a_default_that_is_right_for_one_token_only_is_not_used(tmp_path):
    calls = [{"x": x(2, s, 4), "mask": torch.rand(2, s, s) > 0.2} for s in (5, 7)]
    onnx_model = exported(Causal(), *calls, {"x": x(3, 1, 4)}).to_onnx(tmp_path / "model.onnx")
    given = x(2, 6, 4)
    torch.testing.assert_close(onnx_model(given), Causal()(given), rtol=1e-3, atol=1e-4)


def test_a_recorded_call_that_no_default_serves_is_refused_and_reported():
    torch.manual_seed(0)
    model, observer = Limited(), InputObserver()
    with observer(model):
        model(x(2, 5), x(2, 5))
        model(x(3, 7))
    planned = exportkit.export(model, observer.plan())
    assert planned.domain.absent.keys() == {frozenset()}
    assert [finding.where for finding in planned.plan.findings if finding.kind == "missing input"] == ["y"]


@pytest.mark.parametrize("is_dict", [False, True], ids=["ModelOutput", "dict"])
def test_outputs_that_a_call_lacks_are_absent(is_dict, tmp_path):
    outputs = pytest.importorskip("transformers.modeling_outputs")

    class Optional(torch.nn.Module):
        def forward(self, x, parts=None):
            states = None if parts is None else [part * 2 for part in parts]
            rest = x * 2 if parts is None else x * 2 + parts[0]
            if is_dict:
                return {"last_hidden_state": rest, "hidden_states": states}
            return outputs.BaseModelOutput(last_hidden_state=rest, hidden_states=states)

    model, parts = Optional(), [x(2, 5), x(2, 5)]
    onnx_model = exported(model, {"x": x(2, 4), "parts": [x(2, 4), x(2, 4)]}, {"x": x(3, 6)}).to_onnx(
        tmp_path / "model.onnx"
    )
    assert onnx_model.verify().ok
    for call in ({"x": x(2, 5)}, {"x": x(2, 5), "parts": parts}):
        expected, got = model(**call), onnx_model(**call)
        assert list(got) == list(expected)
        assert (got.get("hidden_states") is None) == (expected.get("hidden_states") is None)


def test_calls_that_leave_out_an_input_and_are_not_stored_are_named_with_what_to_do(tmp_path):
    torch.manual_seed(0)
    model, observer = Limited(), InputObserver()
    with observer(model, store_n_calls=2):
        for call in ({"x": x(2, 5), "y": x(2, 5)}, {"x": x(3, 7), "y": x(3, 7)}, {"x": x(4, 6)}):
            model(**call)
    onnx_model = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    report = onnx_model.verify()
    assert report.ok
    assert "calls 2 leave out y" in str(report)
    assert "store more calls to serve them (store_n_calls)" in str(report)
    with pytest.raises(ArgumentError, match="store_n_calls"):
        onnx_model(x=x(2, 4))


@pytest.mark.runtime
def test_a_prompt_without_mask_and_past_is_served_although_the_cache_counts_tokens(tmp_path):
    model, observer = tiny_mistral(), InputObserver()
    mask = torch.ones(2, 5, dtype=torch.int64)
    mask[0, :2] = 0
    with observer(model), torch.no_grad():
        model.generate(random_ids(2, 5), attention_mask=mask, max_new_tokens=3, min_new_tokens=3)
    graph = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    assert graph.verify().ok

    prompt = {"inputs": random_ids(1, 4), "max_new_tokens": 6, "min_new_tokens": 6}
    expected = model.generate(**prompt)
    with graph.in_place_of(model):
        assert torch.equal(model.generate(**prompt), expected)


@pytest.mark.runtime
@pytest.mark.parametrize("make", [tiny_llama, tiny_mistral])
def test_plain_calls_and_a_generation_are_served_by_one_graph(make, tmp_path):
    model, observer = make(), InputObserver()
    mask = torch.ones(2, 8, dtype=torch.int64)
    mask[0, :2] = 0
    with observer(model, store_n_calls=6), torch.no_grad():
        model(input_ids=random_ids(2, 8), attention_mask=mask)
        model(input_ids=random_ids(1, 9))
        model.generate(random_ids(2, 7), attention_mask=mask[:, :7], max_new_tokens=4, min_new_tokens=4)
    graph = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    assert list(graph.graphs) == [""]
    assert graph.verify().ok

    prompt, tokens = random_ids(2, 4), random_ids(2, 3)
    for first in ({"input_ids": prompt}, {"input_ids": prompt, "attention_mask": mask[:, :4]}):
        expected, found = model(**first), graph(**first)
        torch.testing.assert_close(found["logits"], expected.logits)
        expected = model(tokens, past_key_values=expected.past_key_values)
        found = graph(tokens, past_key_values=found["past_key_values"])
        torch.testing.assert_close(found["logits"], expected.logits)


@pytest.mark.runtime
def test_generations_with_static_caches_of_other_lengths_are_served(tmp_path):
    model, observer = tiny_llama(), InputObserver()
    mask = torch.ones(3, 12, dtype=torch.int64)
    mask[0, :2] = 0

    def generate(batch, length, tokens):
        options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "cache_implementation": "static"}
        torch.manual_seed(batch)
        return model.generate(random_ids(batch, length), attention_mask=mask[:batch, :length], **options)

    with observer(model, store_n_calls=6), torch.no_grad():
        generate(2, 5, 3)
        generate(3, 7, 5)
    graph = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    assert graph.verify().ok
    expected = generate(2, 9, 8)
    with graph.in_place_of(model):
        assert torch.equal(generate(2, 9, 8), expected)
