"""Python values in results: they follow the sizes, keep their type, and are compared like tensors."""

import collections
import dataclasses
import enum
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from tests.trust.cases import at, call, case, x

OTHERS = at((4, 9), (2, 6), (5, 5))


class Mode(enum.Enum):
    WIDE = "wide"
    TALL = "tall"


class Pair(NamedTuple):
    value: Any
    size: Any


@dataclasses.dataclass
class Result:
    value: Any
    size: Any = None
    inner: Any = None


@case(truth=OTHERS)
def number_of_rows(self, x):
    return x * 2, x.shape[0]


@case(at((2, 3, 8, 8), (1, 3, 12, 8)), truth=at((2, 3, 4, 12), (3, 3, 16, 16)))
class PatchEmbedding(nn.Module):
    """Tokens with the height and the width of the grid."""

    def __init__(self):
        super().__init__()
        self.project = nn.Conv2d(3, 4, 4, stride=4)

    def forward(self, pixels):
        tokens = self.project(pixels)
        height, width = tokens.shape[-2:]
        return tokens.flatten(2).mT, height, width


@case(truth=OTHERS)
def size_in_a_dict(self, x):
    return {"value": x.neg(), "length": x.shape[1], "kind": "neg"}


@case(may_refuse=True, truth=OTHERS)
def size_in_a_string(self, x):
    return x.neg(), f"{x.shape[0]} rows"


@case(may_refuse=True, truth=OTHERS)
def size_in_nested_dataclasses(self, x):
    return Result(x * 2, x.shape[1], Result(x + 1, (x.shape[0], 3)))


@case(truth=OTHERS)
def arithmetic_with_sizes(self, x):
    rows, columns = x.shape
    return x.sin(), rows * columns, columns - rows, 2 * columns + 1, columns // 2


@case(truth=OTHERS)
def float_of_a_size(self, x):
    return x.sin(), x.shape[1] / 2, float(x.shape[0])


@case(truth=OTHERS)
def comparison_of_a_size(self, x):
    return x.sin(), x.shape[1] > 6


@case(truth=OTHERS)
def shape_as_list_and_tuple(self, x):
    return x.sin(), list(x.shape), tuple(x.shape)


@case(may_refuse=True, truth=OTHERS)
def shape_itself(self, x):
    return x.sin(), x.shape


@case(serves=OTHERS)
def constants_of_all_kinds(self, x):
    return x.sin(), "text", 1, True, 1.0, None, 2j, Mode.WIDE


@case(truth=OTHERS)
def enum_by_size(self, x):
    return x.sin(), Mode.WIDE if x.shape[1] > x.shape[0] + 2 else Mode.TALL


@case(may_refuse=True, truth=[*OTHERS, *at((2, 12))])
def absent_for_short_inputs(self, x):
    return x.sin(), (x.cos() if x.shape[1] > 6 else None)


@case(truth=[*OTHERS, *at((2, 12))])
def more_results_for_long_inputs(self, x):
    return [x.sin(), x.cos()] if x.shape[1] > 8 else [x.sin()]


@case(truth=OTHERS)
def named_tuple_with_a_size(self, x):
    return Pair(x.sin(), x.shape[0])


@case(serves=OTHERS)
def ordered_dict(self, x):
    return collections.OrderedDict(b=x.sin(), a=[x.cos(), (x.exp(),)])


@case(may_refuse=True, truth=OTHERS)
def default_dict(self, x):
    found = collections.defaultdict(list)
    found["values"].append(x.sin())
    return found


@case(serves=OTHERS)
def empty_containers(self, x):
    return {"values": [x.sin()], "none": [], "empty": {}, "tuple": ()}


@case(serves=OTHERS)
def input_among_the_results(self, x):
    return x, x.sin(), x


@case(serves=OTHERS)
def one_tensor_twice(self, x):
    y = x.sin()
    return {"first": y, "second": y}


@case(may_refuse=True, truth=OTHERS)
def number_from_values(self, x):
    return x.sin(), x.sum().item()


@case(may_refuse=True, truth=OTHERS)
def index_from_values(self, x):
    return x.sin(), int(x.sum(0).argmax())


@case(may_refuse=True, truth=OTHERS)
def list_from_values(self, x):
    return x.sin(), x.argmax(1).tolist()


@case(may_refuse=True, truth=OTHERS)
def array_of_values(self, x):
    return x.sin(), x.detach().numpy()


@case(serves=OTHERS, may_refuse=True)
def dtype_and_device(self, x):
    return x.sin(), x.dtype, x.device


@case(may_refuse=True, truth=OTHERS)
def slice_and_range(self, x):
    return x.sin(), slice(0, x.shape[1]), range(x.shape[0])


@case(
    [call(x(2, 5), 3), call(x(3, 7), 3)],
    truth=[call(x(2, 5), 4), call(x(4, 9), 3), call(x(2, 5), 3.0), call(x(2, 5), True)],
)
def constant_that_is_returned(self, x, factor):
    return x * factor, factor


@case([call(x(2, 5), "a"), call(x(3, 7), "a")], truth=[call(x(2, 5), "b"), call(x(4, 4), "a")])
def options_that_are_returned(self, x, mode="a"):
    return {"value": x.sin(), "options": {"mode": mode, "long": x.shape[1] >= 5}}


@case(serves=OTHERS)
class ParameterAmongTheResults(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(3.0))

    def forward(self, x):
        return x.sin(), self.weight, self.weight * 2


@case(serves=OTHERS)
def zero_dimensional(self, x):
    return x.sum(), x.shape[0] * x.new_ones(()), x.max() > 0


@case(truth=OTHERS)
def lengths_of_the_result(self, x):
    y = F.avg_pool1d(x[:, None], 2)[:, 0]
    return y, y.shape[1], len(y), y.numel(), y.dim()


@case(truth=OTHERS)
def padding_that_was_added(self, x):
    padding = -x.shape[1] % 4
    return F.pad(x, (0, padding)), padding


@case(may_refuse=True, truth=OTHERS)
def object_of_its_own(self, x):
    found = _Found()
    found.value, found.size = x.sin(), x.shape[1]
    return found


class _Found:
    value: Any
    size: Any


@case(truth=at((4, 6), (2, 8), (2, 9), (2, 4), (1, 1)))
def list_with_an_element_for_each_piece(self, x):
    return list(x.split(4, 1))
