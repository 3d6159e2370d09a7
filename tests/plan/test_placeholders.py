"""Relations between values and sizes: runs of placeholder tokens, grids that say how many rows there are."""

from hypothesis import given
from hypothesis import strategies as st

from exportkit.plan.placeholders import Grids, Placeholder, needed_tokens, place_blocks, tokens_fit

GRIDS = Grids("grid", "patches", ((1, 4, 4), (1, 4, 8)))
TOKEN = Placeholder("ids", 98, "patches", 1, 4)


def test_grids_are_taken_in_turn():
    assert GRIDS.taken(3) == [(1, 4, 4), (1, 4, 8), (1, 4, 4)]
    assert [GRIDS.count(images) for images in range(4)] == [0, 16, 48, 64]


def test_each_image_of_a_grid_has_a_run_of_its_own():
    shapes = {"ids": (2, 20), "patches": (64, 8), "grid": (3, 3)}
    assert needed_tokens([TOKEN], shapes, [GRIDS]) == {"ids": [(98, 4), (98, 8), (98, 4)]}


def test_without_a_grid_tokens_stand_alone():
    shapes = {"ids": (2, 20), "images": (2, 3, 8, 8)}
    assert needed_tokens([Placeholder("ids", 98, "images", 3)], shapes) == {"ids": [(98, 1)] * 6}


def test_there_must_be_room_for_another_token():
    rows = Placeholder("ids", 98, "rows")
    assert tokens_fit([rows], {"ids": (2, 3), "rows": (5, 8)})
    assert not tokens_fit([rows], {"ids": (2, 3), "rows": (6, 8)})
    assert tokens_fit([rows], {"ids": (2, 0), "rows": (0, 8)})
    assert tokens_fit([TOKEN], {"ids": (1, 14), "patches": (48, 8), "grid": (2, 3)}, [GRIDS])
    assert not tokens_fit([TOKEN], {"ids": (1, 13), "patches": (48, 8), "grid": (2, 3)}, [GRIDS])


@given(st.lists(st.integers(2, 5), max_size=6), st.integers(1, 4), st.integers(1, 20))
def test_runs_stay_in_their_rows_in_order_and_apart(lengths, rows, columns):
    placed = place_blocks([(98, length) for length in lengths], (rows, columns))
    if placed is None:
        assert lengths
        return
    assert [length for *_, length in placed] == lengths
    ends = [(row, column + length) for _, row, column, length in placed]
    assert all(end <= columns for _, end in ends)
    assert all((row, column) > end for (_, row, column, _), end in zip(placed[1:], ends, strict=False))
