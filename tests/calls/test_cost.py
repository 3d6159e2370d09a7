"""What an observer keeps, and when it stops: shapes of all calls, limits of calls and of memory."""

import gc
import threading
import weakref

import pytest
import torch

from exportkit import InputObserver
from exportkit.calls import shape_counter
from exportkit.calls.observation import Observation, SeenShapes
from exportkit.errors import InvalidRequestError
from tests.models import Add, IdsDecoder, OptionalAdd, Picky, random_cache, random_ids, tiny_llama


def _call_add(model, *rows):
    for n in rows:
        model(torch.ones(n), torch.ones(n))


def _counts(observer, name="x"):
    return [(one.inputs.get(name), one.count) for one in observer.observation.seen]


# Shapes of all calls


def test_shapes_of_all_calls_are_counted():
    model, observer = Add(), InputObserver()
    with observer(model, store_n_calls=2):
        _call_add(model, 1, 2, 1, 3, 3, 1)

    assert observer.num_obs() == 2
    assert _counts(observer) == [((1,), 3), ((2,), 1), ((3,), 2)]
    assert observer.observation.seen[0] == SeenShapes({"x": (1,), "y": (1,)}, {"": (1,)}, 3)


def test_constants_of_calls_that_are_not_stored_are_kept_by_path(tmp_path):
    class Model(torch.nn.Module):
        def forward(self, x, step=0, *, scale=1.0, **options):
            return x

    model, observer = Model(), InputObserver()
    with observer(model, store_n_calls=1):
        model(torch.ones(2), 1)
        for step in (3, 3, 4):
            model(torch.ones(2), step, scale=float("nan"), flag=True, name="a", other=None)
    observer.observation.save(tmp_path / "calls")
    for observation in (observer.observation, Observation.load(tmp_path / "calls")):
        assert [(dict(one.constants), one.count) for one in observation.further] == [
            ({"step": 3, "options.flag": True, "options.name": "a"}, 2),
            ({"step": 4, "options.flag": True, "options.name": "a"}, 1),
        ]


def test_a_loop_that_counts_its_steps_is_counted_by_its_shapes():
    model, observer = OptionalAdd(), InputObserver()
    with observer(model, store_n_calls=0):
        for step in range(3000):
            model(torch.ones(2), step)
    assert sum(one.count for one in observer.observation.further) == 3000
    assert len(observer.observation.further) < 100
    assert observer.observation.problems == ()


def test_inputs_are_told_by_path_however_they_are_given():
    model, observer = OptionalAdd(), InputObserver()
    with observer(model, store_n_calls=0):
        model(torch.ones(2), torch.ones(1))
        model(torch.ones(2), y=torch.ones(1))
        model(y=torch.ones(1), x=torch.ones(2))
        model(torch.ones(2))
        model(torch.ones(2), None)

    assert [(dict(one.inputs), one.count) for one in observer.observation.seen] == [
        ({"x": (2,), "y": (1,)}, 3),
        ({"x": (2,)}, 2),
    ]


def test_shapes_of_caches_are_counted_under_the_paths_of_stored_calls():
    model, observer = IdsDecoder(), InputObserver()
    with observer(model, store_n_calls=1):
        for length in (3, 4, 3, 4):
            model(random_ids(1, 2), past_key_values=random_cache(length))
    first, second = observer.observation.seen

    assert list(first.inputs) == list(observer.observation.calls[0].tensors())
    assert (first.count, second.count) == (2, 2)
    assert second.inputs["past_key_values.layers[1].values"] == (1, 4, 4, 32)


def test_shapes_are_those_before_the_call():
    model, observer = tiny_llama(), InputObserver()
    with observer(model, store_n_calls=1):
        model.generate(random_ids(1, 5), max_new_tokens=5, do_sample=False)
    lengths = [one.inputs.get("past_key_values.layers[0].keys") for one in observer.observation.seen]

    assert [shape and shape[2] for shape in lengths] == [None, 5, 6, 7, 8]
    assert [one.outputs["past_key_values.layers[0].keys"][2] for one in observer.observation.seen] == [5, 6, 7, 8, 9]


def test_calls_that_raise_are_not_counted():
    model, observer = Picky(), InputObserver()
    with observer(model, store_n_calls=1):
        for n in (2, 3, 4, 3):
            try:
                model(torch.ones(n))
            except ValueError:
                continue

    assert _counts(observer) == [((2,), 1), ((4,), 1)]
    assert len(observer.observation.failures) == 0  # the budget was spent by then


def test_number_of_different_shapes_is_bounded_and_told(monkeypatch):
    monkeypatch.setattr(shape_counter, "MOST_SHAPES", 4)
    model, observer = Add(), InputObserver()
    with pytest.warns(RuntimeWarning, match="different shapes were seen"), observer(model, store_n_calls=0):
        _call_add(model, *range(1, 8), 2)

    assert _counts(observer) == [((1,), 1), ((2,), 2), ((3,), 1), ((4,), 1)]
    assert "further ones are not kept" in observer.observation.problems[0]


def test_removed_inputs_are_removed_there_too():
    model, observer = Add(), InputObserver()
    with observer(model):
        _call_add(model, 2)
    observer.remove_inputs(["y"])

    assert dict(observer.observation.seen[0].inputs) == {"x": (2,)}


def test_later_blocks_add_to_what_was_seen():
    model, observer = Add(), InputObserver()
    for _ in range(2):
        with observer(model, store_n_calls=1):
            _call_add(model, 1, 2, 2)

    assert _counts(observer) == [((1,), 2), ((2,), 4)]


# Stopping


def test_stored_calls_only_puts_the_original_back_at_once():
    model, observer = Add(), InputObserver()
    with observer(model, store_n_calls=2, shapes="stored"):
        _call_add(model, 1)
        assert "forward" in vars(model)
        _call_add(model, 2)
        assert "forward" not in vars(model)
        _call_add(model, 3)

    assert "forward" not in vars(model)
    assert _counts(observer) == [((1,), 1), ((2,), 1)]


def test_no_call_to_store_means_nothing_is_put_on():
    model, observer = Add(), InputObserver()
    with observer(model, store_n_calls=0, shapes="stored"):
        assert "forward" not in vars(model)


def test_original_that_was_set_on_the_model_is_put_back():
    model, observer = Add(), InputObserver()
    model.forward = own = lambda x, y: x - y
    with observer(model, store_n_calls=1, shapes="stored"):
        _call_add(model, 1)
        assert vars(model)["forward"] is own


def test_call_that_raises_does_not_end_observing():
    model, observer = Picky(), InputObserver()
    with observer(model, store_n_calls=1, shapes="stored"):
        with pytest.raises(ValueError, match="three rows"):
            model(torch.ones(3))
        assert "forward" in vars(model)
        model(torch.ones(2))
        assert "forward" not in vars(model)

    assert observer.num_obs() == 1


def test_other_observers_stay():
    model, brief, lasting = Add(), InputObserver(), InputObserver()
    with brief(model, store_n_calls=1, shapes="stored"), lasting(model):
        _call_add(model, 1, 2)
        assert "forward" in vars(model)

    assert (brief.num_obs(), lasting.num_obs()) == (1, 2)
    assert "forward" not in vars(model)


def test_observing_can_begin_again_after_it_has_stopped():
    model, observer = Add(), InputObserver()
    for rows in (1, 2):
        with observer(model, store_n_calls=1, shapes="stored"):
            _call_add(model, rows, rows)

    assert _counts(observer) == [((1,), 1), ((2,), 1)]


@pytest.mark.parametrize("shapes", ["all", "stored"])
def test_eight_threads_keep_their_calls_apart(shapes):
    model, observer = Picky(), InputObserver()
    before, returned, errors = dict(vars(model)), [], []

    def work(number):
        for i in range(60):
            x = torch.full((i % 5 + 1,), float(number))
            try:
                result = model(x)
            except ValueError:
                continue
            returned.append(1)
            if not torch.equal(result, x * 2):
                errors.append(number)

    with observer(model, store_n_calls=100, shapes=shapes):
        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    observation = observer.observation
    assert not errors
    assert vars(model) == before
    assert len(observation.calls) == 100
    assert all(torch.equal(call.outputs.leaves[0], call.tensors()["x"] * 2) for call in observation.calls)
    assert sum(one.count for one in observation.seen) == (len(returned) if shapes == "all" else 100)


def test_other_word_for_shapes_is_refused():
    model = Add()
    with pytest.raises(InvalidRequestError, match="'all' or 'stored'"), InputObserver()(model, shapes="some"):
        pass
    assert "forward" not in vars(model)


# Memory


def test_calls_beyond_the_memory_keep_their_shapes_only():
    model, observer = Add(), InputObserver()
    room = 2 * 3 * 4 * 10  # two calls: two inputs and an output of ten numbers
    with pytest.warns(RuntimeWarning, match="Values of 2 calls are kept"), observer(model, 9, max_bytes=room):
        _call_add(model, 10, 10, 10, 1)

    assert observer.num_obs() == 2
    assert _counts(observer) == [((10,), 3), ((1,), 1)]
    assert f"more than {room} bytes (max_bytes)" in observer.observation.problems[0]


def test_outputs_count_as_well():
    class Repeats(torch.nn.Module):
        def forward(self, x):
            return x.repeat(100)

    model, observer = Repeats(), InputObserver()
    with pytest.warns(RuntimeWarning, match="Values of 0 calls"), observer(model, max_bytes=100):
        model(torch.ones(1))

    assert observer.num_obs() == 0
    assert observer.observation.seen[0].outputs == {"": (100,)}


def test_no_memory_and_stored_calls_only_end_observing():
    model, observer = Add(), InputObserver()
    with pytest.warns(RuntimeWarning, match="Values of 0 calls"), observer(model, shapes="stored", max_bytes=0):
        _call_add(model, 1)

    assert observer.is_empty()


def test_spent_memory_puts_the_original_back_at_once(recwarn):
    model, observer = Add(), InputObserver()
    with observer(model, shapes="stored", max_bytes=0):
        _call_add(model, 1)
        assert "forward" not in vars(model)

    assert len(recwarn) == 1


def test_call_that_raises_gives_its_memory_back():
    model, observer = Picky(), InputObserver()
    with observer(model, max_bytes=16):
        for _ in range(3):
            with pytest.raises(ValueError, match="three rows"):
                model(torch.ones(3))
        model(torch.ones(2))

    assert observer.num_obs() == 1


def test_memory_of_earlier_blocks_counts():
    model, observer = Add(), InputObserver()
    with observer(model, 1):
        _call_add(model, 10)
    with pytest.warns(RuntimeWarning, match="Values of 1 calls"), observer(model, max_bytes=200):
        _call_add(model, 10)

    assert observer.num_obs() == 1


def test_shared_memory_counts_once():
    cache = random_cache(256, layers=2, heads=4, head_size=256)  # a MiB for each of its four tensors
    model, observer = _ReturnsCache(), InputObserver()
    with observer(model, max_bytes=4 * 2**20 + 1000):
        for _ in range(3):
            model(cache)

    assert observer.num_obs() == 3
    assert torch.equal(observer.observation.calls[2].outputs.leaves[0], cache.layers[0].keys)


class _ReturnsCache(torch.nn.Module):
    def forward(self, cache):
        return cache


@pytest.mark.parametrize("ask", [InputObserver.num_obs, InputObserver.infer_dynamic_shapes, InputObserver.plan])
def test_values_go_with_their_observer_and_wait_for_no_collection_of_garbage(ask):
    model, observer = IdsDecoder(), InputObserver()
    gc.disable()
    try:
        with observer(model):
            for length in (3, 4):
                model(random_ids(1, 2), past_key_values=random_cache(length))
        ask(observer)
        value = weakref.ref(observer.observation.calls[0].tensors()["input_ids"])
        assert value() is not None
        del observer
        assert value() is None
    finally:
        gc.enable()


class _GrowsCache(torch.nn.Module):
    def forward(self, cache):
        for layer in cache.layers:
            layer.keys = torch.cat([layer.keys, layer.keys[:, :, :1]], dim=2)
            layer.values = torch.cat([layer.values, -layer.values[:, :, :1]], dim=2)
        return cache


@pytest.mark.parametrize("tokens", [1, 62, 63, 64, 400])  # a tensor of 64 tokens has 32 KiB
def test_growing_caches_of_any_size_are_recorded_as_they_were(tokens):
    model, observer, cache = _GrowsCache(), InputObserver(), random_cache(tokens, layers=4)
    given, returned = [], []
    with observer(model):
        for _ in range(3):
            given.append(_tensors(cache))
            model(cache)
            returned.append(_tensors(cache))

    for call, before, after in zip(observer.observation.calls, given, returned, strict=True):
        _assert_equal(call.tensors().values(), before)
        _assert_equal(call.outputs.tensors().values(), after)


def _tensors(cache):
    return [tensor.clone() for layer in cache.layers for tensor in (layer.keys, layer.values)]


def _assert_equal(recorded, expected):
    assert all(map(torch.equal, recorded, expected))
    assert len(recorded) == len(expected)
