"""Decisions by the values of tensors: a graph goes every way that was recorded, and refuses calls that go another."""

import torch
from torch import nn

from tests.trust.cases import call, case, x

_RANDOM = torch.Generator().manual_seed(0)


def uniform(*shape):
    """Returns numbers between 0 and 1, different ones each time."""
    return torch.rand(shape, generator=_RANDOM)


_LOW, _HIGH = uniform(2, 5), uniform(3, 7) * 9 + 1
BOTH = [call(_LOW), call(_HIGH)]
NEW = [call(uniform(4, 9)), call(uniform(1, 5) * 90 + 2), call(uniform(6, 1))]
OTHER = [call(-uniform(3, 4) * 50), call(torch.zeros(2, 3)), call(x(5, 5)), call(torch.full((2, 2), 1.0))]


@case(BOTH, serves=NEW, truth=OTHER)
def scale_of_an_image(self, x):
    if x.max() > 1:
        x = x / 255
    return x * 2


@case(BOTH, serves=NEW, truth=OTHER)
def scale_read_as_a_number(self, x):
    largest = float(x.max())
    return x / largest if largest > 1 else x + largest


@case(
    [call(torch.full((2, 5), 0.1)), call(torch.full((3, 7), 0.3))],
    truth=[call(torch.full((2, 5), v)) for v in (0.1, 0.2)],
)
def number_with_all_digits(self, x):
    """In single precision, 0.1 is larger than Python's."""
    return x * 2 if x[0, 0].item() > 0.1 else x * 3


@case([call(x(2, 5)), call(x(3, 7).abs()), call(-x(4, 6).abs())], truth=[*NEW, *OTHER])
def several_conditions(self, x):
    mean, count = x.mean(), int((x > 0).sum())
    if mean > 0 and not count < 8:
        return x + 1
    if count == 0 or mean < -1:
        return x + 2
    return x + 3


@case(BOTH, serves=NEW, truth=OTHER)
class WayInAnInnerModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.large, self.small = nn.Linear(1, 3), nn.Linear(1, 3)
        self.inner = _Chosen(self.large, self.small)

    def forward(self, x):
        return {"found": self.inner(x.mean(1, keepdim=True))}


class _Chosen(nn.Module):
    def __init__(self, large, small):
        super().__init__()
        self.large, self.small = large, small

    def forward(self, x):
        return self.large(x) if (x > 1).any().item() else self.small(x)


@case(BOTH, serves=NEW, truth=OTHER)
def written_in_place_on_one_way(self, x):
    y = x.clone()
    if x.sum() > x.numel():
        y[:, 0] = 5
    else:
        y.mul_(2)
    return y


@case(BOTH, serves=NEW, truth=OTHER)
def argument_changed_on_one_way(self, x):
    if x.max() > 1:
        x.add_(1)
    return x * 2


@case(BOTH, serves=NEW, truth=OTHER)
def attribute_set_on_one_way(self, x):
    self.factor = 1
    if x.max() > 1:
        self.factor = 3
    return x * self.factor


@case(BOTH, truth=[*NEW, *OTHER])
def selection_on_one_way(self, x):
    chosen = x.mean(1) > 0.6
    return x[chosen].mean(0) if chosen.sum() >= 2 else x.mean(0)


@case(BOTH, truth=[*NEW, *OTHER], may_refuse=True)
def as_often_as_it_takes(self, x):
    while x.abs().max().item() > 1:
        x = x / 2
    return x


@case(BOTH, serves=NEW[:1], truth=[*NEW[1:], *OTHER])
def way_that_no_call_took(self, x):
    return x if x.min() < -1 else x * 2


@case(BOTH, serves=NEW, truth=OTHER)
def number_by_way(self, x):
    return (x, 1) if x.max() > 1 else (x * 2, 7)


@case([call(uniform(3, 2)), call(torch.ones(2, 2))], truth=[call(torch.ones(5, 2)), *OTHER])
def equality_of_tensors(self, x):
    return x * 2 if torch.equal(x, x.round()) else x.sum(1, keepdim=True) + x


@case(BOTH, truth=[*NEW, *OTHER], may_refuse=True)
class BufferWrittenOnOneWay(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        if x.max() > 1:
            self.count += 1
        return x * (self.count + 1)


@case(BOTH, truth=[*NEW, *OTHER], may_refuse=True)
def other_shapes_by_way(self, x):
    return x[:, :2] if x.max() > 1 else x


@case([call(uniform(2, 4)), call(uniform(3, 4))], truth=[call(uniform(2, 4) + 60)])
class BufferReturnedOnTheRecordedWay(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.arange(4.0))

    def forward(self, x):
        return self.table * 2 if x.max() > 50 else self.table


@case([call(uniform(2, 4)), call(uniform(3, 4))], truth=[call(uniform(2, 4) + 60)], may_refuse=True)
def nothing_but_a_number_on_the_recorded_way(self, x):
    return x.shape[0] if x.max() > 50 else x.shape[0] + 1


LOW_OR_HIGH = [call(x(2, 5, 4) + 1), call(x(3, 8, 4) + 1)]
SMALL = [call(uniform(2, 9, 4) / 9), call(uniform(1, 7, 4) / 9), call(uniform(4, 1, 4)), call(uniform(1, 1, 4) * 5)]


@case(LOW_OR_HIGH, truth=SMALL)
def loop_that_ends_before_it_decides_by_a_size(self, x):
    state = x.mean(1)
    for i in range(x.shape[1]):
        if x[:, i].max() > 1:
            break
        state = state + (1.0 if i in (0, 2, 5) and len(x) == 1 else 2.0)
    return state


@case(LOW_OR_HIGH, truth=SMALL)
def loop_that_ends_before_its_last_turn(self, x):
    state = x.amax(1)
    for i, row in enumerate(x.unbind(1)):
        if bool((row > 1.5).any()):
            break
        state = row if i < x.shape[1] - 1 else state * 0.5
    return state


@case(LOW_OR_HIGH, serves=[call(x(4, 6, 4)), call(x(2, 12, 4) / 9)], truth=SMALL)
def best_row_of_a_loop(self, x):
    best, place = None, 0
    for i in range(x.shape[1]):
        score = x[:, i].sum()
        if best is None or score > best:
            best, place = score, i
    return x * best + i, torch.as_tensor(place)


@case(
    [call(x(2, 5, 4)), call(x(3, 8, 4))], serves=[call(x(4, 7, 4)), call(x(1, 4, 4) * 9)], truth=[call(x(2, 3, 4) * 9)]
)
def first_turn_of_a_loop_that_may_have_none(self, x):
    state = x.mean(1)
    for _ in range(3, x.shape[1]):
        if state.max() > 3:
            state = state * 2
            break
        state = state + (1.0 if state.max() > 2 else 0.0)
    return state


@case(truth=[call(x(2, 5) * 1000), call(x(4, 9) * 1000), call(x(1, 3) * 1000)], may_refuse=True)
def limit_of_values_unless_compiling(self, x):
    if not torch.compiler.is_compiling() and x.abs().max() > 100:
        x = x.clamp(-100, 100)
    return x * 2


@case(truth=[call(x(2, 5) * 1000), call(x(4, 9) * 1000), call(x(1, 3) * 1000)], may_refuse=True)
def limit_of_a_number_unless_compiling(self, x):
    if not torch.compiler.is_compiling() and x.abs().max().item() > 100:
        x = x.clamp(-100, 100)
    return x * 2


@case(
    [call(x(2, 5), torch.arange(5) < 3), call(x(3, 7), torch.arange(7) < 4)],
    serves=[call(x(4, 9), torch.arange(9) < 9), call(x(1, 6), torch.arange(6) < 2)],
)
def mask_that_is_left_out_unless_compiling(self, x, mask):
    if not torch.compiler.is_compiling() and mask.all():
        return x
    return x * mask
