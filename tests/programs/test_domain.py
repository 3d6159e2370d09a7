"""The domain of a graph: what it refuses and says, how it prints and explains, and its JSON form."""

import json
from dataclasses import replace

import pytest
import torch

import exportkit
from exportkit.errors import ArgumentError, PlanError
from exportkit.plan.conditions import SizeCondition
from exportkit.plan.expression import Expression
from exportkit.programs.call_check import CallCheck, DomainInput, SmallSizes
from exportkit.programs.domain import Domain
from exportkit.programs.python_values import PythonValues
from exportkit.trees.fingerprint import NONE, TENSOR, fingerprint

ROWS, COLUMNS = Expression.of("rows"), Expression.of("columns")
DOMAIN = Domain(
    inputs=(
        DomainInput("x", "float32", (ROWS, COLUMNS, Expression(constant=6))),
        DomainInput("bias", "float32", (ROWS,), True),
    ),
    ranges={"rows": (0, 99), "columns": (0, None)},
    conditions=(
        SizeCondition("rows * columns <= 4096", "model.py:3", True),
        SizeCondition("columns % 2 == 0", "torch/nn.py:4"),
        SizeCondition("columns <= 5000"),
    ),
    patterns=(SmallSizes({"rows": 1}), SmallSizes({"columns": 0}, ("columns % 2 == 0",)), SmallSizes({"columns": 1})),
    constants={"mode": "add"},
    values=PythonValues({"x": (TENSOR,), "bias": (TENSOR,), "mode": (fingerprint("add"),)}, {"bias": NONE}),
    absent={frozenset(): (), frozenset(["bias"]): ()},
)


def test_it_prints_as_a_table():
    assert str(DOMAIN) == (
        "input  dtype    sizes\n"
        "x      float32  (rows, columns, 6)\n"
        "bias   float32  (rows)              optional\n"
        "sizes: 1 <= rows <= 99\n"
        "sizes: 0 <= columns <= 5000\n"
        "small sizes: rows = 1\n"
        "small sizes: columns = 0\n"
        "small sizes: columns = 1\n"
        "condition: rows * columns <= 4096  (model.py:3)\n"
        "conditions of torch's own code: 2\n"
        "may be left out: bias\n"
        "constant: mode = 'add'"
    )


@pytest.mark.parametrize(
    ("patterns", "lines"),
    [
        ([], []),
        ([{"columns": 1}], ["columns = 1"]),
        ([{"columns": 1}, {"columns": 0}], ["columns = 0 or 1"]),
        ([{"rows": 1}, {"columns": 0}], ["rows = 1", "columns = 0"]),
        (
            [{"columns": 0}, {"rows": 1}, {"columns": 1, "rows": 1}, {"columns": 1}, {"columns": 0, "rows": 1}],
            ["rows = 1, columns = 0 or 1, in any combination"],
        ),
    ],
)
def test_small_sizes_take_one_line_if_all_combinations_are_inside(patterns, lines):
    domain = replace(DOMAIN, patterns=tuple(map(SmallSizes, patterns)))
    assert [line for line in str(domain).splitlines() if line.startswith("small")] == [
        f"small sizes: {line}" for line in lines
    ]


def test_its_limits_are_said_in_a_line():
    assert DOMAIN.limits() == [
        "1 <= rows <= 99",
        "0 <= columns <= 5000",
        "rows * columns <= 4096",
        "columns % 2 == 0",
        "not columns = 1 with rows = 1",
    ]


def test_its_limits_name_what_conditions_of_torch_amount_to():
    conditions = (
        SizeCondition("(4095 + 8 * rows) // 4096 == 1"),
        SizeCondition("rows // (columns + 4) < 50"),
        SizeCondition("max(3, rows) * columns + rows * columns + rows + columns < 12345"),
    )
    domain = replace(DOMAIN, ranges={"rows": (0, None), "columns": (0, 512)}, conditions=conditions, patterns=())
    assert domain.limits() == [
        "2 <= rows <= 512",
        "2 <= columns <= 512",
        "rows // (columns + 4) < 50",
        "1 longer condition on sizes",
    ]
    assert replace(domain, conditions=conditions[1:2], ranges={"rows": (0, 99), "columns": (0, 99)}).limits() == [
        "2 <= rows <= 99",
        "2 <= columns <= 99",
        "1 condition of torch's own code",
    ]


def test_it_survives_json():
    assert Domain.from_json(json.loads(json.dumps(DOMAIN.to_json()))) == DOMAIN


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"conditions": [{"text": "__import__('os').system('true')"}]}, "Not a condition on sizes"),
        ({"conditions": [{"text": "depth <= 5"}]}, "a variable that the plan does not have"),
        ({"conditions": [{"text": 5}]}, "expected a string, got 5"),
        ({"conditions": [5]}, "damaged"),
        ({"inputs": [{"path": "x", "dtype": "load", "sizes": []}]}, "damaged"),
        ({"ranges": {"rows": [1]}}, "damaged"),
        ({"patterns": [{"sizes": {"depth": 1}, "waived": []}]}, "damaged"),
    ],
)
def test_damaged_or_hostile_json_is_an_error_of_exportkit(change, message):
    with pytest.raises(PlanError, match=message):
        Domain.from_json(json.loads(json.dumps(DOMAIN.to_json())) | change)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "A required input is missing"),
        ({"x": (2, 4, 6), "y": (2,)}, "The graph has no input for this tensor"),
        ({"x": (2, 4, 7)}, "An input does not fit the graph"),
        ({"x": (2, 4, 6, 1)}, "An input does not fit the graph"),
        ({"x": (2, 4, 6), "bias": (3,)}, r"rows = 2, as axis 0 of x shows"),
        ({"x": (100, 4, 6)}, r"rows at least 0 and at most 99"),
        ({"x": (1, 4098, 6), "bias": (1,)}, r"rows \* columns <= 4096, got 1 \* 4098 = 4098"),
        ({"x": (64, 80, 6)}, r"rows \* columns <= 4096, got 64 \* 80 = 5120"),
        ({"x": (2, 5, 6)}, r"columns % 2 == 0, got 5 % 2 = 1"),
        ({"x": (1, 1, 6)}, r"is not proven for rows = 1, columns = 1"),
        ({"x": (0, 4, 6)}, r"is not proven for rows = 0"),
    ],
)
def test_calls_outside_are_refused_with_the_condition_that_they_break(given, message):
    with pytest.raises(ArgumentError, match=message):
        DOMAIN.require({path: torch.ones(shape) for path, shape in given.items()})


def test_another_dtype_is_refused():
    with pytest.raises(ArgumentError, match="An input does not fit the graph"):
        DOMAIN.require({"x": torch.ones(2, 4, 6, dtype=torch.float64)})


@pytest.mark.parametrize("shape", [(2, 4, 6), (64, 64, 6), (1, 2, 6), (5, 0, 6)])
def test_calls_inside_are_accepted(shape):
    DOMAIN.require({"x": torch.ones(shape)})
    DOMAIN.require({"x": torch.ones(shape), "bias": torch.ones(shape[0])})


def test_a_condition_that_is_waived_for_small_sizes_holds_for_all_others():
    above = (SizeCondition("columns > 3"),)
    waiving = replace(DOMAIN, conditions=above, patterns=(SmallSizes({"columns": 0}, ("columns > 3",)),))
    waiving.require({"x": torch.ones(2, 0, 6)})
    with pytest.raises(ArgumentError, match="columns > 3, got 2"):
        waiving.require({"x": torch.ones(2, 2, 6)})


def test_constants_with_another_value_are_refused():
    DOMAIN.values.require({"x": torch.ones(9, 6), "mode": "add"})
    with pytest.raises(ArgumentError, match="a different value of this constant"):
        DOMAIN.values.require({"x": torch.ones(9, 6), "mode": "double"})


def test_it_explains_a_call_condition_by_condition():
    assert DOMAIN.explain({"x": torch.ones(2, 4, 6)}).startswith(
        "inside\nsizes: rows 2, columns 4\nyes  0 <= rows <= 99: 2"
    )
    text = DOMAIN.explain({"x": torch.ones(64, 80, 6)})
    assert text.startswith("outside: The graph does not serve these sizes: rows * columns <= 4096, got 64 * 80 = 5120.")
    assert "\nNO   rows * columns <= 4096: 64 * 80 = 5120\n" in text
    assert "\nyes  columns % 2 == 0: 80 % 2 = 0\n" in text


def test_an_export_has_a_domain():
    model, observer = torch.nn.Linear(6, 2), exportkit.InputObserver()
    with observer(model):
        model(torch.ones(2, 6))
        model(torch.ones(3, 6))
    domain = exportkit.export(model, observer).domain
    assert domain.ranges == {"batch": (0, None)}
    assert [str(size) for size in domain.inputs[0].sizes] == ["batch", "6"]
    assert [str(pattern) for pattern in domain.patterns] == ["batch = 1"]


@pytest.mark.parametrize("of_frames", [False, True])
def test_only_a_mask_over_frames_may_end_within_the_last_state(of_frames):
    mask = DomainInput("attention_mask", "float32", (ROWS, Expression((("columns", 4),), 1)), of_frames=of_frames)
    check = CallCheck((DOMAIN.inputs[0], mask), {"rows": (1, None), "columns": (1, None)}, (), ())
    x = torch.zeros(2, 3, 6)
    check.require({"x": x, "attention_mask": torch.zeros(2, 13)})
    for frames in (9, 11, 15, 17):
        if of_frames and abs(frames - 13) < 4:
            check.require({"x": x, "attention_mask": torch.zeros(2, frames)})
        else:
            with pytest.raises(ArgumentError, match=rf"where: axis 1 of attention_mask\n.*\n *got: {frames}"):
                check.require({"x": x, "attention_mask": torch.zeros(2, frames)})


def test_a_condition_that_is_required_later_leaves_recorded_calls_inside():
    waiving = replace(DOMAIN, conditions=(), waived=(SizeCondition("rows % (columns - 4) != 0"),))  # no value at 4
    required = waiving.requiring({"rows": 6, "columns": 6}, [{"rows": 2, "columns": 4}, {"rows": 3, "columns": 8}])
    required.require({"x": torch.ones(2, 4, 6)})
    required.require({"x": torch.ones(3, 8, 6)})
    with pytest.raises(ArgumentError, match="does not serve these sizes"):
        required.require({"x": torch.ones(6, 6, 6)})
    with pytest.raises(ArgumentError, match="does not serve these sizes"):
        required.require({"x": torch.ones(3, 4, 6)})


@pytest.mark.parametrize("stored", [Expression.of("past"), Expression((("past", 1),), cap=3)])
def test_a_mask_counts_no_cached_tokens_without_a_cache(stored):
    past = DomainInput("past", "float32", (ROWS, stored), True)
    mask = DomainInput("mask", "float32", (ROWS, Expression.of("past") + COLUMNS))
    ranges = {"rows": (1, None), "columns": (1, None), "past": (0, None)}
    check = CallCheck((DOMAIN.inputs[0], past, mask), ranges, (), [SmallSizes({"past": 0})])
    x = torch.zeros(2, 4, 6)
    check.require({"x": x, "mask": torch.zeros(2, 4)})
    check.require({"x": x, "mask": torch.zeros(2, 6), "past": torch.zeros(2, 2)})
    with pytest.raises(ArgumentError, match=r"where: past\n *expected: past = 0\n *got: past = 5"):
        check.require({"x": x, "mask": torch.zeros(2, 9)})
