"""
Find the broken layer
=====================

A port of a model returns different values from the original. Which layer is wrong?
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from exportkit import trace_model

# %%
# The original, and a port with a mistake: in the third layer, the heads of one projection are in the wrong order.

torch.manual_seed(0)
config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=6, num_attention_heads=4, vocab_size=99)
original, port = LlamaForCausalLM(config).eval(), LlamaForCausalLM(config).eval()
port.load_state_dict(original.state_dict())
weight = port.model.layers[2].self_attn.k_proj.weight.data
weight.copy_(weight.view(4, 16, 64).flip(0).reshape(64, 64))

ids = torch.randint(3, 99, (2, 10))
with torch.no_grad():
    print("largest difference of the logits:", (original(ids).logits - port(ids).logits).abs().max().item())

# %%
# Both runs are recorded and compared. All later layers return different values as well, but only one adds an error.

with torch.no_grad(), trace_model(original, values="all") as right:
    original(ids)
with torch.no_grad(), trace_model(port, values="all") as wrong:
    port(ids)
comparison = right.compare(wrong)
print(comparison)

# %%
# A run of the same model in bfloat16 differs only by rounding.

with torch.no_grad(), trace_model(original.to(torch.bfloat16), values="all") as rounded:
    original(ids)
print(right.compare(rounded).verdict())
assert comparison.first.path == "model.layers.2.self_attn.k_proj"
