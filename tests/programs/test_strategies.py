"""The table of strategies: their order, and what a report says about the attempts."""

import pytest
import torch

import exportkit
from exportkit.errors import ExportError
from exportkit.programs.strategies import STRATEGIES
from tests.programs import failing


def observed(model, *shapes):
    observer = exportkit.InputObserver()
    with observer(model.eval(), store_n_calls=len(shapes)):
        for shape in shapes:
            model(torch.randn(*shape))
    return observer


def test_the_table_is_in_the_order_in_which_strategies_are_tried():
    assert [strategy.name for strategy in STRATEGIES] == [
        "plain trace",
        "lists as separate tensors",
        "lengths kept symbolic",
        "strict tracing",
        "transformers' export patches",
        "static lengths",
        "several programs",
    ]


def test_a_plain_trace_is_the_only_attempt_where_it_succeeds():
    model = torch.nn.Linear(6, 2)
    exported = exportkit.export(model, observed(model, (2, 6), (3, 6)))
    assert [str(attempt) for attempt in exported.attempts] == ["plain trace: succeeded"]


def test_a_loop_over_a_length_that_no_call_varied_is_exported_with_static_lengths():
    model = failing.Loop()
    plan = observed(model, (2, 5, 6), (3, 5, 6)).plan().dynamic("x", 1)
    exported = exportkit.export(model, plan)
    assert exported.attempts[0].strategy == "plain trace"
    assert exported.attempts[0].outcome == "failed"
    assert exported.attempts[0].reason
    assert str(exported.attempts[-1]) == "plain trace, static lengths: succeeded"


def test_where_nothing_helps_the_error_is_about_the_plain_trace():
    model = failing.Loop()
    with pytest.raises(ExportError, match="became static"):
        exportkit.export(model, observed(model, (2, 5, 6), (3, 7, 6)))
