"""
A cache of your own
===================

What if the model fills a cache of its own class, which begins without tensors, as research code does?
"""

from tempfile import TemporaryDirectory

import torch

import exportkit


class Cache:
    def __init__(self):
        self.keys, self.offset = None, 0

    def update(self, keys):
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys], 1)
        self.offset += keys.shape[1]
        return self.keys


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = torch.nn.Embedding(50, 8), torch.nn.Embedding(64, 8)

    def forward(self, ids, cache):
        start, length = cache.offset, ids.shape[1]
        x = self.tokens(ids) + self.positions(torch.arange(start, start + length))
        keys = cache.update(x)
        mask = torch.ones(length, start + length, dtype=torch.bool).tril(start)
        return (x @ keys.mT).masked_fill(~mask, -1e9).softmax(-1) @ keys


# %%
# Prompts and tokens are recorded as usual, each call with the cache as it was before the model changed it.

model, observer = Attention().eval(), exportkit.InputObserver()
with observer(model, store_n_calls=4), torch.no_grad():
    for rows, prompt in ((2, 6), (3, 4)):
        cache = Cache()
        for length in (prompt, 1):
            model(torch.randint(50, (rows, length)), cache)

# %%
# The graph changes the caller's cache as the model does, including its Python number. One graph serves prompts, single
# tokens, and several tokens on a filled cache.

with TemporaryDirectory() as folder, torch.no_grad():
    onnx_model = exportkit.export(model, observer).to_onnx(f"{folder}/attention.onnx")
    print(onnx_model.verify())
    mine, other = Cache(), Cache()
    for tokens in torch.randint(50, (4, 9)).split([5, 1, 3], dim=1):
        torch.testing.assert_close(onnx_model(tokens, mine), model(tokens, other))
    print(mine.offset, tuple(mine.keys.shape))
