"""Text: x-transformers, sentence-transformers, and language models written by hand."""

import torch
from cases import case, ints, randn
from torch import nn

WORDS, MORE_WORDS = [(2, 6), (3, 9)], [(1, 7), (4, 14)]


def _decoder(**options):
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=16, depth=2, heads=2, attn_dim_head=8, **options)
    model = TransformerWrapper(num_tokens=60, max_seq_len=64, attn_layers=layers)
    return model, lambda batch, words: model(ints(batch, words))


def _encoder(**options):
    from x_transformers import Encoder, TransformerWrapper

    layers = Encoder(dim=16, depth=2, heads=2, attn_dim_head=8, **options)
    model = TransformerWrapper(num_tokens=60, max_seq_len=64, attn_layers=layers)

    def use(batch, words):
        lengths = torch.tensor([words, *[words - 2] * (batch - 1)])
        model(ints(batch, words), mask=torch.arange(words)[None] < lengths[:, None])

    return model, use


@case(WORDS, MORE_WORDS)
def decoder():
    return _decoder()


@case(WORDS, MORE_WORDS)
def decoder_with_rotary():
    return _decoder(rotary_pos_emb=True, use_rmsnorm=True, ff_glu=True)


@case(WORDS, MORE_WORDS)
def decoder_with_alibi():
    return _decoder(alibi_pos_bias=True)


@case(WORDS, MORE_WORDS)
def decoder_with_flash_attention():
    return _decoder(attn_flash=True, attn_kv_heads=1)


@case(WORDS, MORE_WORDS)
def decoder_with_memory():
    return _decoder(attn_num_mem_kv=2, attn_head_scale=True)


@case(WORDS, MORE_WORDS)
def encoder_with_mask():
    return _encoder()


@case(WORDS, MORE_WORDS)
def encoder_with_relative_positions():
    return _encoder(rel_pos_bias=True, attn_qk_norm=True)


@case([(2, 6, 5), (3, 9, 7)], [(1, 7, 4), (4, 14, 10)])
def cross_attention():
    from x_transformers import CrossAttender

    model = CrossAttender(dim=16, depth=2, heads=2, attn_dim_head=8)
    return model, lambda batch, words, others: model(randn(batch, words, 16), context=randn(batch, others, 16))


@case([(2,), (3,)], [(1,), (5,)])
def patches_of_images():
    from x_transformers import Encoder, ViTransformerWrapper

    layers = Encoder(dim=16, depth=1, heads=2, attn_dim_head=8)
    model = ViTransformerWrapper(image_size=32, patch_size=8, num_classes=5, attn_layers=layers)
    return model, lambda batch: model(randn(batch, 3, 32, 32))


@case([(2, 12), (3, 20)], [(1, 16), (4, 30)])
def continuous_values():
    from x_transformers import ContinuousTransformerWrapper, Encoder

    layers = Encoder(dim=16, depth=1, heads=2, attn_dim_head=8)
    model = ContinuousTransformerWrapper(dim_in=6, dim_out=3, max_seq_len=64, attn_layers=layers)
    return model, lambda batch, steps: model(randn(batch, steps, 6))


def _sentences(pooling="mean", normalised=False):
    import pathlib
    import tempfile

    import tokenizers
    import transformers
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules

    words = {word: index for index, word in enumerate(["[PAD]", "[UNK]", *(f"w{index}" for index in range(40))])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    folder = pathlib.Path(tempfile.mkdtemp())
    transformers.BertModel(config).save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", model_max_length=64
    ).save_pretrained(folder)
    parts = [
        modules.Transformer(str(folder)),
        modules.Pooling(16, pooling),
        *([modules.Normalize()] if normalised else []),
    ]
    model = SentenceTransformer(modules=parts, device="cpu")

    def use(batch, count):
        texts = [" ".join(f"w{(index * 7 + row) % 40}" for index in range(count - row % 3)) for row in range(batch)]
        model.encode(texts, batch_size=batch, show_progress_bar=False)

    return model, use


@case(WORDS, MORE_WORDS)
def sentences():
    return _sentences()


@case(WORDS, MORE_WORDS)
def sentences_by_their_first_word():
    return _sentences("cls", normalised=True)


@case(WORDS, MORE_WORDS)
def small_language_model():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
            self.net = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
            self.register_buffer("causal", torch.ones(64, 64).tril().view(1, 1, 64, 64))

        def forward(self, x):
            batch, steps, width = x.size()
            q, k, v = (p.view(batch, steps, 2, 8).transpose(1, 2) for p in self.qkv(self.norm(x)).split(width, 2))
            scores = (q @ k.transpose(-2, -1)) * 8**-0.5
            scores = scores.masked_fill(self.causal[:, :, :steps, :steps] == 0, float("-inf")).softmax(-1)
            x = x + self.out((scores @ v).transpose(1, 2).contiguous().view(batch, steps, width))
            return x + self.net(x)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.places = nn.Embedding(60, 16), nn.Embedding(64, 16)
            self.blocks, self.head = nn.Sequential(Block(), Block()), nn.Linear(16, 60)

        def forward(self, tokens, targets=None):
            assert tokens.shape[1] <= 64, "too long"
            x = self.blocks(self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device)))
            logits = self.head(x)
            loss = None if targets is None else nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            return logits, loss

    model = Model()
    return model, lambda batch, words: model(ints(batch, words))


@case([(2, 6, 0), (2, 1, 6), (2, 1, 7)], [(1, 7, 0), (4, 1, 9), (3, 3, 5)])
def cache_of_keys_in_tuples():
    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.qkv = nn.Embedding(60, 16), nn.Linear(16, 48)

        def forward(self, tokens, past=None):
            q, k, v = self.qkv(self.words(tokens)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4).unbind(0)
            if past is not None:
                k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
            seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
            return nn.functional.scaled_dot_product_attention(q, k, v, seen).transpose(1, 2).flatten(2), (k, v)

    model = Cached()

    def use(batch, words, past):
        cache = (randn(batch, 2, past, 8), randn(batch, 2, past, 8)) if past else None
        model(ints(batch, words), cache)

    return model, use


@case([(2, 6, 9), (3, 9, 5)], [(1, 7, 8), (4, 14, 20)])
def late_interaction():
    class Interaction(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(60, 16)

        def forward(self, query, document, mask):
            q, d = (nn.functional.normalize(self.words(tokens), dim=-1) for tokens in (query, document))
            return (q @ d.transpose(1, 2)).masked_fill(~mask.unsqueeze(1), -1e4).amax(-1).sum(-1)

    model = Interaction()

    def use(batch, words, others):
        model(ints(batch, words), ints(batch, others), torch.arange(others)[None].expand(batch, -1) < others - 2)

    return model, use


@case(WORDS, MORE_WORDS)
def characters_in_words():
    class Characters(nn.Module):
        def __init__(self):
            super().__init__()
            self.characters = nn.Embedding(50, 8)
            self.filters = nn.ModuleList(nn.Conv1d(8, 4, size, padding=size // 2) for size in (1, 3, 5))
            self.gate = nn.Linear(12, 24)

        def forward(self, words):
            batch, count, letters = words.shape
            x = self.characters(words.view(-1, letters)).transpose(1, 2)
            x = torch.cat([layer(x).amax(-1) for layer in self.filters], -1)
            shown, gate = self.gate(x).chunk(2, -1)
            return (gate.sigmoid() * shown.relu() + (1 - gate.sigmoid()) * x).view(batch, count, -1)

    model = Characters()
    return model, lambda batch, words: model(ints(batch, words, 7))
