"""Tiny models of transformers, with random weights: as in their documentation, padded, and called in unusual ways."""

import torch

from tests.trust.cases import call, case, control, ints

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
DECODER = SIZES | {"vocab_size": 32, "num_key_value_heads": 1, "max_position_embeddings": 64}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def ones(*shape):
    return torch.ones(shape, dtype=torch.long)


def padded(rows, length, left=True):
    """Returns an attention mask with more padding in each row."""
    kept = torch.arange(length) >= torch.arange(rows)[:, None]
    return (kept if left else kept.flip(1)).long()


def generates(*lengths, new=4, rows=2, mask=ones, **options):
    """Returns a function that lets a model generate from prompts of these lengths."""

    def run(model):
        for length in lengths:
            torch.manual_seed(length)
            ids = torch.randint(3, 30, (rows, length))
            settings = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0} | options
            with torch.no_grad():
                model.generate(ids, attention_mask=mask(rows, length), **settings)

    return run


AS_GENERATE = {"use_cache": True, "logits_to_keep": 1}
PROMPTS = [
    call(input_ids=ints(rows, length), position_ids=torch.arange(length).repeat(rows, 1), **AS_GENERATE)
    for rows, length in ((3, 9), (1, 5), (2, 2))
]
UNLIKE_GENERATE = [
    call(ints(3, 9)),
    call(input_ids=ints(3, 9), use_cache=False),
    call(input_ids=ints(3, 9), **AS_GENERATE),
    call(input_ids=ints(2, 5), attention_mask=padded(2, 5), **AS_GENERATE),
]


@control(generates(6), serves=PROMPTS, truth=UNLIKE_GENERATE, slack=10.0)
def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**DECODER, **TOKENS))


def _agree_without_padding(expected, got):
    """Whether results agree where no row has padding: what a padded position sees is arbitrary."""
    pairs = [(expected.logits[:, -1], got.logits[:, -1])]
    for a, b in zip(expected.past_key_values.layers, got.past_key_values.layers, strict=True):
        pairs += [(a.keys[:, :, 3:], b.keys[:, :, 3:]), (a.values[:, :, 3:], b.values[:, :, 3:])]
    return expected.logits.shape == got.logits.shape and all(torch.allclose(a, b, atol=1e-4) for a, b in pairs)


@case(
    generates(6, mask=padded),
    truth=[call(input_ids=ints(3, 9), attention_mask=padded(3, 9), **AS_GENERATE), call(ints(2, 5))],
    same=_agree_without_padding,
)
def llama_with_padding():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**DECODER, **TOKENS))


@case(
    generates(9, 4),
    may_refuse=True,
    truth=[call(ints(3, 12)), call(ints(1, 3)), call(ints(2, 9), attention_mask=padded(2, 9))],
    slack=10.0,
)
def mistral_with_a_window():
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(**DECODER, **TOKENS, sliding_window=6))


@control(
    [call(ints(2, 5), padded(2, 5, left=False)), call(ints(3, 7), padded(3, 7, left=False))],
    serves=[call(ints(4, 9), padded(4, 9, left=False)), call(ints(1, 6), ones(1, 6))],
    slack=10.0,
)
def bert():
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig(**SIZES, vocab_size=32, max_position_embeddings=64))


@case(
    [call(ints(2, 5)), call(ints(3, 7))],
    serves=[call(ints(4, 9))],
    truth=[
        call(ints(2, 17)),
        call(ints(2, 9), padded(2, 9)),
        call(ints(1, 16)),
        call(ints(2, 9), output_attentions=True),
    ],
    slack=10.0,
)
def bert_with_few_positions():
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(**SIZES, vocab_size=32, max_position_embeddings=16))


@case(
    generates(6, eos_token_id=None),
    may_refuse=True,
    truth=[call(ints(3, 9), attention_mask=ones(3, 9), decoder_input_ids=ints(3, 2))],
    slack=10.0,
)
def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 32}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0, eos_token_id=2))


@control(generates(5), serves=PROMPTS, truth=UNLIKE_GENERATE, slack=10.0)
def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32, n_positions=64, **TOKENS))
