"""
Data-dependent control flow
===========================

My model exits early when it is confident. How do I export code that branches on the value of a tensor?
"""

from tempfile import TemporaryDirectory

import torch

import exportkit


class EarlyExit(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(16, 16) for _ in range(3)])
        self.heads = torch.nn.ModuleList([torch.nn.Linear(16, 4) for _ in range(3)])

    def forward(self, x):
        for layer, head in zip(self.layers, self.heads, strict=True):
            x = x + layer(x).relu()
            scores = head(x).softmax(-1)
            if scores.max(-1).values.min().item() > 0.9:  # confident about all rows
                break
        return scores


# %%
# ``torch.export`` raises an error at the ``if``: a trace has no values, so it cannot know which branch is taken.
# exportkit traces the branches that the recorded calls take: some of these calls exit after one or two layers.

torch.manual_seed(0)
model, observer = EarlyExit().eval(), exportkit.InputObserver()
with observer(model, store_n_calls=5), torch.no_grad():
    for batch, scale in ((2, 20.0), (1, 4.0), (3, 0.5), (2, 10.0), (4, 50.0)):
        model(torch.randn(batch, 16) * scale)

# %%
# The graph chooses between the results as the model does. Computations that only one of them needs are in a branch.

exported = exportkit.export(model, observer)
with TemporaryDirectory() as folder, torch.no_grad():
    onnx_model = exported.to_onnx(f"{folder}/early_exit.onnx")
    print(onnx_model.verify())
    for scale in (0.1, 1.0, 2.0, 5.0, 10.0, 50.0):
        x = torch.randn(4, 16) * scale
        torch.testing.assert_close(onnx_model(x), model(x))

# %%
# If no recorded call had exited early, the graph would refuse calls that do, and the report would name the line.
