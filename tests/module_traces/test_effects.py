"""A model runs as it would without a trace, and is as it was afterwards."""

import contextlib
import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from exportkit import InputObserver, capture, trace_model
from tests.models import random_ids, tiny_llama
from tests.module_traces.models import Block, Fails, Stack


def run(model):
    torch.manual_seed(0)
    x = torch.randn(3, 4, requires_grad=True)
    result = nn.functional.dropout(model(x), 0.5)
    result.sum().backward()
    return result.detach(), x.grad, torch.rand(2), torch.is_grad_enabled()


def test_numbers_gradients_and_random_numbers_are_the_same():
    model = Stack(2)
    expected = run(model)
    with trace_model(model, values="all"):
        found = run(model)

    assert all(torch.equal(a, b) for a, b in zip(expected[:3], found[:3], strict=True))
    assert found[3] is expected[3]


def test_the_model_the_classes_and_the_process_are_as_before():
    model = tiny_llama()
    before = [dict(vars(module)) for module in model.modules()]
    classes = {type(module): type(module).forward for module in model.modules()}
    call, printed = nn.Module.__call__, copy.copy(torch._tensor_str.PRINT_OPTS)
    output = io.StringIO()
    with contextlib.redirect_stdout(output), trace_model(model, values="all"):
        model(random_ids(1, 3))
        assert [dict(vars(module)) for module in model.modules()] == before
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())

    assert [dict(vars(module)) for module in model.modules()] == before
    assert {cls: cls.forward for cls in classes} == classes
    assert nn.Module.__call__ is call
    assert vars(torch._tensor_str.PRINT_OPTS) == vars(printed)
    assert output.getvalue() == ""


def test_everything_is_put_back_after_an_exception():
    model = Fails()
    forward, call = Fails.forward, nn.Module.__call__
    with pytest.raises(ValueError, match="no such thing"), trace_model(model) as trace:
        model(torch.ones(2, 4))

    assert Fails.forward is forward
    assert nn.Module.__call__ is call
    assert trace.complete
    assert [(call.path, call.error) for call in trace.calls] == [
        ("", "ValueError: no such thing"),
        ("good", None),
        ("bad", None),
    ]


class Unspeakable(ValueError):
    """An error of which no text can be made."""

    def __str__(self):
        raise KeyError("no text")


class Raises(nn.Module):
    def forward(self, x):
        raise Unspeakable


def test_an_error_without_a_text_is_passed_on():
    model = Raises()
    with pytest.raises(Unspeakable), trace_model(model) as trace:
        model(torch.ones(2))

    assert "Unspeakable" in trace.calls[0].error


def test_a_model_is_pickled_and_copied_while_it_is_traced():
    model = Block()
    x = torch.ones(2, 4)
    with trace_model(model) as trace:
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        assert all(torch.equal(other(x), model(x)) for other in copies)

    assert [call.path for call in trace.calls] == ["", "first", "second"] * 2


def test_blocks_inside_of_each_other_record_the_same_calls():
    model = Stack(1)
    with trace_model(model) as outer:
        model(torch.ones(3, 4))
        with trace_model(model, values="all") as inner:
            model.forward(torch.ones(3, 4))
        model(torch.ones(3, 4))

    paths = [call.path for call in inner.calls]
    assert paths == ["", "blocks.0", "blocks.0.first", "blocks.0.second"]
    assert [call.path for call in outer.calls] == paths * 3
    assert inner.calls[0].outputs[0].hash == outer.calls[4].outputs[0].hash


def test_blocks_that_end_in_another_order():
    model = Stack(1)
    call, forward = nn.Module.__call__, Stack.forward
    first, second = trace_model(model), trace_model(model)
    one, two = first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    model(torch.ones(3, 4))
    second.__exit__(None, None, None)

    assert (len(one.calls), len(two.calls)) == (0, 4)
    assert nn.Module.__call__ is call
    assert Stack.forward is forward


def test_tensors_can_be_resized_afterwards():
    model = Block()
    with trace_model(model, values="all"):
        result = model(torch.ones(3, 4)).detach()
    result.resize_(5, 5)
    assert result.shape == (5, 5)


def test_tensors_are_not_kept():
    import weakref

    model = Block()
    with trace_model(model, values="all"):
        result = model(torch.ones(3, 4))
        gone = weakref.ref(result)
        del result
        assert gone() is None


def test_modes_of_the_caller_see_nothing_of_it():
    model = Block()

    def flops():
        with FlopCounterMode(display=False) as counter:
            model(torch.ones(3, 4))
            model(torch.ones(4, 3).t())
        return counter.get_total_flops(), counter.get_flop_counts()

    expected = flops()
    with trace_model(model, values="all") as trace:
        assert flops() == expected
    assert trace.complete, trace.problems


@pytest.mark.parametrize("context", [lambda: torch.device("meta"), lambda: torch.autocast("cpu")])
def test_modes_of_the_caller_do_not_change_what_is_recorded(context):
    model = Block()
    x = torch.ones(4, 3).t()
    with context(), trace_model(model, values="all") as trace:
        model(x)
    assert trace.complete, trace.problems
    assert torch.equal(trace.tensor(trace.calls[0].inputs[0]), x)


def test_a_traced_model_is_exported_and_compiled():
    model = Block()
    x = torch.ones(2, 4)
    said = pytest.warns(RuntimeWarning, match=r"torch.compile, torch.export")
    with said, trace_model(model) as trace:
        program = torch.export.export(model, (x,))
        compiled = torch.compile(model, backend="eager", fullgraph=True)(x)
        model(x)

    assert torch.equal(program.module()(x), compiled)
    assert [call.path for call in trace.calls] == ["", "first", "second"]


def test_a_model_that_was_compiled_before_runs_on():
    model = Block()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    x = torch.ones(2, 4)
    expected = compiled(x)
    with trace_model(compiled):
        assert torch.equal(compiled(x), expected)
    assert torch.equal(compiled(x), expected)


def test_layers_that_run_again_in_the_backward_pass_are_recorded_once():
    from torch.utils.checkpoint import checkpoint

    model = Block()
    x = torch.ones(2, 4, requires_grad=True)
    with trace_model(model) as trace:
        checkpoint(model, x, use_reentrant=False).sum().backward()
    assert [call.path for call in trace.calls] == ["", "first", "second"]


def test_observer_capture_and_trace_together():
    model, observer = Stack(1), InputObserver()
    x = torch.ones(3, 4)
    with observer(model), trace_model(model) as trace, capture(model, {"hidden_states": Block}) as captured:
        model(x)
        model.forward(x)

    assert [call.path for call in trace.calls if call.parent is None] == ["", ""]
    assert len(trace.calls) == 8
    assert observer.num_obs() == 2
    assert len(captured["hidden_states"]) == 2
    assert "forward" not in vars(model)
