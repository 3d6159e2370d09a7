"""Models that keep their state on their modules: the graph takes and returns it, the ONNX model remembers it."""

import pytest
import torch

import exportkit
from exportkit.programs.kept_state import with_module_state
from tests.arguments.generative import VOCABULARY, ids
from tests.models import Growing


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


class Positions(torch.nn.Module):
    """Adds the place of each token; the state is an integer, and a tensor that begins as None."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(99, 4)
        self.reset()

    def reset(self):
        self.offset, self.cache = 0, None

    def forward(self, x):
        x = x + self.embedding(torch.arange(self.offset, self.offset + x.shape[1]))
        self.offset += x.shape[1]
        self.cache = x if self.cache is None else torch.cat([self.cache, x], 1)
        return x + self.cache.mean(1, keepdim=True)


class InAnObject(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.kept = Growing()

    def forward(self, x):
        return x + self.kept.update(x).sum(1, keepdim=True) / self.kept.offset


class InAList(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.last = [None, None]

    def forward(self, x):
        for layer in range(2):
            x = x.cumsum(1) if self.last[layer] is None else x.cumsum(1) + self.last[layer]
            self.last[layer] = x[:, -1:]
        return x


class InPlace(torch.nn.Module):
    """Writes into a tensor of fixed size, as Llama of Meta does."""

    def __init__(self):
        super().__init__()
        self.cache = torch.zeros(4, 32, 4)

    def forward(self, x, start):
        rows, length, _ = x.shape
        self.cache[:rows, start : start + length] = x
        keys = self.cache[:rows, : start + length]
        mask = torch.ones(length, start + length, dtype=torch.bool).tril(start)
        return (x @ keys.mT).masked_fill(~mask, -1e9).softmax(-1) @ keys


class InBuffers(torch.nn.Module):
    """Writes into a buffer at given positions, as gpt-fast does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.zeros(2, 32, 4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, positions):
        self.cache[:, positions] = x
        self.calls += 1
        mask = torch.arange(32) <= positions[:, None]
        return (x @ self.cache.mT).masked_fill(~mask, -1e9).softmax(-1) @ self.cache


class SetOnce(torch.nn.Module):
    """Keeps what its first call computes, which the same call would replace by an equal tensor."""

    def __init__(self):
        super().__init__()
        self.shift = None

    def forward(self, x, start=None):
        if start is not None:
            self.shift = start.sum(1, keepdim=True)
        return x + self.shift


class Clock(torch.nn.Module):
    """Counts time in steps of half a second."""

    time = 0.0

    def forward(self, x):
        self.time += 0.5
        return x * self.time


def tokens(rows, length):
    return torch.randn(rows, length, 4)


STATES = {
    "an integer": (Positions, [(tokens(2, 5),), (tokens(2, 1),), (tokens(2, 1),)]),
    "a number": (Clock, [(tokens(2, 5),), (tokens(2, 1),), (tokens(3, 2),)]),
    "an object": (InAnObject, [(tokens(2, 5),), (tokens(2, 1),), (tokens(2, 2),)]),
    "a list": (InAList, [(tokens(2, 5),), (tokens(2, 1),), (tokens(2, 2),)]),
    "set once": (SetOnce, [(tokens(2, 5), tokens(2, 5)), (tokens(2, 1),), (tokens(2, 2),)]),
    "in place": (InPlace, [(tokens(2, 5), 0), (tokens(2, 1), 5), (tokens(2, 2), 6)]),
    "prompts alone": (InPlace, [(tokens(2, 5), 0), (tokens(3, 4), 0)]),
    "buffers": (InBuffers, [(tokens(2, n), torch.arange(p, p + n)) for p, n in ((0, 5), (5, 1), (6, 2))]),
    "buffers, prompts alone": (InBuffers, [(tokens(2, n), torch.arange(n)) for n in (5, 4)]),
}


@pytest.mark.parametrize("kind", STATES)
def test_where_a_state_is_does_not_matter(kind, tmp_path):
    make_model, calls = STATES[kind]
    model = make_model()
    graph = exportkit.export(model, observed(model, *calls)).to_onnx(tmp_path / "model.onnx")
    report = graph.verify()
    assert report.ok, str(report)
    fresh = make_model()
    fresh.load_state_dict({**fresh.state_dict(), **dict(model.named_parameters())})
    for call in calls:
        args = [torch.randn_like(v) if isinstance(v, torch.Tensor) and v.is_floating_point() else v for v in call]
        with torch.no_grad():
            torch.testing.assert_close(graph(*args), fresh(*args))


def test_a_model_that_is_reset_before_each_call_begins_anew(tmp_path):
    model, observer = Positions(), exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for rows, length in ((2, 5), (3, 4)):
            model.reset()
            model(tokens(rows, length))
    exported = exportkit.export(model, observer)
    assert any("starts afresh" in finding.text for finding in exported.plan.findings)
    graph = exported.to_onnx(tmp_path / "model.onnx")
    assert graph.verify().ok
    for _ in range(2):
        x = tokens(1, 6)
        model.reset()
        torch.testing.assert_close(graph(x), model(x).detach())


class Recurrent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Linear(8, 4)
        self.begin(1)

    def begin(self, rows):
        self.hidden = torch.zeros(rows, 4)

    def forward(self, x):
        self.hidden = torch.tanh(self.weight(torch.cat([x, self.hidden + 0 * x], 1)))
        return self.hidden


def test_a_state_of_zeros_has_as_many_rows_as_the_call(tmp_path):
    model, observer = Recurrent(), exportkit.InputObserver()
    with observer(model, store_n_calls=4), torch.no_grad():
        for rows in (2, 3):
            model.begin(rows)
            for _ in range(2):
                model(torch.randn(rows, 4))
    graph = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    assert graph.verify().ok
    model.begin(5)
    for _ in range(2):
        x = torch.randn(5, 4)
        torch.testing.assert_close(graph(x), model(x).detach())


def test_statistics_are_no_state():
    model = torch.nn.BatchNorm1d(4, track_running_stats=True)
    observer = observed(model, (torch.randn(3, 4),), (torch.randn(2, 4),))
    assert with_module_state(model, "forward", observer.observation) is None


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
    assert len(exported.programs) == 1
    assert exported.rules == ("sliding windows of symbolic length", "gated recurrence as one loop operator")
    report = exported.to_onnx(tmp_path / "model.onnx").verify()
    assert report.ok, str(report)


def test_recurrent_blocks_that_use_no_cache_start_each_call_anew(tmp_path):
    model = recurrent_gemma()
    observer = exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for batch, length in ((2, 5), (3, 7)):
            model(input_ids=ids(length).expand(batch, -1), use_cache=False)
    onnx_model = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    assert onnx_model.verify().ok, str(onnx_model.verify())
    later = {"input_ids": ids(4).expand(5, -1), "use_cache": False}
    for _ in range(2):
        torch.testing.assert_close(onnx_model(**later).logits, model(**later).logits.detach(), rtol=1e-4, atol=1e-5)
