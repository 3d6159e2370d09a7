"""Selecting values by position, and keeping no more of them than are wanted."""

from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from exportkit.module_outputs.record import Match, Record, Selection, targets_of

COUNTS = st.integers(0, 12)
INDICES = st.sets(st.integers(-14, 14), max_size=5)


@given(COUNTS, INDICES)
def test_selected_are_the_positions_that_indexing_finds(count, indices):
    selection = Selection(indices)
    wanted = {range(count)[index] for index in indices if -count <= index < count}
    assert {position for position in range(count) if selection(position, count)} == wanted


@given(COUNTS, INDICES)
def test_a_record_has_the_selected_values_and_none_elsewhere(count, indices):
    module = nn.Identity()
    match = Match(module, "", 0, targets_of({"hidden_states": nn.Identity})[0])
    record = Record(["hidden_states"], {"hidden_states": Selection(indices)})
    for value in range(count):
        record.add(match, str(value))
    wanted = {range(count)[index] for index in indices if -count <= index < count}
    expected = tuple(str(position) if position in wanted else None for position in range(count))
    assert record.values()["hidden_states"] == expected


@given(COUNTS, INDICES)
def test_values_that_cannot_be_wanted_any_more_are_let_go(count, indices):
    class Value:
        alive = 0

        def __init__(self):
            Value.alive += 1

        def __del__(self):
            Value.alive -= 1

    match = Match(nn.Identity(), "", 0, targets_of({"hidden_states": nn.Identity})[0])
    record = Record(["hidden_states"], {"hidden_states": Selection(indices)})
    for _ in range(count):
        record.add(match, Value())
    tail = max((-index for index in indices if index < 0), default=0)
    assert Value.alive <= len([index for index in indices if index >= 0]) + tail
