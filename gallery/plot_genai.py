"""
Generate in onnxruntime-genai
=============================

How does a language model run in onnxruntime-genai, which has a generation loop of its own, without Python code?
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnxruntime_genai
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import exportkit

torch.manual_seed(0)
small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
config = LlamaConfig(**small, vocab_size=99, bos_token_id=1, eos_token_id=2, pad_token_id=0)
model, observer = LlamaForCausalLM(config).eval(), exportkit.InputObserver()
with observer(model):
    model.generate(torch.randint(3, 99, (1, 7)), max_new_tokens=4, do_sample=False)

# %%
# The folder of a causal language model contains what the runtime needs. If there is a tokenizer, save it there as well.

folder = TemporaryDirectory()
onnx_model = exportkit.export(model, observer).save(folder.name, runtime="genai")
print("proof:", onnx_model.verify().verdict())
print(sorted(path.name for path in Path(folder.name).iterdir()))
print(json.loads(Path(folder.name, "genai_config.json").read_text())["model"]["decoder"]["inputs"])

# %%
# The runtime manages the cache and selects the tokens, here greedily and for two prompts at once.

runtime = onnxruntime_genai.Model(folder.name)
parameters = onnxruntime_genai.GeneratorParams(runtime)
prompts = torch.randint(3, 99, (2, 9))
parameters.set_search_options(batch_size=2, do_sample=False, min_length=21, max_length=21)
generator = onnxruntime_genai.Generator(runtime, parameters)
generator.append_tokens(prompts.numpy().astype(np.int32))
while not generator.is_done():
    generator.generate_next_token()
got = torch.tensor(np.stack([generator.get_sequence(row) for row in range(2)]))

# %%
# ``generate`` in PyTorch returns the same tokens.

expected = model.generate(prompts, min_new_tokens=12, max_new_tokens=12, do_sample=False)
print("equal to generate:", torch.equal(got.long(), expected))
print(got[:, 9:])
