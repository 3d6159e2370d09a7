"""Loops that go on until the values of tensors end them, and ones that return: the graph ends where the model does."""

import pytest
import torch

from tests.rewrites.test_loops import proven


def until_it_is_small(_self, x):
    count = 0
    while x.norm() > 1:
        x, count = x / 2, count + 1
    return x, torch.as_tensor(count)


def until_nothing_changes(_self, x):
    mask = (x[..., 0] > 0).float()
    labels = torch.arange(1.0, x.shape[1] + 1) * mask
    while True:
        new = torch.nn.functional.max_pool1d(labels[:, None], 3, 1, 1)[:, 0] * mask
        if torch.equal(new, labels):
            return labels
        labels = new


def until_a_flag_is_set(_self, x):
    done = False
    while not done:
        y = x * 0.5
        done = torch.allclose(x, y, atol=1e-2)
        x = y
    return x


def until_an_error_is_small(self, x):
    state, error, count = torch.zeros_like(x), float("inf"), 0
    while error > 1e-4 and count < 200:
        new = torch.tanh(self.layer(state) * 0.3 + x)
        error = (new - state).norm().item() / (state.norm().item() + 1e-8)
        state, count = new, count + 1
    return state


def for_at_most_many_iterations(self, x):
    state = torch.zeros_like(x)
    for _ in range(500):
        new = torch.tanh(self.layer(state) * 0.3 + x)
        if (new - state).norm() < 1e-4:
            break
        state = new
    return state


def with_a_loop_inside(_self, x):
    count = 0
    while x.norm() > 1:
        state = torch.zeros_like(x[:, 0])
        for t in range(x.shape[1]):
            state = torch.tanh(state + x[:, t])
        x, count = x / 2 + state[:, None] * 0.01, count + 1
    return x * count


def inside_of_a_loop(_self, x):
    state, states = x[:, 0], []
    for t in range(x.shape[1]):
        state = torch.tanh(state + x[:, t])
        while state.norm() > 0.5:
            state = state * 0.7
        states.append(state)
    return torch.stack(states, 1)


def inside_of_another_one(_self, x):
    while x.norm() > 1:
        y = x * 2
        while y.abs().max() > 0.5:
            y = y * 0.5
        x = x * 0.7 + y * 0.1
    return x


def with_a_check(_self, x):
    while x.norm() > 1:
        if torch.isnan(x).any():
            raise ValueError("not a number")
        x = x / 2
    return x


def by_number_and_value(_self, x):
    share, total, count = x[..., 0].softmax(1), torch.zeros(len(x)), 0
    while total.min() < 0.4:
        total = total + share[:, count]
        count += 1
    return total, torch.as_tensor(count)


def that_repeats_an_iteration(_self, x):
    iteration, state = 0, x.mean(1)
    while iteration < x.shape[1]:
        if x.abs().max() > 1:  # such an iteration does not count
            x = x * 0.5
            continue
        state = state * 0.7 + x[:, iteration]
        iteration += 1
    return state


def that_returns_from_a_test(_self, x):
    count = 0
    while x.norm() > 1:
        x, count = x / 2, count + 1
        if x.abs().max() < 0.3:
            return x * 3, torch.as_tensor(count)
    return x, torch.as_tensor(count)


def that_returns_or_breaks(_self, x):
    while True:
        x = x / 2
        if x.norm() < 1:
            break
        if x.abs().max() < 0.6:
            return x * 3
    return x


def that_returns_from_a_length(_self, x):
    total = x[:, 0] * 0
    for row in x.unbind(1):
        total = total + row
        if total.sum() > 5:
            total = total * 2
            return total.neg()
    return total - 1


def that_returns_a_place(_self, x):
    for place, row in enumerate(x.unbind(1)):
        if row.sum() > 2:
            return torch.tensor(place)
    return torch.tensor(-1)


@pytest.mark.parametrize(
    "function",
    [
        that_returns_from_a_test,
        that_returns_or_breaks,
        that_returns_from_a_length,
        that_returns_a_place,
        until_it_is_small,
        until_nothing_changes,
        until_a_flag_is_set,
        until_an_error_is_small,
        for_at_most_many_iterations,
        with_a_loop_inside,
        inside_of_a_loop,
        inside_of_another_one,
        with_a_check,
        by_number_and_value,
        that_repeats_an_iteration,
    ],
)
def test_a_loop_ends_where_that_of_the_model_does(function, tmp_path):
    model, graph, _ = proven(function, tmp_path)
    for batch, length, scale in ((4, 11, 1.0), (2, 7, 0.05), (3, 16, 20.0), (1, 5, 3.0)):
        x = torch.randn(batch, length, 4) * scale
        with torch.no_grad():
            torch.testing.assert_close(graph(x), model(x), atol=1e-3, rtol=1e-3)
