"""Layers that need not run for questions that are not about weights."""

import torch
from transformers import DynamicCache

import exportkit
from exportkit.programs.layer import CopiedLayer
from exportkit.programs.reused_layers import ReusedLayers
from tests.models import random_ids, tiny_llama


class Scale(torch.nn.Module):
    """A layer that counts how often it runs."""

    def __init__(self, factor):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(factor))
        self.count = 0

    def forward(self, x, in_place=False, again=False, state=None):
        self.count += 1
        if in_place:
            x.add_(1)
        if state is not None:
            state.seen = x + 1
        return x if again else x * self.factor


def both(**kwargs):
    """Returns what two layers return, of which the second one need not run, and how often it ran."""
    first, second = Scale(2.0), Scale(3.0)
    layers = ReusedLayers((CopiedLayer("1", second, "0", first, frozenset(), 1),), {})
    with torch.no_grad(), layers():
        results = first(torch.ones(2), **kwargs), second(torch.ones(2), **kwargs)
    assert "forward" not in vars(first) | vars(second)
    return *results, second.count


def test_a_layer_that_is_called_alike_returns_what_the_other_one_returned():
    one, other, count = both()
    assert count == 0
    assert torch.equal(one, other)
    assert one is not other


def test_a_layer_runs_if_the_other_one_wrote_into_its_arguments():
    _, other, count = both(in_place=True)
    assert count == 1
    assert other.tolist() == [6.0, 6.0]


def test_a_layer_returns_its_own_argument_where_the_other_one_did():
    first, second = Scale(2.0), Scale(3.0)
    layers = ReusedLayers((CopiedLayer("1", second, "0", first, frozenset(), 1),), {})
    given = torch.zeros(2)
    with layers():
        first(torch.ones(2), again=True)
        assert second(given, again=True) is given
    assert second.count == 0


def test_a_layer_runs_if_the_other_one_has_changed_an_object_that_both_were_given():
    class State:
        seen = None

    assert both(state=State())[-1] == 1


def test_a_layer_runs_if_it_is_called_in_another_way_or_has_hooks():
    first, second = Scale(2.0), Scale(3.0)
    layers = ReusedLayers((CopiedLayer("1", second, "0", first, frozenset(), 1),), {})
    with torch.no_grad(), layers():
        second(torch.ones(2))  # before the other one
        first(torch.ones(2))
        second(torch.ones(3))
        second(torch.ones(2), again=True)
        second(torch.ones(2).double())
        assert second.count == 4
        second(torch.ones(2))
        assert second.count == 4
        with_hook = second.register_forward_pre_hook(lambda *_: None)
        second(torch.ones(2))
        assert second.count == 5
        with_hook.remove()
        second(torch.ones(2))  # again without the other one
        assert second.count == 6


def test_a_deep_model_and_its_program_skip_the_same_layers():
    model = tiny_llama(num_hidden_layers=5)
    observer = exportkit.InputObserver()
    with observer(model):
        model.generate(random_ids(2, 7), max_new_tokens=3, do_sample=False)
    (traced,) = exportkit.export(model, observer).programs.values()
    assert [layer.path.rpartition(".")[2] for layer in traced.layers.layers] == ["2", "3", "4"]

    def run(past):
        with torch.no_grad():
            return model(torch.ones(2, 3, dtype=torch.int64), past_key_values=past)

    whole = run(DynamicCache(config=model.config))
    for past in (DynamicCache(config=model.config), whole.past_key_values):
        filled = past.get_seq_length()
        with traced.layers():
            returned = run(past)
        keys = [layer.keys for layer in returned.past_key_values.layers]
        assert [key.shape for key in keys] == [(2, 2, filled + 3, 4)] * 5
        new = [key[:, :, filled:] for key in keys]
        assert not torch.equal(new[0], new[1])
        assert all(torch.equal(new[1], other) for other in new[2:])
    assert torch.equal(run(DynamicCache(config=model.config)).logits, whole.logits)
