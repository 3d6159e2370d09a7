"""Objects that a model takes, changes and returns, such as caches of research code, with counters and flags inside."""

import torch
from torch import nn
from transformers import DynamicCache

from tests.trust.cases import call, case, control, x


class KeysCache:
    """What most such classes are: tensors, how many tokens there were, and settings."""

    def __init__(self, keys=None, seen=0, flip=False, mode="new"):
        self.keys, self.seen, self.flip, self.mode = keys, seen, flip, mode

    def append(self, x):
        self.keys = x if self.keys is None else torch.cat([self.keys, x], 1)
        return self.keys.sum(1, keepdim=True)


class CountingCache(DynamicCache):
    """A cache of transformers with a counter and a flag of its own."""

    def __init__(self, length=0, seen=0, flip=False):
        super().__init__()
        self.seen, self.flip = seen, flip
        if length:
            self.update(x(2, 1, length, 4), x(2, 1, length, 4), 0)


def generate(model):
    """Two runs of a prompt and two single tokens."""
    for batch, length in ((2, 5), (3, 7)):
        cache = None
        for new in (length, 1, 1):
            _, cache = model(x(batch, new, 4)) if cache is None else model(x(batch, new, 4), cache)


def filled(batch, length, **attributes):
    """A call of one token with a filled cache, which counted its tokens unless something else is given."""
    return call(x(batch, 1, 4), KeysCache(x(batch, length, 4), **{"seen": length, **attributes}))


FILLED = [filled(2, 4), filled(4, 9), call(x(4, 3, 4))]
ODD = [filled(2, 4, seen=9), filled(2, 4, flip=True), filled(2, 4, mode="old"), filled(2, 5, seen=0)]


@control(generate, serves=FILLED, truth=ODD)
class CountsTokens(nn.Module):
    """Nobody reads the counter, and it comes back."""

    def forward(self, x, cache=None):
        cache = KeysCache() if cache is None else cache
        cache.seen += x.shape[1]
        return x + cache.append(x), cache


@control(generate, serves=FILLED, truth=ODD)
class PositionsFromACounter(nn.Module):
    def forward(self, x, cache=None):
        cache = KeysCache() if cache is None else cache
        positions = torch.arange(cache.seen, cache.seen + x.shape[1])
        cache.seen += x.shape[1]
        return x * 2 + positions[None, :, None] + cache.append(x), cache


@case(generate, truth=[*FILLED, *ODD])
class CountsCallsInACache(nn.Module):
    def forward(self, x, cache=None):
        cache = KeysCache() if cache is None else cache
        cache.seen += 1
        return x + cache.append(x) * cache.seen, cache


@case(generate, truth=[*FILLED, *ODD])
class FlagThatIsRead(nn.Module):
    """Passes the counter on without looking at it."""

    def forward(self, x, cache=None):
        cache = KeysCache() if cache is None else cache
        return (x * 3 if cache.flip else -x) + cache.append(x), cache


@case(generate, truth=[*FILLED, *ODD])
class FlagThatIsSet(nn.Module):
    def forward(self, x, cache=None):
        cache = KeysCache() if cache is None else cache
        x = x * 2 if cache.flip else x * 3
        cache.flip = True
        return x + cache.append(x), cache


@case(generate, truth=[*FILLED, *ODD], may_refuse=True)
class TextThatIsSet(nn.Module):
    def forward(self, x, cache=None):
        cache = KeysCache() if cache is None else cache
        cache.mode = "new" if cache.keys is None else "old"
        return x + cache.append(x), cache


@case(generate, truth=[*FILLED, *ODD])
class NewObject(nn.Module):
    def forward(self, x, cache=None):
        new = KeysCache(None if cache is None else cache.keys, x.shape[1] if cache is None else cache.seen + x.shape[1])
        return x + new.append(x), new


@case(generate, truth=[*FILLED, *ODD], may_refuse=True)
class AllCountersOfAnObject(nn.Module):
    def forward(self, x, cache=None):
        cache = KeysCache() if cache is None else cache
        for name, value in list(vars(cache).items()):
            if type(value) is int:
                setattr(cache, name, value + x.shape[1])
        return x + cache.seen * cache.append(x), cache


def counted(length, **attributes):
    """The same with a cache that is derived from one of transformers."""
    return call(x(2, 1, 4), CountingCache(length, **{"seen": length, **attributes}))


@case(generate, truth=[counted(4), counted(4, seen=9), counted(4, flip=True)], may_refuse=True)
class CounterOfADerivedCache(nn.Module):
    def forward(self, x, cache=None):
        cache = CountingCache() if cache is None else cache
        positions = torch.arange(cache.seen, cache.seen + x.shape[1])
        keys, _ = cache.update(x[:, None], x[:, None], 0)
        cache.seen += x.shape[1]
        return x + positions[None, :, None] + keys.sum((1, 2))[:, None], cache


@case(generate, truth=[counted(4), counted(4, flip=True)], may_refuse=True)
class FlagOfADerivedCache(nn.Module):
    def forward(self, x, cache=None):
        cache = CountingCache() if cache is None else cache
        keys, _ = cache.update(x[:, None], x[:, None], 0)
        return (x if cache.flip else -x) + keys.sum((1, 2))[:, None], cache


class State:
    """Not named like a cache."""

    def __init__(self, keys=None, seen=0):
        self.keys, self.seen = keys, seen


def _step_by_step(model):
    for batch, length in ((2, 5), (3, 7)):
        state = State()
        for new in (length, 1, 1):
            model(x(batch, new, 4), state)


def _with_state(batch, length):
    return call(x(batch, 1, 4), State(x(batch, length, 4), length))


@case(_step_by_step, truth=[_with_state(2, 5), _with_state(4, 6)], finding="in.?place|changes", may_refuse=True)
class ChangesWhatItIsGiven(nn.Module):
    """Keeps the tokens in an argument, and does not return it."""

    def forward(self, x, state):
        state.keys = x if state.keys is None else torch.cat([state.keys, x], 1)
        state.seen += x.shape[1]
        return state.keys.sum(1)


@case(_step_by_step, truth=[_with_state(2, 5), _with_state(4, 6)], finding="in.?place|changes", may_refuse=True)
class CountsInWhatItIsGiven(nn.Module):
    def forward(self, x, state):
        state.seen += x.shape[1]
        return x * 2


@case(generate, truth=FILLED, finding="in.?place|changes", may_refuse=True)
class ChangesACacheAndReturnsOther(nn.Module):
    def forward(self, x, cache=None):
        cache = KeysCache() if cache is None else cache
        total = cache.append(x)
        return total, KeysCache(cache.keys * 1)


def _from_empty_caches(model):
    for batch, length in ((2, 5), (3, 7)):
        cache = KeysCache()
        for new in (length, 1, 1):
            model(x(batch, new, 4), cache)


@control(
    _from_empty_caches, serves=[*FILLED[:2], call(x(4, 3, 4), KeysCache())], truth=[call(x(2, 4, 4), KeysCache(seen=3))]
)
class AddsTheCountedTokens(nn.Module):
    """Raises if a cache without keys has counted tokens."""

    def forward(self, x, cache):
        positions = torch.arange(cache.seen + x.shape[1])
        cache.seen += x.shape[1]
        cache.append(x)
        return cache.keys + positions[None, :, None]
