"""
A multimodal model in two graphs, called as one
===============================================

How does a multimodal model generate from pixels and a prompt, without the PyTorch model?
"""

from tempfile import TemporaryDirectory

import torch
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

import exportkit

small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
text = LlamaConfig(**small, num_attention_heads=4, vocab_size=99)
vision = CLIPVisionConfig(**small, num_attention_heads=2, image_size=32, patch_size=16)
torch.manual_seed(0)
model = LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text, image_token_id=98)).eval()
options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def prompt(batch, words):
    ids = torch.randint(3, 90, (batch, 1 + 4 + words))
    ids[:, 1:5] = 98  # placeholders for four rows of features, which is one image
    return {"input_ids": ids, "pixel_values": torch.randn(batch, 3, 32, 32)}


# %%
# ``generate`` first runs the image encoder, and passes its features to ``forward``. With ``parts="auto"``, the observer
# records both. Each becomes a graph of its own. The proof covers each graph, and both together.

folder, observer = TemporaryDirectory(), exportkit.InputObserver()
with observer(model, parts="auto"):
    model.generate(**prompt(1, 5), max_new_tokens=4, **options)
onnx_model = exportkit.export(model, observer).to_onnx(f"{folder.name}/llava.onnx")
print(onnx_model.verify())

# %%
# The loop passes pixels together with the prompt, then each new token with the cache.


def greedy(inputs, count):
    length, tokens = inputs["input_ids"].shape[1], []
    while len(tokens) < count:
        ids = inputs["input_ids"]
        positions = torch.arange(length - ids.shape[1], length).expand(ids.shape)
        outputs = onnx_model(**inputs, position_ids=positions, logits_to_keep=1)  # as generate asked for it
        tokens.append(outputs.logits[:, -1].argmax(-1, keepdim=True))
        inputs, length = {"input_ids": tokens[-1], "past_key_values": outputs.past_key_values}, length + 1
    return torch.cat(tokens, dim=1)


for batch in (1, 2):
    inputs = prompt(batch, 8)
    expected = model.generate(**inputs, max_new_tokens=10, **options)[:, -10:]
    print(f"batch {batch}: equal to generate:", torch.equal(greedy(inputs, 10), expected), expected.tolist())
