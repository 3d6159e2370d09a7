"""
A cache of your own, or state on modules
========================================

What if the model fills a cache of its own class, or keeps its cache on its modules, as research code does?
"""

from tempfile import TemporaryDirectory

import torch

import exportkit


class Cache:
    """Begins without tensors; the model fills it."""

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
        self.query = torch.nn.Linear(8, 8)

    def forward(self, ids, cache):
        start, length = cache.offset, ids.shape[1]
        x = self.tokens(ids) + self.positions(torch.arange(start, start + length))
        keys = cache.update(x)
        mask = torch.ones(length, start + length, dtype=torch.bool).tril(start)
        return (self.query(x) @ keys.mT).masked_fill(~mask, -1e9).softmax(-1) @ keys


def ids(rows, length):
    return torch.randint(50, (rows, length))


# %%
# Prompts and tokens are recorded as usual. The first call has an empty cache.
# Each call is recorded with the cache as it was before the model changed it.

model, observer = Attention().eval(), exportkit.InputObserver()
with observer(model, store_n_calls=5), torch.no_grad():
    for rows, prompt in ((2, 6), (3, 4)):
        cache = Cache()
        for length in (prompt, 1):
            model(ids(rows, length), cache)
print(observer.plan())

# %%
# The graph changes the caller's cache as the model does, its Python number included. One graph serves prompts, single
# tokens, and several tokens on a filled cache.

with TemporaryDirectory() as folder:
    onnx_model = exportkit.export(model, observer).to_onnx(f"{folder}/attention.onnx")
    print(onnx_model.verify())
    mine, others = Cache(), Cache()
    for length in (5, 1, 3):
        tokens = ids(4, length)
        torch.testing.assert_close(onnx_model(tokens, mine), model(tokens, others).detach())
    print(mine.offset, tuple(mine.keys.shape))


# %%
# If the cache is on the module, the graph takes it as ``module_state`` and returns it, and the ``OnnxModel`` keeps it
# between calls.


class WithOwnCache(torch.nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention, self.cache = attention, Cache()

    def forward(self, ids):
        return self.attention(ids, self.cache)


stateful, observer = WithOwnCache(model).eval(), exportkit.InputObserver()
with observer(stateful), torch.no_grad():
    for length in (6, 1, 1):
        stateful(ids(2, length))
with TemporaryDirectory() as folder:
    onnx_model = exportkit.export(stateful, observer).to_onnx(f"{folder}/stateful.onnx")
    print(onnx_model.verify())
    for length in (5, 1):
        onnx_model(ids(2, length))
    print(tuple(onnx_model.module_state["_cache"].keys.shape))
    onnx_model.module_state = None  # begins anew
