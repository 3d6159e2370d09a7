"""Inputs and results in containers, classes that hold tensors, Python numbers, methods other than forward."""

import collections
import dataclasses
import typing

import torch
from cases import case, ints, randn
from torch import nn

ROWS, MORE_ROWS = [(2, 5), (3, 8)], [(1, 6), (4, 12)]


class Point(typing.NamedTuple):
    position: torch.Tensor
    weight: torch.Tensor


@dataclasses.dataclass
class Result:
    hidden: torch.Tensor
    scores: torch.Tensor | None = None


class Gaussian:
    """A plain object that holds tensors, as libraries return it."""

    def __init__(self, parameters):
        self.mean, self.log_variance = parameters.chunk(2, -1)
        self.deviation = (0.5 * self.log_variance).exp()


class Nested(nn.Module):
    """A linear layer, and a function of it and of the inputs."""

    def __init__(self, function, width=6, out=8):
        super().__init__()
        self.layer, self.function = nn.Linear(width, out), function

    def forward(self, *args, **kwargs):
        return self.function(self.layer, *args, **kwargs)


@case(ROWS, MORE_ROWS)
def nested_dicts():
    model = Nested(
        lambda layer, batch: {"out": {"hidden": layer(batch["a"]["x"])}, "sum": batch["b"][0] + batch["b"][1]}
    )

    def use(rows, steps):
        model({"a": {"x": randn(rows, steps, 6)}, "b": [randn(rows, 4), randn(rows, 4)]})

    return model, use


@case(ROWS, MORE_ROWS)
def named_tuples():
    model = Nested(lambda layer, point: Point(layer(point.position), point.weight.softmax(-1)))
    return model, lambda rows, steps: model(Point(randn(rows, steps, 6), randn(rows, steps)))


@case(ROWS, MORE_ROWS)
def dataclass_returned():
    model = Nested(lambda layer, x: Result(layer(x), x.softmax(-1)))
    return model, lambda rows, steps: model(randn(rows, steps, 6))


@case(ROWS, MORE_ROWS)
def dataclass_taken():
    model = Nested(lambda layer, given: layer(given.hidden) + given.scores.unsqueeze(-1))
    return model, lambda rows, steps: model(Result(randn(rows, steps, 6), randn(rows, steps)))


@case(ROWS, MORE_ROWS)
def dataclass_with_none():
    model = Nested(lambda layer, x: Result(layer(x)))
    return model, lambda rows, steps: model(randn(rows, steps, 6))


@case(ROWS, MORE_ROWS)
def plain_object_returned():
    model = Nested(lambda layer, x: Gaussian(layer(x)))
    return model, lambda rows, steps: model(randn(rows, steps, 6))


@case(ROWS, MORE_ROWS)
def plain_object_taken():
    model = Nested(lambda layer, given: layer(given.mean * given.deviation), 4)
    return model, lambda rows, steps: model(Gaussian(randn(rows, steps, 8)))


@case(ROWS, MORE_ROWS)
def ordered_dict_returned():
    model = Nested(lambda layer, x: collections.OrderedDict(out=layer(x), aux=x.mean(-1)))
    return model, lambda rows, steps: model(randn(rows, steps, 6))


@case(ROWS, MORE_ROWS)
def batch_encoding_taken():
    from transformers import BatchEncoding

    model = Nested(lambda layer, given: layer(torch.nn.functional.one_hot(given["input_ids"], 6).float()))
    return model, lambda rows, steps: model(BatchEncoding({"input_ids": ints(rows, steps, below=6)}))


@case(ROWS, MORE_ROWS)
def model_output_of_its_own():
    from transformers.utils import ModelOutput

    @dataclasses.dataclass
    class Output(ModelOutput):
        hidden: torch.Tensor | None = None
        scores: torch.Tensor | None = None

    model = Nested(lambda layer, x: Output(hidden=layer(x), scores=x.sum(-1)))
    return model, lambda rows, steps: model(randn(rows, steps, 6))


@case(ROWS, MORE_ROWS)
def keyword_arguments_of_any_name():
    model = Nested(lambda layer, x, **extra: layer(x) + sum(value.unsqueeze(-1) for value in extra.values()))
    return model, lambda rows, steps: model(randn(rows, steps, 6), bias=randn(rows, steps), noise=randn(rows, steps))


@case(ROWS, MORE_ROWS)
def several_positional_tensors():
    model = Nested(lambda layer, *parts: [layer(part) for part in parts])
    return model, lambda rows, steps: model(randn(rows, steps, 6), randn(rows, 6), randn(rows, steps, 2, 6))


@case(ROWS, MORE_ROWS)
def states_in_a_list():
    model = Nested(lambda layer, x, states: (layer(x), [state + x.mean() for state in states]))
    return model, lambda rows, steps: model(randn(rows, steps, 6), [randn(2, rows, 4) for _ in range(3)])


@case([(2, 3), (3, 5)], [(1, 4), (2, 7)])
def list_of_varying_length():
    model = Nested(lambda layer, parts: layer(torch.stack(parts)).mean(0))
    return model, lambda rows, parts: model([randn(rows, 6) for _ in range(parts)])


@case([(2, 5, 0.5), (3, 8, 2.0)], [(1, 6, 1.5), (4, 12, -3.0)])
def python_float_that_varies():
    model = Nested(lambda layer, x, scale: layer(x) * scale)
    return model, lambda rows, steps, scale: model(randn(rows, steps, 6), scale)


@case([(2, 5, 3), (3, 8, 7)], [(1, 6, 4), (4, 12, 11)])
def python_integer_in_arithmetic():
    model = Nested(lambda layer, x, time: layer(x) * torch.sin(torch.tensor(0.1) * time))
    return model, lambda rows, steps, time: model(randn(rows, steps, 6), time)


@case([(2, 5, 3), (3, 8, 4)], [(1, 6, 2), (4, 12, 9)])
def python_integer_as_a_size():
    model = Nested(lambda layer, x, length: layer(x)[:, :length] + torch.arange(length)[None, :, None])
    return model, lambda rows, steps, length: model(randn(rows, steps, 6), length)


@case([(2, 5, 3, 4), (3, 8, 6, 5)], [(1, 6, 2, 7), (4, 12, 9, 8)])
def height_and_width_as_numbers():
    model = Nested(lambda layer, x, height, width: nn.functional.interpolate(x, (height, width)).sum(1) + layer.bias[0])
    return model, lambda rows, side, height, width: model(randn(rows, 3, side, side), height, width)


@case([(2, 5, True), (3, 8, False)], [(1, 6, True), (4, 12, False)])
def flag_that_varies():
    model = Nested(lambda layer, x, twice: layer(x) * 2 if twice else layer(x).relu())
    return model, lambda rows, steps, twice: model(randn(rows, steps, 6), twice=twice)


@case([(2, 5, True), (3, 8, False)], [(1, 6, True), (4, 12, False)])
def optional_mask():
    model = Nested(lambda layer, x, mask=None: layer(x) if mask is None else layer(x) * mask.unsqueeze(-1))
    return model, lambda rows, steps, given: model(
        randn(rows, steps, 6), **({"mask": randn(rows, steps)} if given else {})
    )


@case(ROWS, MORE_ROWS)
def sizes_returned():
    model = Nested(lambda layer, x: (layer(x).flatten(0, 1), x.shape[0], (x.shape[1], x.shape[1] * 2)))
    return model, lambda rows, steps: model(randn(rows, steps, 6))


@case(ROWS, MORE_ROWS, method="encode")
def method_of_its_own():
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 8)

        def encode(self, x, normalise=True):
            x = self.layer(x)
            return nn.functional.normalize(x, dim=-1) if normalise else x

        def forward(self, x):
            return self.encode(x).sum()

    model = Encoder()
    return model, lambda rows, steps: model.encode(randn(rows, steps, 6))


@case(ROWS, MORE_ROWS)
def argument_named_input():
    class Named(nn.Module):
        def forward(self, input, self_=None):
            kept = input.double().to(torch.float32)
            return kept * 2 if self_ is None else kept + self_

    model = Named()
    return model, lambda rows, steps: model(input=randn(rows, steps))


@case(ROWS, MORE_ROWS)
def result_that_is_an_input():
    model = Nested(lambda layer, x, y: (x, layer(x), y, x))
    return model, lambda rows, steps: model(randn(rows, steps, 6), ints(rows))


@case([(5,), (8,)], [(1,), (13,)])
def number_of_zero_dimensions():
    model = Nested(lambda layer, x, temperature: (layer(x) / temperature).softmax(-1))
    return model, lambda rows: model(randn(rows, 6), torch.tensor(1.0 + rows / 10))
