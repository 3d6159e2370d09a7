"""The observed run is sacred: whatever recording meets, the call returns or raises what it would have anyway."""

import threading
import types
import warnings

import pytest
import torch
from transformers import cache_utils

from exportkit import InputObserver
from exportkit.errors import NoCallsError, ObservationError, UnregisteredClassError
from tests.models import Add, Countdown, IdsDecoder, Picky, random_cache, random_ids


class Box:
    """Holds a tensor, and is known to nobody."""

    def __init__(self, tensor):
        self.tensor = tensor


class Unboxes(torch.nn.Module):
    def forward(self, box):
        return Box(box.tensor * 2)


class Returns(torch.nn.Module):
    """Returns something that is no tensor."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, x):
        return self.value


class Unclonable(torch.Tensor):
    """A tensor of which no copy can be made."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.clone, torch.Tensor.detach):
            raise RuntimeError("no copies")
        return super().__torch_function__(func, types, args, kwargs or {})


class Length(torch.nn.Module):
    def forward(self, x):
        return len(x)


def _unclonable():
    return torch.ones(2).as_subclass(Unclonable)


def _call_all(model, observer, rows, errors=ValueError, **options):
    with observer(model, **options):
        for n in rows:
            try:
                model(torch.full((n,), float(n)))
            except errors as error:
                yield str(error)


def _run(model, observer, inputs, error=None):
    with observer(model):
        for x in inputs:
            model(x)
        if error is not None:
            raise error


# What models take and return


def test_cache_that_is_registered_nowhere_is_recorded():
    model, observer = IdsDecoder(), InputObserver()
    assert cache_utils.DynamicCache not in torch.utils._pytree.SUPPORTED_NODES
    with observer(model):
        model(random_ids(1, 2), past_key_values=random_cache(3))

    assert observer.num_obs() == 1
    assert observer.observation.problems == ()


def test_layer_of_an_unknown_kind_is_recorded_with_its_tensors():
    class OtherLayer(cache_utils.CacheLayerMixin):
        def __init__(self):
            super().__init__()
            self.summary, self.norms = torch.ones(1, 4), [torch.ones(2), torch.ones(3)]

        def lazy_initialization(self, key_states, value_states): ...
        def update(self, key_states, value_states, *args, **kwargs): ...
        def get_mask_sizes(self, query_length): ...
        def get_seq_length(self): ...
        def get_max_length(self): ...

    cache = cache_utils.Cache(layers=[OtherLayer()])
    model, observer = IdsDecoder(), InputObserver()
    with observer(model):
        model(random_ids(1, 2), past_key_values=cache)

    assert list(observer.observation.calls[0].tensors()) == [
        "input_ids",
        "past_key_values.layers[0].summary",
        "past_key_values.layers[0].norms[0]",
        "past_key_values.layers[0].norms[1]",
    ]


def test_object_that_cannot_be_built_again_is_passed_through_and_named_when_it_is_needed():
    model, observer, box = Unboxes(), InputObserver(), Box(torch.ones(2))
    box.lock = threading.Lock()
    with observer(model):
        result = model(box)

    assert result.tensor.tolist() == [2, 2]
    assert observer.num_obs() == 1
    with pytest.raises(UnregisteredClassError, match="class Box holds tensors") as raised:
        observer.infer_dynamic_shapes()
    assert "where: box" in str(raised.value)


@pytest.mark.parametrize(
    "value", ["text", 3, 2.5, None, object(), [], {}, {"a": 1}, {1, 2}, print, torch.float32, range(2), Box(None)]
)
def test_output_that_is_no_tensor_is_returned_and_recorded(value):
    model, observer = Returns(value), InputObserver()
    with observer(model), warnings.catch_warnings(action="error"):
        assert model(torch.ones(2)) is value

    assert observer.num_obs() == 1
    assert observer.infer_dynamic_shapes() == ({},)


def test_output_of_a_generator_is_not_used_up():
    class Yields(torch.nn.Module):
        def forward(self, x):
            return (x * n for n in range(3))

    model, observer = Yields(), InputObserver()
    with observer(model):
        values = [value.item() for value in model(torch.ones(1))]

    assert values == [0, 1, 2]


# Which output belongs to which input


def test_call_that_raises_raises_the_same_error_and_is_listed_as_failure():
    model, observer = Picky(), InputObserver()
    errors = list(_call_all(model, observer, [3]))

    assert errors == ["three rows"]
    (failure,) = observer.observation.failures
    assert failure.error == "ValueError: three rows"
    assert failure.arguments == "dict(x:T1s3)"


def test_outputs_stay_with_their_inputs_after_an_error():
    model, observer = Picky(), InputObserver()
    assert len(list(_call_all(model, observer, [2, 3, 4]))) == 1

    pairs = [(call.tensors()["x"].tolist(), call.outputs.leaves[0].tolist()) for call in observer.observation.calls]
    assert pairs == [([2, 2], [4, 4]), ([4] * 4, [8] * 4)]


def test_calls_that_raise_take_nothing_of_the_budget():
    model, observer = Picky(), InputObserver()
    assert len(list(_call_all(model, observer, [3, 3, 3, 3, 1, 2], store_n_calls=2))) == 4

    assert observer.num_obs() == 2
    assert len(observer.observation.failures) == 4


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, StopIteration])
def test_interruption_is_passed_on(error):
    class Interrupts(torch.nn.Module):
        def forward(self, x):
            raise error

    model, observer = Interrupts(), InputObserver()
    with observer(model), pytest.raises(error):
        model(torch.ones(1))

    assert "forward" not in vars(model)


def test_wrong_arguments_raise_what_they_always_raise():
    model, observer = Add(), InputObserver()
    with pytest.raises(TypeError) as expected:
        model(torch.ones(1), z=1)
    with observer(model), pytest.raises(TypeError) as got:
        model(torch.ones(1), z=1)

    assert str(got.value) == str(expected.value)


def test_outputs_stay_with_their_inputs_in_recursion():
    model, observer = Countdown(), InputObserver()
    with observer(model, store_n_calls=5):
        model(torch.arange(3.0))

    pairs = [(call.tensors()["x"].tolist(), call.outputs.leaves[0].tolist()) for call in observer.observation.calls]
    assert pairs == [([0, 1, 2], [3]), ([1, 2], [3]), ([2], [2])]


def test_outputs_stay_with_their_inputs_in_several_threads():
    class Slow(torch.nn.Module):
        def forward(self, x):
            barrier.wait()  # all calls run at the same time
            return x * 2

    threads_count = 4
    barrier = threading.Barrier(threads_count, timeout=30)
    model, observer = Slow(), InputObserver()
    with observer(model, store_n_calls=100):
        threads = [
            threading.Thread(target=lambda n=n: [model(torch.full((n,), float(n))) for _ in range(5)])
            for n in range(1, threads_count + 1)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    calls = observer.observation.calls
    assert len(calls) == 5 * threads_count
    for call in calls:
        assert torch.equal(call.outputs.leaves[0], call.tensors()["x"] * 2)


def test_budget_holds_in_several_threads():
    model, observer = Add(), InputObserver()

    def work():
        for _ in range(20):
            model(torch.ones(1), torch.ones(1))

    with observer(model, store_n_calls=7):
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert observer.num_obs() == 7


class Unspeakable(ValueError):
    """An error of which no text can be made."""

    def __str__(self):
        raise KeyError("no text")


class Raises(torch.nn.Module):
    """Raises an error that it was given."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def forward(self, x):
        raise self.error


class Unreadable(torch.Tensor):
    """A tensor of which no copy can be made, for a reason that cannot be told."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.clone, torch.Tensor.detach):
            raise Unspeakable
        return super().__torch_function__(func, types, args, kwargs or {})


def test_error_without_a_text_is_passed_on():
    error = Unspeakable()
    model, observer = Raises(error), InputObserver()
    with pytest.raises(Unspeakable) as raised, observer(model):
        model(torch.ones(2))

    assert raised.value is error
    (failure,) = observer.observation.failures
    assert failure.error == "Unspeakable: (its message cannot be shown)"


# When recording itself fails


def test_problem_without_a_text_leaves_the_call_alone():
    model, observer = Length(), InputObserver()
    with pytest.warns(RuntimeWarning, match="Unspeakable"), observer(model):
        assert model(torch.ones(2).as_subclass(Unreadable)) == 2


class Encoding(torch.nn.Module):
    """A method that feeds another one."""

    def encode(self, x):
        return len(x)

    def forward(self, x):
        return x * 2


def test_problem_with_a_part_is_told_with_its_name():
    model, observer = Encoding(), InputObserver()
    told = pytest.warns(RuntimeWarning, match="First problem: encode: RuntimeError: no copies")
    with told, observer(model, parts=["encode"]):
        model.encode(_unclonable())


@pytest.mark.parametrize("is_named", [True, False])
def test_problem_with_an_application_is_told_although_the_block_raises(is_named):
    stages = {"length": Length(), "scale": Encoding()}
    application, observer = stages if is_named else types.SimpleNamespace(**stages), InputObserver()
    told = pytest.warns(RuntimeWarning, match=r"length\.forward: RuntimeError: no copies")
    with told, pytest.raises(ZeroDivisionError), observer(application):
        _ = stages["length"](_unclonable()) // 0


def test_problem_while_recording_leaves_the_call_alone_and_is_told_after_the_block():
    model, observer = Length(), InputObserver()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with observer(model):
            assert model(_unclonable()) == 2
            assert not told

    (warning,) = told
    assert warning.category is RuntimeWarning
    assert "could not record 1 of the observed calls; the model was not affected" in str(warning.message)
    assert "RuntimeError: no copies" in str(warning.message)
    assert warning.filename == __file__


def test_problem_with_an_output_leaves_the_result_alone():
    value = _unclonable()
    model, observer = Returns(value), InputObserver()
    with pytest.warns(RuntimeWarning, match="no copies"), observer(model):
        assert model(torch.ones(2)) is value

    assert observer.is_empty()


def test_other_calls_are_recorded_all_the_same():
    model, observer = Length(), InputObserver()
    with pytest.warns(RuntimeWarning, match="could not record 2 of"):
        _run(model, observer, [torch.ones(1), _unclonable(), torch.ones(2), _unclonable(), torch.ones(3)])

    assert [len(call.tensors()["x"]) for call in observer.observation.calls] == [1, 2, 3]


def test_problem_is_told_once_for_each_block():
    model, observer = Length(), InputObserver()
    with pytest.warns(RuntimeWarning), observer(model):
        model(_unclonable())
    with warnings.catch_warnings(action="error"), observer(model):
        model(torch.ones(1))


def test_error_in_the_block_is_not_hidden_by_a_problem():
    model, observer = Length(), InputObserver()
    with pytest.warns(RuntimeWarning), pytest.raises(ZeroDivisionError):
        _run(model, observer, [_unclonable()], ZeroDivisionError)


# What is said when there is nothing


def test_block_without_a_call_is_named_as_such():
    observer = InputObserver()
    with observer(Add()):
        pass
    with pytest.raises(NoCallsError, match=r"No inputs were captured\.\n  where: Add\.forward"):
        observer.infer_dynamic_shapes()


def test_error_of_the_model_is_the_reason_when_every_call_raised():
    model, observer = Picky(), InputObserver()
    assert list(_call_all(model, observer, [3]))
    with pytest.raises(ObservationError, match="Every observed call raised") as raised:
        observer.infer_arguments()
    assert "ValueError: three rows" in str(raised.value)


def test_problem_is_the_reason_when_no_call_could_be_recorded():
    model, observer = Length(), InputObserver()
    with pytest.warns(RuntimeWarning), observer(model):
        model(_unclonable())
    with pytest.raises(ObservationError, match="could not be recorded") as raised:
        observer.infer_arguments()
    assert "no copies" in str(raised.value)
