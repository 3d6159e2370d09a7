"""Models that keep their state on their modules: the graph takes and returns it, the ONNX model remembers it."""

import torch

import exportkit
from exportkit.programs.subject import with_module_state
from tests.arguments.generative import VOCABULARY, ids


class Running(torch.nn.Module):
    """Adds up what it was given; a tensor that never changes is no state."""

    def __init__(self):
        super().__init__()
        self.total, self.weight = None, torch.tensor(2.0)

    def forward(self, x, start=False):
        before = torch.zeros_like(x[:, 0]) if self.total is None or start else self.total
        self.total = before + self.weight * x.sum(1)
        return self.total + x[:, -1]


def recurrent_gemma():
    from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

    torch.manual_seed(0)
    special = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "attention_window_size": 6}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "lru_width": 32}
    config = RecurrentGemmaConfig(**special, **heads, **sizes, block_types=["recurrent", "attention"])
    return RecurrentGemmaForCausalLM(config).eval()


def observed(model, *calls):
    observer = exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for call in calls:
            model(*call)
    return observer


def test_the_state_becomes_an_input_and_an_output_and_is_put_back(tmp_path):
    model = Running()
    observer = observed(model, (torch.ones(2, 3),), (torch.ones(2, 5),))
    held = model.total
    exported = exportkit.export(model, observer)
    assert model.total is held
    assert exported.traced.input_paths == ("x", "module_state._total")
    assert any("keeps its state on its modules" in finding.text for finding in exported.plan.findings)
    report = exported.to_onnx(tmp_path / "model.onnx").verify()
    assert report.ok, str(report)


def test_the_onnx_model_goes_on_from_call_to_call_and_starts_anew_with_another_batch(tmp_path):
    model = Running()
    onnx_model = exportkit.export(model, observed(model, (torch.ones(2, 3),), (torch.ones(2, 5),))).to_onnx(
        tmp_path / "model.onnx"
    )
    assert onnx_model(torch.ones(2, 3)).tolist() == [7.0, 7.0]
    assert onnx_model(torch.ones(2, 4)).tolist() == [15.0, 15.0]
    assert onnx_model(torch.ones(3, 1)).tolist() == [3.0, 3.0, 3.0]
    zeros = {"_total": torch.zeros(3)}
    assert onnx_model(torch.ones(3, 1), module_state=zeros).tolist() == [3.0, 3.0, 3.0]
    assert onnx_model.module_state["_total"].tolist() == [2.0, 2.0, 2.0]


def test_a_model_with_constant_tensors_on_its_modules_keeps_no_state():
    model = torch.nn.Sequential(torch.nn.Linear(4, 2))
    model[0].scale = torch.tensor(3.0)
    observer = observed(model, (torch.ones(3, 4),))
    assert with_module_state(model, "forward", observer.observation) is None


def test_one_graph_serves_recurrent_blocks(tmp_path):
    model = recurrent_gemma()
    model.generation_config.eos_token_id = None
    observer = exportkit.InputObserver()
    with observer(model, store_n_calls=3), torch.no_grad():
        model.generate(input_ids=ids(7), max_new_tokens=3, do_sample=False, pad_token_id=0)
    exported = exportkit.export(model, observer)
    assert exported.rules == ("sliding windows of symbolic length", "gated recurrence as one loop operator")
    report = exported.to_onnx(tmp_path / "model.onnx").verify()
    assert report.ok, str(report)
