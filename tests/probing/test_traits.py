"""What a model reads of its arguments besides sizes, dtypes and values: found by running it, and asked of calls."""

import contextlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from exportkit.calls.call import Call
from exportkit.calls.signature import Signature
from exportkit.errors import ArgumentError
from exportkit.probing.traits import APART, Traits, find_traits, require_traits
from exportkit.trees import flatten


def traits_of(forward, **arguments):
    model = type("Model", (nn.Module,), {"forward": forward})()
    trees = {name: flatten(value) for name, value in arguments.items()}
    return find_traits(model, "forward", Call(trees, Signature.of(model.forward)))


@pytest.mark.parametrize(
    ("decides", "trait"),
    [
        (lambda x: x.is_contiguous(), "contiguous"),
        (lambda x: x.stride(0) > x.stride(-1), "contiguous"),
        (lambda x: x.is_contiguous(memory_format=torch.channels_last), "contiguous"),
        (lambda x: x.storage_offset() == 0, "at the start of its memory"),
        (lambda x: x.requires_grad, "without a gradient"),
        (lambda x: type(x) is torch.Tensor, "of class Tensor"),
    ],
)
def test_a_decision_by_what_operators_ignore_is_found(decides, trait):
    assert trait in traits_of(lambda self, x: x * 2 if decides(x) else x * 3, x=torch.rand(2, 3, 4, 5)).tensors


def test_a_model_that_reads_it_without_effect_asks_for_nothing():
    def forward(self, x, options):
        x = x if x.is_contiguous() else x.contiguous()
        x = x.detach() if x.requires_grad else x
        return x * options["b"]

    assert traits_of(forward, x=torch.rand(2, 3), options={"a": 1, "b": 2}) == Traits()


def test_equal_results_from_memory_that_is_shared_do_not_count():
    assert traits_of(lambda self, x, y: x * 2 if x is y else x + y, x=torch.rand(2), y=torch.rand(2)) == Traits()


def test_two_arguments_that_may_not_be_one_tensor_are_found():
    found = traits_of(lambda self, x, y: x if x is y else x + y, x=torch.rand(2), y=torch.rand(2))
    assert found.tensors == ("in memory of its own",)
    require_traits(found.tensors, {"x": torch.rand(2), "y": torch.rand(2)})
    both = torch.rand(4)
    require_traits(found.tensors, {"x": both[:2], "y": both[2:]})
    with pytest.raises(ArgumentError, match=r"where: y\n.*a tensor in memory of its own"):
        require_traits(found.tensors, {"x": both[:3], "y": both[2:]})


views = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 12)), max_size=3)


@given(first=views, second=views, offset=st.integers(0, 20))
def test_two_views_overlap_if_they_have_an_element_in_common(first, second, offset):
    numbers = torch.arange(200)  # of which each value is its place
    views = [
        numbers.as_strided([size for size, _ in axes], [stride for _, stride in axes], start)
        for axes, start in ((first, 0), (second, offset))
    ]
    common = {*views[0].reshape(-1).tolist()} & {*views[1].reshape(-1).tolist()}
    refusal = pytest.raises(ArgumentError) if common else contextlib.nullcontext()
    with refusal:
        require_traits((APART,), {"x": views[0], "y": views[1]})


def test_only_the_dict_whose_order_matters_is_found():
    def forward(self, batch, options):
        return next(iter(batch["inner"].values())) * options["b"]

    batch = {"inner": {"z": torch.rand(2), "y": torch.rand(2)}, "other": torch.rand(2)}
    assert traits_of(forward, batch=batch, options={"a": 1, "b": 2}).orders == {"batch.inner": ("z", "y")}


def test_a_decision_by_gradients_is_announced():
    found = traits_of(lambda self, x: x * 2 if torch.is_grad_enabled() else x, x=torch.rand(2))
    assert [finding.text for finding in found.findings()] == [
        "the model returns a different result where torch records gradients; the graph returns the one obtained under "
        "torch.no_grad()."
    ]


def test_nothing_is_said_about_a_model_that_never_returns_the_same():
    calls = []

    def forward(self, x):
        calls.append(x)
        return x * len(calls) if x.is_contiguous() else x

    assert traits_of(forward, x=torch.rand(2, 3)) == Traits()


def test_a_layout_for_which_the_model_raises_is_not_asked_for():
    def forward(self, x):
        return x.view(-1) if x.stride(-1) else x

    assert traits_of(forward, x=torch.rand(2, 3)) == Traits()
