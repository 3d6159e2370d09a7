"""JSON data are read as values of annotated types, or refused with the place where they are not."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from exportkit.json_data import InvalidDataError, Positive, Size, parse_json, read


@dataclass(frozen=True)
class Axis:
    """An axis of an input."""

    name: str
    sizes: tuple[Size | None, ...] = ()
    step: Positive = 1
    role: Literal["batch", "other"] = "other"


@dataclass(frozen=True)
class Table:
    """Axes by input."""

    axes: Mapping[str, tuple[Axis, ...]]
    ends: tuple[str, int] = ("", 0)
    names: frozenset[str] = frozenset()
    weight: float = 1.0
    rest: Any = None
    more: Mapping[str, Any] = field(default_factory=dict)


def test_data_become_values_of_the_annotated_types():
    data = {
        "axes": {"x": [{"name": "rows", "sizes": [2, None], "role": "batch"}, {"name": "columns"}]},
        "ends": ["a", -1],
        "names": ["b", "a", "b"],
        "weight": 3,
        "rest": [{"anything": None}],
    }
    rows = Axis("rows", (2, None), role="batch")
    wanted = Table({"x": (rows, Axis("columns"))}, ("a", -1), frozenset("ab"), 3, [{"anything": None}])
    assert read(Table, data) == wanted


@pytest.mark.parametrize(
    ("kind", "data", "message"),
    [
        (int, True, "expected an integer from -9223372036854775808 to 9223372036854775807, got True"),
        (int, 2**63, "got 9223372036854775808"),
        (Size, -1, "expected an integer from 0 to 9223372036854775807, got -1"),
        (Positive, 0, "from 1 to"),
        (float, float("inf"), "expected a number, got inf"),
        (float, "1", "expected a number, got 1"),
        (str, 5, "expected a string, got 5"),
        (str, "\ud800", r"expected a string of Unicode characters, got '\ud800'"),
        (bool, 1, "expected true or false, got 1"),
        (None, 0, "expected null, got 0"),
        (Literal["a", "b"], "c", "expected 'a' or 'b', got c"),
        (Literal[1], True, "expected 1, got True"),
        (tuple[int, ...], {}, "expected a list, got {}"),
        (tuple[int, ...], [0, [1]], "[1]: expected an integer"),
        (tuple[str, int], ["a"], "expected a list of 2 values, got ['a']"),
        (Mapping[str, int], {"a": {"b": 1}}, "a: expected an integer"),
        (Mapping[str, int], [1], "expected a dict, got [1]"),
        (int | None, "x", "expected an integer"),
        (Axis, {"sizes": []}, "expected a value for name, got none"),
        (Axis, {"name": "x", "shape": []}, "expected the names name, sizes, step, role, got name, shape"),
        (Table, {"axes": {"x": [{"name": "x", "sizes": [1, -1]}]}}, "axes.x[0].sizes[1]: expected an integer from 0"),
    ],
)
def test_other_data_are_refused_with_their_place(kind, data, message):
    with pytest.raises(InvalidDataError) as raised:
        read(kind, data)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Expecting property name"),
        ("NaN", "NaN is not JSON"),
        ("[-Infinity]", "-Infinity is not JSON"),
        ("[" * 100_000, "the data is nested too deeply"),
        (b"\xff", "codec can't decode"),
        ("1" * 5000, "Exceeds the limit"),
    ],
)
def test_text_that_is_no_json_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_json(text)
