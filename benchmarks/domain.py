"""The cost of checking a call against the domain of a graph. Prints a table and writes ``results/domain.json``.

The call has a cache of 80 layers: 160 tensors of rank 4, a mask and token ids. Times are medians of CPU time.
"""

from __future__ import annotations

import statistics

import torch
from figures import Figure, publish
from measure import collector_off, cpu_seconds
from observing import LAYERS

from exportkit.plan.conditions import SizeCondition
from exportkit.plan.expression import Expression
from exportkit.programs.call_check import DomainInput, SmallSizes
from exportkit.programs.domain import Domain

BATCH, PAST, NEW = map(Expression.of, ("batch", "past", "sequence"))
CALLS, ROUNDS = 200, 21


def main() -> None:
    cached = (BATCH, Expression.of(8), PAST, Expression.of(64))
    paths = [f"past_key_values.layers[{layer}].{kind}" for layer in range(LAYERS) for kind in ("keys", "values")]
    domain = Domain(
        inputs=(
            DomainInput("input_ids", "int64", (BATCH, NEW)),
            DomainInput("attention_mask", "int64", (BATCH, PAST + NEW), True),
            *(DomainInput(path, "float32", cached, True) for path in paths),
        ),
        ranges={"batch": (0, None), "past": (0, None), "sequence": (0, 4096)},
        conditions=(SizeCondition("past + sequence <= 4096"), SizeCondition("batch * sequence <= 4096")),
        patterns=(SmallSizes({"sequence": 1}), SmallSizes({"past": 0}), SmallSizes({"batch": 1, "sequence": 1})),
        constants={},
        absent={frozenset(): (), frozenset(paths): ()},
    )
    given = {path: torch.zeros(2, 8, 3, 64) for path in paths}
    given |= {"input_ids": torch.zeros(2, 1, dtype=torch.int64), "attention_mask": torch.ones(2, 4, dtype=torch.int64)}
    domain.require(given)  # prepares the checks
    with collector_off():
        micros = statistics.median(cpu_seconds(lambda: domain.require(given), CALLS) for _ in range(ROUNDS)) * 1e6
    figure = Figure(f"check of a call with a cache of {LAYERS} layers", {"exportkit": micros}, "µs", micros, target=50)
    publish("domain", "Checking calls: what is added to each", ("exportkit",), [figure])


if __name__ == "__main__":
    main()
