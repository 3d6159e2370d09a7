"""
Sentence embeddings on ONNX
===========================

``SentenceTransformer.encode`` sorts texts, pads them in batches, and returns arrays. How does it run on a graph?
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from transformers import BertConfig, BertModel, BertTokenizerFast

import exportkit

# %%
# A tiny encoder with random weights takes the place of a real one, which ``SentenceTransformer(name)`` would load.

WORDS = ["a", "the", "cat", "dog", "bird", "sees", "hears", "and", "not", "small", "old"]

folder = TemporaryDirectory()
checkpoint = Path(folder.name, "bert")
torch.manual_seed(0)
tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
BertModel(BertConfig(vocab_size=len(tokens), **small)).save_pretrained(checkpoint)
BertTokenizerFast(vocab={token: number for number, token in enumerate(tokens)}).save_pretrained(checkpoint)
encoder = Transformer(str(checkpoint))
model = SentenceTransformer(modules=[encoder, Pooling(encoder.get_embedding_dimension()), Normalize()])

# %%
# The model takes and returns a dict of features, which needs no configuration. Two batches show what varies.

observer = exportkit.InputObserver()
with observer(model):
    model.encode(["the cat sees a bird", "a dog"])
    model.encode(["the old dog hears the cat and the bird", "not a cat", "birds"])

out = Path(folder.name, "out")
print(exportkit.export(model, observer).save(out).verify().verdict())

# %%
# ``encode`` itself is unchanged: only ``forward`` is replaced, and only inside the block.

texts = ["a small bird hears the dog", "the cat", "an old cat and a dog and a bird", "not the dog"] * 10
expected = model.encode(texts)
with exportkit.load(out).in_place_of(model) as calls:
    found = model.encode(texts, batch_size=8)
print(calls, "equal within 1e-5:", np.abs(found - expected).max() < 1e-5)
