"""
Hidden states and attentions of any model
=========================================

What do the layers of a model return, and how can I see that without changing its code?
"""

import re

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from exportkit import apply_patches, capture, clear_patch_mapping, register_patch_mapping

# %%
# The model uses fused attention, which does not compute weights. While it is captured, it uses eager attention.

torch.manual_seed(0)
config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=99)
model, ids = LlamaForCausalLM(config).eval(), torch.randint(3, 99, (1, 6))
specs = {
    "hidden_states": LlamaDecoderLayer,
    "attentions": "self_attn",
    "mlp": re.compile(r"layers\.\d+\.mlp$"),
}
with torch.no_grad(), capture(model, specs) as captured:
    model(ids)
for key, values in captured.items():
    print(f"{key}: {[tuple(value.shape) for value in values]}")
print("weights sum to one:", all(torch.allclose(value.sum(-1), torch.ones(1)) for value in captured["attentions"]))

# %%
# Each call has its own values: here one call for the prompt, and one for each new token.

with capture(model, {"attentions": "self_attn"}) as captured:
    model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
print([tuple(call["attentions"][0].shape) for call in captured.calls])

# %%
# What if the second layer did nothing? Its class is replaced inside the block, and its weights stay in place.


class Skipped(LlamaDecoderLayer):
    def forward(self, hidden_states, *args, **kwargs):
        return hidden_states if self.self_attn.layer_idx else super().forward(hidden_states, *args, **kwargs)


register_patch_mapping({"LlamaDecoderLayer": Skipped})
with torch.no_grad(), apply_patches(model) as applied, capture(model, {"hidden_states": Skipped}) as captured:
    model(ids)
clear_patch_mapping()
print(applied)
print(
    "changed by each layer:",
    [not torch.equal(a, b) for a, b in zip(captured["hidden_states"], captured["hidden_states"][1:], strict=False)],
)
