"""Deep models whose layers look alike: what torch traces of some is copied to the others, if they do the same."""

import torch
from torch import nn

from tests.trust.cases import at, control

DEPTH, WIDTH = 9, 5
RECORDED = at((2, 3, WIDTH), (3, 4, WIDTH))
KINDS = ["add"] * 5 + ["subtract"] + ["add"] * 3
SERVES = at((4, 6, WIDTH), (2, 1, WIDTH))


class Layer(nn.Module):
    """A layer that knows its number."""

    def __init__(self, number):
        super().__init__()
        self.number = number
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.inner(x).tanh()


class Stack(nn.Module):
    """Runs one layer after the other."""

    layer = Layer

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([self.layer(number) for number in range(DEPTH)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@control(RECORDED, SERVES)
class EqualLayers(Stack):
    pass


@control(RECORDED, SERVES)
class LaterLayersDiffer(Stack):
    class layer(Layer):
        def forward(self, x):
            return super().forward(x) if self.number < 6 else x - self.inner(x)


@control(RECORDED, SERVES)
class EveryThirdLayerDiffers(Stack):
    class layer(Layer):
        def forward(self, x):
            return super().forward(x) if self.number % 3 else x - self.inner(x)


@control(RECORDED, SERVES)
class LastLayerDiffers(Stack):
    class layer(Layer):
        def forward(self, x):
            return x * 3 if self.number == DEPTH - 1 else super().forward(x)


@control(RECORDED, SERVES)
class ScaledByNumber(Stack):
    class layer(Layer):
        def forward(self, x):
            return super().forward(x) / (self.number + 1)


@control(RECORDED, SERVES)
class NumbersAndSizes(Stack):
    """Numbers of layers meet sizes and tensors; other numbers happen to be equal to them."""

    class layer(Layer):
        def __init__(self, number):
            super().__init__(number)
            self.three, self.one = 3, 1

        def forward(self, x):
            x = super().forward(x) / (x.shape[1] * self.one + self.three)
            if self.number > -x.shape[0] * self.three:
                x = x + self.number * x.sin() / 100 + x.shape[1] * self.number / 100
            return x


@control(RECORDED, SERVES)
class KindsByNumber(Stack):
    """Looks up what to do in a list."""

    class layer(Layer):
        def __init__(self, number):
            super().__init__(number)
            self.kinds = KINDS

        def forward(self, x):
            return super().forward(x) if self.kinds[self.number] == "add" else x - self.inner(x)


@control(RECORDED, SERVES)
class KindsByName(Stack):
    """Looks up what to do in a dict."""

    class layer(Layer):
        def forward(self, x):
            return {7: torch.relu}.get(self.number, torch.tanh)(super().forward(x))


@control(RECORDED, SERVES)
class WrittenNumber(Stack):
    class layer(Layer):
        def forward(self, x):
            return super().forward(x) if f"{self.number}" != "6" else x.relu()


@control(RECORDED, SERVES)
class OtherAttribute(Stack):
    """One layer has another function, deep inside."""

    class layer(Layer):
        def __init__(self, number):
            super().__init__(number)
            self.options = {"act": [torch.relu if number == 6 else torch.tanh]}

        def forward(self, x):
            return x + self.options["act"][0](self.inner(x))


@control(RECORDED, SERVES)
class OtherClosure(Stack):
    class layer(Layer):
        def __init__(self, number):
            super().__init__(number)
            factor = 2.0 if number == 6 else 1.0
            self.scale = lambda x: x * factor

        def forward(self, x):
            return self.scale(super().forward(x))


@control(RECORDED, SERVES)
class OneWithoutBias(Stack):
    class layer(Layer):
        def __init__(self, number):
            super().__init__(number)
            self.inner = nn.Linear(WIDTH, WIDTH, bias=number != 6)


@control(RECORDED, SERVES)
class OneWithAHook(Stack):
    def __init__(self):
        super().__init__()
        self.layers[6].inner.register_forward_hook(lambda _module, _args, result: result * 2)


@control(RECORDED, SERVES)
class OneInDoublePrecision(Stack):
    class layer(Layer):
        def __init__(self, number):
            super().__init__(number)
            self.inner = self.inner.to(torch.float64 if number == 6 else torch.float32)

        def forward(self, x):
            return x + self.inner(x.to(self.inner.weight.dtype)).tanh().to(x.dtype)


@control(RECORDED, SERVES)
class TiedWeights(Stack):
    def __init__(self):
        super().__init__()
        for layer in self.layers[4:]:
            layer.inner.weight = self.layers[1].inner.weight


@control(RECORDED, SERVES)
class SameLayerAgain(Stack):
    def forward(self, x):
        for number in (0, 1, 2, 2, 3, 5, 4, 4, 8, 1):
            x = self.layers[number](x)
        return x


@control(RECORDED, SERVES)
class ArgumentOfALayer(Stack):
    """Every layer but one gets the same number."""

    class layer(Layer):
        def forward(self, x, scale=1.0):
            return super().forward(x) * scale

    def forward(self, x):
        for layer in self.layers:
            x = layer(x, scale=3.0 if layer.number == 6 else 0.5)
        return x


@control(RECORDED, SERVES)
class TensorOfALayer(Stack):
    """Layers get one tensor or another."""

    class layer(Layer):
        def forward(self, x, other):
            return super().forward(x) + other

    def forward(self, x):
        first, second = x.sin(), x.cos()
        for layer in self.layers:
            x = layer(x, second if layer.number in (5, 6, 8) else first)
        return x


@control(RECORDED, SERVES)
class SkippedConnections(Stack):
    """Later layers take what the first ones have put away."""

    class layer(Layer):
        def forward(self, x, kept):
            if len(kept) < 4 and self.number < 4:
                kept.append(x)
            elif kept:
                x = x + kept.pop()
            return super().forward(x)

    def forward(self, x):
        kept = []
        for layer in self.layers:
            x = layer(x, kept)
        return x


@control(RECORDED, SERVES)
class SumOfAll(Stack):
    """Layers add to an item that all of them share."""

    class layer(Layer):
        def forward(self, x, shared):
            x = super().forward(x)
            shared["sum"] = shared["sum"] + x
            return x

    def forward(self, x):
        shared = {"sum": x * 0}
        for layer in self.layers:
            x = layer(x, shared)
        return x, shared["sum"]


@control(RECORDED, SERVES)
class ItemOfEach(Stack):
    """Each layer reads and writes an item of its own."""

    class layer(Layer):
        def forward(self, x, states):
            states[self.number] = states[self.number] + x
            return super().forward(x) * states[self.number]

    def forward(self, x):
        states = [x + number for number in range(DEPTH)]
        for layer in self.layers:
            x = layer(x, states)
        return x, torch.stack(states)


@control(RECORDED, SERVES)
class ItemOfTheLayerBefore(Stack):
    class layer(Layer):
        def forward(self, x, states):
            before = states[self.number - 1] if self.number else x
            states[self.number] = super().forward(x) + before
            return states[self.number]

    def forward(self, x):
        states = [None] * DEPTH
        for layer in self.layers:
            x = layer(x, states)
        return x


@control(RECORDED, SERVES)
class InPlace(Stack):
    class layer(Layer):
        def forward(self, x, total):
            total.add_(x)
            return super().forward(x)

    def forward(self, x):
        total = torch.zeros_like(x)
        for layer in self.layers:
            x = layer(x, total)
        return x + total


@control(RECORDED, SERVES)
class ViewOfAnArgument(Stack):
    """A layer returns a view, which is changed in place afterwards."""

    class layer(Layer):
        def forward(self, x):
            x = super().forward(x)
            return x, x[:, :1]

    def forward(self, x):
        for layer in self.layers:
            x, part = layer(x)
            part.mul_(2)
        return x


@control(RECORDED, SERVES)
class SizesAndNumbers(Stack):
    """Layers return numbers."""

    class layer(Layer):
        def forward(self, x, length):
            return super().forward(x) / length, self.number, x.shape[1] + 1

    def forward(self, x):
        length, total = x.shape[0], 0
        for layer in self.layers:
            x, number, length = layer(x, length)
            total += number
        return x * total


@control(RECORDED, SERVES)
class GrowingSizes(Stack):
    """The sequence gets longer with each layer."""

    class layer(Layer):
        def forward(self, x):
            x = super().forward(x)
            return torch.cat([x, x[:, :1]], 1)


@control(RECORDED, SERVES)
class CountsItself(Stack):
    """A number outside of the layers is counted up by each of them."""

    class layer(Layer):
        def forward(self, x):
            self.counter[0] += 1
            return super().forward(x) * self.counter[0]

    @staticmethod
    def counter():
        return [0]

    def forward(self, x):
        counter = self.counter()
        for layer in self.layers:
            layer.counter = counter
            x = layer(x)
        return x


@control(RECORDED, SERVES)
class BuffersOfTheirOwn(Stack):
    class layer(Layer):
        def __init__(self, number):
            super().__init__(number)
            self.register_buffer("scale", torch.tensor(1.0 + number))
            self.register_buffer("mask", torch.arange(WIDTH) <= number)

        def forward(self, x):
            return super().forward(x) * self.scale.where(self.mask, 0.5)


@control(RECORDED, SERVES)
class TensorsThatAreNoBuffers(Stack):
    class layer(Layer):
        def __init__(self, number):
            super().__init__(number)
            self.scale = torch.tensor(1.0 + number)

        def forward(self, x):
            return super().forward(x) * self.scale


class _Counter:
    count = 0


@control(RECORDED, SERVES)
class CountsInAnObject(CountsItself):
    """From a count on, layers do something else."""

    counter = _Counter

    class layer(Layer):
        def forward(self, x):
            self.counter.count += 1
            return super().forward(x) if self.counter.count < 7 else x.relu()


@control(RECORDED, SERVES)
class CountsInAList(CountsItself):
    class layer(Layer):
        def forward(self, x):
            self.counter[0] += 1
            return super().forward(x) if self.counter[0] < 7 else x.relu()


@control(RECORDED, SERVES)
class CountsInAnArgument(Stack):
    class layer(Layer):
        def forward(self, x, counter):
            counter.count += 1
            return super().forward(x) if counter.count < 7 else x.relu()

    def forward(self, x):
        counter = _Counter()
        for layer in self.layers:
            x = layer(x, counter)
        return x
