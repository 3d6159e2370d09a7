"""Threads: those that a layer runs in are followed, and those of other requests are not mixed up."""

import concurrent.futures
import contextvars
import functools
import gc
import queue
import random
import threading
import weakref

import pytest
import torch
from torch import nn

from exportkit import capture
from tests.module_outputs.models import InPool, Layer, Stack, assert_same, states_of, traces


class InThreads(Stack):
    """Runs each layer in a thread of its own."""

    def run(self, x):
        for layer in self.layers:
            result = []
            thread = threading.Thread(target=lambda layer=layer, x=x, result=result: result.append(layer(x)))
            thread.start()
            thread.join()
            x = result[0]
        return x


class Branches(Stack):
    """Runs all layers at once, the last one first."""

    def run(self, x):
        turns = [threading.Event() for _ in self.layers]

        def branch(i):
            if i + 1 < len(turns):
                turns[i + 1].wait(10)
            y = self.layers[i](x)
            turns[i].set()
            return y

        with concurrent.futures.ThreadPoolExecutor(len(turns)) as pool:
            return sum(pool.map(branch, range(len(turns))))


class SharedPool(Stack):
    """Runs its layers in a pool that all calls share, and that is older than they are."""

    pool = None

    def run(self, x):
        for layer in self.layers:
            x = self.pool.submit(layer, x).result()
        return x


@pytest.fixture
def _pool_with_threads():
    with concurrent.futures.ThreadPoolExecutor(3) as SharedPool.pool:
        list(SharedPool.pool.map(str, range(20)))  # its threads exist
        yield
    SharedPool.pool = None


@pytest.fixture(autouse=True)
def _threads_start_as_before():
    before = threading.Thread.start, concurrent.futures.ThreadPoolExecutor.submit
    yield
    assert (threading.Thread.start, concurrent.futures.ThreadPoolExecutor.submit) == before


@pytest.mark.usefixtures("_pool_with_threads")
@pytest.mark.parametrize("cls", [InThreads, InPool, SharedPool])
def test_layers_that_run_in_worker_threads_are_captured(cls):
    model, x = cls(), torch.randn(2, 4)
    with capture(model, {"hidden_states": Layer}) as captured:
        model(x)
    assert_same(captured["hidden_states"], states_of(model, x))
    assert_same(model(x, output_hidden_states=True).hidden_states, states_of(model, x))


@pytest.mark.usefixtures("_pool_with_threads")
def test_threads_that_live_on_keep_no_model_alive():
    model = InThreads()
    stop, started = threading.Event(), threading.Event()
    with capture(model, {"hidden_states": Layer}) as captured:
        thread = threading.Thread(target=lambda: (started.set(), stop.wait(10)))
        thread.start()
        model(torch.ones(1, 4))
        SharedPool.pool.submit(int).result()
    started.wait(10)
    seen = [weakref.ref(model), weakref.ref(captured["hidden_states"][1])]
    del model, captured
    gc.collect()
    assert [reference() for reference in seen] == [None, None]
    stop.set()
    thread.join()


def test_branches_that_run_at_once_are_in_the_order_of_the_model():
    model, x = Branches(), torch.randn(2, 4)
    with capture(model, {"branches": Layer}) as captured:
        model(x)
    assert_same(captured["branches"], [layer(x) for layer in model.layers])


def request_of(model, dice):
    """One call with one of many requests; checks that the result has its own values, and no others."""
    x = torch.randn(dice.randint(1, 4), 4)
    kind = dice.randrange(6)
    if kind == 0:
        assert isinstance(model(x), torch.Tensor)
    elif kind == 1:
        assert_same(model(x, output_hidden_states=True).hidden_states, states_of(model, x))
    elif kind == 2:
        states = model(x, output_hidden_states=[1]).hidden_states
        assert [state is None for state in states] == [True, False, True, True]
        assert torch.equal(states[1], states_of(model, x)[1])
    elif kind == 3:
        with capture(model, {"hidden_states": Layer}) as captured:
            model(x)
        assert len(captured.calls) == 1
        assert_same(captured["hidden_states"], states_of(model, x))
    elif kind == 4:
        with capture(model, {"linear": nn.Linear}) as captured:
            result = model(x, output_hidden_states=True)
        assert len(captured["linear"]) == 3
        assert_same(result.hidden_states, states_of(model, x))
    else:
        with capture(model, {"hidden_states": Layer}) as captured, pytest.raises(RuntimeError):
            model(torch.randn(1, 5))
        assert captured.calls == []


@pytest.mark.usefixtures("_pool_with_threads")
@pytest.mark.parametrize("cls", [Stack, InPool, SharedPool])
def test_eight_threads_of_different_requests_never_mix(cls):
    model = cls()
    before = traces(model)

    def serve(seed):
        dice = random.Random(seed)
        for _ in range(200 if cls is Stack else 50):
            with torch.no_grad():
                request_of(model, dice)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(serve, seed) for seed in range(8)]:
            done.result()
    assert traces(model) == before


def test_calls_of_other_threads_are_left_alone():
    model = Stack()
    calls, answers = queue.Queue(), queue.Queue()

    def serve():
        for x in iter(calls.get, None):
            answers.put(model(x))

    server = threading.Thread(target=serve)
    server.start()
    with capture(model, {"hidden_states": Layer}) as captured:
        calls.put(torch.ones(3, 4))
        answers.get(timeout=10)
        model(torch.ones(1, 4))
    calls.put(None)
    server.join()
    assert [len(call["hidden_states"][0]) for call in captured.calls] == [1]


def test_threads_that_nobody_can_assign_are_warned_about_or_follow_by_context():
    class Served(Stack):
        carry = False

        def __init__(self):
            super().__init__()
            self.calls, self.answers = [queue.Queue(), queue.Queue()]
            self.server = threading.Thread(target=self.serve)
            self.server.start()

        def serve(self):
            for work in iter(self.calls.get, None):
                self.answers.put(work())

        def run(self, x):
            for layer in self.layers:
                work = functools.partial(layer, x)
                self.calls.put(functools.partial(contextvars.copy_context().run, work) if self.carry else work)
                x = self.answers.get(timeout=10)
            return x

    model = Served()
    try:
        with pytest.warns(UserWarning, match="older than the capture"), capture(model, {"layers": Layer}) as captured:
            model(torch.ones(1, 4))
        assert captured["layers"] == ()
        model.carry = True
        with capture(model, {"layers": Layer}) as captured:
            model(torch.ones(1, 4))
        assert len(captured["layers"]) == 3
    finally:
        model.calls.put(None)
        model.server.join()


def test_whoever_replaces_the_start_of_threads_meanwhile_keeps_that():
    started, before = [], threading.Thread.start
    try:
        with capture(Stack(), {"layers": Layer}):
            ours = threading.Thread.start
            theirs = lambda thread: (started.append(thread), ours(thread))  # noqa: E731
            threading.Thread.start = theirs
        assert threading.Thread.start is theirs
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()
        assert started == [thread]
    finally:
        threading.Thread.start = before
