"""
State on modules
================

What if the model keeps its cache on its modules, instead of taking and returning it?
"""

from tempfile import TemporaryDirectory

import torch

import exportkit


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = torch.nn.Embedding(50, 8), torch.nn.Embedding(64, 8)
        self.reset()

    def reset(self):
        self.keys, self.offset = None, 0

    def forward(self, ids):
        start, length = self.offset, ids.shape[1]
        x = self.tokens(ids) + self.positions(torch.arange(start, start + length))
        self.keys = x if self.keys is None else torch.cat([self.keys, x], 1)
        self.offset += length
        mask = torch.ones(length, start + length, dtype=torch.bool).tril(start)
        return (x @ self.keys.mT).masked_fill(~mask, -1e9).softmax(-1) @ self.keys


# %%
# A prompt and two tokens are recorded.

model, observer = Attention().eval(), exportkit.InputObserver()
with observer(model), torch.no_grad():
    for length in (6, 1, 1):
        model(torch.randint(50, (2, length)))

# %%
# The graph takes the state as ``module_state`` and returns it, and the ``OnnxModel`` keeps it between calls.

with TemporaryDirectory() as folder, torch.no_grad():
    onnx_model = exportkit.export(model, observer).to_onnx(f"{folder}/attention.onnx")
    print(onnx_model.verify())
    model.reset()
    for tokens in torch.randint(50, (2, 9)).split([5, 1, 3], dim=1):
        torch.testing.assert_close(onnx_model(tokens), model(tokens))
    print({name: tuple(value.shape) for name, value in onnx_model.module_state.items() if value.numel()})
    onnx_model.module_state = None  # resets the state
