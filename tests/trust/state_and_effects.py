"""State on modules, changes of inputs, hooks and randomness: part of the graph, refused, or announced.

All of these may be refused, since a graph has no place for most of them. A finding is enough where the effect is an
in-place change of an input or a hook; the harness compares the arguments after each call, too.
"""

import random

import torch
from torch import nn

from tests.trust.cases import at, call, case, x

OTHERS = at((4, 9), (2, 5), (2, 5), (3, 1))
IN_PLACE = "in.?place|modifies|changes"
HOOK = "hook"


@case(truth=OTHERS, may_refuse=True)
class LastInput(nn.Module):
    """Adds what the call before gave."""

    last = None

    def forward(self, x):
        result = x if self.last is None or self.last.shape != x.shape else x + self.last
        self.last = x
        return result


@case(at((2, 5), (2, 5)), truth=at((2, 5), (2, 5), (2, 5)), may_refuse=True)
class RunningSum(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(2, 5))

    def forward(self, x):
        self.total += x
        return self.total * 2


@case(truth=OTHERS, may_refuse=True)
class RunningScale(nn.Module):
    """Divides by the largest value of all calls."""

    def __init__(self):
        super().__init__()
        self.register_buffer("largest", torch.tensor(1.0))

    def forward(self, x):
        self.largest.copy_(torch.maximum(self.largest, x.abs().max()))
        return x / self.largest


@case(truth=OTHERS, may_refuse=True)
class CountsCalls(nn.Module):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.calls


@case(truth=OTHERS, may_refuse=True)
class EveryOtherCall(nn.Module):
    flip = False

    def forward(self, x):
        self.flip = not self.flip
        return -x if self.flip else x


@case(truth=OTHERS, may_refuse=True)
class KeepsACache(nn.Module):
    """Results by shape: a second call of a shape gets what the first one got."""

    def __init__(self):
        super().__init__()
        self.found = {}

    def forward(self, x):
        return self.found.setdefault(tuple(x.shape), x * 2)


@case(at((1, 5), (1, 1), (1, 1)), truth=at((1, 4), (1, 1), (1, 1), (1, 1)), may_refuse=True)
class KeepsItsPast(nn.Module):
    """A prompt starts anew, a single column goes on."""

    past = None

    def forward(self, x):
        self.past = x if x.shape[1] > 1 or self.past is None else torch.cat([self.past, x], 1)
        return self.past.cumsum(1)[:, -x.shape[1] :]


@case(truth=at((4, 9), (2, 5), (2, 12)), serves=at((4, 7)))
class TableThatGrows(nn.Module):
    """Positions are computed when they are first needed; the result does not depend on the calls before."""

    table = None

    def forward(self, x):
        if self.table is None or len(self.table) < x.shape[1]:
            self.table = torch.arange(x.shape[1]) * 0.5
        return x * self.table[: x.shape[1]]


@case(serves=at((4, 9), (2, 12)))
class RemembersWhatNobodyReads(nn.Module):
    last = None

    def forward(self, x):
        self.last = x.detach()
        return x * 2


@case(finding=IN_PLACE, truth=OTHERS, may_refuse=True)
def adds_in_place(self, x):
    return x.add_(1)


@case(finding=IN_PLACE, truth=OTHERS, may_refuse=True)
def changes_its_input_after_use(self, x):
    y = x * 2
    x.zero_()
    return y


@case(finding=IN_PLACE, truth=OTHERS, may_refuse=True)
def writes_a_column_of_its_input(self, x):
    x[:, 0] = 7
    return x.sum(1)


@case(
    [call(x(2, 5), torch.zeros(4, 5)), call(x(3, 7), torch.zeros(4, 7))],
    finding=IN_PLACE,
    truth=[call(x(1, 9), torch.ones(4, 9)), call(x(4, 5), torch.ones(4, 5))],
    may_refuse=True,
)
def fills_a_buffer_of_the_caller(self, x, buffer):
    buffer[: len(x)] = x
    return buffer.sum(0)


@case(
    [call({"a": x(2, 5)}), call({"a": x(3, 7)})],
    finding=IN_PLACE,
    truth=[call({"a": x(4, 9)}), call({"a": x(2, 5)})],
    may_refuse=True,
)
def adds_a_key_to_a_dict(self, batch):
    batch["b"] = batch["a"] * 2
    return batch["b"] + 1


@case(
    [call(x(2, 5), [x(2, 5)]), call(x(3, 7), [x(3, 7)])],
    finding=IN_PLACE,
    truth=[call(x(4, 9), [x(4, 9)])],
    may_refuse=True,
)
def appends_to_a_list(self, x, values):
    values.append(x)
    return sum(values)


@case(
    [call(x(2, 5), {"step": 1}), call(x(3, 7), {"step": 1})],
    finding=IN_PLACE,
    truth=[call(x(4, 9), {"step": 1}), call(x(4, 9), {"step": 2})],
    may_refuse=True,
)
def counts_in_a_dict(self, x, state):
    state["step"] += 1
    return x * state["step"]


@case(finding=IN_PLACE, truth=OTHERS, may_refuse=True)
def changes_a_view_of_its_input(self, x):
    x.T[0].mul_(3)
    return x * 1


@case(serves=at((4, 9), (2, 12)))
def changes_its_own_copy(self, x):
    y = x.clone()
    y[:, 0] = 0
    y.mul_(2)[:, 1:].add_(1)
    return y


def _linear():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))


FIVE = at((2, 5), (3, 5))
MORE = at((4, 5), (1, 5), (2, 5))


@case(FIVE, truth=MORE, finding=HOOK, may_refuse=True)
def hook_on_the_model():
    model = _linear()
    model.register_forward_hook(lambda module, args, output: output * 2)
    return model


@case(FIVE, truth=MORE, finding=HOOK, may_refuse=True)
def hook_before_the_model():
    model = _linear()
    model.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    return model


@case(FIVE, truth=MORE, finding=HOOK, may_refuse=True)
def hook_on_an_inner_module():
    model = _linear()
    model[0].register_forward_hook(lambda module, args, output: output.abs())
    return model


@case(FIVE, truth=MORE, finding=HOOK, may_refuse=True)
def hook_with_names_on_an_inner_module():
    model = _linear()
    model[2].register_forward_pre_hook(lambda module, args, kwargs: ((args[0] - 1,), kwargs), with_kwargs=True)
    return model


@case(FIVE, serves=MORE, finding=HOOK)
def hook_that_only_counts():
    model = _linear()
    model.register_forward_hook(_Counter())
    return model


class _Counter:
    calls = 0

    def __call__(self, module, args, output):
        self.calls += 1


@case(truth=OTHERS, may_refuse=True)
def random_noise(self, x):
    return x + torch.randn_like(x)


@case(truth=OTHERS, may_refuse=True)
def random_numbers_of_python(self, x):
    return x * random.random()


@case(FIVE, truth=MORE, training=True, may_refuse=True)
class DropoutInTraining(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 64), nn.Dropout(0.5), nn.Linear(64, 1))

    def forward(self, x):
        return self.layers(x)


@case(FIVE, serves=MORE)
class DropoutInEvaluation(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 64), nn.Dropout(0.5), nn.Linear(64, 1))

    def forward(self, x):
        return self.layers(x)


@case(FIVE, truth=MORE, training=True, may_refuse=True)
class BatchNormThatLearns(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x):
        return self.norm(x)


@case(FIVE, truth=MORE, may_refuse=True)
class OtherInTraining(nn.Module):
    """In evaluation mode when recorded, and when called."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x):
        return self.layer(x) * (3 if self.training else 2)


_SEEN = []


@case(truth=OTHERS, may_refuse=True)
def reads_a_global_list(self, x):
    _SEEN.append(len(x))
    return x * len(_SEEN)


@case(at((2, 5), (2, 5)), truth=at((2, 5), (2, 5)), may_refuse=True)
class ChangesItsWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5))

    def forward(self, x):
        with torch.no_grad():
            self.weight.mul_(0.5)
        return x * self.weight


@case(
    [call(x(2, 1), torch.zeros(2, 4)), call(x(3, 1), torch.ones(3, 4))],
    serves=[call(x(4, 1), torch.ones(4, 4))],
)
class StateFromCallToCall(nn.GRUCell):
    """Given and returned, as it should be."""

    def __init__(self):
        super().__init__(1, 4)


@case(truth=at((2, 5), (4, 9), (2, 5)), may_refuse=True)
class InnerModuleRemembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = _Momentum()

    def forward(self, x):
        return self.inner(x.mean(1)) * 2


class _Momentum(nn.Module):
    mean = 0.0

    def forward(self, values):
        self.mean = 0.9 * self.mean + 0.1 * values.mean()
        return values - self.mean


@case(
    [call(x(2, 5), torch.tensor([1, 2])), call(x(3, 7), torch.tensor([3, 1, 2]))],
    serves=[call(x(2, 9), torch.tensor([4, 2]))],
    truth=[call(x(2, 5), torch.tensor([1, 6]))],
)
def asserts_something_about_a_value(self, x, lengths):
    longest = lengths.max().item()
    torch._check(longest <= x.shape[1])
    return x * longest


# Constants that are written before they decide.
beyond_a_limit = case(truth=[call(x(2, 5)), call(x(4, 9) + 60), call(x(3, 7) - 60)], may_refuse=True)


@beyond_a_limit
def flag_written_into_a_constant(self, x):
    flags = torch.tensor([0, 1])
    flags[0] = (x.max() > 50).long()
    return x * 2 if flags[0] else x


@beyond_a_limit
def flag_written_into_a_view_of_a_constant(self, x):
    flags = torch.arange(4)
    flags.view(2, 2)[0, 0] = (x.max() > 50).long()
    return x * 2 if flags[0] else x


@beyond_a_limit
def flag_written_into_the_data_of_a_constant(self, x):
    flags = torch.arange(2)
    flags.data[0] = (x.max() > 50).long()
    return x * 2 if flags[0] else x


@beyond_a_limit
def flag_written_by_a_function(self, x):
    flags = torch.linspace(-2, 1, 2)
    nn.functional.relu(flags, inplace=True)
    return x * 2 if flags[0] < 0 else x


class _Flags(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("flags", torch.tensor([0, 1]))


@beyond_a_limit
class FlagWrittenIntoACopyOfABuffer(_Flags):
    def forward(self, x):
        flags = self.flags.clone()
        flags[0] = (x.max() > 50).long()
        return x * 2 if flags[0] else x


@beyond_a_limit
class FlagWrittenByAnOperator(_Flags):
    def forward(self, x):
        flags = torch.linspace(0, 1, 2)
        torch.mul(self.flags, x.max() > 50, out=flags)
        return x * 2 if flags[1] else x


@case(serves=at((4, 9)), truth=at((1, 1)))
def axes_made_by_arange(self, x):
    axes = torch.arange(1, x.ndim)
    axes[-1] = -1
    return x - x.mean(dim=axes.tolist(), keepdim=True)


# One prompt is recorded, so that a second run of it sets what is already there.
one_prompt = case(
    [call(x(2, 6, 4)), call(x(2, 1, 4), x(2, 1)), call(x(3, 1, 4), x(3, 1))],
    truth=[call(x(4, 9, 4)), call(x(4, 1, 4), x(4, 1))],
    may_refuse=True,
)


@one_prompt
class KeepsTheLengthOfThePrompt(nn.Module):
    length = 0

    def forward(self, x, previous=None):
        if previous is None:
            self.length = x.shape[1]
        return x * self.length


@one_prompt
class KeepsAQuotientOfThePrompt(nn.Module):
    scale = 1.0

    def forward(self, x, previous=None):
        if previous is None:
            self.scale = 1 / x.shape[1]
        return x * self.scale


@one_prompt
class KeepsTheLengthOfThePromptInADict(nn.Module):
    def __init__(self):
        super().__init__()
        self.sizes = {"length": 0}

    def forward(self, x, previous=None):
        if previous is None:
            self.sizes["length"] = x.shape[1]
        return x * self.sizes["length"]
