"""
A language model with its cache
===============================

Does one graph serve a prompt, single tokens on a cache, and batches of prompts of different lengths?
"""

from tempfile import TemporaryDirectory

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import exportkit

torch.manual_seed(0)
config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=99)
model, observer = LlamaForCausalLM(config).eval(), exportkit.InputObserver()
options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}

# %%
# One short ``generate`` is recorded, with a single prompt. It calls the model once with the prompt, and then with one
# token at a time and a growing cache.

with observer(model):
    model.generate(torch.randint(3, 99, (1, 7)), max_new_tokens=4, **options)
for call in observer.observation.calls:
    print({path: tuple(tensor.shape) for path, tensor in list(call.tensors().items())[:3]})

# %%
# The graph accepts a past of any length, including none. The outputs for the cache are the inputs of the next call.

folder = TemporaryDirectory()
onnx_model = exportkit.export(model, observer).to_onnx(f"{folder.name}/llama.onnx")
print(*onnx_model.session.shapes.items(), sep="\n")
print("proof:", onnx_model.verify().verdict())

# %%
# Three prompts of different lengths, padded on the left: nothing like this was recorded. The loop below decodes
# greedily without the PyTorch model. ``onnx_model`` is called like the model, and returns what the model returns.


def greedy(ids, mask, count):
    tokens, cache = [], None
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    while len(tokens) < count:
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "past_key_values": cache}
        outputs = onnx_model(**inputs, logits_to_keep=1)  # as generate asked for it
        ids, cache = outputs.logits[:, -1].argmax(-1, keepdim=True), outputs.past_key_values
        mask, positions = torch.cat([mask, torch.ones_like(ids)], dim=1), positions[:, -1:] + 1
        tokens.append(ids)
    return torch.cat(tokens, dim=1)


prompts, mask = torch.randint(3, 99, (3, 9)), torch.ones(3, 9, dtype=torch.int64)
for row, padding in enumerate((0, 2, 5)):
    prompts[row, :padding] = mask[row, :padding] = 0
expected = model.generate(prompts, attention_mask=mask, max_new_tokens=12, **options)[:, 9:]
print("equal to generate:", torch.equal(greedy(prompts, mask, 12), expected))
print(expected)
