"""The domain of a graph: what it refuses, how it prints, and its JSON form."""

import json

import pytest
import torch

import exportkit
from exportkit.errors import ArgumentError
from exportkit.plan.expression import Expression
from exportkit.programs.domain import Domain, DomainInput, SizeCondition
from exportkit.programs.python_values import PythonValues
from exportkit.trees.fingerprint import NONE, TENSOR, fingerprint

BATCH = Expression.of("batch")
DOMAIN = Domain(
    inputs=(
        DomainInput("x", "float32", (BATCH, Expression(constant=6))),
        DomainInput("bias", "float32", (BATCH,), True),
    ),
    ranges={"batch": (0, 8)},
    limits=(SizeCondition("batch <= 8", "model.py:3", True),),
    guards=(SizeCondition("Mod(batch, 2) == 0", "model.py:4", True), SizeCondition("batch >= 2")),
    constants={"mode": "add"},
    values=PythonValues({"x": (TENSOR,), "bias": (TENSOR,), "mode": (fingerprint("add"),)}, {"bias": NONE}),
)


def test_it_prints_as_a_table():
    assert str(DOMAIN) == (
        "input  dtype    sizes\n"
        "x      float32  (batch, 6)\n"
        "bias   float32  (batch)     optional\n"
        "range: 0 <= batch <= 8\n"
        "limit: batch <= 8  (model.py:3)\n"
        "guard: Mod(batch, 2) == 0  (model.py:4)\n"
        "guards of torch's own code: 1\n"
        "constant: mode = 'add'"
    )


def test_it_survives_json():
    assert Domain.from_json(json.loads(json.dumps(DOMAIN.to_json()))) == DOMAIN


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "A required input is missing"),
        ({"x": torch.ones(2, 6), "y": torch.ones(2)}, "The graph has no input for this tensor"),
        ({"x": torch.ones(2, 7)}, "An input does not fit the graph"),
        ({"x": torch.ones(2, 6, 1)}, "An input does not fit the graph"),
        ({"x": torch.ones(2, 6, dtype=torch.float64)}, "An input does not fit the graph"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(given, message):
    with pytest.raises(ArgumentError, match=message):
        DOMAIN.require_tensors(given)


def test_what_fits_is_accepted():
    DOMAIN.require_tensors({"x": torch.ones(9, 6)})
    DOMAIN.require_ranges({"x": (8, 6)})
    DOMAIN.values.require({"x": torch.ones(9, 6), "mode": "add"})


def test_sizes_out_of_range_and_other_constants_are_refused():
    with pytest.raises(ArgumentError, match=r"batch at least 0 and at most 8"):
        DOMAIN.require_ranges({"x": (9, 6)})
    with pytest.raises(ArgumentError, match="another value of this constant"):
        DOMAIN.values.require({"x": torch.ones(9, 6), "mode": "double"})


def test_an_export_has_a_domain():
    model, observer = torch.nn.Linear(6, 2), exportkit.InputObserver()
    with observer(model):
        model(torch.ones(2, 6))
        model(torch.ones(3, 6))
    domain = exportkit.export(model, observer).domain
    assert domain.ranges == {"batch": (0, None)}
    assert [str(size) for size in domain.inputs[0].sizes] == ["batch", "6"]
