"""What a call changes besides what it returns: found by running the model, and written back into what a caller gave."""

from collections import deque

import pytest
import torch

import exportkit
from exportkit import InputObserver, export
from exportkit.calls.observation import WrittenArgument
from exportkit.errors import ArgumentError
from exportkit.probing.effects import changed_state, write_back, written_arguments
from tests.models import tiny_llama


def observed(model, *args):
    observer = InputObserver()
    with observer(model), torch.no_grad():
        model(*args)
    return observer.observation


class Changes(torch.nn.Module):
    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, value):
        return self.change(value)


def appended(items):
    items.append(items[0] + 1)
    return items[0] * 2


def keyed(batch):
    batch["hidden"] = batch["x"] + 1
    return batch


@pytest.mark.parametrize(
    ("change", "value", "written"),
    [
        (lambda x: x + 1, torch.ones(2), None),
        (lambda x: x.add_(0), torch.ones(2), WrittenArgument("", ("",))),  # other values may change
        (lambda x: x.add_(1), torch.ones(2), WrittenArgument("", ("",))),
        (lambda x: x.add_(1) * 2, torch.ones(2), WrittenArgument(None, ("",))),
        (lambda x: (x[0] * 2, x[0].mul_(3)), [torch.ones(2)], WrittenArgument(None, ("[0]",))),
        (lambda x: {"sum": x.sum(), "same": x.mul_(3)}, torch.ones(2), WrittenArgument("same", ("",))),
        (appended, [torch.ones(2)], WrittenArgument(None)),
        (keyed, {"x": torch.ones(2)}, WrittenArgument("")),
    ],
)
def test_arguments_that_a_model_changes_are_found_with_their_place_in_the_result(change, value, written):
    model = Changes(change)
    found = written_arguments(observed(model, value), model, "forward")
    assert found == ({} if written is None else {"value": written})


def test_a_cache_that_is_filled_and_returned_is_an_argument_that_changes():
    model, observer = tiny_llama(), InputObserver()
    with observer(model):
        model.generate(torch.randint(3, 60, (1, 4)), max_new_tokens=2, do_sample=False)
    assert written_arguments(observer.observation, model, "forward") == {
        "past_key_values": WrittenArgument("past_key_values")
    }


@pytest.mark.parametrize("in_place", [True, False])
def test_tensors_are_written_to_or_replaced_as_the_model_does_it(in_place):
    tensor = torch.zeros(2)
    given = {"items": [tensor, torch.ones(2)], "gone": 1}
    made = {"items": [torch.ones(2), torch.ones(2), torch.ones(3)], "new": torch.ones(1)}
    kept = given["items"]
    assert write_back(given, made, WrittenArgument(None, ("items[0]",) if in_place else ())) is given
    assert given["items"] is kept
    assert (given["items"][0] is tensor) == in_place
    assert [item.tolist() for item in kept] == [[1, 1], [1, 1], [1, 1, 1]]
    assert list(given) == ["items", "new"]


def test_buffers_and_attributes_that_a_call_changes_are_named():
    class Counts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("total", torch.zeros(()))
            self.calls, self.seen, self.table = 0, [], torch.ones(2)

        def forward(self, x):
            self.calls += 1
            self.total += 1
            self.seen.append(x.shape)
            return x * 2

    model = torch.nn.Sequential(Counts())
    call = observed(model, torch.ones(2)).calls[0]
    assert sorted(changed_state(model, "forward", call)) == ["0.calls", "0.seen", "0.total"]


class Store:
    """States of the steps so far, and how many there were."""

    def __init__(self, batch):
        self.seen, self.states = 0, torch.zeros(batch, 0, 4)


class Storing(torch.nn.Module):
    """Adds its input to a store that it gets, and returns the store, too."""

    def forward(self, x, store):
        store.states = torch.cat([store.states, x], 1)
        store.seen = store.seen + x.shape[1]
        return {"mean": store.states.sum(1) / store.seen, "store": store}


@pytest.mark.runtime
def test_a_number_of_an_object_that_is_changed_in_place_is_changed_too(tmp_path):
    model, observer = Storing(), InputObserver()
    with observer(model, store_n_calls=4):
        for batch, length in ((2, 3), (3, 5)):
            store = Store(batch)
            for _ in range(2):
                model(torch.randn(batch, length, 4), store)
    graph = export(model, observer).to_onnx(tmp_path / "model.onnx")
    assert graph.verify().ok
    given, expected = Store(4), Store(4)
    for length in (2, 6, 1):
        x = torch.randn(4, length, 4)
        torch.testing.assert_close(graph(x, given)["mean"], model(x, expected)["mean"])
        assert given.seen == expected.seen
        torch.testing.assert_close(given.states, expected.states)


class Window(torch.nn.Module):
    """Sums the latest states of a queue, to which it adds one, and notes in the settings of it how many it took."""

    def forward(self, x, queue, settings):
        queue["states"].append(x.sum(1))
        queue["states"].popleft()
        settings.inner["total"] = settings.inner["total"] + x.sum()
        return torch.stack(list(queue["states"])).sum(0)


class Settings:
    """Has a dict that others may hold as well."""

    def __init__(self):
        self.inner = {"total": torch.zeros(())}


@pytest.fixture(scope="module")
def window(tmp_path_factory):
    model, observer = Window(), InputObserver()
    with observer(model):
        for batch, length in ((2, 3), (3, 5)):
            model(torch.randn(batch, length, 4), *window_state(batch))
    folder = tmp_path_factory.mktemp("window") / "model"
    export(model, observer).save(folder)
    return model, exportkit.load(folder)


def window_state(batch):
    return {"states": deque([torch.zeros(batch, 4), torch.ones(batch, 4)])}, Settings()


@pytest.mark.runtime
def test_queues_and_parts_of_objects_are_changed_where_they_are(window):
    model, graph = window
    assert graph.verify().ok
    (queue, settings), expected = window_state(4), window_state(4)
    states, inner = queue["states"], settings.inner
    for length in (2, 6):
        x = torch.randn(4, length, 4)
        torch.testing.assert_close(graph(x, queue, settings), model(x, *expected))
    torch.testing.assert_close(list(states), list(expected[0]["states"]))
    torch.testing.assert_close(inner["total"], expected[1].inner["total"])


@pytest.mark.runtime
def test_a_proof_looks_at_what_a_call_leaves_in_its_arguments(window, monkeypatch):
    monkeypatch.setattr("exportkit.onnx_files.runner.write_back", lambda given, made, written: given)
    assert "queue.states[0]: " in window[1].verify().problems()[0]


class Doubling(torch.nn.Module):
    """Changes one argument, then reads the other one."""

    def forward(self, x, first, second):
        first["state"] = first["state"] + x
        return second["state"] * 2


@pytest.mark.runtime
def test_an_object_that_is_given_in_two_places_is_refused_if_the_model_changes_it(tmp_path):
    model, observer, other = Doubling(), InputObserver(), InputObserver()
    with observer(model):
        for size in (2, 3):
            model(torch.ones(size), {"state": torch.zeros(size)}, {"state": torch.zeros(size)})
    graph = export(model, observer).to_onnx(tmp_path / "model.onnx")
    state = {"state": torch.zeros(4)}
    with pytest.raises(ArgumentError, match=r"given in two places.*\n.*where: first, second\n"):
        graph(torch.ones(4), state, state)
    torch.testing.assert_close(state, {"state": torch.zeros(4)})

    with other(model):  # what is recorded was made with one object, which copies of the arguments do not repeat
        for size in (2, 3):
            state = {"state": torch.zeros(size)}
            model(torch.ones(size), state, state)
    report = export(model, other).to_onnx(tmp_path / "other.onnx").verify()
    assert report.problems()[0].startswith("recorded call 0: differs, result: ")


class Adding(torch.nn.Module):
    """Writes to one argument, then reads the other one."""

    def forward(self, x, state):
        state.add_(1)
        return x * 2


@pytest.mark.runtime
def test_a_view_of_a_tensor_that_the_model_writes_to_is_refused(tmp_path):
    model, observer = Adding(), InputObserver()
    with observer(model):
        for size in (2, 3):
            model(torch.ones(size), torch.ones(size, 4))
    graph = export(model, observer).to_onnx(tmp_path / "model.onnx")
    assert graph.verify().ok
    memory = torch.zeros(2, 4, 4)
    torch.testing.assert_close(graph(memory[0, 0], memory[1]), torch.zeros(4))
    with pytest.raises(ArgumentError, match="a tensor in memory of its own"):
        graph(memory[1, 0], memory[1])
