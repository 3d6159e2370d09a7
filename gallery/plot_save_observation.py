"""
Record on one machine, export on another
========================================

How can I export on a machine that does not have the inputs, perhaps without passing on any values?
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import exportkit


class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.embed, self.layers = torch.nn.Embedding(99, 32), torch.nn.TransformerEncoder(layer, 2)

    def forward(self, input_ids, attention_mask):
        return self.layers(self.embed(input_ids), src_key_padding_mask=attention_mask == 0).mean(dim=1)


def build():
    torch.manual_seed(0)
    return Encoder().eval()


# %%
# Here the model runs on real inputs. The recorded calls are saved as JSON and safetensors, with or without values.

folder, model, observer = TemporaryDirectory(), build(), exportkit.InputObserver()
with observer(model):
    for length in (6, 9):
        model(torch.randint(3, 99, (1, length)), torch.ones(1, length, dtype=torch.int64))
for name, values in (("with_values", True), ("shapes_only", False)):
    observer.observation.save(f"{folder.name}/{name}", values=values)
    files = sorted(path for path in Path(folder.name, name).rglob("*") if path.is_file())
    print(name, {path.name: f"{path.stat().st_size} bytes" for path in files})
del model, observer

# %%
# The other machine has the code of the model, but no inputs. Values that were not saved are made up, and the proof
# compares the graph with what the model returns for them.

for name in ("with_values", "shapes_only"):
    observation = exportkit.Observation.load(f"{folder.name}/{name}")
    print(observation)
    onnx_model = exportkit.export(build(), observation).save(f"{folder.name}/{name}_onnx")
    print(onnx_model.verify())

# %%
# The folder that ``save`` wrote needs neither the model nor its code.

loaded = exportkit.load(f"{folder.name}/with_values_onnx")
inputs = torch.randint(3, 99, (4, 12)), torch.ones(4, 12, dtype=torch.int64)
print("largest difference:", (loaded(*inputs) - build()(*inputs)).abs().max().item())
