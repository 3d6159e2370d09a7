"""
A language model in four bits
=============================

How accurate is a language model whose weights have four bits, and what does onnxruntime-genai generate with it?
"""

from tempfile import TemporaryDirectory

import numpy as np
import onnxruntime_genai
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import exportkit

# %%
# Random weights say nothing about accuracy, so a small model first learns to count, in steps of 1 to 4.


def texts(rows, length):
    start, step = torch.randint(96, (rows, 1)), torch.randint(1, 5, (rows, 1))
    return 3 + (start + step * torch.arange(length)) % 96


torch.manual_seed(0)
small = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(**small, vocab_size=99, bos_token_id=1, eos_token_id=2, pad_token_id=0))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for _ in range(150):
    batch = texts(32, 16)
    optimizer.zero_grad()
    model(input_ids=batch, labels=batch).loss.backward()
    optimizer.step()

# %%
# The graph is compared with the model on the recorded calls, and on others. ``accuracy=0.98`` is the share of positions
# at which the most likely token has to be the model's. The most sensitive layers are stored in more bits until this
# share is reached.

observer, folder = exportkit.InputObserver(), TemporaryDirectory()
with observer(model.eval()):
    for rows in (1, 8):
        model.generate(texts(rows, 12), max_new_tokens=8, do_sample=False)
exported = exportkit.export(model, observer)
print(exported.save(folder.name, runtime="genai", weights="int4", accuracy=0.98).verify())

# %%
# The runtime continues counting as the model does.

prompt, runtime = texts(1, 12), onnxruntime_genai.Model(folder.name)
parameters = onnxruntime_genai.GeneratorParams(runtime)
parameters.set_search_options(do_sample=False, max_length=24)
generator = onnxruntime_genai.Generator(runtime, parameters)
generator.append_tokens(prompt.numpy().astype(np.int32))
while not generator.is_done():
    generator.generate_next_token()
print("PyTorch:", model.generate(prompt, max_new_tokens=12, do_sample=False)[0, 12:].tolist())
print("int4:   ", generator.get_sequence(0)[12:].tolist())
