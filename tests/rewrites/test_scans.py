"""Loops over tokens and chunks as operators: the same numbers at any length, from any state, in one graph."""

import contextlib

import pytest
import torch

import exportkit
from exportkit.rewrites.chunk_scans import attend_in_chunks, delta_rule, state_space_scan
from exportkit.rewrites.table import applied, matching_rewrites
from exportkit.rewrites.token_scans import traced_lightning_attention, weighted_average
from tests.arguments.generative import VOCABULARY, ids, observed, padded_left

SPECIAL = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LENGTHS = [1, 19]  # one token, and more than a chunk


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def with_larger_weights(model, factor):
    """As initialised, a layer adds so little that nobody would see it missing."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "A_log" not in name:
                parameter.mul_(factor)
    return model.eval()


def mamba():
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(**SPECIAL, hidden_size=32, state_size=4, num_hidden_layers=2, time_step_rank=4)
    return with_larger_weights(MambaForCausalLM(config), 1.5)


def mamba2():
    from transformers import Mamba2Config, Mamba2ForCausalLM

    sizes = {"hidden_size": 32, "num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 8}
    return with_larger_weights(Mamba2ForCausalLM(Mamba2Config(**SPECIAL, **sizes, num_hidden_layers=1)), 1.5)


class DeltaLayer(torch.nn.Module):
    """A layer that looks the delta rule up in the module of its class, as those of transformers do."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, 4 * 3 * 6)
        self.rates = torch.nn.Embedding(VOCABULARY, 4 * 2)

    def forward(self, ids, state=None):
        query, key, value = self.embed(ids).unflatten(-1, (3, 4, 6)).unbind(2)
        decay, beta = self.rates(ids).unflatten(-1, (2, 4)).unbind(2)
        output, state = torch_chunk_gated_delta_rule(
            query,
            key,
            value,
            g=-decay.exp(),
            beta=beta.sigmoid(),
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        return {"output": output, "state": state}


def torch_chunk_gated_delta_rule(*args, **kwargs):
    from transformers.models.qwen3_next import modeling_qwen3_next

    return modeling_qwen3_next.torch_chunk_gated_delta_rule(*args, **kwargs)


def rwkv():
    from transformers import RwkvConfig, RwkvForCausalLM

    config = RwkvConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, intermediate_size=64)
    return RwkvForCausalLM(config).eval()


def minimax():
    from transformers import MiniMaxConfig, MiniMaxForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "block_size": 4}
    config = MiniMaxConfig(**SPECIAL, **sizes, **experts, **layers, head_dim=8)
    return with_larger_weights(MiniMaxForCausalLM(config), 1.5)


def randn(*shape):
    return torch.randn(*shape)


def assert_same(expected, got):
    for a, b in zip(expected, got, strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("length", LENGTHS)
def test_the_state_space_scan_computes_what_transformers_does(length):
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    tensors = (
        randn(2, length, 4, 6),
        randn(2, length, 4),
        -torch.rand(4),
        randn(2, length, 2, 5),
        randn(2, length, 2, 5),
    )
    options = {"D": randn(4), "dt_bias": randn(4), "dt_softplus": True, "dt_limit": (0.0, 1.5)}
    state = {"initial_states": randn(2, 4, 6, 5), "return_final_states": True}
    assert_same(mamba2_chunk_scan(*tensors, 8, **options, **state), state_space_scan(*tensors, 8, **options, **state))
    assert_same([mamba2_chunk_scan(*tensors, 8)], [state_space_scan(*tensors, 8)])


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("by_channel", [False, True])
def test_the_delta_rule_computes_what_transformers_does(length, by_channel):
    if by_channel:
        from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention as reference
    else:
        from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule as reference
    keys = (randn(2, length, 4 if by_channel else 2, 5) for _ in range(2))
    decay = -20 * torch.rand(2, length, 4, 5) if by_channel else -20 * torch.rand(2, length, 4)
    tensors = *keys, randn(2, length, 4, 6), decay, torch.rand(2, length, 4)
    options = {"output_final_state": True, "chunk_size": 8}
    options |= {"initial_state": randn(2, 4, 5, 6), "use_qk_l2norm_in_kernel": True}
    assert_same(reference(*tensors, **options), delta_rule(*tensors, **options))


def test_the_delta_rule_returns_a_state_only_where_it_is_asked_for():
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    keys = (randn(2, 3, 2, 5) / 4 for _ in range(2))
    tensors = *keys, randn(2, 3, 4, 6), -torch.rand(2, 3, 4), torch.rand(2, 3, 4)
    output, state = delta_rule(*tensors)
    assert state is None
    assert_same([torch_chunk_gated_delta_rule(*tensors)[0]], [output])


@pytest.mark.parametrize("length", LENGTHS)
def test_rwkvs_average_computes_what_transformers_does(length):
    from transformers.models.rwkv.modeling_rwkv import rwkv_linear_attention

    tensors = randn(6), randn(6), 3 * randn(2, length, 6), randn(2, length, 6)
    expected, got = (f(*tensors, return_state=True) for f in (rwkv_linear_attention, weighted_average))
    assert_same([expected[0], *expected[1]], [got[0], *got[1]])
    expected, got = (f(*tensors, state=tuple(expected[1])) for f in (rwkv_linear_attention, weighted_average))
    assert_same([expected[0], *expected[1]], [got[0], *got[1]])


def test_a_chunk_is_never_longer_than_the_tokens():
    tensors = randn(1, 3, 2, 4), randn(1, 3, 2, 4), randn(1, 3, 2, 4), -torch.rand(1, 3, 2, 1), randn(1, 2, 4, 4)
    whole, state = attend_in_chunks(*tensors, chunk_size=2**40)  # a chunk of that size would not fit in any memory
    assert_same(attend_in_chunks(*tensors, chunk_size=2), (whole, state))


def test_several_tokens_on_a_state_give_what_they_give_one_by_one():
    model, tokens = mamba(), ids(6, batch=2)
    with torch.no_grad():
        cache = model(tokens[:, :2], use_cache=True).cache_params
        for i in range(2, 6):
            expected = model(tokens[:, i : i + 1], cache_params=cache, use_cache=True)
        cache = model(tokens[:, :2], use_cache=True).cache_params
        with applied(matching_rewrites(model, {}), model):
            got = model(tokens[:, 2:], cache_params=cache, use_cache=True)
    assert_same([expected.logits[:, -1]], [got.logits[:, -1]])
    for layer, other in zip(expected.cache_params.layers, got.cache_params.layers, strict=True):
        assert_same([layer.recurrent_states[0]], [other.recurrent_states[0]])


@pytest.mark.parametrize(
    ("build", "rule"),
    [
        (mamba, "selective scan as one loop operator"),
        (mamba2, "state-space chunks as one loop operator"),
    ],
)
def test_one_graph_serves_prompts_single_tokens_and_several_on_a_state(build, rule, tmp_path):
    model = build()
    exported = exportkit.export(model, observed(model, padded_left(7)))
    assert exported.rules == (rule,)
    report = exported.to_onnx(tmp_path / "model.onnx").verify()
    assert report.ok, str(report)


def test_one_graph_serves_any_number_of_chunks_of_the_delta_rule(tmp_path):
    model, observer = DeltaLayer().eval(), exportkit.InputObserver()
    with observer(model), torch.no_grad():
        state = model(ids(7, batch=2))["state"]
        model(ids(1, batch=2), state=state)
    exported = exportkit.export(model, observer)
    assert exported.rules == ("delta rule as one loop operator",)
    onnx_model = exported.to_onnx(tmp_path / "model.onnx")
    report = onnx_model.verify()
    assert report.ok, str(report)
    tokens, state = ids(150), randn(1, 4, 6, 6)  # two chunks of 64 and a part of one
    expected, got = model(tokens, state=state), onnx_model(tokens, state=state)
    assert_same([expected["output"].detach(), expected["state"].detach()], [got["output"], got["state"]])


def test_rwkv_starts_without_tokens_and_in_any_batch(tmp_path):
    model = rwkv()
    exported = exportkit.export(model, observed(model, {"input_ids": ids(7)}))
    assert exported.rules == ("weighted average of tokens as one loop operator",)
    assert exported.traced.defaults.values["state[4]"] == -1e30
    report = exported.to_onnx(tmp_path / "model.onnx").verify()
    assert report.ok, str(report)
    assert len({row.sizes["batch"] for row in report.rows}) > 1


def test_functions_and_methods_are_put_back_when_a_trace_fails():
    from transformers.cache_utils import Cache
    from transformers.models.mamba import modeling_mamba

    model = mamba()
    before = modeling_mamba.mamba_selective_scan, dict(vars(Cache))
    rewrites = matching_rewrites(model, {})
    with contextlib.suppress(RuntimeError), applied(rewrites, model):
        assert modeling_mamba.mamba_selective_scan is not before[0]
        raise RuntimeError
    assert (modeling_mamba.mamba_selective_scan, dict(vars(Cache))) == before


@pytest.mark.parametrize("lengths", [(9,), (9, 1), (5, 4)])
def test_lightning_attention_computes_what_transformers_does(lengths):
    from transformers.models.minimax.modeling_minimax import MiniMaxCache

    attention = minimax().model.layers[0].self_attn
    mask = torch.ones(2, lengths[0], dtype=torch.int64)
    mask[0, :2] = 0
    parts = [randn(2, length, 32) for length in lengths]

    def run():
        cache = MiniMaxCache()
        masks = [mask, *[None] * (len(parts) - 1)]
        results = (attention(part, None, m, past_key_values=cache) for part, m in zip(parts, masks, strict=True))
        return [tensor for result in results for tensor in result]

    with torch.no_grad():
        expected = run()
        with traced_lightning_attention(attention):
            assert_same(expected, run())
        assert_same(expected, run())


def test_a_model_that_takes_its_mask_for_something_else_while_decoding_is_served_without(tmp_path):
    """Its mask is as long as the first layer's cache, which holds a state, so a padded prompt goes wrong in torch."""
    model = minimax()
    exported = exportkit.export(model, observed(model, {"input_ids": ids(7, 1)}))
    assert list(exported.programs) == ["prefill", "decode"]
    assert exported.save(tmp_path / "out").verify().ok
