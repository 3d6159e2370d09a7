"""Decisions in loops over a length, by the iteration or by values: both sides are computed, and the graph chooses."""

import inspect

import pytest
import torch

import exportkit
from exportkit.errors import ExportError
from tests.rewrites.test_loops import looping, proven


def by_the_number_of_the_iteration(self, x):
    length, state, taken = x.shape[1], x.mean(1), torch.zeros_like(x)
    for i in range(length):
        if i < length - 1 and i % 2 == 0:
            following = x[:, i + 1]
            state = state + following * 0.1
        elif i in (1, 5):
            state = state - x[:, i]
        else:
            state = state * 0.5
        state = state * 0.5 + (x[:, i + 1] if i < length - 1 else 0.25)
        if i + 1 < length and x[:, i + 1].sum() > 0:
            state = state + 1
        if not 1 <= i < 4:
            continue
        taken[:, i] = state * (length if i % 3 else 2)
    return state, taken


def by_values(self, x):
    state, best, place = x.mean(1), None, 0
    for i, row in enumerate(x.unbind(1)):
        score = row.sum()
        if best is None or score > best:
            best, place = score, i
        scale = 1.0 if bool((row > 0).any()) else 0.5
        state = torch.tanh(self.layer(state) * scale + row) if row.max().item() < 1 or i == 2 else state * 0.9
    return state, best, torch.as_tensor(place)


def up_to_a_value(self, x):
    state = x.mean(1)
    for i, row in enumerate(x.unbind(1)):
        state = torch.tanh(self.layer(state) + row)
        if state.abs().max() > 0.9:
            state = state + i
            break
        state = state * 0.99
    return state * i, row


def up_to_a_number_of_iterations(self, x):
    state, count = x.mean(1), 0
    while count < x.shape[1] and state.abs().max() < 0.9:
        state = torch.tanh(self.layer(state) + x[:, count])
        count += 1
    total = x.sum(1)
    for i in range(x.shape[1]):
        if i > 3:
            break
        total = total * 0.5 + x[:, i]
    return state, torch.as_tensor(count), total


def until_it_converges(self, x):
    found, iteration, error = torch.zeros_like(x), 0, torch.tensor(1.0)
    while iteration < 30 and error > 1e-2:
        new = torch.tanh(self.layer(found) * 0.5 + x)
        error = (new - found).abs().max()
        found = new
        iteration += 1
    for _ in range(20):
        x = x * 0.7 + found * 0.1
        if x.abs().max() < 0.5:
            break
    return found, x, torch.as_tensor(iteration)


def a_while_loop_with_a_break(self, x):
    state, iteration = x.mean(1), 0
    while iteration < x.shape[1]:
        new = torch.tanh(self.layer(state) + x[:, iteration])
        if new.abs().max() > 0.9:
            break
        state = new * 0.99
        iteration += 1
    return state, torch.as_tensor(iteration)


def counted_in_other_ways(self, x):
    state, last = x.mean(1), x.shape[1] - 1
    while last > 0:
        state = torch.tanh(self.layer(state) + x[:, last])
        last -= 1
    place, total = x.shape[1] - 1, x.sum(1)
    while place >= 0 and total.abs().max() > 0.5:
        total = total * 0.7 + x[:, place] * 0.1
        place -= 2
    count = 1
    while count <= x.shape[1]:
        state = state * 0.9 + x[:, count - 1]
        count += 3
    return state + last, total, torch.as_tensor(place), state * count


def into_lists_up_to_a_value(self, x):
    state, states, iteration = x.mean(1) * 0, [x[:, 0]], 0
    while iteration < x.shape[1] and state.abs().max() < 0.9:
        state = torch.tanh(self.layer(state) + x[:, iteration])
        states.append(state)
        iteration += 1
    token, tokens, scores = x.sum((1, 2)).long() % 4, [], []
    for _ in range(16):
        score, token = (self.layer.weight[token] + x.mean(1)).softmax(-1).max(-1)
        tokens += [token]
        scores.append(score)
        if (token == 3).any():
            break
    return torch.stack(states, 1), torch.stack(tokens, 1), sum(scores) / len(scores)


def cell(x, state, count):
    peak = x
    if not torch.all(count == 0):
        peak = torch.maximum(x, state)
    return torch.tanh(peak + state), count + 1


def damped(state):
    if state.abs().max() > 0.8:
        return state * 0.5
    gate = torch.sigmoid(state)
    return gate * state if gate.sum() > 3 else state + 0.1


CELLS = {"cell": cell}


def in_functions_that_it_calls(self, x):
    state, count, step = x.mean(1), torch.zeros(x.shape[0]), CELLS["cell"]
    for row in x.unbind(1):
        state, count = step(self.layer(row), state, count)
        state = damped(state)
    return state, count


def that_leave_names_as_they_were(self, x):
    state, last, seen = x.mean(1), x[:, 0] * 0, x[:, 0]
    for row in x.unbind(1):
        if row.sum() > 1:
            last = row
        elif row.max() > 0.5:
            last = row * 2
        if row.sum() > 0:
            scaled = row * 2 if row.max() > 1 else row * 3
            if row.max() > 0.8:
                seen = row
            if row.min() > -0.8:
                part = row * 0.3
                state = state - part
            state = state * 0.5 + scaled * 0.1 + seen
        else:
            state = state * 0.5 + last
    return state, last


DECIDING = [
    by_the_number_of_the_iteration,
    by_values,
    up_to_a_value,
    up_to_a_number_of_iterations,
    until_it_converges,
    a_while_loop_with_a_break,
    counted_in_other_ways,
    into_lists_up_to_a_value,
    in_functions_that_it_calls,
    that_leave_names_as_they_were,
]


@pytest.mark.parametrize("function", DECIDING)
def test_a_loop_that_decides_is_right_at_any_length_and_for_any_values(function, tmp_path):
    model, graph, report = proven(function, tmp_path)
    assert "values x 0.03" in report
    for batch, length, scale in ((4, 11, 1.0), (2, 7, 0.05), (3, 16, 0.05), (2, 12, 3.0), (5, 2, -0.5)):
        x = torch.randn(batch, length, 4) * scale
        with torch.no_grad():
            torch.testing.assert_close(graph(x), model(x), atol=1e-5, rtol=1e-4)


def test_functions_that_a_loop_calls_have_their_own_code_after_the_export():
    code = cell.__code__
    model, observer = looping(in_functions_that_it_calls)
    exportkit.export(model, observer)
    assert cell.__code__ is code
    assert "_exportkit_loops" not in globals()


def that_adds_to_a_list_in_some_iterations(self, x):
    rows = [x[:, 0]]
    for row in x.unbind(1):
        if row.max() > 1:
            rows.append(row)
    return torch.stack(rows, 1)


def that_decides_about_shapes(self, x):
    state = x.mean(1)
    for i in range(x.shape[1]):
        state = state.sum(0) if i % 2 else state + x[:, i]
    return state


@pytest.mark.parametrize("function", [that_adds_to_a_list_in_some_iterations, that_decides_about_shapes])
def test_sides_that_cannot_be_computed_together_are_refused_with_the_line(function):
    model, observer = looping(function)
    with pytest.raises(ExportError) as caught:
        exportkit.export(model, observer)
    lines, first = inspect.getsourcelines(function)
    places = [f"{__file__}:{first + number}" for number in range(len(lines))]
    assert any(place in str(caught.value) for place in places)
