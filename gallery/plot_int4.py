"""
A language model in four bits
=============================

How accurate is a language model whose weights have four bits? Does onnxruntime-genai generate the same text with it?
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnxruntime_genai
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import exportkit

# %%
# Random weights say nothing about accuracy. So a small model first learns to go on counting, in steps of 1 to 4.


def texts(rows, length):
    start, step = torch.randint(3, 99, (rows, 1)), torch.randint(1, 5, (rows, 1))
    return 3 + (start - 3 + step * torch.arange(length)) % 96


torch.manual_seed(0)
small = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
config = LlamaConfig(**small, vocab_size=99, bos_token_id=1, eos_token_id=2, pad_token_id=0)
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for _ in range(150):
    batch = texts(32, 16)
    optimizer.zero_grad()
    model(input_ids=batch, labels=batch).loss.backward()
    optimizer.step()
model.eval()

# %%
# The recorded calls are what the weights are judged on. ``accuracy=0.98`` is the share of positions at which the most
# likely token has to be the model's; layers that do most harm get more bits until it is.

observer = exportkit.InputObserver()
with observer(model):
    for rows in (1, 8):
        model.generate(texts(rows, 12), max_new_tokens=8, do_sample=False)

folder = TemporaryDirectory()
exported = exportkit.export(model, observer)
onnx_model = exported.save(folder.name, runtime="genai", weights="int4", accuracy=0.98)
print(onnx_model.verify())

# %%
# The weights take a fraction of the space, and the runtime counts on as the model does.

plain = sum(weight.nbytes for weight in model.parameters())
stored = sum(path.stat().st_size for path in Path(folder.name).glob("*.onnx.data"))
print(f"weights: {plain / 1e6:.2f} MB in float32, {stored / 1e6:.2f} MB in the folder")

runtime = onnxruntime_genai.Model(folder.name)
parameters = onnxruntime_genai.GeneratorParams(runtime)
prompt = texts(1, 12)
parameters.set_search_options(do_sample=False, max_length=24)
generator = onnxruntime_genai.Generator(runtime, parameters)
generator.append_tokens(prompt.numpy().astype(np.int32))
while not generator.is_done():
    generator.generate_next_token()
expected = model.generate(prompt, max_new_tokens=12, do_sample=False)
print("PyTorch:", expected[0, 12:].tolist())
print("int4:   ", generator.get_sequence(0)[12:].tolist())
