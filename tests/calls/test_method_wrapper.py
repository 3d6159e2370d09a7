"""While a model is observed it looks as it always does; afterwards nothing is left on it."""

import concurrent.futures
import copy
import functools
import gc
import inspect
import pickle
import threading
import types
import weakref

import pytest
import torch
from torch.onnx import InputObserver as TorchObserver

from exportkit import InputObserver
from tests.models import Add, Classifier, OptionalAdd, random_ids, tiny_llama


def _run(model, rows):
    return model(torch.ones(rows), torch.ones(rows))


def _doubled(x):
    return x * 2


def _enter(observer, model):
    context = observer(model)
    context.__enter__()
    return lambda: context.__exit__(None, None, None)


def test_nothing_is_left_on_the_model():
    model = Classifier()
    before = dict(vars(model))
    with InputObserver()(model):
        model(torch.ones(1, 6))
    with InputObserver()(model, method_name="classify"):
        model.classify(torch.ones(1, 6))

    assert vars(model) == before


def test_nothing_is_left_on_the_model_after_an_error():
    model = Add()
    with pytest.raises(ZeroDivisionError), InputObserver()(model):
        raise ZeroDivisionError

    assert "forward" not in vars(model)


def test_forward_that_was_set_on_the_model_is_the_same_object_afterwards():
    model = Add()
    model.forward = own = lambda x, y: x - y
    with InputObserver()(model):
        assert _run(model, 2).sum() == 0

    assert vars(model)["forward"] is own


def test_parameters_buffers_and_modules_are_not_touched():
    model = Classifier()
    state = {name: id(value) for name, value in model.state_dict(keep_vars=True).items()}
    with InputObserver()(model):
        model(torch.ones(1, 6))
        assert [name for name, _ in model.named_modules()] == ["", "linear"]
        assert {name: id(value) for name, value in model.state_dict(keep_vars=True).items()} == state
        assert model._forward_hooks == {}


def test_signature_is_the_original_one():
    model = OptionalAdd()
    signature = inspect.signature(model.forward)
    with InputObserver()(model):
        assert inspect.signature(model.forward) == signature
        assert model.forward.__name__ == "forward"
        assert model.forward.__doc__ == OptionalAdd.forward.__doc__


def test_signature_of_a_transformers_model_is_the_original_one():
    model = tiny_llama()
    signature = inspect.signature(model.forward)
    with InputObserver()(model):
        assert inspect.signature(model.forward) == signature


def test_class_patched_while_it_is_observed_is_honoured():
    class Patched(Add):
        pass

    model, observer = Patched(), InputObserver()
    with observer(model):
        Patched.forward = lambda self, x, y: x * 100
        assert _run(model, 1).item() == 100

    assert observer.observation.calls[0].outputs.leaves[0].item() == 100


def test_class_patched_later_is_honoured():
    class Patched(Add):
        pass

    model = Patched()
    with InputObserver()(model):
        _run(model, 1)
    Patched.forward = lambda self, x, y: x * 100

    assert _run(model, 1).item() == 100


def test_two_observers_hear_the_same_calls():
    model, first, second = Add(), InputObserver(), InputObserver()
    with first(model), second(model):
        _run(model, 2)

    assert first.num_obs() == second.num_obs() == 1
    assert "forward" not in vars(model)


def test_each_observer_keeps_snapshots_of_its_own():
    model, first, second = Add(), InputObserver(), InputObserver()
    with first(model), second(model):
        _run(model, 2)
    first.observation.calls[0].tensors()["x"].zero_()

    assert second.observation.calls[0].tensors()["x"].sum() == 2


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_observers_may_leave_in_any_order(order):
    model, observers = Add(), (InputObserver(), InputObserver())
    leave = [_enter(observer, model) for observer in observers]
    _run(model, 1)
    leave[order[0]]()
    _run(model, 2)
    leave[order[1]]()
    _run(model, 3)

    assert observers[order[0]].num_obs() == 1
    assert observers[order[1]].num_obs() == 2
    assert "forward" not in vars(model)


def test_one_observer_may_watch_two_models():
    first, second, observer = Add(), Add(), InputObserver()
    with observer(first), observer(second):
        _run(first, 1)
        _run(second, 2)

    assert [len(call.tensors()["x"]) for call in observer.observation.calls] == [1, 2]
    assert "forward" not in vars(first) | vars(second)


def test_observer_that_is_entered_twice_hears_each_call_once():
    model, observer = Add(), InputObserver()
    with observer(model):
        with observer(model):
            _run(model, 1)
        _run(model, 2)
    _run(model, 3)

    assert [len(call.tensors()["x"]) for call in observer.observation.calls] == [1, 2]
    assert "forward" not in vars(model)


def test_observer_of_torch_outside_hears_the_calls_too():
    model, ours, theirs = Add(), InputObserver(), TorchObserver()
    with theirs(model):
        with ours(model):
            _run(model, 1)
        _run(model, 2)
    _run(model, 3)

    assert (ours.num_obs(), theirs.num_obs()) == (1, 2)


def test_observer_of_torch_inside_hears_the_calls_too():
    model, ours, theirs = Add(), InputObserver(), TorchObserver()
    with ours(model):
        with theirs(model):
            _run(model, 1)
        _run(model, 2)
    _run(model, 3)

    assert (ours.num_obs(), theirs.num_obs()) == (2, 1)
    assert "forward" not in vars(model)


def test_wrapper_that_outlives_our_observer_leads_to_the_original():
    model, ours, theirs = Add(), InputObserver(), TorchObserver()
    leave_ours, leave_theirs = _enter(ours, model), _enter(theirs, model)
    _run(model, 1)
    leave_ours()
    assert _run(model, 2).tolist() == [2, 2]
    leave_theirs()
    assert _run(model, 3).tolist() == [2, 2, 2]

    assert (ours.num_obs(), theirs.num_obs()) == (1, 2)
    assert "forward" not in vars(model)


def test_wrapper_that_was_put_on_meanwhile_stays():
    model, observer = Add(), InputObserver()
    with observer(model):
        observed = model.forward
        model.forward = wrapper = lambda *args: observed(*args) * 10
        assert _run(model, 1).item() == 20

    assert vars(model)["forward"] is wrapper
    assert _run(model, 1).item() == 20
    assert observer.num_obs() == 1


def test_copy_of_an_observed_model_is_not_observed():
    model, observer = Classifier(), InputObserver()
    with observer(model):
        twin = copy.deepcopy(model)
        with torch.no_grad():
            twin.linear.bias += 1
        difference = twin(torch.ones(1, 6)) - model(torch.ones(1, 6))

    torch.testing.assert_close(difference, torch.ones(1, 3))
    assert observer.num_obs() == 1
    assert twin(torch.ones(1, 6)).shape == (1, 3)


def test_copy_of_an_observed_model_honours_a_class_that_is_patched_later():
    class Patched(Add):
        pass

    model = Patched()
    with InputObserver()(model):
        twin = copy.deepcopy(model)
    Patched.forward = lambda self, x, y: x * 100

    assert _run(twin, 1).item() == 100
    assert "forward" not in vars(twin)


def test_copy_of_an_observed_model_keeps_a_forward_of_its_own():
    model = Classifier()
    model.forward = types.MethodType(lambda self, x: self.linear(x) * 2, model)
    with InputObserver()(model):
        twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.linear.weight.zero_()
        twin.linear.bias.fill_(3)

    assert twin(torch.ones(1, 6)).tolist() == [[6, 6, 6]]


def test_observed_model_can_be_pickled():
    model, observer = Classifier(), InputObserver()
    with observer(model):
        twin = pickle.loads(pickle.dumps(model))
        assert torch.equal(twin(torch.ones(1, 6)), twin.linear(torch.ones(1, 6)))
        with torch.no_grad():
            twin.linear.bias.fill_(100)
        assert twin(torch.ones(1, 6)).min() > 50

    assert observer.num_obs() == 0


def test_observed_model_with_a_forward_of_its_own_can_be_pickled():
    model = Classifier()
    model.forward = _doubled
    with InputObserver()(model):
        twin = pickle.loads(pickle.dumps(model))

    assert twin(torch.ones(1)).item() == 2


def test_model_is_freed_with_its_last_reference():
    model, observer = Classifier(), InputObserver()
    with observer(model):
        model(torch.ones(1, 6))
    gone = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()
    assert observer.num_obs() == 1


def test_questions_can_be_asked_when_the_model_is_gone():
    observer = InputObserver()
    with observer(Add()) as same:
        assert same is observer
    model = Add()
    with observer(model):
        _run(model, 2)
        _run(model, 3)
    del model

    assert [variable.name for variable in observer.plan().variables]
    assert observer.infer_arguments()[0].shape == (2,)


def test_method_that_calls_forward_is_observed_by_itself():
    model, observer = tiny_llama(), InputObserver()
    with observer(model, method_name="generate"):
        model.generate(random_ids(1, 4), max_new_tokens=2, do_sample=False)

    assert observer.num_obs() == 1
    assert "generate" not in vars(model)


def test_method_that_a_wrapper_passes_on_is_observed():
    class Wrapper(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.inner, name)

    model, observer = Wrapper(Classifier()), InputObserver()
    with observer(model, method_name="classify"):
        assert model.classify(torch.ones(1, 6)).shape == (1,)

    assert observer.num_obs() == 1
    assert "classify" not in vars(model)


def test_static_method_is_observed():
    class Static(torch.nn.Module):
        @staticmethod
        def double(x):
            return x * 2

    model, observer = Static(), InputObserver()
    with observer(model, method_name="double"):
        assert model.double(torch.ones(1)).item() == 2

    assert observer.infer_arguments()[0].item() == 1


def test_callable_that_is_no_function_is_observed():
    class Doubles(torch.nn.Module):
        forward = functools.partial(_doubled)

    model, observer = Doubles(), InputObserver()
    with observer(model):
        assert model(torch.ones(1)).item() == 2

    assert observer.num_obs() == 1


class Unsigned(Add):
    """Has a method whose signature cannot be read."""

    def describe(self, x):
        return x

    describe.__signature__ = "none"


@pytest.mark.parametrize("is_application", [True, False])
def test_method_without_a_readable_signature_is_left_alone(is_application):
    model, observer = Unsigned(), InputObserver()
    with observer([model] if is_application else model):
        _run(model, 2)

    assert observer.num_obs() == 1
    assert "forward" not in vars(model)


class Unsettable(Add):
    """Has a method that cannot be replaced."""

    def describe(self, x):
        return x

    def __setattr__(self, name, value):
        if name == "describe":
            raise AttributeError(name)
        super().__setattr__(name, value)


def test_nothing_is_left_on_a_model_that_cannot_be_observed():
    model, observer = Unsettable(), InputObserver()
    before = dict(vars(model))
    with pytest.raises(AttributeError, match="describe"), observer(model):
        pass

    assert vars(model) == before


class Meeting(Add):
    """Has a method that two threads run at the same time."""

    def __init__(self):
        super().__init__()
        self.barrier = threading.Barrier(2, timeout=60)

    def meet(self, x):
        self.barrier.wait()
        return x


def test_methods_that_several_threads_call_at_once_are_all_counted():
    model, observer = Meeting(), InputObserver()
    with observer(model), concurrent.futures.ThreadPoolExecutor(2) as threads:
        list(threads.map(model.meet, (1, 2)))

    assert observer.observation.called_instead == {"meet": 2}
