"""Inputs that a call may leave out: together, alone, or only with others; a pattern is recorded, proven, or refused."""

import torch
from torch.nn import functional as F

from tests.trust.cases import call, case, x


def masks(*shape):
    """Returns a boolean mask that keeps about half."""
    mask = x(*shape) > 0
    mask[..., 0] = True
    return mask


@case(
    [call(x(2, 5), x(2, 5), x(2, 5)), call(x(3, 7), None, x(3, 7)), call(x(3, 7), x(3, 7), None)],
    truth=[call(x(2, 5)), call(x(4, 9), None, None), call(x(4, 9), x(4, 9)), call(x(4, 9), z=x(4, 9))],
)
def both_absent(self, x, y=None, z=None):
    y_or_0 = 0 if y is None else y
    z_or_0 = 0 if z is None else z
    return x * (2 if y is None and z is None else 1) + y_or_0 - z_or_0


@case(
    [call(x(2, 5), x(2, 5)), call(x(3, 7))],
    truth=[call(x(4, 9) * 200), call(x(4, 9) * 200, x(4, 9) * 200)],
)
def clamped_if_alone(self, x, y=None):
    return x.clamp(max=100) if y is None else x + y


@case(
    [call(x(2, 4, 5, 8), masks(2, 1, 5, 5)), call(x(3, 4, 7, 8))],
    may_refuse=True,
    truth=[call(x(2, 4, 1, 8)), call(x(2, 4, 6, 8)), call(x(1, 4, 6, 8), masks(1, 1, 6, 6)), call(x(1, 4, 1, 8))],
)
def causal_without_a_mask(self, x, mask=None):
    return F.scaled_dot_product_attention(x, x * 0.5, x + 1, attn_mask=mask, is_causal=mask is None)


@case(
    [call(x(2, 5), torch.ones(2, 5)), call(x(3, 7))],
    serves=[call(x(4, 9)), call(x(4, 9), torch.zeros(4, 9))],
    may_refuse=True,
)
def ones_if_absent(self, x, weights=None):
    if weights is None:
        weights = torch.ones_like(x)
    return (x * weights).sum(1) / weights.sum(1).clamp(min=1)


@case(
    [call({"a": x(2, 5), "b": x(2, 5)}), call({"a": x(3, 7), "b": x(3, 7)})],
    serves=[call({"b": x(4, 9), "a": x(4, 9)})],
    truth=[call({"a": x(2, 5)}), call({"a": x(2, 5), "b": x(2, 5), "c": x(2, 5)}), call({"b": x(2, 5)}), call({})],
)
def keys_that_change(self, batch):
    total = batch["a"] * 2
    for key in batch:
        if key != "a":
            total = total + batch[key] * len(batch)
    return total


@case(
    [call(a=x(2, 5)), call(a=x(3, 7), b=x(3, 7))],
    may_refuse=True,
    truth=[call(b=x(2, 5)), call(a=x(2, 5), c=x(2, 5)), call(b=x(4, 9), a=x(4, 9)), call(a=x(4, 9))],
)
def named_tensors(self, **tensors):
    return sum(value * (index + 1) for index, value in enumerate(tensors.values()))


@case(
    [call(x(2, 5), x(2, 5)), call(x(3, 7), x(3, 7))],
    truth=[call(x(2, 5)), call(x(2, 5), x(2, 5), x(2, 5)), call()],
)
def any_number_of_tensors(self, *tensors):
    return torch.stack(tensors).mean(0) if tensors else torch.zeros(1)


@case(
    [call([x(2, 5), x(2, 5)]), call([x(3, 7), x(3, 7)])],
    truth=[call([x(2, 5)]), call([x(2, 5)] * 3), call([x(2, 5), None]), call((x(2, 5), x(2, 5)))],
)
def lists_of_other_lengths(self, values):
    found = [value for value in values if value is not None]
    return sum(found) / len(values) + isinstance(values, tuple)


@case(
    [call([x(2, 5), None]), call([x(3, 7), x(3, 7)])],
    may_refuse=True,
    truth=[call([None, x(2, 5)]), call([x(4, 9), None]), call([x(4, 9), x(4, 9)]), call([x(2, 5)]), call([None, None])],
)
def absent_inside_a_list(self, values):
    return sum(value * (index + 1) for index, value in enumerate(values) if value is not None)


@case(
    [call(x(2, 5)), call(x(3, 7))],
    serves=[call(x(4, 9), None)],
    truth=[call(x(2, 5), x(2, 5)), call(x(2, 5), y=x(1, 5))],
)
def never_given(self, x, y=None):
    return x * 2 if y is None else x - y


@case(
    [call(x(2, 5), y=None), call(x(3, 7), y=None)],
    truth=[call(x(2, 5)), call(x(2, 5), y="missing"), call(x(2, 5), y=0)],
)
def none_is_not_missing(self, x, y="missing"):
    return x * 2 if y is None else x * 3 if y == "missing" else x


@case(
    [call(x(2, 5), x(2, 5), x(2, 5)), call(x(3, 7))],
    truth=[call(x(2, 5), x(2, 5)), call(x(2, 5), z=x(2, 5)), call(x(4, 9)), call(x(4, 9), x(4, 9), x(4, 9))],
)
def only_together(self, x, y=None, z=None):
    if y is not None and z is not None:
        return x + y * z
    return x if y is None and z is None else x * 7


@case(
    [call(x(2, 5), cond=x(2, 5)), call(x(3, 7), other=x(3, 7))],
    may_refuse=True,
    truth=[call(x(4, 9)), call(x(4, 9), cond=x(4, 9), other=x(4, 9)), call(x(4, 9), other=x(4, 9))],
)
def one_or_the_other(self, x, cond=None, other=None):
    if (cond is None) == (other is None):
        return x.abs()
    return x + cond if cond is not None else x - other


@case(
    [call(x(2, 5, 4), x(2, 3, 4)), call(x(3, 1, 4), x(3, 6, 4)), call(x(2, 5, 4))],
    may_refuse=True,
    truth=[call(x(2, 1, 4), x(2, 9, 4)), call(x(2, 1, 4)), call(x(1, 4, 4), x(1, 2, 4)), call(x(4, 6, 4), x(4, 0, 4))],
)
def past_that_changes_the_result(self, new, past=None):
    if past is None:
        return new.cumsum(1) + 1, new
    whole = torch.cat([past, new], 1)
    return whole.cumsum(1)[:, past.shape[1] :], whole


@case(
    [call(x(2, 5), masks(2, 5)), call(x(3, 7))],
    truth=[call(x(4, 9)), call(x(4, 9), masks(4, 9)), call(x(4, 9), masks(4, 9).float()), call(x(1, 3))],
)
def average_with_a_mask(self, x, mask=None):
    if mask is None:
        return x.mean(1) * 1.5
    return (x * mask).sum(1) / mask.sum(1)


@case(
    [call(x(2, 5), {"y": x(2, 5)}), call(x(3, 7), {})],
    may_refuse=True,
    truth=[call(x(4, 9), {"y": x(4, 9)}), call(x(4, 9), None), call(x(4, 9)), call(x(4, 9), {"z": x(4, 9)})],
)
def dict_that_may_be_empty(self, x, extra=None):
    if not extra:
        return x * (4 if extra is None else 5)
    return x + sum(extra.values())


@case(
    [call(x(2, 5), x(2, 5)), call(x(3, 7), x(3, 7))],
    truth=[call(x(2, 5)), call(x(2, 5), None), call(x(2, 5), y=None)],
)
def always_given(self, x, y=None):
    return x * 3 if y is None else x * y


@case(
    [call(x(2, 5)), call(x(3, 7), y=x(3, 7)), call(x(3, 7), y=x(3, 7), scale=2.0)],
    may_refuse=True,
    truth=[call(x(4, 9), scale=2.0), call(x(4, 9), y=x(4, 9)), call(x(4, 9), y=x(4, 9), scale=3.0), call(x(4, 9))],
)
def absent_with_a_constant(self, x, y=None, scale=1.0):
    return x * scale if y is None else (x + y) / scale


@case(
    [call(x(2, 5), x(2, 5)), call(x(3, 7), x(3, 7))],
    serves=[call(y=x(4, 9), x=x(4, 9)), call(x(4, 9), y=x(4, 9))],
    truth=[call(x(4, 9), z=x(4, 9)), call(x(4, 9), x(4, 9), x(4, 9))],
)
def names_and_positions(self, x, y):
    return x - 2 * y


@case(
    [call(x(2, 5), x(2, 5)), call(x(3, 7))],
    truth=[call(x(4, 120)), call(x(4, 100)), call(x(4, 120), x(4, 120)), call(x(1, 1))],
    serves=[call(x(4, 9)), call(x(4, 9), x(4, 9)), call(x(4, 300), x(4, 300))],
)
def scaled_if_long_and_alone(self, x, y=None):
    if y is None:
        return x * 2 if x.shape[1] > 100 else x
    return x + y


@case(
    [call(x(2, 5), x(2, 5)), call(x(3, 7))],
    truth=[call(x(4, 2001)), call(x(4, 1999))],
    serves=[call(x(4, 9)), call(x(4, 9), x(4, 9))],
)
def scaled_if_thousands_and_alone(self, x, y=None):
    if y is None and x.shape[0] * x.shape[1] >= 8000:
        return x * 2
    return x + (torch.zeros_like(x) if y is None else y)


@case(
    [call(x(2, 5), x(2, 5)), call(x(3, 7))],
    truth=[call(x(4, 90)), call(x(4, 64)), call(x(4, 65), x(4, 65))],
    serves=[call(x(4, 9)), call(x(4, 90)), call(x(4, 90), x(4, 90))],
)
def windowed_if_alone(self, x, y=None):
    """Beside a window that leaves out nothing, with and without it."""
    if y is None and x.shape[1] > 64:
        return torch.cat([x[:, :64], x[:, 64:]], 1) + 1
    return x + 1 if y is None else x + 1 + y * 0


@case(
    [call(x(2, 5), x(2, 5)), call(x(3, 7))],
    truth=[call(x(4, 1)), call(x(1, 1)), call(x(4, 1), x(4, 1))],
    serves=[call(x(4, 9)), call(x(4, 9), x(4, 9))],
)
def negated_if_single_and_alone(self, x, y=None):
    if y is None and x.shape[1] == 1:
        return -x
    return x if y is None else x + y


def _added_if_alike(x, y):
    return x if y is None or y.shape != x.shape else x + y


@case(
    [call(x(2, 5)), call(x(3, 5), x(2, 5))],
    serves=[call(x(4, 5)), call(x(4, 5), x(2, 5))],
    truth=[call(x(2, 5), x(2, 5)), call(x(4, 5), x(4, 5)), call(x(3, 5), x(4, 5))],
)
def added_if_of_one_shape(self, x, y=None):
    return _added_if_alike(x, y)


@case(
    [call(x(2, 5)), call(x(3, 7), x(2, 5))],
    serves=[call(x(4, 9)), call(x(4, 9), x(2, 5))],
    truth=[call(x(2, 5), x(2, 5)), call(x(2, 9), x(2, 5)), call(x(4, 9), x(4, 9))],
)
def added_if_of_the_shape_of_another_call(self, x, y=None):
    return _added_if_alike(x, y)


@case(
    [call(x(2, 5)), call(x(3, 7), {"y": x(2, 6)}), call(x(4, 6), {"y": x(3, 5)})],
    serves=[call(x(4, 9))],
    truth=[call(x(2, 5), {"y": x(2, 5)}), call(x(4, 9), {"y": x(4, 9)}), call(x(4, 9), {"y": x(4, 8)})],
)
def added_if_of_one_shape_in_a_dict(self, x, more=None):
    return x if more is None else _added_if_alike(x, more["y"])


@case(
    [call(x(2, 6, 4)), call(x(2, 1, 4), x(2, 1)), call(x(3, 1, 4), x(3, 1))],
    serves=[call(x(4, 6, 4)), call(x(4, 1, 4), x(4, 1))],
    truth=[call(x(4, 9, 4)), call(x(4, 2, 4)), call(x(4, 9, 4), x(4, 1))],
)
def times_its_length_if_alone(self, x, y=None):
    return x * (x.size(1) if y is None else 6)


@case(
    [call(x(2, 5, 4), x(2, 6)), call(x(3, 7, 4) + 1.5)],
    serves=[call(x(4, 9, 4), x(4, 6)), call(x(4, 9, 4) + 1.5)],
    truth=[call(x(4, 9, 4) - 1.5), call(x(2, 5, 4) - 1.5), call(x(4, 9, 4) - 1.5, x(4, 6))],
)
def summed_if_given_or_if_the_last_is_positive(self, x, y=None):
    if y is not None:
        return x.sum(1)
    if torch.tanh(x[:, -1]).sum() > 0:
        return x.sum(1)
    return x[:, -1]
