"""Eight threads call one observed module for minutes. Each record must pair the inputs and outputs of the same call.

Run it: ``python benchmarks/soak.py --minutes 10``. It raises an AssertionError, or prints what was checked.
"""

from __future__ import annotations

import argparse
import random
import threading
import time
from collections import Counter
from typing import Any

import torch

import exportkit
from exportkit.calls.observation import Observation

THREADS = 8
SHARED = torch.arange(2.0**19)  # large enough to be shared by copy-on-write, and seen by all threads


class Doubles(torch.nn.Module):
    """Doubles its input in place and returns it; sometimes fails, before or after the change."""

    def forward(self, x: torch.Tensor, data: dict[str, Any]) -> dict[str, Any]:
        if data["fails"] == "before":
            raise ValueError("before")
        result = {"twice": x * 2, "list": [data["y"] + 1], "large": data["shared"] * 2 if len(x) % 7 == 0 else None}
        x.zero_()
        if data["fails"] == "after":
            raise ValueError("after")
        return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=10)
    until = time.monotonic() + 60 * parser.parse_args().minutes
    torch.set_num_threads(1)
    totals: Counter[str] = Counter()
    while time.monotonic() < until:
        totals += soak(random.choice(["all", "stored"]), random.choice([3, 20, 200]), random.choice([None, 2**23]))
    print(", ".join(f"{name}: {count}" for name, count in totals.items()))


def soak(shapes: Any, store_n_calls: int, max_bytes: int | None) -> Counter[str]:
    """Observes one module for some time, and checks the records."""
    model, observer = Doubles(), exportkit.InputObserver()
    before, returned = dict(vars(model)), [0] * THREADS
    with observer(model, store_n_calls=store_n_calls, shapes=shapes, max_bytes=max_bytes):
        threads = [threading.Thread(target=call_often, args=(model, number, returned)) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if shapes == "stored":
            assert "forward" not in vars(model), "the stand-in is still there"
    assert vars(model) == before, "something is left on the model"
    observation = observer.observation
    check(observation)
    if shapes == "all":
        seen = sum(one.count for one in observation.seen)
        assert seen == sum(returned), f"{sum(returned)} calls returned, the shapes of {seen} were seen"
    return Counter(blocks=1, returned=sum(returned), stored=len(observation.calls), raised=len(observation.failures))


def call_often(model: torch.nn.Module, number: int, returned: list[int]) -> None:
    random_numbers = random.Random(number + time.monotonic_ns())
    for _ in range(400):
        x = torch.full((random_numbers.randint(1, 20),), random_numbers.random())
        expected = x * 2
        data = {"y": x.clone(), "shared": SHARED, "fails": random_numbers.choice(["no"] * 8 + ["before", "after"])}
        try:
            result = model(x, data)
        except ValueError as error:
            assert error.args == (data["fails"],)  # noqa: PT017
            continue
        returned[number] += 1
        assert torch.equal(result["twice"], expected), "the result of another call was returned"
        if result["large"] is not None:
            result["large"].zero_()  # what was recorded must not follow


def check(observation: Observation) -> None:
    """Checks that the outputs of each record belong to its inputs, as they were before the call."""
    assert not [problem for problem in observation.problems if "max_bytes" not in problem], observation.problems[:3]
    for call in observation.calls:
        inputs, outputs = call.tensors(), call.outputs.tensors()
        assert torch.equal(outputs["twice"], inputs["x"] * 2)
        assert torch.equal(outputs["list[0]"], inputs["data.y"] + 1)
        assert torch.equal(inputs["x"], inputs["data.y"])
        assert torch.equal(inputs["data.shared"], SHARED)
        if "large" in outputs:
            assert torch.equal(outputs["large"], SHARED * 2)


if __name__ == "__main__":
    main()
