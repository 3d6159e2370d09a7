"""Which sizes a run reads, and how it compares them."""

import torch

from exportkit.probing.size_reads import SizeReads, size_reads


def reads(function, *shape):
    found = size_reads(lambda: function(torch.ones(shape)))[0]
    assert found is not None
    return found


def sides(function, *shape):
    return list(reads(function, *shape).comparisons().values())


def test_comparisons_of_sizes_have_both_sides():
    assert sides(lambda x: x.shape[1] > 1000, 2, 5) == [(5, 1000)]
    assert sides(lambda x: x.size(1) > 1000, 2, 5) == [(5, 1000)]
    assert sides(lambda x: len(x) == 3 or x.numel() in {4, 8}, 2, 4) == [(8, 8)]
    assert sides(lambda x: bool(x.dim()), 2, 4) == [(2, 0)]


def test_numbers_calculated_from_sizes_are_compared_as_sizes_are():
    assert sides(lambda x: (x.shape[0] * x.shape[1] + 1) // 2 >= 7, 2, 5) == [(5, 7)]
    assert sides(lambda x: max(x.shape[0], 3 - x.shape[1]), 2, 5) == [(-2, 2)]


def test_the_limit_of_a_comparison_is_known_unless_it_is_a_size():
    assert [found.limit for found in reads(lambda x: x.shape[1] < 9, 2, 5).comparisons()] == [9]
    assert [found.limit for found in reads(lambda x: x.shape[1] < x.shape[0], 2, 5).comparisons()] == [None]


def test_the_same_line_is_the_same_comparison_at_other_sizes():
    def function(x):
        return x * 2 if x.shape[1] > 8 else x

    first, second = reads(function, 2, 5), reads(function, 2, 12)
    assert first.comparisons().keys() == second.comparisons().keys()
    assert first.decisions() != second.decisions()
    assert first.decisions() == reads(function, 3, 6).decisions()


def test_what_the_model_computes_is_unchanged():
    def function(x):
        rows, columns = x.shape
        table = {5: 1.5}
        y = x.view(rows, -1)[:, : columns - 1] * table[columns]
        return torch.cat([y, x.new_zeros(rows, columns % 3)], 1).expand(rows, *y.shape[1:-1], -1), range(columns)[-1]

    x = torch.randn(4, 5)
    with SizeReads():
        got = function(x)
    expected = function(x)
    assert torch.equal(got[0], expected[0])
    assert got[1] == expected[1]


def test_a_function_that_raises_has_no_reads():
    assert size_reads(lambda: torch.ones(2) @ torch.ones(3)) == (None, None)
