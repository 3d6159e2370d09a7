"""
From a few calls to a proven ONNX file
======================================

What varied between the calls of a model, and does its exported graph serve sizes that nobody has run?
"""

from tempfile import TemporaryDirectory

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import exportkit
from exportkit import InputObserver, make_dynamic_cache, string_type

# %%
# An axis whose size changed between the calls is dynamic. The first axis of ``y`` was 1 each time: it stays static.


class AddModel(torch.nn.Module):
    def forward(self, x, y):
        return x + y


model, observer = AddModel(), InputObserver()
with observer(model):
    for x_shape, y_shape in (((2, 6), (1, 6)), ((3, 7), (1, 7)), ((4, 8), (1, 8))):
        model(torch.randn(x_shape), torch.randn(y_shape))
print(observer.num_obs(), "calls:", observer.infer_dynamic_shapes())
print("arguments:", string_type(observer.infer_arguments(), with_shape=True))

# %%
# A language model gets a prompt first, then one token after another and a cache that grows. The batch was 1 in both
# calls; ``set_batch_dimension_for=True`` makes it dynamic in every input.


class LanguageModel(torch.nn.Module):
    def forward(self, input_ids, attention_mask=None, past_key_values=None):
        return input_ids


model, observer = LanguageModel(), InputObserver()
with observer(model):
    for tokens, total in ((10, 10), (1, 11)):
        ids, mask = torch.ones((1, tokens), dtype=torch.int64), torch.ones((1, total), dtype=torch.int64)
        layers = [(torch.rand(1, 4, total, 32), torch.rand(1, 4, total, 32)) for _ in range(2)]
        model(input_ids=ids, attention_mask=mask, past_key_values=make_dynamic_cache(layers))
for name, shapes in observer.infer_dynamic_shapes(set_batch_dimension_for=True).items():
    print(f"{name}: {shapes}")
print("arguments:", string_type(observer.infer_arguments(), with_shape=True))

# %%
# Only the first call has an image. ``value_if_missing`` says what stands for it in the others.


class Multimodal(torch.nn.Module):
    def forward(self, input_ids, pixel_values=None):
        return input_ids


model, observer = Multimodal(), InputObserver(value_if_missing={"pixel_values": torch.empty((0, 3, 224, 224))})
with observer(model):
    model(input_ids=torch.ones((1, 12), dtype=torch.int64), pixel_values=torch.rand(1, 3, 224, 224))
    model(input_ids=torch.ones((1, 1), dtype=torch.int64))
print(observer.infer_dynamic_shapes())

# %%
# Now a real model: a tiny Llama generates with batch 1. The mask has one 0, padding on the left, because ``generate``
# drops a mask of ones. The plan says what varies and why; the model itself has confirmed what the batch is.

torch.manual_seed(0)
config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=99)
model, observer = LlamaForCausalLM(config).eval(), InputObserver()
ids, mask = torch.randint(3, 99, (1, 7)), torch.tensor([[0, 1, 1, 1, 1, 1, 1]])
with observer(model):
    model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0)
print(observer.plan())

# %%
# The graph runs in onnxruntime against the model: a row for each recorded call, and for sizes that nobody has run.

with TemporaryDirectory() as folder:
    onnx_model = exportkit.export(model, observer).to_onnx(f"{folder}/llama.onnx")
    print(onnx_model.verify())
