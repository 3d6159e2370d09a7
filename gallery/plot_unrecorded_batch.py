"""
A batch that was never recorded
===============================

All my calls had batch 1. How do I export a graph that serves any batch, and how do I know that it is right?
"""

from tempfile import TemporaryDirectory

import torch

import exportkit


class Scores(torch.nn.Module):
    """Scores a text. ``table`` is shared by all rows, and its first axis has size 1 too."""

    def __init__(self):
        super().__init__()
        self.embed, self.layer = torch.nn.Embedding(50, 16), torch.nn.Linear(16, 16)

    def forward(self, ids, table):
        return (self.layer(self.embed(ids)).relu() * table).mean(dim=1)


torch.manual_seed(0)
model, observer = Scores().eval(), exportkit.InputObserver()
calls = [(torch.randint(50, (1, length)), torch.rand(1, 16)) for length in (5, 9)]
with observer(model):
    for call in calls:
        model(*call)

# %%
# With a recorded call and a dynamic batch, torch.export fails, because it specialises axes of size 1.

length = torch.export.Dim("length")
try:
    torch.export.export(model, calls[0], dynamic_shapes=({0: torch.export.Dim("batch"), 1: length}, None))
except Exception as error:
    print(type(error).__name__, "-", next(line.strip() for line in str(error).splitlines() if "batch" in line)[:110])

# %%
# exportkit runs the model with repeated rows: if the outputs repeat too, the axis is the batch. The first axis of
# ``ids`` is the batch and the first axis of ``table`` is not, although both were always 1.

plan = observer.plan()
print(plan)
print(plan.explain("ids", 0))
print(plan.explain("table", 0))

# %%
# The export uses sizes of its own, all different and greater than 1. The proof has batches that were never recorded.

exported = exportkit.export(model, observer)
print("exported with", dict(exported.sizes))
with TemporaryDirectory() as folder:
    print(exported.to_onnx(f"{folder}/scores.onnx").verify())
