"""Decisions by size: the condition belongs to the graph, and a call on the other side of it is refused or right.

Recorded with (2, 5) and (3, 7) unless a case says otherwise.
"""

import logging
import math

import torch
from torch import nn
from torch.nn import functional as F

from tests.trust.cases import at, call, case, x


@case(serves=at((4, 5), (2, 9)), truth=at((6, 8), (8, 5), (41, 1), (2, 21)))
def product_of_sizes(self, x):
    return x * 2 if x.shape[0] * x.shape[1] > 40 else x + 1


@case(serves=at((4, 6)), truth=at((16, 8), (64, 2), (2, 64), (500, 3)))
def number_of_elements(self, x):
    return x.flatten(1).sum(-1) if x.numel() <= 64 else x.flatten(1).mean(-1)


@case(serves=at((2, 4), (3, 5)), truth=at((8, 8), (2, 40), (12, 1), (11, 2)))
def sum_of_sizes(self, x):
    rows, columns = x.shape
    return x - 1 if rows + columns > 12 else x * x


@case(serves=at((2, 8), (3, 9)), truth=at((4, 5), (9, 2), (5, 10), (5, 11)))
def ratio_of_sizes(self, x):
    return x.cos() if x.shape[1] > 2 * x.shape[0] else x.sin()


@case(at((4, 6), (5, 8)), serves=at((6, 9)), truth=at((2, 5), (3, 20), (8, 8), (9, 3)))
def quotient_of_sizes(self, x):
    return x * (x.shape[1] / x.shape[0]) if x.shape[1] / x.shape[0] < 2.5 else x


@case(serves=at((2, 9), (4, 6)), truth=at((2, 8), (2, 64), (3, 4), (5, 12), (2, 0)))
def multiple_of_four(self, x):
    return x.reshape(len(x), -1, 4).sum(-1) if x.shape[1] % 4 == 0 else x.sum(-1, keepdim=True)


@case(at((2, 8), (3, 12)), serves=at((4, 16)), truth=at((2, 9), (2, 6), (3, 13)))
def not_a_multiple_of_four(self, x):
    if x.shape[1] % 4:
        x = F.pad(x, (0, 4 - x.shape[1] % 4), value=2.0)
    return x.cumsum(1)


@case(may_refuse=True, truth=at((4, 5), (5, 5), (6, 7), (9, 3)))
def parity_of_the_batch(self, x):
    return x.neg() if len(x) & 1 else x.exp()


@case(at((2, 6), (3, 8)), serves=at((4, 7)), truth=at((2, 9), (2, 11), (2, 5), (2, 3), (3, 17)))
def integer_quotient(self, x):
    return x + x.shape[1] // 3 if x.shape[1] // 3 == 2 else x - x.shape[1] // 3


@case(serves=at((3, 11), (2, 50)), truth=at((2, 101), (2, 100), (1, 200), (2, 5000)))
def more_than_a_hundred(self, x):
    return x[:, :3] if x.shape[1] > 100 else x[:, -3:]


@case(serves=at((2, 9)), truth=at((4, 4), (7, 7), (1, 1), (5, 3)))
def square(self, x):
    return x + x.T if x.shape[0] == x.shape[1] else x * 2


@case([call(x(2, 5), x(4, 5)), call(x(3, 7), x(2, 7))], truth=[call(x(4, 5), x(4, 5)), call(x(6, 3), x(6, 3))])
def two_inputs_of_one_shape(self, x, y):
    return x * y if x.shape == y.shape else x * y.sum(0)


@case([call(x(2, 5), x(5, 3)), call(x(3, 7), x(7, 4))], truth=[call(x(4, 6), x(6, 4)), call(x(2, 3), x(3, 2))])
def first_size_of_one_is_the_second_of_another(self, x, y):
    return x @ y * 3 if x.shape[0] == y.shape[1] else x @ y


@case(serves=at((4, 9)), truth=at((2, 11), (12, 4), (11, 11), (30, 2)))
def larger_of_two_sizes(self, x):
    return x.tanh() if max(x.shape) > 10 else x.sigmoid()


@case(serves=at((4, 9)), truth=at((6, 4), (7, 2), (5, 5), (9, 1)))
def smaller_of_two_sizes_cuts(self, x):
    return x[:, : min(x.shape)]


@case(may_refuse=True, truth=at((2, 6), (3, 4), (2, 12), (4, 1)))
def loop_over_columns(self, x):
    total = torch.zeros(len(x))
    for column in range(x.shape[1]):
        total = total * 0.5 + x[:, column]
    return total


@case(may_refuse=True, truth=at((2, 6), (3, 8), (2, 16), (2, 17), (2, 2)))
def loop_that_halves_a_size(self, x):
    size = x.shape[1]
    while size > 1:
        size, x = size // 2, x * 1.5
    return x


@case(may_refuse=True, truth=at((4, 5), (1, 5), (5, 7)))
def loop_over_rows(self, x):
    return torch.stack([row * index for index, row in enumerate(x)])


@case(may_refuse=True, truth=at((4, 5), (1, 7), (6, 3)))
def list_with_an_element_for_each_row(self, x):
    return [row.sum() for row in x]


@case(serves=at((4, 6)), truth=[call(x(2, 3, 5)), call(x(5)), call(x(3, 7, 1))])
def number_of_axes(self, x):
    return x.sum(-1) if x.dim() == 2 else x * 2


@case(serves=at((2, 6), (2, 8)), truth=at((2, 3), (2, 4), (2, 9), (2, 10), (2, 1)))
def between_two_limits(self, x):
    return x * 10 if 4 <= x.shape[1] <= 9 else x / 10


@case(may_refuse=True, truth=at((2, 6), (2, 8), (9, 5), (9, 7)))
def table_by_size(self, x):
    return x * {5: 2.0, 7: 2.0, 8: 3.0}.get(x.shape[1], 1.0)


@case(serves=at((4, 9), (2, 16)), truth=at((2, 17), (3, 33)))
class LearnedPositions(nn.Module):
    """Sixteen positions; the model raises for more."""

    def __init__(self):
        super().__init__()
        self.positions = nn.Embedding(16, 4)

    def forward(self, x):
        return x[..., None] * self.positions(torch.arange(x.shape[1]))


@case(serves=at((2, 9), (4, 20)), truth=at((2, 33), (2, 40)))
def raises_above_a_limit(self, x):
    if x.shape[1] > 32:
        raise ValueError("at most 32 columns")
    return x.softmax(-1)


@case(serves=at((2, 9), (4, 20)), truth=at((2, 25), (25, 3)))
def asserts_a_limit(self, x):
    assert max(x.shape) <= 24, "too large"
    return x - x.mean()


@case(serves=at((2, 3), (4, 6)), truth=at((4, 8), (2, 9), (2, 20)))
def cut_at_eight(self, x):
    return x[:, :8] * 2


@case(serves=at((2, 9)), truth=at((2, 6), (3, 8), (2, 1), (2, 2)))
def halves(self, x):
    left, right = x.chunk(2, 1)
    return left[:, : right.shape[1]] - right


@case(may_refuse=True, truth=at((2, 4), (2, 6), (2, 8), (2, 9), (2, 13), (2, 3)))
def four_chunks_or_fewer(self, x):
    return x.chunk(4, 1)[-1]


@case(may_refuse=True, truth=at((2, 6), (2, 9), (2, 11), (3, 3), (2, 2)))
def last_of_pieces_of_three(self, x):
    return x.split(3, 1)[-1].sum(1)


@case(serves=at((2, 9), (4, 6)), truth=at((2, 8), (2, 4), (2, 1)))
def padded_to_a_multiple_of_four(self, x):
    return F.pad(x, (0, -x.shape[1] % 4)).reshape(len(x), -1, 4).amax(-1)


@case(serves=at((2, 9), (4, 6)), truth=at((2, 3), (2, 4), (2, 2)))
def windows_of_three(self, x):
    return x.unfold(1, 3, 2).sum(-1)


@case(serves=at((2, 9)), truth=at((4, 6), (2, 2), (2, 1)))
def pairs_of_columns(self, x):
    return x[:, : x.shape[1] - x.shape[1] % 2].reshape(len(x), -1, 2).prod(-1)


@case(serves=at((4, 9)), truth=at((5, 9), (5, 12), (4, 12), (6, 11)))
def condition_inside_a_condition(self, x):
    if len(x) > 4:
        return x * 2 if x.shape[1] > 10 else x * 3
    return x


@case(may_refuse=True, truth=at((2, 6), (2, 8), (3, 4), (3, 9)))
def comparison_as_a_number(self, x):
    return x * (1 + (x.shape[1] > 6))


@case(serves=at((2, 6)), truth=at((2, 33), (2, 32), (3, 100)), plan=lambda plan: plan.range("x_axis_1", 2, 32))
def range_given_by_the_user(self, x):
    return x.relu()


@case(serves=at((2, 9), (4, 3)), truth=at((2, 12), (3, 13)))
def size_in_a_tensor(self, x):
    return torch.where(torch.tensor(x.shape[1]) > 11, x * 2, x + 1)


@case(may_refuse=True, truth=at((2, 6), (4, 3), (2, 9), (5, 1)))
def reshape_that_is_tried(self, x):
    try:
        return x.reshape(3, -1).sum() + x
    except RuntimeError:
        return x.abs()


@case(
    [call(x(4, 6, 4), x(4, 6)), call(x(2, 10, 4)), call(x(2, 9, 4), x(2, 9))],
    serves=[call(x(3, 8, 4), x(3, 8)), call(x(3, 11, 4), x(3, 11))],
    truth=[call(x(3, 9, 4)), call(x(1, 8, 4)), call(x(1, 1, 4), x(1, 1))],
)
def view_that_is_tried_beside_an_optional_input(self, x, mask=None):
    try:
        y = x.view(len(x), -1, 2, 4).sum(2)
    except RuntimeError:
        y = x
    return y, 3 if len(x) == 1 else 2


@case(truth=[call(x(5, 2).T), call(x(2, 10)[:, ::2])])
def memory_layout(self, x):
    return x * 2 if x.is_contiguous() else x * 3


@case(truth=[call(x(2, 5).requires_grad_())], may_refuse=True)
def gradient_of_the_input(self, x):
    return x * 2 if x.requires_grad else x * 3


@case(may_refuse=True)
def mode_of_gradients(self, x):
    return x * 2 if torch.is_grad_enabled() else x * 3


@case(serves=at((4, 9)), truth=at((2, 30), (2, 31), (9, 6), (9, 40)))
def condition_in_a_helper(self, x):
    return _long(x) if x.size(-1) >= 30 else x.cumsum(-1)


def _long(x):
    return x.flip(-1)


@case(serves=at((4, 9)), truth=at((2, 4), (2, 2), (4, 12), (3, 24), (2, 1)))
def two_thresholds_and_a_remainder(self, x):
    size = x.shape[1]
    if size < 5:
        return x * 0
    return x * 5 if size % 12 == 0 else x


@case(at((2, 20), (3, 30)), serves=at((4, 25)), truth=at((2, 12), (2, 10), (2, 5)))
def small_inputs_take_another_way(self, x):
    return F.avg_pool1d(x[:, None], 3, 2)[:, 0] if x.shape[-1] > 12 else x


@case([call(x(2, 5), x(2, 3)), call(x(3, 7), x(3, 4))], truth=[call(x(2, 5), x(2, 5)), call(x(4, 3), x(4, 8))])
def longer_input_wins(self, x, y):
    return x.sum(1) if x.shape[1] > y.shape[1] else y.sum(1)


@case(truth=[call(x(2, 1100)), call(x(2, 1000)), call(x(2, 999)), call(x(1, 1100))], serves=[call(x(4, 9))])
def text_of_a_length(self, x):
    """A trace has the name of a symbol instead of the digits, and no guard."""
    return x * 3 if len(str(x.shape[1])) > 3 else x * 2


@case(truth=[call(x(128, 5)), call(x(100, 5)), call(x(99, 5)), call(x(4, 9))], may_refuse=True)
def formatted_number_of_rows(self, x):
    return x * 3 if len(f"{x.shape[0]}") > 2 else x * 2


@case(serves=[call(x(4, 9)), call(x(4, 1200)), call(x(200, 9))])
def cached_by_text(self, x):
    """Text that changes nothing."""
    key = f"{x.shape[0]}x{x.shape[1]}"
    self.__dict__.setdefault("cache", {}).setdefault(key, x.shape[1])
    return x * self.cache[key]


@case(at((2, 20), (3, 30)), serves=at((4, 21)), truth=at((2, 15), (2, 16), (2, 31), (2, 32), (2, 33), (2, 1)))
def steps_by_logarithm(self, x):
    for step in range(int(math.log2(x.shape[1]))):
        x = x + x.roll(2**step, 1)
    return x


_FACTORS = {5: 2.0, 8: 3.0, (4, 9): 5.0}


@case(serves=at((4, 6)), truth=at((4, 9), (2, 8), (9, 4), (8, 2), (1, 5), (1, 1)))
def factor_from_a_table(self, x):
    return x * _FACTORS.get(x.shape[1], 1.0)


@case(serves=at((4, 6)), truth=at((4, 9), (2, 8), (9, 4), (8, 2), (1, 5), (1, 1)))
def factor_from_a_table_of_shapes(self, x):
    return x * _FACTORS.get(tuple(x.shape), 1.0)


@case(serves=at((4, 6)), truth=at((4, 9), (2, 8), (9, 4), (8, 2), (1, 5), (1, 1)), may_refuse=True)
def factor_from_a_table_in_a_list(self, x):
    tables = [{}, _FACTORS]
    return x * tables[1].get(x.shape[1], 1.0)


@case(serves=at((4, 6)), truth=at((4, 9), (2, 8), (9, 4), (8, 8), (1, 5), (1, 1), (7, 7)))
def number_of_different_sizes(self, x):
    sizes = set()
    sizes.update(x.shape)
    return x * len(sizes)


class TablesByLength(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = {8: torch.ones(8), 11: torch.arange(11) * 0.5}

    def forward(self, x):
        length = x.shape[1]
        if length not in self.tables:
            self.tables[length] = torch.arange(length) * 0.5
        return x + self.tables[length]


case(serves=at((4, 6), (2, 9)), truth=at((2, 8), (1, 11), (3, 1), (8, 4)))(TablesByLength)


_BY_NAME = {"n=8": 3.0, "4x9": 5.0}


@case(serves=at((4, 6)), truth=at((4, 9), (2, 8), (9, 4), (8, 2), (1, 5), (1, 1)))
def factor_by_the_name_of_a_length(self, x):
    return x * _BY_NAME.get(f"n={x.shape[1]}", 1.0)


@case(serves=at((4, 6)), truth=at((4, 9), (2, 8), (9, 4), (8, 2), (1, 5), (1, 1)))
def factor_by_the_name_of_a_shape(self, x):
    rows, columns = x.shape
    return x * _BY_NAME.get(f"{rows}x{columns}", 1.0)


@case(serves=at((4, 6)), truth=at((2, 8), (3, 5), (8, 2), (1, 5), (1, 1)))
class LayersByLength(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({"8": nn.Linear(8, 8)})
        self.register_buffer("shift_5", torch.ones(5))

    def forward(self, x):
        length = str(x.shape[1])
        x = self.layers[length](x) if length in self.layers else x
        return x + getattr(self, f"shift_{x.shape[1]}", 0)


@case(serves=at((4, 6), (2, 8), (3, 5)))
def length_in_a_message(self, x):
    """Returns the same for 5, 8 and any other length."""
    assert x.shape[1] < 1000, f"expected less than 1000 tokens, got {x.shape[1]}"
    message = f"{x.shape[1]} tokens of at most 1000"
    return x * 2 if message else x


@case(serves=at((4, 6), (2, 20)), truth=at((2, 3), (4, 3), (8, 2), (1, 3)))
def one_size_behind_a_line_that_logs(self, x):
    """Is traced at more than nine columns, where three columns are out of the question."""
    if x.shape[1] > 9:
        logging.getLogger(__name__).debug("long")
    return x + 1 if x.shape[1] == 3 else x * 2


@case(serves=at((4, 6), (2, 12), (2, 20)), truth=at((2, 21), (3, 40), (2, 3), (2, 4), (1, 30)))
def limits_behind_a_line_that_logs(self, x):
    if x.shape[1] > 9:
        logging.getLogger(__name__).debug("long")
    return x + 1 if x.shape[1] > 20 or x.shape[1] < 4 else x * 2


@case(serves=at((64, 4), (70, 8)), truth=at((71, 3), (99, 5), (2, 64)))
def limit_behind_a_line_that_makes_contiguous(self, x):
    if x.shape[0] >= 64:
        x = x.contiguous()
    return x + 1 if x.shape[0] > 70 else x * 2


@case(truth=at((4, 6), (2, 9), (2, 10), (3, 20)))
def same_limit_as_a_line_that_logs(self, x):
    if x.shape[1] > 9:
        logging.getLogger(__name__).debug("long")
    return x + 1 if x.shape[1] >= 10 else x * 2


@case(serves=at((4, 6), (2, 20)), truth=at((2, 3), (4, 2), (5, 4), (1, 3)))
def slice_behind_a_line_that_logs(self, x):
    if x.shape[1] > 9:
        logging.getLogger(__name__).debug("long")
    first = x[:, :4]
    return first.sum(1) / first.shape[1]


# Numbers that code gets from sizes, by which it may decide in lines that a trace does not see.


@case(serves=at((4, 6), (2, 9)), truth=at((2, 10), (2, 11), (3, 16), (3, 17), (1, 10)))
def number_from_a_size_that_is_looked_for(self, x):
    return x * 2 if int(x.shape[1] * 0.5) in (5, 8) else x * 3


@case(serves=at((3, 7)), truth=at((4, 6), (2, 18), (2, 23), (3, 22), (1, 40)))
def number_from_a_size_as_a_place_in_a_list(self, x):
    return x * [1, 1, 3, 4][int(x.shape[1] * 0.25)]


@case(at((1, 5), (1, 6)), truth=at((1, 20), (1, 23), (1, 40), (2, 10), (5, 4), (1, 3)))
def number_from_sizes_of_one_row(self, x):
    return x * 2 if [0, 0, 0, 0, 0, 9, 0, 0, 9, 0, 0][int(x.shape[0] * x.shape[1] * 0.25)] else x


@case(serves=at((4, 6), (3, 8)), truth=at((2, 9), (3, 12), (2, 13), (3, 16)))
def bits_of_a_size(self, x):
    return x * 2 if (x.shape[1] + 3) & ~3 != 8 and x.shape[1] & 4 else x * 3


@case(serves=at((4, 6), (3, 12)), truth=at((2, 8), (3, 3)))
def table_in_the_code_by_length(self, x):
    return {3: x + 1, 8: x * 2}.get(x.shape[1], x)


@case(at((2, 10), (3, 14)), serves=at((4, 11)), truth=at((2, 5), (2, 9), (3, 4), (1, 8)))
def squeeze_of_a_quotient(self, x):
    return x[:, : x.shape[1] // 5].squeeze(1)


# Decisions that make a difference for some values only, which the recorded calls need not have.


@case([call(torch.rand(2, 5)), call(torch.rand(3, 7))], truth=[call(x(2, 5)), call(x(4, 3)), call(x(2, 9))])
def recorded_values_that_make_no_difference(self, x):
    return x.relu() if max(x.shape[1] - 4, 1) < 2 else x


@case(
    [call(-x(2, 5).abs()), call(x(3, 7) + 9), call(x(4, 6))],
    truth=[call(torch.full(shape, 0.05)) for shape in ((2, 8), (2, 5), (1, 9), (6, 8), (1, 3))],
    may_refuse=True,
)
def limit_by_size_of_a_decision_by_values(self, x):
    return x * 2 if x.sum().item() > max(x.shape[0] - 2, 1) else x - 1


@case(
    [call(-torch.rand(4, 4)), call(-torch.rand(8, 5)), call(-torch.rand(3, 6))],
    truth=[call(torch.full((rows, 5), total / rows / 5)) for rows in (3, 4, 8) for total in (1.2, 2.5, 3.5)],
    may_refuse=True,
)
def limit_by_size_of_a_decision_that_all_calls_made_alike(self, x):
    return x * 2 if x.sum().item() > min(x.shape[0] - 2, 3) else x - 1


# Decisions that code makes in eager mode only, as it asks whether it is traced, or what kind of number a size is.


@case(serves=at((4, 6), (2, 300)), truth=at((2, 512), (2, 513), (1, 600)))
def limit_unless_compiling(self, x):
    if not torch.compiler.is_compiling() and x.shape[1] > 512:
        return x * 2
    return x


@case(serves=at((4, 6), (2, 300)), truth=at((2, 512), (2, 513), (1, 600), (65, 4)))
def limit_unless_compiling_beside_another(self, x):
    if x.shape[0] > 64 or (not torch.compiler.is_compiling() and x.shape[1] > 512):
        return x * 2
    return x


@case(serves=at((4, 6)), truth=at((2, 29), (2, 30), (1, 30), (3, 31)))
def length_unless_exporting(self, x):
    return x * 2 if not torch.compiler.is_exporting() and x.shape[1] == 30 else x


@case(serves=at((4, 6), (2, 300)), truth=at((2, 512), (2, 513), (1, 600)))
def limit_of_an_int(self, x):
    return x * 2 if isinstance(x.shape[1], int) and x.shape[1] > 512 else x


@case(serves=at((4, 6), (2, 300)), truth=at((2, 512), (2, 513), (1, 600)))
def limit_for_plain_tensors(self, x):
    return x * 2 if type(x) is torch.Tensor and x.shape[1] > 512 else x


@case(serves=at((4, 6), (2, 600), (1, 600)))
def limit_unless_compiling_that_changes_nothing(self, x):
    if not torch.compiler.is_compiling() and x.shape[1] > 512:
        return torch.cat([part * 2 for part in x.split(512, 1)], 1)
    return x * 2
