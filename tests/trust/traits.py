"""What Python reads of arguments besides sizes, dtypes and values: memory, gradients, identity, the order of keys."""

import types

import torch
from torch import nn

from tests.trust.cases import at, call, case, control, x


@case(serves=at((4, 9)), truth=[call(x(2, 10)[:, ::2]), call(x(5, 2).T)])
def strides(self, x):
    return x * 2 if x.stride(-1) == 1 else x * 3


@case(serves=at((4, 9)), truth=[call(x(3, 5)[1:])])
def offset_in_memory(self, x):
    return x * 2 if x.storage_offset() == 0 else x * 3


@case(
    at((2, 3, 4, 5), (3, 3, 6, 7)),
    serves=at((1, 3, 5, 5)),
    truth=[call(x(2, 3, 4, 5).to(memory_format=torch.channels_last))],
)
def channels_last(self, x):
    return x * 2 if x.is_contiguous(memory_format=torch.channels_last) else x * 3


@case(serves=at((4, 9)), truth=[call(x(2, 10)[:, ::2]), call(x(9, 4).T)])
def read_by_strides(self, x):
    return torch.as_strided(x, (x.shape[0], x.shape[1]), (x.shape[1], 1)) * 2


@control(serves=[call(x(2, 10)[:, ::2]), call(x(5, 2).T), call(x(2, 5).requires_grad_())])
def made_contiguous(self, x):
    x = x.detach() if x.requires_grad else x
    return (x if x.is_contiguous() else x.contiguous()).view(-1, 1) * 2


@case(truth=[call(x(2, 5).requires_grad_())])
def leaf_with_a_gradient(self, x):
    return x * 2 if x.is_leaf and x.requires_grad else x * 3


def _without_gradients(model):
    with torch.no_grad():
        model(x(2, 5))
        model(x(3, 7))


@case(_without_gradients, truth=at((4, 9)), finding="gradients", may_refuse=True)
def mode_of_gradients_when_called(self, x):
    return x * 2 if torch.is_grad_enabled() else x * 3


def twice(tensor):
    return call(tensor, tensor)


TWO = [call(x(2, 5), x(2, 5)), call(x(3, 7), x(3, 7))]


@case(TWO, serves=[call(x(4, 9), x(4, 9))], truth=[twice(x(2, 5)), twice(x(4, 9))])
def one_tensor_given_twice(self, x, y):
    return x * 3 if x is y else x + y


@control(TWO, serves=[call(x(4, 9), x(4, 9)), twice(x(4, 9))])
def one_tensor_given_twice_without_effect(self, x, y):
    return x * 2 if x is y else x + y


@case(serves=at((4, 9)), truth=[call(nn.Parameter(x(2, 5)))])
def parameter(self, x):
    return x * 2 if isinstance(x, nn.Parameter) else x * 3


def _with_scale(tensor):
    tensor.scale = 2
    return tensor


@case(serves=at((4, 9)), truth=[call(_with_scale(x(2, 5)))])
def attribute_that_a_caller_set(self, x):
    return x * getattr(x, "scale", 1)


@case(
    [call({"a": x(2, 5), "b": x(2, 5)}), call({"a": x(3, 7), "b": x(3, 7)})],
    serves=[call({"a": x(4, 9), "b": x(4, 9)})],
    truth=[call({"b": x(2, 5), "a": x(2, 5)})],
)
def order_of_tensors(self, batch):
    first, *_ = batch.values()
    return first * 2 + sum(batch.values())


@case(
    [call({"k": {"a": x(2, 5), "b": x(2, 5)}}), call({"k": {"a": x(3, 7), "b": x(3, 7)}})],
    truth=[call({"k": {"b": x(2, 5), "a": x(2, 5)}})],
)
def order_inside(self, batch):
    first, *_ = batch["k"].values()
    return first * 2 + sum(batch["k"].values())


@case(
    [call(x(2, 5), {"b": 2, "a": 1}), call(x(3, 7), {"b": 2, "a": 1})],
    truth=[call(x(2, 5), {"a": 1, "b": 2})],
)
def order_of_options(self, x, options):
    return x * next(iter(options.values()))


@case([call(x(2, 5), a=1, b=2), call(x(3, 7), a=1, b=2)], truth=[call(x(2, 5), b=2, a=1)])
def order_of_keywords(self, x, **options):
    return x * next(iter(options.values()))


@case(truth=at((4, 9), (2, 5), (3, 1)), may_refuse=True)
class StateInAPlainObject(nn.Module):
    def __init__(self):
        super().__init__()
        self.kept = types.SimpleNamespace(mean=torch.zeros(()))

    def forward(self, x):
        self.kept.mean = 0.5 * self.kept.mean + x.mean()
        return x * self.kept.mean


@case(truth=[call(x(2, 5).abs() + 1), call(x(4, 9).abs() + 1), call(-x(2, 5).abs())], may_refuse=True)
def decision_by_values_that_is_tried(self, x):
    try:
        if x.min() > 0:
            return x * 2
    except Exception:
        pass
    return x * 3
