"""Python values among the inputs: equal in type and in value, or refused."""

import dataclasses
import enum
import functools
import math
import types
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn import functional as F

from tests.trust.cases import call, case, x


def with_value(value, *others, **options):
    """Recorded with one value; called with the others, and with the same at further sizes."""
    return {
        "recorded": [call(x(2, 5), value), call(x(3, 7), value)],
        "truth": [*(call(x(2, 5), other) for other in others), *(call(x(4, 9), other) for other in others)],
        "serves": [] if options.get("may_refuse") else [call(x(4, 9), value)],
        **options,
    }


@dataclasses.dataclass
class Config:
    factor: float = 2.0
    layers: Any = (1, 2)
    activation: Any = "relu"


class Plain:
    def __init__(self, **values):
        self.__dict__.update(values)


class Kind(enum.Enum):
    SUM = 1
    MEAN = 2


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


FACTORS = numpy.arange(3, dtype=numpy.float32)


class Graph:
    """An object that holds tensors, as those of torch_geometric do."""

    def __init__(self, nodes, weights):
        self.nodes, self.weights = nodes, weights


@case(**with_value(True, 1, 1.0, False))
def true_is_not_one(self, x, flag):
    return x * 3 if flag is True else x + 1


@case(**with_value(1, 1.0, True, 2))
def integer_is_not_float(self, x, value):
    return x // 1 if isinstance(value, float) else x * value


@case(**with_value("sum", "mean", "SUM", None, b"sum"))
def text(self, x, how):
    return x.sum(1) if how == "sum" else x.mean(1)


@case(**with_value(torch.relu, torch.tanh, F.gelu, nn.ReLU(), nn.Tanh()), may_refuse=True)
def function(self, x, activation):
    return activation(x)


@case(**with_value(functools.partial(torch.mul, other=2), functools.partial(torch.mul, other=3)), may_refuse=True)
def partial_function(self, x, function):
    return function(x)


@case(**with_value(lambda x: x * 2, lambda x: x * 3), may_refuse=True)
def anonymous_function(self, x, function):
    return function(x)


def _closure(factor):
    return lambda x: x * factor


@case(**with_value(_closure(2), _closure(3)), may_refuse=True)
def closure(self, x, function):
    return function(x)


@case(**with_value(torch.float32, torch.float64, torch.float16, torch.int64, None), may_refuse=True)
def dtype(self, x, dtype):
    return x.to(dtype) if dtype else x * 2


@case(**with_value(2 + 1j, 2 - 1j, 2.0), may_refuse=True)
def complex_number(self, x, factor):
    return x * factor.real + factor.imag


@case(**with_value([], None, (), [1], {}), may_refuse=True)
def empty_list(self, x, scales):
    if scales is None:
        return x * 100
    return x * (1 + len(scales)) + isinstance(scales, tuple)


@case(**with_value([1, 2], [1, 2, 3], [1], (1, 2), [2, 1], [1, 2.0], [True, 2]))
def list_of_numbers(self, x, scales):
    for scale in scales:
        x = x * scale + isinstance(scale, float)
    return x.neg() if isinstance(scales, tuple) else x


@case(**with_value({"a": 1, "b": [2, {"c": 3}]}, {"a": 1, "b": [2, {"c": 4}]}, {"a": 1, "b": [2, {"c": 3, "d": 5}]}))
def nested_options(self, x, options):
    inner = options["b"][1]
    return x * options["a"] + sum(inner.values())


@case(**with_value({"a": 1}, {"a": 1, "b": 1}, {}, {"b": 1}, {"a": True}))
def keys_of_a_dict(self, x, options):
    return x * (len(options) + 2 * ("b" in options)) + isinstance(options.get("a"), bool)


@case(**with_value(Config(), Config(3.0), Config(layers=(1, 2, 3)), Config(activation="tanh"), Config(layers=[1, 2])))
def dataclass_of_options(self, x, config):
    x = getattr(torch, config.activation)(x) * config.factor
    return x + len(config.layers) + 5 * isinstance(config.layers, list)


@case(**with_value(Plain(factor=2), Plain(factor=3), Plain(factor=2, offset=1), Plain(factor=2.0)), may_refuse=True)
def object_of_options(self, x, config):
    return x * config.factor + getattr(config, "offset", 0) + isinstance(config.factor, float)


@case(**with_value(types.SimpleNamespace(a=Plain(b=1)), types.SimpleNamespace(a=Plain(b=2))), may_refuse=True)
def nested_namespace(self, x, config):
    return x * config.a.b


@case(**with_value(Graph(x(4, 3), x(4)), Graph(x(4, 3), x(4)), Graph(x(6, 3), x(6))), may_refuse=True)
def object_with_tensors(self, x, graph):
    return x.sum() + graph.nodes.sum(1) * graph.weights


@case(
    **with_value(Plain(a=[Plain(b={"c": torch.ones(3)})]), Plain(a=[Plain(b={"c": torch.zeros(3)})])), may_refuse=True
)
def tensors_deep_inside_objects(self, x, holder):
    return x[:, :3] + holder.a[0].b["c"]


@case(**with_value(Kind.SUM, Kind.MEAN, 1), may_refuse=True)
def enumeration(self, x, kind):
    return x.sum(1) if kind is Kind.SUM else x.mean(1)


@case(**with_value(Level.LOW, Level.HIGH, 1), may_refuse=True)
def enumeration_of_integers(self, x, level):
    return x * 10 if isinstance(level, Level) and level == 1 else x * int(level)


@case(**with_value(float("inf"), -float("inf"), float("nan"), 1e300), may_refuse=True)
def infinite_limit(self, x, limit):
    return x.clamp(max=limit) if limit > 0 else x * 2


@case(**with_value(0.0, -0.0, 0, False), may_refuse=True)
def negative_zero(self, x, zero):
    return x * 2 if str(zero) == "0.0" else x * 3


@case(**with_value(float("nan"), 1.0, float("nan")), may_refuse=True)
def not_a_number(self, x, value):
    return x + 1 if math.isnan(value) else x * value


@case(**with_value(slice(0, 3), slice(1, 4), slice(0, 3, 2)), may_refuse=True)
def slice_of_columns(self, x, columns):
    return x[:, columns]


@case(**with_value(range(3), range(4), range(0, 3, 2), [0, 1, 2]), may_refuse=True)
def range_of_columns(self, x, columns):
    return sum(x[:, column] for column in columns) * (1 + isinstance(columns, range))


@case(**with_value({1, 2}, {1, 2, 3}, frozenset({1, 2})), may_refuse=True)
def set_of_numbers(self, x, numbers):
    return x * sum(numbers) + isinstance(numbers, frozenset)


@case(**with_value(numpy.float32(2), numpy.float32(3), numpy.float64(2), 2.0), may_refuse=True)
def scalar_of_numpy(self, x, factor):
    return x * float(factor) + isinstance(factor, numpy.floating)


@case(**with_value(FACTORS, FACTORS + 1, FACTORS[:2]), may_refuse=True)
def array_of_numpy(self, x, factors):
    return x.sum() * torch.from_numpy(factors)


@case(**with_value(nn.Linear(5, 2), nn.Linear(5, 2)), may_refuse=True)
def module_as_an_argument(self, x, layer):
    return F.linear(x[:, :5], layer.weight, layer.bias)


@case(**with_value(Config, Plain, dict), may_refuse=True)
def class_as_an_argument(self, x, kind):
    return x * 2 if kind is Config else x * 3


@case(**with_value(torch.preserve_format, torch.contiguous_format), may_refuse=True)
def memory_format(self, x, memory_format):
    return x.clone(memory_format=memory_format) * (1 + (memory_format is torch.contiguous_format))


@case(**with_value(torch.device("cpu"), "cpu", None), may_refuse=True)
def device(self, x, device):
    return x * 2 if isinstance(device, torch.device) else x * 3


@case(**with_value(torch.Size([2, 3]), (2, 3), torch.Size([3, 2])), may_refuse=True)
def target_shape(self, x, shape):
    return x.new_ones(shape) * x.sum() * (1 + isinstance(shape, torch.Size))


@case(
    [call(x(2, 5)), call(x(3, 7))],
    serves=[call(x(2, 9), factor=2), call(x(4, 5), 2)],
    truth=[call(x(2, 5), factor=3), call(x(2, 5), 2.0), call(x(2, 5), None)],
)
def default_given_by_name(self, x, factor=2):
    return x * factor if isinstance(factor, int) else x


@case(
    [call(x(2, 5), scale=2), call(x(3, 7), scale=2)],
    truth=[call(x(2, 5)), call(x(2, 5), scale=3), call(x(2, 5), scale=2, other=1), call(x(2, 5), offset=2)],
)
def further_keywords(self, x, **options):
    for name, value in options.items():
        x = x * value if name == "scale" else x + value
    return x


@case(
    [call(x(2, 5), 2, 3), call(x(3, 7), 2, 3)],
    truth=[call(x(2, 5), 2), call(x(2, 5)), call(x(2, 5), 3, 2), call(x(2, 5), 2, 3, 4)],
)
def further_positions(self, x, *factors):
    for index, factor in enumerate(factors):
        x = x * factor + index
    return x


@case(
    [call(x(2, 5), True), call(x(3, 7), False)],
    may_refuse=True,
    truth=[call(x(2, 5), False), call(x(3, 7), True), call(x(4, 9), 1), call(x(4, 9), 0), call(x(4, 9))],
)
def flag_that_varies(self, x, negate=None):
    return x * 5 if negate is None else -x if negate is True else x + 1


@case(
    [call(x(2, 5), 2), call(x(3, 7), 3)],
    may_refuse=True,
    truth=[call(x(2, 5), 3), call(x(2, 5), 4), call(x(2, 5), 0), call(x(2, 5), 2.5), call(x(2, 5), -1)],
)
def integer_that_varies(self, x, count):
    return x[:, :count] if count > 0 else x.neg()


@case(
    [call(x(2, 5), 0.5), call(x(3, 7), 0.25)],
    may_refuse=True,
    truth=[call(x(2, 5), 0.25), call(x(2, 5), 0.75), call(x(2, 5), -2.0), call(x(2, 5), 1)],
)
def float_that_varies(self, x, temperature):
    return x / temperature if temperature > 0 else x


@case(
    [call([x(2, 5), 3]), call([x(3, 7), 3])],
    serves=[call([x(4, 9), 3])],
    truth=[call([x(2, 5), 4]), call([x(2, 5)]), call([x(2, 5), 3, x(2, 5)]), call((x(2, 5), 3))],
)
def constant_beside_a_tensor(self, values):
    return values[0] * sum(values[1:]) if isinstance(values, list) else values[0]


def generator(seed):
    return torch.Generator().manual_seed(seed)


@case(
    recorded=[call(x(2, 5), generator=generator(0)), call(x(3, 7), generator=generator(1))],
    serves=[call(x(4, 9), generator=generator(2)), call(x(2, 5), generator=generator(0))],
    truth=[call(x(4, 9), generator=None)],
)
def generator_that_nothing_is_drawn_from(self, x, generator=None):
    return x * 2


@case(
    recorded=[call(x(2, 5), generator=generator(0)), call(x(3, 7), generator=generator(0))],
    truth=[call(x(4, 9), generator=generator(1))],
    may_refuse=True,
)
def generator_that_numbers_are_drawn_from(self, x, generator=None):
    return x + torch.rand((), generator=generator)


@case(
    recorded=[call(x(2, 5), generator=generator(4)), call(x(3, 7), generator=generator(4))],
    truth=[call(x(4, 9), generator=generator(1))],
    may_refuse=True,
)
def seed_of_a_generator(self, x, generator=None):
    return x + float(generator.initial_seed())


def with_flags(*flags, **options):
    """Recorded with each flag in turn; called with each at sizes beyond the limits of the models below."""
    return {
        "recorded": [call(x(2 + n, 5 + n), **flag) for n, flag in enumerate(flags)],
        "truth": [call(x(4, size), **flag) for flag in flags for size in (150, 1200)],
        "serves": [call(x(4, 9), **flag) for flag in flags],
        **options,
    }


@case(**with_flags({"flag": False}, {"flag": True}))
def a_flag_for_long_inputs(self, x, flag=False):
    return x * 2 if flag and x.shape[1] > 1000 else x + 1


@case(**with_flags({"mode": "a"}, {"mode": "b"}))
def a_mode_for_long_inputs(self, x, **options):
    return x * 2 if options.get("mode") == "b" and x.shape[1] > 100 else x + 1


@case(**with_flags({"flag": False}, {"flag": True}))
def a_limit_from_a_table(self, x, flag=False):
    limit = {False: 2000, True: 1000}[flag]
    return x * 2 if x.shape[1] > limit else x


@case(**with_flags({"data": {"flag": False}}, {"data": {"flag": True}}))
def a_flag_in_a_dict(self, x, data=None):
    return x * 2 if data["flag"] and len(x.T) > 100 else x


@case(**with_flags({"mode": "a"}, {"mode": "a"}, {"mode": "a"}, {"mode": "b"}, serves=[call(x(4, 9), mode="a")]))
def a_mode_after_the_stored_calls(self, x, mode="a"):
    return x * 2 if mode == "b" and x.shape[1] > 100 else x + 1


@case(**with_flags({"mode": "a"}, {"mode": "a"}, {"mode": "a"}, {"mode": "b"}))
def a_mode_that_is_not_read(self, x, mode="a"):
    return x + 1
