"""Loops over a length become one operator, or stay what they are: a size that the trace fixes."""

import functools
import inspect
import itertools
import math
import sys
from collections import deque

import pytest
import torch

import exportkit
from exportkit._torch_compat.loop_operators import scan
from exportkit.errors import ExportError
from exportkit.rewrites.table import LOOPS


class Looping(torch.nn.Module):
    """Calls a function with itself and its input; has some layers."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.cell, self.layer, self.wide = torch.nn.LSTMCell(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 8)
        self.moves, self.last = torch.nn.Parameter(torch.randn(4, 4)), None
        self.deep = torch.nn.LSTM(4, 2, num_layers=2, bidirectional=True, batch_first=True, bias=False)
        self.gated, self.plain = torch.nn.GRU(4, 4), torch.nn.RNN(4, 4, nonlinearity="relu")

    def forward(self, *args):
        return self.function(self, *args)

    def of_its_base(self, x):
        return x + self.last


class OfClass(Looping):
    """Calls a method of its class."""

    def forward(self, x):
        return self.run(x)

    def of_a_method(self, x):
        return self.layer(x) + self.last

    def of_a_lambda(self, x):
        return (lambda factor: self.last * factor)(0.5) + x  # noqa: PLC3002 (as models have it)

    def of_its_base(self, x):
        return super().of_its_base(x) * 0.5

    def collect(self, x, states):
        for t in range(x.shape[1]):
            states.append(self.layer(x[:, t]))


def looping(function, is_method=True):
    """A model whose class has the function as a method, or which holds the function, and calls of it."""
    torch.manual_seed(0)
    cls = type("Looping", (OfClass,), {"run": function, "__module__": __name__}) if is_method else Looping
    model = cls(function).eval()
    observer = exportkit.InputObserver()
    with observer(model), torch.no_grad():
        model(torch.randn(2, 5, 4))
        model(torch.randn(3, 8, 4))
    return model, observer


def proven(function, folder):
    """The model with the function, its graph, in which the loop is an operator, and what the proof says."""
    model, observer = looping(function)
    exported = exportkit.export(model, observer)
    assert LOOPS.name in exported.rules
    graph = exported.to_onnx(folder / "model.onnx")
    report = graph.verify()
    assert report.ok, str(report)
    torch.manual_seed(1)
    return model, graph, str(report)


def over_slices(self, x):
    state, states = None, []
    for step in x.unbind(1):
        state = self.cell(step, state)
        states.append(state[0].unsqueeze(1))
    return torch.cat(states, dim=1), state[1]


def best_path(self, x):
    scores = self.layer(x)
    best, back = scores[:, 0], []
    for step in range(1, x.shape[1]):
        found = (best.unsqueeze(2) + self.moves).max(1)
        back.append(found.indices)
        best = found.values + scores[:, step]
    back.append(back[-1])
    return best.logsumexp(-1), torch.stack(back, 1)


def decoded_from_behind(self, x):
    best, back = x[:, 0], []
    for step in range(1, x.shape[1]):
        best, indices = (best.unsqueeze(2) + self.moves + x[:, step].unsqueeze(1)).max(1)
        back.append(indices)
    last = best.argmax(1)
    path, states = [last], deque([last])
    for indices in reversed(back):
        last = indices.gather(1, last.unsqueeze(1)).squeeze(1)
        path.insert(0, last)
        states.appendleft(last + 1)
    path.insert(0, last)
    states.reverse()
    return torch.stack(path, 1), torch.stack(list(states), 1)


def without_repeats(self, x):
    seen, order = torch.zeros(x.shape[:2], dtype=torch.bool), []
    for step in x.unbind(1):
        scores = (self.layer(x) @ step.unsqueeze(-1)).squeeze(-1) * torch.tensor(0.5)
        scores[seen] = -float("inf")
        best = scores.argmax(1) * int(2.0) // 2
        seen = seen.scatter(1, best[:, None], True)
        order.append(best)
    return torch.stack(order, 1)


def from_behind(self, x):
    result, state = torch.zeros_like(x), x.new_zeros(x.size(0), 1, 4)
    length = x.size(1)
    for i in reversed(range(length)):
        if self.last is None:
            state = torch.tanh(self.layer(x[:, i : i + 1]) + state)
        result[:, length - 1 - i] = state[:, 0] * i
        result[:, i] += state[:, 0]
    return result


def beside_its_number(self, x):
    total = 0.0
    for number, (token, other) in enumerate(zip(x.transpose(0, 1), x.flip(1).unbind(1), strict=True), start=2):
        total = total * 0.5 + self.layer(token) * number - other
    return total


def of_two_lengths(self, x):
    for i in range(x.shape[1] - 1):
        y = x[:, i]
        x = x + self.layer(x[:, i + 1]).unsqueeze(1) * 0.1
        for _ in range(2):
            y = y * 0.5
        x = x + y.unsqueeze(1)
    return x


def in_comprehensions(self, x):
    i = 3
    tokens = [self.layer(x[:, i : i + 2]).mean(1) * i for i in range(x.shape[1] - 1)]
    others = torch.stack(tuple(a + b for a, b in zip(x.unbind(1), x.flip(1).unbind(1), strict=True)))
    return torch.stack(tokens, dim=1).amax(1) * i + sum(torch.tanh(token) for token in x.unbind(1)), others


def over_lists_in_expressions(self, x):
    rows = x.unbind(1)
    means = [row.mean() for row in x.sum(-1)]
    first, *rest, last = rows
    state = first
    for row in rest:
        state = torch.tanh(self.layer(state) + row)
    state = functools.reduce(lambda state, row: torch.tanh(self.layer(state) - row), x.split(1, 1), state.unsqueeze(1))
    total = sum(rows) / len(rows) + sum(rows[1:], last) + functools.reduce(torch.add, rows)
    tokens = torch.stack(x.unbind(1)[::2], dim=1)
    again = torch.stack([row.amax(0) for row in torch.stack([x[:, i] * (i + 1) for i in range(x.shape[1])], 1)])
    return state, total, tokens, again, max(means) - sum(means)


def over_two_lengths(self, x):
    cost = torch.cdist(x, x[:, 1:])
    best = torch.full((x.shape[0], x.shape[1] + 1, x.shape[1]), 1e4)
    best[:, 0, 0] = 0
    for i in range(1, x.shape[1] + 1):
        for j in range(1, x.shape[1]):
            before = torch.minimum(torch.minimum(best[:, i - 1, j], best[:, i, j - 1]), best[:, i - 1, j - 1])
            best[:, i, j] = cost[:, i - 1, j - 1] + before
    return best[:, -1, -1]


def over_views_of_one_tensor(self, x):
    first, second = torch.split(tensor=self.wide(x), split_size_or_sections=4, dim=-1)
    state, states = x[:, 0], []
    for t in range(x.shape[1]):
        state = torch.tanh(state * first[:, t] + second[:, t] - x[:, -1])
        states.append(state)
    return torch.stack(states, 1)


def doubled(value):
    return [doubled(part) for part in value] if isinstance(value, list) else value * 2


def twice(function):
    @functools.wraps(function)
    def doubling(*args, **options):
        return function(*args, **options) * 2

    return doubling


@twice
@torch.no_grad()
def in_a_decorated_function(self, x):
    state = torch.zeros(x.shape[0], 4)
    for step in range(x.shape[1]):
        state = state * 0.5 + x[:, step]
    return state


def nested(value):
    if isinstance(value, list):
        return [nested(part) for part in value]
    return value * 2


def by_a_function_that_calls_itself(self, x):
    parts = nested([x, [x + 1]])
    rows = [row * 2 for row in x.unbind(1)]
    return torch.stack(rows, 1) + parts[0] + parts[1][0] + doubled([x])[0]


@pytest.mark.parametrize(
    "function",
    [
        by_a_function_that_calls_itself,
        in_a_decorated_function,
        in_comprehensions,
        over_lists_in_expressions,
        over_views_of_one_tensor,
        over_slices,
        best_path,
        decoded_from_behind,
        without_repeats,
        from_behind,
        beside_its_number,
        of_two_lengths,
    ],
)
def test_a_loop_over_a_length_is_one_operator(function):
    model, observer = looping(function)
    exported = exportkit.export(model, observer)
    assert LOOPS.name in exported.rules
    for batch, length in ((4, 13), (2, 6)):
        x = torch.randn(batch, length, 4)
        with torch.no_grad():
            torch.testing.assert_close(exported.program.module(check_guards=False)(x=x), model(x))
    assert vars(type(model))["run"] is function


def test_two_nested_loops_over_lengths_are_one_operator():
    model, observer = looping(over_two_lengths)
    exported = exportkit.export(model, observer.plan().range("x_axis_1", 3, 9))
    x = torch.randn(4, 9, 4)
    torch.testing.assert_close(exported.program.module(check_guards=False)(x=x), model(x))


def while_a_list_is_shorter(self, x):
    """Decoders of speech go on until there is a result for each frame."""
    state, outputs, means = x.new_zeros(x.shape[0], 4), [], []
    frames = x.transpose(0, 1)
    while len(outputs) < frames.size(0):
        update, new = torch.sigmoid(self.wide(frames[len(outputs)] @ self.moves.T)).chunk(2, 1)
        state = update * state + (1 - update) * new
        outputs += [state]
        means.append(state.sum(1) / len(outputs))
    return torch.stack(outputs, 1), torch.stack(means, 1)


def accumulated(model, token, state, total):
    state = torch.tanh(model.layer(token) + state)
    total += state
    return state, total


def with_a_sum_that_a_function_adds_to(self, x):
    state, total, states = x.new_zeros(x.shape[0], 4), x.new_zeros(x.shape[0], 4), []
    for t in range(x.shape[1]):
        state, total = accumulated(self, x[:, t], state, total)
        states.append(state + total)
    return torch.stack(states, 1), total


def with_functions_that_onnx_does_not_have(self, x):
    """Filters invert a matrix in each step, for example."""
    state, states, one = x.new_zeros(x.shape[0], 4), [], torch.eye(2)
    for t in range(x.shape[1]):
        now = x[:, t]
        spread = now[:, :2, None] * now[:, None, 2:] / 4 + one
        gain = torch.linalg.inv(spread @ spread.mT + one).flatten(1)
        middle = now.median(-1, keepdim=True).values + now.quantile(0.3, -1, keepdim=True)
        state = state / 2 + gain + middle + torch.erfinv(now.tanh() / 2) + torch.fft.fft(now).abs()
        states.append(state)
    return torch.stack(states, 1)


def with_a_query_that_sees_nothing(self, x):
    rows = []
    for t in range(x.shape[1]):
        seen = (x[:, :, 0] > x[:, t, :1])[:, None, None]
        query, keys = x[:, t, None, None], x[:, None]
        rows.append(torch.nn.functional.scaled_dot_product_attention(query, keys, keys, seen)[:, 0, 0])
    return torch.stack(rows, 1)


def with_a_probability_at_the_end(self, x):
    """What is computed after the loop has no name of a value in the loop."""
    state, cell = x.new_zeros(x.shape[0], 4), torch.nn.functional.gelu
    for t in range(x.shape[1]):
        state = cell(self.layer(x[:, t])).sigmoid() * state + cell(x[:, t]).sigmoid()
    return torch.sigmoid(self.layer(state))


KEEPS_STATES, KEEPS_TOTALS = True, False
DECAY = torch.tensor([0.5, 0.25, 0.125, 1.0])  # a plain tensor: neither a parameter nor a buffer


def that_keeps_what_it_is_told_to(self, x):
    state, states, totals, signs, total = x.new_zeros(x.shape[0], 4), [], [x[:, 0]], [], 0
    for t in range(x.shape[1]):
        state = torch.tanh(self.layer(x[:, t]) + state * DECAY)
        total = total + state
        if KEEPS_STATES:
            states.append(state)
        if KEEPS_TOTALS:
            totals.append(total)
        if state.sum() > 0:
            signs.append(state * 2)
        elif KEEPS_TOTALS:
            signs.append(total)
        else:
            signs.append(-state)
    return torch.stack(states, 1), torch.stack(totals, 1), torch.stack(signs, 1)


def that_looks_for_something_in_each_iteration(self, x):
    """An `else` of an inner loop ends an iteration of the outer one."""
    state = x.new_zeros(x.shape[0], 4)
    for _ in range(3):
        for limit in (0.5, 2.0):
            if limit > 1:
                break
        else:
            continue
        state = state + limit
    for t in range(x.shape[1]):
        state = torch.tanh(self.layer(x[:, t]) + state)
    return state


def that_sets_a_slice_by_its_number(self, x):
    x = x.clone()
    for i in range(x.shape[1]):
        x[:, :i] = self.layer(x[:, :1])
    return x


def with_conditions_of_bytes(self, x):
    mask = torch.ones(x.shape[:2], dtype=torch.uint8)
    if not mask[:, 0].all():
        raise ValueError("the first token of each row counts")
    score = x[:, 0]
    for t in range(1, x.shape[1]):
        score = torch.where(mask[:, t].unsqueeze(1), torch.logaddexp(score, x[:, t]), score)
    return score


def with_a_loop_in_each_iteration(self, x):
    outputs = []
    for i in range(x.shape[1]):
        state = torch.zeros_like(x[:, 0])
        for j in range(x.shape[1]):
            state = torch.tanh(self.layer(x[:, j]) * 0.5 + state)
        outputs.append(state * x[:, i])
    return torch.stack(outputs, 1)


@pytest.mark.parametrize(
    "function",
    [
        with_a_loop_in_each_iteration,
        that_keeps_what_it_is_told_to,
        that_looks_for_something_in_each_iteration,
        that_sets_a_slice_by_its_number,
        with_conditions_of_bytes,
        with_a_probability_at_the_end,
        best_path,
        without_repeats,
        while_a_list_is_shorter,
        with_a_sum_that_a_function_adds_to,
        with_functions_that_onnx_does_not_have,
        with_a_query_that_sees_nothing,
    ],
)
def test_a_loop_over_a_length_is_proven(function, tmp_path):
    model, observer = looping(function, is_method=False)
    graph = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    report = graph.verify()
    assert report.ok, str(report)
    x = torch.randn(4, 11, 4)
    torch.testing.assert_close(graph(x), model(x), atol=1e-5, rtol=1e-4)


def recurrent_over_frames(self, x):
    frames = []
    for start in range(0, x.shape[1], x.shape[1]):
        frames.append(self.recurrent(x[:, start : start + x.shape[1]])[0])
    return torch.cat(frames, 1)


def test_a_recurrent_layer_forgets_the_length_of_traces_that_failed(tmp_path):
    torch.manual_seed(0)
    model = Looping(recurrent_over_frames)
    model.recurrent = torch.nn.LSTM(4, 5, batch_first=True)
    observer = exportkit.InputObserver()
    with observer(model), torch.no_grad():
        model(torch.randn(2, 5, 4))
        model(torch.randn(3, 8, 4))
    graph = exportkit.export(model.eval(), observer).to_onnx(tmp_path / "model.onnx")
    assert graph.verify().ok
    x = torch.randn(4, 13, 4)
    torch.testing.assert_close(graph(x), model(x), atol=1e-5, rtol=1e-4)


def test_a_loop_that_ran_before_makes_no_size_of_a_later_one_dynamic(tmp_path):
    scan(lambda c, x: (c * x[0] + x[1].sum(), c * 2), torch.zeros(2, 3), (torch.randn(5, 2, 3), torch.randn(5, 7)))
    model, observer = looping(with_recurrent_layers)
    assert exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx").verify().ok


def exported_rows(function, path):
    """A model that calls a function of rows and their lengths, and its graph."""
    model, observer = Looping(function).eval(), exportkit.InputObserver()
    with observer(model), torch.no_grad():
        model(torch.randn(2, 5, 4), torch.tensor([5, 3]))
        model(torch.randn(3, 8, 4), torch.tensor([4, 8, 1]))
    graph = exportkit.export(model, observer).to_onnx(path / "model.onnx")
    assert graph.verify().ok
    return model, graph


def up_to_the_length_of_each_row(self, x, lengths):
    mask, scale = torch.zeros(x.shape[:2], dtype=torch.bool), torch.ones(x.shape)
    for i, length in enumerate(lengths):
        mask[i, :length] = True
        scale[i, length.item() - 1 :, 1:3] = 2
    return x.masked_fill(~mask.unsqueeze(-1), 0) * scale


def from_the_length_of_each_row(self, x, lengths):
    weight = x.new_ones(x.shape[0], x.shape[1])
    for i, length in enumerate(lengths.tolist()):
        weight[i, length:] = 0
    return weight


def before_the_length_of_each_row(self, x, lengths):
    weight = x.new_ones(x.shape[0], x.shape[1])
    for i in range(x.shape[0]):
        weight[i, int(lengths[i]) - 3 : lengths[i]] = 0.5
    return weight


ROWS = [up_to_the_length_of_each_row, from_the_length_of_each_row, before_the_length_of_each_row]


@pytest.mark.parametrize("function", ROWS)
def test_rows_are_set_as_far_as_their_lengths(function, tmp_path):
    model, graph = exported_rows(function, tmp_path)
    for lengths in ([2], [0, 9, 12, -2], [1, 1]):  # slices count from the end, and end where the row does
        x = torch.randn(len(lengths), 9, 4)
        torch.testing.assert_close(graph(x, torch.tensor(lengths)), model(x, torch.tensor(lengths)))


def of_what_is_there(self, x, lengths):
    sums, parts, last = torch.zeros_like(x), torch.zeros(len(x), x.shape[1] + 2, 4), []
    for i, length in enumerate(lengths.tolist()):
        sums[i, :length] = torch.tanh(self.layer(x[i, : sys.maxsize][:length])).cumsum(0)
        parts[i, 1 : length + 1, :2] = x[i, :length, 2:].flip(0) ** 2 - 1
        parts[i, length:] = x[i, :1] / 2
        last.append((2 * x[i, length - 2 :]).mean() + x[i, : length + 1].sum() + x[i, :length].mean(1).sum())
    return sums, parts, torch.stack(last)


@pytest.mark.parametrize("lengths", [[2], [9, 7, 3], [1, 1]])
def test_rows_are_computed_as_far_as_their_lengths(lengths, row_graph):
    model, graph = row_graph
    x = torch.randn(len(lengths), 9, 4)
    with torch.no_grad():
        torch.testing.assert_close(graph(x, torch.tensor(lengths)), model(x, torch.tensor(lengths)), equal_nan=True)


@pytest.fixture(scope="module")
def row_graph(tmp_path_factory):
    return exported_rows(of_what_is_there, tmp_path_factory.mktemp("rows"))


def between_places(self, x, lengths):
    found = x.clone()
    for i in range(len(x)):
        found[i, lengths[i] : lengths[i] + 3] = self.layer(x[i, lengths[i] : lengths[i] + 3])
    return found


def test_a_part_of_a_row_is_set_to_as_many_values_or_the_call_is_refused(tmp_path):
    model, observer = Looping(between_places).eval(), exportkit.InputObserver()
    with observer(model), torch.no_grad():
        model(torch.randn(2, 5, 4), torch.tensor([1, 3]))
        model(torch.randn(3, 8, 4), torch.tensor([4, 0, 7]))
    graph = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    assert graph.verify().ok
    for lengths in ([0, 9], [12, 6], [-2, 8], [-9, -3]):  # the part may be shorter, or empty
        x = torch.randn(2, 9, 4)
        with torch.no_grad():
            torch.testing.assert_close(graph(x, torch.tensor(lengths)), model(x, torch.tensor(lengths)))


def of_levels(self, x, levels):
    found = []
    for i in range(levels.shape[0]):
        level = levels[i].item()
        found.append(x[i] * (level * 2) + x[0] * (levels[i].item() - 128))
    return torch.stack(found), torch.stack([x[0] * (level * level) for level in levels.tolist()])


def of_flags(self, x, flags):
    seen, found = flags > 20, []
    for i in range(len(x)):
        is_seen = seen[i].item()
        found.append(x[i] * (is_seen + seen[0].item()) + (1 if is_seen else 0))
    return torch.stack(found)


def of_thresholds(self, x, levels):
    found, thirds = [], [x[0] * (level / 3 > 5592405.5) for level in levels.int().tolist()]
    for i, level in enumerate(levels.tolist()):
        found.append(x[i] * (1.0 if level == 0.1 else 2.0 if level > 0.3 else 3.0))
    return torch.stack(found), torch.stack(thirds)


READ = {
    of_levels: (torch.uint8, [[200, 250, 3, 255], [130]]),
    of_flags: (torch.int32, [[40, 40, 1], [1, 2, 40]]),
    of_thresholds: (torch.float32, [[0.1, 0.2, 0.3], [16777218.0, 0.30000001, 16777216.0, 16777220.0]]),
}


@pytest.mark.parametrize("function", READ)
def test_numbers_that_a_loop_reads_neither_wrap_nor_are_rounded(function, tmp_path):
    dtype, others = READ[function]
    model, observer = Looping(function).eval(), exportkit.InputObserver()
    with observer(model), torch.no_grad():
        model(torch.randn(5, 4), torch.tensor([1, 19, 30, 2, 4]).to(dtype))
        model(torch.randn(7, 4), torch.tensor([30, 5, 6, 1, 2, 40, 7]).to(dtype))
    graph = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    assert graph.verify().ok
    for values in others:
        x, numbers = torch.randn(len(values), 4), torch.tensor(values).to(dtype)
        torch.testing.assert_close(graph(x, numbers), model(x, numbers), atol=1e-5, rtol=1e-4)


def places_of_the_largest(self, x, lengths):
    found = []
    for i, length in enumerate(lengths):
        largest = x[i, length - 1 :].max(0)
        found.append(largest.values + largest.indices)
    return torch.stack(found), torch.stack(
        [row[length - 1 :].max(0).indices for row, length in zip(x, lengths, strict=True)]
    )


def test_places_in_a_slice_count_from_its_start(tmp_path):
    model, graph = exported_rows(places_of_the_largest, tmp_path)
    for x in (torch.randn(3, 9, 4), torch.full((3, 9, 4), -math.inf), torch.full((3, 9, 4), math.nan)):
        lengths = torch.tensor([2, 9, 1])
        torch.testing.assert_close(graph(x, lengths), model(x, lengths), equal_nan=True)


def test_means_of_slices_in_half_precision_do_not_overflow(tmp_path):
    model, observer = Looping(mean_of_each_row).eval(), exportkit.InputObserver()
    with observer(model), torch.no_grad():
        model(torch.rand(2, 5, 4).half(), torch.tensor([5, 3]))
        model(torch.rand(3, 8, 4).half(), torch.tensor([4, 8, 1]))
    exported = exportkit.export(model, observer)
    x, lengths = torch.full((2, 600, 4), 200.0).half(), torch.tensor([600, 500])
    want = model(x, lengths)
    torch.testing.assert_close(exported.program.module(check_guards=False)(args_0=x, args_1=lengths), want)


def padded_and_joined(self, x, lengths):
    padded = [self.layer(x[i, :length]) for i, length in enumerate(lengths)]
    seen = torch.arange(x.shape[1]) < lengths[:, None]
    chosen, means = [row[mask] for row, mask in zip(x, seen, strict=True)], []
    for row in chosen:
        means.append(row.sum(0))
    first = x[0, :0]
    for i, length in enumerate(lengths):
        first = torch.cat([first, x[i, :length] * 2])
    across = [row[:length].transpose(0, 1) for row, length in zip(x, lengths, strict=True)]
    return (
        torch.nn.utils.rnn.pad_sequence(padded, batch_first=True, padding_value=-1.0),
        torch.nn.utils.rnn.pad_sequence(chosen),
        torch.cat(chosen) + first,
        torch.cat(across, dim=1),
        torch.stack(means),
        chosen[0],
    )


def of_chosen_rows(self, x, lengths):
    """All elements have as many rows, which is known before the loop."""
    chosen = x[lengths > 1]
    state, states = chosen.new_zeros(len(chosen), 4), []
    for t in range(x.shape[1]):
        state = torch.tanh(self.layer(chosen[:, t]) + state)
        states.append(state)
    return torch.stack(states, 1)


@pytest.mark.parametrize("function", [padded_and_joined, of_chosen_rows])
def test_lists_hold_tensors_of_different_lengths(function, tmp_path):
    model, graph = exported_rows(function, tmp_path)
    for lengths in ([2], [0, 9, 7], [6, 0], [1, 1]):
        x = torch.randn(len(lengths), 9, 4)
        with torch.no_grad():
            torch.testing.assert_close(graph(x, torch.tensor(lengths)), model(x, torch.tensor(lengths)))


class Regulated(torch.nn.Module):
    """Repeats each token as often as it lasts, and every token of a row that would be empty, as models of speech do."""

    def __init__(self):
        super().__init__()
        self.durations = torch.nn.Linear(4, 1)

    def forward(self, x):
        durations = (self.durations(x).squeeze(-1) * 3).long().clamp(min=0)
        return regulated(x, durations), durations


def regulated(tokens, durations):
    if durations.sum() == 0:
        durations[durations.sum(1).eq(0)] = 1
    found = tokens.new_zeros(tokens.size(0), durations.sum(1).max(), tokens.size(2))
    for i, (row, times) in enumerate(zip(tokens, durations, strict=True)):
        repeated = torch.repeat_interleave(row, times, dim=0)
        found[i, : repeated.size(0)] = repeated
    return found


def test_tokens_are_repeated_as_often_as_they_last(tmp_path):
    torch.manual_seed(0)
    model, observer = Regulated().eval(), exportkit.InputObserver()
    silent = -9 * model.durations.weight.detach().sign() * torch.ones(2, 6, 4)
    with observer(model), torch.no_grad():
        for x in (torch.randn(2, 5, 4), torch.randn(3, 7, 4), silent):
            model(x)
    graph = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    assert graph.verify().ok
    for x in (torch.randn(4, 9, 4), silent[:1, :3], torch.cat([silent, torch.randn(2, 6, 4)])):
        with torch.no_grad():
            torch.testing.assert_close(graph(x), model(x))


def into_everything_that_grows(self, x):
    self.last, found, slots = x.new_zeros(x.shape[0], 4), {"states": [], "halves": []}, [None] * x.shape[1]
    joined, begun, both, others = x[:, :0], None, None, []
    for i in range(x.shape[1]):
        self.last = self.layer(x[:, i]) + 0.5 * self.last
        joined = torch.cat([joined, self.last.unsqueeze(1)], dim=1)
        begun = self.last[:, None] if begun is None else torch.cat((begun, self.last[:, None]), 1)
        if i == 0:  # noqa: SIM108
            both = x[:, i : i + 1]
        else:
            both = torch.cat((x[:, i : i + 1], both), -2)
        found["states"].append(self.last)
        found["halves"] += [self.last / 2]
        others += [self.last * i]
        slots[i] = self.last
    states = [torch.stack(parts, 1) for parts in (found["states"], found["halves"], others, slots)]
    return joined, begun, both, *states, self.last


def through_layers(self, x):
    states, seen = [x.new_zeros(x.shape[0], 4) for _ in range(2)], torch.zeros(x.shape[0], 4, dtype=torch.bool)
    total, tops = x.new_zeros(x.shape[0], 4), []
    for token in x.chunk(x.shape[1], 1):
        value, means = token.squeeze(1), []
        for number in range(2):
            states[number] = torch.tanh(self.layer(value) + states[number])
            value = states[number]
            means.append(value.mean())
        total.mul_(0.9).add_(value.masked_fill(seen, 0) + sum(means))
        seen.scatter_(1, value.argmax(1, keepdim=True), True)
        fresh = value * 2
        fresh.add_(1)
        tops.append(fresh)
    return torch.stack(tops, 1), states[0], total, seen


def into_lists_of_several(self, x):
    levels, of_each, pairs = [x.mean(1), x.sum(1)], [], []
    for token in x.unbind(1):
        of_each.append([level + token for level in levels])
        pairs.append((token, token.sum()))
    of_each = [torch.cat(several) for several in of_each]
    products = [first * second + i for i, (first, second) in enumerate(pairs)]
    return torch.stack(of_each), torch.stack(products), pairs[0][1], torch.stack([pair[0] for pair in pairs[:2]])


def over_pairs_of_places(self, x):
    boxes, slices = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], []
    for i, j in itertools.product(range(len(x)), range(x.shape[1])):
        size = 0.25
        boxes += [(j + 0.5) / 7, (i + 0.5) / 3]
        for ratio in (2.0, 3.0):
            width = size * ratio
            for left in [place - ratio for place in [j]]:
                boxes += [width, left]
    for token in x.unbind(1):
        slices.append(token)
        slices.append(token * 2)
    return torch.Tensor(boxes).view(-1, 6), torch.stack(slices)


def with_the_first_iteration_apart(self, x):
    tokens, outputs, differences, i = x.unbind(1), [], [], 0
    for number in range(len(tokens)):
        if number == 0:  # noqa: SIM108
            state = self.layer(tokens[number])
        else:
            state = torch.tanh(state + tokens[number] - tokens[number - 1])
        outputs += [state]
    while i < x.size(1):
        if i:
            state = state + x[:, i - 1]
        differences.append(state)
        i += 1
    return torch.stack(outputs, 1), torch.stack(differences, 1), state * i


def from_the_end(self, x):
    state = total = self.layer(x[:, 0])
    parts, last = [], []
    for i in range(x.shape[1] - 1, -1, -1):
        state = torch.tanh(self.layer(x[:, i : i + 1]) + state[:, None])[:, 0]
        parts.append(state)
    for i in range(1, x.shape[1] + 1):
        last.append(torch.add(x[:, -i], state))
        total += x[:, -i]
    first = total
    for row in x.unbind(1):
        total += row
    return torch.stack(parts, 1), torch.stack(last, 1), total - first


def from_the_second_on(self, x):
    rows = torch.zeros(1, 4)
    best = x[:, 0] + torch.Tensor(rows)
    for i in range(1, x.shape[1]):
        best = torch.logsumexp(best.unsqueeze(2) + self.moves, 1) + x[:, i]
    return best


def by_sizes_from_around_it(self, x):
    batch, length, width = x.shape
    state, total, weight = [x.new_zeros(batch, width) for _ in range(3)]
    states = []
    for t in range(length):
        mixed = state.view(batch, 2, 2).reshape(batch, width)
        total, weight = total + mixed, weight + x[:, t]
        state = torch.sigmoid(total + weight)
        states.append(state)
    return torch.stack(states, 1), total


def with_recurrent_layers(self, x):
    """Decoders call recurrent layers for each token, and some read the values of a tensor as its `data`."""
    state, outputs = x.new_zeros(4, x.shape[0], 2), []
    pair, hidden, single = (state, state), None, x.new_zeros(1, 4)
    for t in range(x.shape[1]):
        found, pair = self.deep(x[:, t : t + 1], pair)
        found, hidden = self.gated(found.transpose(0, 1), hidden)
        outputs.append(self.plain(found)[0][0].data.view(x.shape[0], 4))
        _, single = self.gated(x[:1, t], single)
    return torch.stack(outputs, 1), *pair, hidden, single


@pytest.mark.parametrize(
    "function",
    [
        into_everything_that_grows,
        into_lists_of_several,
        over_pairs_of_places,
        through_layers,
        by_sizes_from_around_it,
        with_recurrent_layers,
        with_the_first_iteration_apart,
        from_the_second_on,
        from_the_end,
    ],
)
def test_state_in_other_places_is_carried_at_any_length(function, tmp_path):
    model, observer = looping(function)
    last = model.last
    graph = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    assert model.last is last
    report = graph.verify()
    assert report.ok, str(report)
    for batch, length in ((4, 11), (2, 1), (1, 1)):
        x = torch.randn(batch, length, 4)
        with torch.no_grad():
            torch.testing.assert_close(graph(x), model(x), atol=1e-5, rtol=1e-4)


def over_the_strongest(self, x):
    count = int(2 * math.log(x.shape[1]))
    weights, places = x.topk(count, dim=1)
    total = torch.zeros_like(x)
    for i in range(count):
        total = total + torch.gather(x, 1, places[:, i : i + 1]) * weights[:, i].unsqueeze(1)
    return total


def test_a_loop_of_as_many_iterations_as_a_logarithm_serves_any_length(tmp_path):
    model, observer = looping(over_the_strongest)
    graph = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    for length in (5, 7, 8, 12, 13, 40):
        x = torch.randn(2, length, 4)
        torch.testing.assert_close(graph(x), model(x))


def mean_of_each_row(self, x, lengths):
    means = [x[i, : lengths[i]].mean(0) for i in range(x.shape[0])]
    sums = [torch.sum(row[:length, 1:], dim=0) for row, length in zip(x, lengths)]  # noqa: B905
    return torch.stack(means), torch.stack(sums)


def test_rows_are_reduced_as_far_as_their_lengths(tmp_path):
    model, graph = exported_rows(mean_of_each_row, tmp_path)
    for lengths in ([2], [0, 9, 12, -2], [1, 1]):  # slices count from the end, and end where the row does
        x = torch.randn(len(lengths), 9, 4)
        torch.testing.assert_close(graph(x, torch.tensor(lengths)), model(x, torch.tensor(lengths)), equal_nan=True)


def parts_of_each_row(self, x, lengths):
    largest = [x[i, : lengths[i]].amax(0) for i in range(x.shape[0])]
    halves = [x[i, : int(lengths[i].item() / 2)].sum(0) for i in range(x.shape[0])]
    before = [x[:, i - 3] for i in range(x.shape[1])]
    return torch.stack(largest), torch.stack(halves), torch.stack(before)


def test_a_loop_raises_where_the_model_raises(tmp_path):
    model, graph = exported_rows(parts_of_each_row, tmp_path)
    x, lengths = torch.randn(2, 99, 4), torch.tensor([99, -2])
    torch.testing.assert_close(graph(x, lengths), model(x, lengths), atol=1e-5, rtol=1e-4)
    # an empty slice has no largest element, and two elements have no third from the end
    for rows, lengths in ((x, torch.tensor([4, 0])), (x[:, :2], torch.tensor([1, 1]))):
        with pytest.raises(IndexError):
            model(rows, lengths)
        with pytest.raises(exportkit.errors.RuntimeFailure):
            graph(rows, lengths)


def into_the_arguments_of(function, states, x):
    for i in range(x.shape[1]):
        states[:, i] = function(x[:, i])


def by_a_function_that_fills_its_argument(self, x):
    states = torch.zeros_like(x)
    into_the_arguments_of(self.layer, states, x)
    return states


def test_a_loop_fills_the_argument_of_a_function():
    model, observer = looping(by_a_function_that_fills_its_argument)
    exported = exportkit.export(model, observer)
    x = torch.randn(3, 9, 4)
    torch.testing.assert_close(exported.program.module(check_guards=False)(x=x), model(x))


def that_sets_an_attribute_elsewhere(self, x):
    self.last = x[:, 0]
    for i in range(x.shape[1]):
        self.last = torch.tanh(last_of(self) + x[:, i])
    return self.last


def last_of(model):
    return model.last


def that_reads_a_tensor_that_grows(self, x):
    found = x[:, :1]
    for i in range(x.shape[1]):
        found = torch.cat([found, self.layer(found.mean(1, keepdim=True) + x[:, i : i + 1])], 1)
    return found


def that_sets_an_attribute_that_a_method_uses(self, x):
    self.last = x[:, 0]
    for i in range(x.shape[1]):
        self.last = torch.tanh(self.of_a_method(x[:, i])) + self.last
    return self.last


def that_sets_an_attribute_that_a_lambda_uses(self, x):
    self.last = x[:, 0]
    for i in range(x.shape[1]):
        self.last = torch.tanh(self.of_a_lambda(x[:, i]))
    return self.last


def that_sets_an_attribute_that_a_base_class_uses(self, x):
    self.last = x[:, 0]
    for i in range(x.shape[1]):
        self.last = torch.tanh(self.of_its_base(x[:, i]))
    return self.last


def that_sets_what_a_function_reads(self, x):
    state = x[:, 0]

    def step(value):
        return torch.tanh(self.layer(value) + state)

    for i in range(x.shape[1]):
        state = step(x[:, i])
    return state


def that_sets_what_a_lambda_reads(self, x):
    state, states = x[:, 0], []
    mixed = lambda value: value + state  # noqa: E731 (as models have it)
    for i in range(x.shape[1]):
        state = self.layer(x[:, i])
        states.append(mixed(x[:, i]))
    return torch.stack(states, 1)


def that_sets_what_a_function_reads_later(self, x):
    last = x[:, 0]

    def doubled():
        return last * 2

    for i in range(x.shape[1]):
        last = self.layer(x[:, i])
    return doubled()


def that_fills_a_list_of_the_caller(self, x):
    states = []
    self.collect(x, states)
    return torch.stack(states, 1)


def that_fills_a_list_with_two_names(self, x):
    found = {"steps": []}
    steps = found["steps"]
    for i in range(x.shape[1]):
        steps.append(self.layer(x[:, i]))
    return x.sum(1) + len(found["steps"])


def that_changes_what_it_has_appended(self, x):
    state, states = torch.ones(4), []
    for i in range(x.shape[1]):
        states.append(state)
        state.mul_(x[0, i])
    return torch.stack(states)


def that_changes_a_view(self, x):
    x = x.clone()
    for i in range(x.shape[1]):
        row = x[:, i]
        row.mul_(2)
    return x


def that_goes_on_while(self, x):
    i, states = 0, []
    while len(states) < x.shape[1]:
        if i % 2 == 0:
            states.append(x[:, i // 2])
        i += 1
    return torch.stack(states, 1)


def that_changes_a_shape(self, x):
    total = torch.zeros(1, 4)
    for step in x.unbind(1):
        total = total + step
    return total


def that_picks_in_a_comprehension(self, x):
    return torch.stack([x[:, i] for i in range(x.shape[1]) if i % 2])


def that_collects_elsewhere(self, x):
    found = {}
    for i in range(x.shape[1]):
        found[i] = x[:, i]
    return torch.stack([*found.values()])


def that_computes_an_index(self, x):
    return torch.stack([x[:, int(i * 0.29)] for i in range(x.shape[1])])


def that_rounds(self, x):
    return torch.stack([x[:, i] * (i * 0.29 // 1) for i in range(x.shape[1])])


def that_takes_powers(self, x):
    return torch.stack([x[:, i] / 2**i for i in range(x.shape[1])])


def that_pads_in_front(self, x):
    chosen = [row[row[:, 0] > 0] for row in x]
    return torch.nn.utils.rnn.pad_sequence(chosen, padding_side="left")


# What the error says, and the text of the line that it names.
REFUSED = {
    that_sets_an_attribute_elsewhere: ("it sets the attribute `self.last`", "self.last = torch.tanh"),
    that_reads_a_tensor_that_grows: (
        "`found` grows with each iteration, and the loop also reads it",
        "found = torch.cat",
    ),
    that_sets_an_attribute_that_a_method_uses: (
        "the attribute last, which of_a_method() also uses",
        "self.last = torch.tanh",
    ),
    that_sets_an_attribute_that_a_lambda_uses: (
        "the attribute last, which of_a_lambda() also uses",
        "self.last = torch.tanh",
    ),
    that_sets_an_attribute_that_a_base_class_uses: (
        "the attribute last, which of_its_base() also uses",
        "self.last = torch.tanh",
    ),
    that_sets_what_a_function_reads: ("`state`, which a function inside of this one also uses", "for i in"),
    that_sets_what_a_lambda_reads: ("`state`, which a function inside of this one also uses", "for i in"),
    that_sets_what_a_function_reads_later: ("`last`, which a function inside of this one also uses", "for i in"),
    that_fills_a_list_with_two_names: ("the list `steps`, which has another name as well", "for i in"),
    that_changes_what_it_has_appended: ("changes `state` in place, which has another name as well", "for i in"),
    that_changes_a_view: ("it changes `row` in place (`mul_`)", "row.mul_(2)"),
    that_goes_on_while: ("it goes on while something holds", "while len(states) < x.shape[1]:"),
    that_changes_a_shape: ("an iteration changes the shape of a tensor", "total = total + step"),
    that_picks_in_a_comprehension: ("it filters elements by a condition", "for i in range(x.shape[1]) if i % 2"),
    that_computes_an_index: ("a number that is computed from others becomes an int", "int(i * 0.29)"),
    that_rounds: ("a number that is not an int is rounded", "i * 0.29 // 1"),
    that_takes_powers: ("a power of an int may not fit into 64 bits", "2**i"),
    that_pads_in_front: ("the elements of this list have lengths that depend on values", 'padding_side="left"'),
    that_collects_elsewhere: ("whose index depends on the iteration", "found[i] = x[:, i]"),
}


def test_a_loop_that_fills_a_list_of_the_caller_fixes_the_length():
    model, observer = looping(that_fills_a_list_of_the_caller)
    with pytest.raises(ExportError, match="adds to the list `states`, which belongs to the caller"):
        exportkit.export(model, observer)


@pytest.mark.parametrize("function", REFUSED)
def test_other_loops_fix_the_length_and_the_error_names_the_line(function):
    model, observer = looping(function)
    with pytest.raises(ExportError, match="became static") as caught:
        exportkit.export(model, observer)
    reason, code = REFUSED[function]
    message = str(caught.value)
    lines, first = inspect.getsourcelines(function)
    number = first + next(number for number, line in enumerate(lines) if code in line)
    assert reason in message
    assert code in message
    assert f"{__file__}:{number}" in message
