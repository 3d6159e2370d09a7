"""Calls from several threads and tasks: each belongs to the right trace, below the right call."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from exportkit import trace_model
from tests.module_traces.models import Block, Stack, in_threads


def test_two_threads_inside_of_one_trace():
    model = Stack(2)
    barrier = threading.Barrier(2)

    def step():
        barrier.wait()
        for _ in range(5):
            model(torch.ones(3, 4))

    with trace_model(model, values="all") as trace:
        in_threads(step, step)

    assert trace.complete
    assert len(trace.calls) == 2 * 5 * 7
    for number in (0, 1):
        calls = [call for call in trace.calls if call.thread == number]
        assert len(calls) == 35
        by_index = {call.index: call for call in calls}
        assert all(call.parent is None if not call.path else call.parent in by_index for call in calls)


def test_two_threads_with_a_trace_each():
    model = Stack(1)
    barrier = threading.Barrier(2)
    traces = {}

    def step(rows):
        with trace_model(model) as trace:
            barrier.wait()
            for _ in range(5):
                model(torch.ones(rows, 4))
            barrier.wait()
        traces[rows] = trace

    call = nn.Module.__call__
    in_threads(lambda: step(2), lambda: step(3))

    for rows, trace in traces.items():
        assert len(trace.calls) == 20
        assert {call.inputs[0].shape for call in trace.calls} == {(rows, 4)}
    assert nn.Module.__call__ is call


def test_layers_that_run_in_threads_are_below_the_call_that_started_them():
    class Parallel(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Block(), Block()])

        def forward(self, x):
            with ThreadPoolExecutor(2) as pool:
                return sum(pool.map(lambda block: block(x), self.blocks))

    model = Parallel()
    with trace_model(model) as trace:
        model(torch.ones(3, 4))

    blocks = [call for call in trace.calls if call.class_name == "Block"]
    assert [call.parent for call in blocks] == [0, 0]
    assert len(trace.calls) == 7


def test_a_thread_that_is_older_than_the_trace():
    model = Stack(1)
    begin, done = threading.Event(), threading.Event()

    def work():
        begin.wait()
        model(torch.ones(3, 4))
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    with trace_model(model) as trace:
        model(torch.ones(2, 4))
        begin.set()
        done.wait()
    thread.join()

    assert [call.thread for call in trace.calls] == [0] * 4 + [1] * 4


def test_a_call_that_runs_on_after_the_trace():
    class Waits(nn.Module):
        def forward(self, x):
            started.set()
            end.wait()
            return x * 2

    model, results = Waits(), []
    started, end = threading.Event(), threading.Event()
    said = pytest.warns(RuntimeWarning, match="The ends of 1 calls are missing")
    with said, trace_model(model) as trace:
        thread = threading.Thread(target=lambda: results.append(model(torch.ones(2))))
        thread.start()
        started.wait()
    end.set()
    thread.join()

    assert results[0].tolist() == [2, 2]
    assert not trace.complete
    assert trace.calls[0].error == "the recording ended inside this call"


def test_tasks():
    model = Stack(1)

    async def step(rows):
        with trace_model(model) as trace:
            for _ in range(3):
                await asyncio.sleep(0)
                model(torch.ones(rows, 4))
        return trace

    async def both():
        return await asyncio.gather(step(2), step(3))

    for rows, trace in zip((2, 3), asyncio.run(both()), strict=True):
        assert {call.inputs[0].shape for call in trace.calls} == {(rows, 4)}
        assert len(trace.calls) == 12
