"""What a call changes besides what it returns: found by running the model, and written back into what a caller gave."""

import pytest
import torch

from exportkit import InputObserver, export
from exportkit.calls.observation import WrittenArgument
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
        (lambda x: x.add_(0), torch.ones(2), None),
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
