"""
From a few calls to a proven ONNX file
======================================

What varies between the calls of a model, and does the exported graph serve sizes that were never recorded?
"""

from tempfile import TemporaryDirectory

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import exportkit
from exportkit import InputObserver, string_type

# %%
# An axis whose size changes between calls is dynamic. The first axis of ``y`` was 1 in every call, so it is static.


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
# Now a language model: a tiny Llama generates with batch 1. The mask has a 0 for padding on the left, because
# ``generate`` drops a mask of ones. The plan says what varies and why. The batch was found by running the model.

torch.manual_seed(0)
config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=99)
model, observer = LlamaForCausalLM(config).eval(), InputObserver()
ids, mask = torch.randint(3, 99, (1, 7)), torch.tensor([[0, 1, 1, 1, 1, 1, 1]])
with observer(model):
    model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0)
print(observer.plan())

# %%
# onnxruntime is compared with the model: one row for each recorded call, and rows for sizes that were never recorded.

with TemporaryDirectory() as folder:
    onnx_model = exportkit.export(model, observer).to_onnx(f"{folder}/llama.onnx")
    print(onnx_model.verify())
