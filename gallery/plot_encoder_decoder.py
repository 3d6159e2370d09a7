"""
An encoder-decoder model in two graphs
======================================

How can an encoder-decoder model generate without PyTorch, and without running the encoder again for each token?
"""

from tempfile import TemporaryDirectory

import torch
from transformers import T5Config, T5ForConditionalGeneration

import exportkit

torch.manual_seed(0)
config = T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, decoder_start_token_id=0)
model, observer = T5ForConditionalGeneration(config).eval(), exportkit.InputObserver()
options = {"do_sample": False, "eos_token_id": None}


def sentences(*lengths):
    ids, mask = torch.randint(3, 99, (len(lengths), max(lengths))), torch.ones(len(lengths), max(lengths)).long()
    for row, length in enumerate(lengths):
        ids[row, length:] = mask[row, length:] = 0
    return {"input_ids": ids, "attention_mask": mask}


# %%
# ``generate`` runs the encoder once, before the decoder. ``parts="auto"`` records the encoder too, and it becomes a
# graph of its own. The decoder is one graph: the first call projects the encoder states, later calls use the cache.

with observer(model, parts="auto"):
    model.generate(**sentences(7, 5), max_new_tokens=4, **options)
folder = TemporaryDirectory()
onnx_model = exportkit.export(model, observer).to_onnx(f"{folder.name}/t5.onnx")
print("parts:", {name: list(part.session.shapes) for name, part in onnx_model.parts.items()})

print("proof:", onnx_model.verify().verdict())

# %%
# The loop runs the encoder once, then the decoder with its cache. Lengths and batches differ from the recorded ones.


def greedy(inputs, count):
    states = onnx_model.parts["encoder"](**inputs)
    ids, cache, tokens = torch.zeros(len(inputs["input_ids"]), 1, dtype=torch.int64), None, []
    while len(tokens) < count:
        given = {"attention_mask": inputs["attention_mask"], "encoder_outputs": states, "past_key_values": cache}
        outputs = onnx_model(**given, decoder_input_ids=ids)
        ids, cache = outputs.logits[:, -1].argmax(-1, keepdim=True), outputs.past_key_values
        tokens.append(ids)
    return torch.cat(tokens, dim=1)


for lengths in ((11,), (4, 9, 6)):
    inputs = sentences(*lengths)
    expected = model.generate(**inputs, max_new_tokens=10, **options)[:, 1:]
    print(f"lengths {lengths}: equal to generate:", torch.equal(greedy(inputs, 10), expected))
