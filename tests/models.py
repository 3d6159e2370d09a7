"""Tiny models for all tests: plain modules that show one way of being called, and transformers models of two layers.

All weights are random and small; nothing is downloaded. Models of transformers are built by functions, so that
transformers is imported only by the tests that need it.
"""

from __future__ import annotations

import torch
from torch import nn

VOCABULARY = 64
HEADS, HEAD_SIZE, LAYERS = 4, 32, 2


class Add(nn.Module):
    """Two tensors, one of which may broadcast."""

    def forward(self, x, y):
        return x + y


class OptionalAdd(nn.Module):
    """A tensor that may be left out."""

    def forward(self, x, y=None):
        return x if y is None else x + y


class Scale(nn.Module):
    """A tensor and Python constants, with and without defaults."""

    def forward(self, x, factor, offset=0, negate=False):
        scaled = x * factor + offset
        return -scaled if negate else scaled


class Total(nn.Module):
    """Any number of tensors, by position and by name."""

    def forward(self, x, *args, **kwargs):
        return x + sum(value.sum() for value in (*args, *kwargs.values()))


class Weighted(nn.Module):
    """A dict of tensors."""

    def forward(self, data):
        return data["values"] * data["weights"].sum()


class Countdown(nn.Module):
    """Calls itself, on one row less, until one row is left."""

    def forward(self, x):
        return x if len(x) == 1 else x[:1] + self(x[1:]).sum()


class Growing:
    """A cache of one layer that begins without tensors."""

    def __init__(self):
        self.keys, self.offset = None, 0

    def update(self, keys):
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys], 1)
        self.offset += keys.shape[1]
        return self.keys


class Picky(nn.Module):
    """Refuses three rows."""

    def forward(self, x):
        if len(x) == 3:
            raise ValueError("three rows")
        return x * 2


class AddsInPlace(nn.Module):
    """Changes its input, and returns it."""

    def forward(self, x):
        return x.add_(1)


class Classifier(nn.Module):
    """A linear layer, with one method more than forward."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x):
        return self.linear(x)

    def classify(self, x):
        return self.linear(x).argmax(-1)


class IdsDecoder(nn.Module):
    """Called like a decoder; returns the token ids that it was given."""

    def forward(self, input_ids, attention_mask=None, past_key_values=None):
        return input_ids


class ZerosDecoder(nn.Module):
    """Called like a decoder; returns zeros for each token."""

    def forward(self, input_ids, attention_mask=None, past_key_values=None):
        return torch.zeros(*input_ids.shape, HEAD_SIZE)


class PastDecoder(nn.Module):
    """Called like a decoder; its tokens attend to those stored in the cache where the mask, as long, lets them."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HEADS * HEAD_SIZE)

    def forward(self, input_ids, attention_mask=None, past_key_values=None):
        batch, length = input_ids.shape
        hidden = self.embedding(input_ids).view(batch, length, HEADS, HEAD_SIZE).transpose(1, 2)
        for layer in past_key_values.layers:
            scores = hidden @ layer.keys.transpose(-1, -2)
            scores = scores.masked_fill(attention_mask[:, None, None, :] == 0, float("-inf"))
            hidden = hidden + scores.softmax(-1) @ layer.values
        return hidden.transpose(1, 2).reshape(batch, length, HEADS * HEAD_SIZE)


class ImageDecoder(nn.Module):
    """Called like a decoder that also takes images; adds their mean to each embedded token."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HEAD_SIZE)

    def forward(self, input_ids, pixel_values=None, attention_mask=None, past_key_values=None):
        hidden = self.embedding(input_ids)
        if pixel_values is not None:
            hidden = hidden + pixel_values.sum()
        return hidden


class Captioner(nn.Module):
    """Token ids, with a row of features wherever the placeholder stands; the features are a structure.

    Like a multimodal model it reads only a part of that structure, a list with a tensor for each image, and hands the
    structure back.
    """

    placeholder = 7

    def __init__(self):
        super().__init__()
        self.embed, self.encoder, self.head = nn.Embedding(20, 4), nn.Linear(3, 4), nn.Linear(4, 20)

    def get_image_features(self, pixels):
        """Features of images ``(images, 2, 3)``: two rows for each."""
        rows = self.encoder(pixels)
        return {"pooled": [rows.flatten(0, 1)], "raw": rows * 2}

    def forward(self, tokens, features=None):
        embeddings = self.embed(tokens)
        if features is None:
            return {"logits": self.head(embeddings)}
        rows, chosen = torch.cat(features["pooled"]), tokens == self.placeholder
        if not torch.compiler.is_exporting() and int(chosen.sum()) != len(rows):
            raise ValueError("as many rows as placeholders")
        embeddings = embeddings.masked_scatter(chosen.unsqueeze(-1).expand_as(embeddings), rows)
        return {"logits": self.head(embeddings), "features": features}

    def caption(self, tokens, pixels):
        """Runs with the features of images, and once more without."""
        return self(tokens, features=self.get_image_features(pixels)), self(tokens[:, :1] * 0 + 1)


def random_cache(length, batch=1, layers=LAYERS, heads=HEADS, head_size=HEAD_SIZE, sliding_window=None):
    """Returns a DynamicCache with ``length`` random tokens in each layer."""
    from exportkit import make_dynamic_cache

    shape = (batch, heads, length, head_size)
    pairs = [(torch.randn(shape), torch.randn(shape)) for _ in range(layers)]
    return make_dynamic_cache(pairs, sliding_window=sliding_window)


def random_ids(batch, length):
    """Returns random token ids."""
    return torch.randint(3, VOCABULARY, (batch, length))


_DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def tiny_llama(**changes) -> nn.Module:
    """Returns a decoder with full attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_DECODER | changes)).eval()


def tiny_mistral(sliding_window=6, **changes) -> nn.Module:
    """Returns a decoder with sliding-window attention in all layers."""
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(**_DECODER | changes, sliding_window=sliding_window, head_dim=4)
    return MistralForCausalLM(config).eval()


def tiny_gpt2() -> nn.Module:
    """Returns a decoder with learned positions."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": VOCABULARY, "n_positions": 128, "n_embd": 16, "n_layer": LAYERS, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=2, pad_token_id=0)).eval()


def tiny_mamba() -> nn.Module:
    """Returns a decoder whose layers keep states of fixed size instead of keys and values."""
    from transformers import MambaConfig, MambaForCausalLM

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": LAYERS, "state_size": 4}
    return MambaForCausalLM(MambaConfig(**sizes, bos_token_id=1, eos_token_id=2, pad_token_id=0)).eval()


def tiny_t5() -> nn.Module:
    """Returns an encoder-decoder."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": LAYERS, "num_heads": 4}
    tokens = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    return T5ForConditionalGeneration(T5Config(**sizes, **tokens)).eval()


def tiny_bert() -> nn.Module:
    """Returns an encoder that classifies its input."""
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
    return BertForSequenceClassification(BertConfig(vocab_size=VOCABULARY, **sizes)).eval()


IMAGE_TOKEN = 9


def tiny_llava() -> nn.Module:
    """Returns a decoder with a vision encoder; each 28×28 image stands for four tokens ``IMAGE_TOKEN``."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
    vision = CLIPVisionConfig(**sizes, image_size=28, patch_size=14, projection_dim=16)
    text = LlamaConfig(**_DECODER)
    config = LlavaConfig(text_config=text, vision_config=vision, image_token_index=IMAGE_TOKEN, image_seq_length=4)
    return LlavaForConditionalGeneration(config).eval()
