"""The proof that a replacement computes the same as what it replaces."""

import pytest
import torch
from torch import nn

from exportkit import check_patch
from exportkit.errors import InvalidTypeError, PatchError


class Layer(nn.Linear):
    def forward(self, x, other=None):
        return {"y": super().forward(x), "kind": "linear"}


class ByHand(Layer):
    def forward(self, x, other=None):
        return {"y": (x[..., None, :] * self.weight).sum(-1) + self.bias, "kind": "linear"}


class Wrong(Layer):
    def forward(self, x, other=None):
        return {"y": nn.Linear.forward(self, x) * 1.02, "kind": "linear"}


class OtherConstant(Layer):
    def forward(self, x, other=None):
        return super().forward(x) | {"kind": "affine"}


class OtherStructure(Layer):
    def forward(self, x, other=None):
        return nn.Linear.forward(self, x)


class OtherSignature(Layer):
    def forward(self, y):
        return super().forward(y)


@pytest.mark.parametrize(
    "inputs",
    [
        torch.randn(3, 4),
        (torch.randn(3, 4),),
        [torch.randn(3, 4)],
        {"x": torch.randn(3, 4)},
        ((torch.randn(3, 4),), {"other": None}),
    ],
)
def test_equal_modules_are_equal(inputs):
    layer = Layer(4, 2)
    checked = check_patch(layer, ByHand, inputs)
    assert sorted(row.path for row in checked.rows) == ["kind", "y"]
    assert 0 <= checked.largest < 1e-6
    assert str(checked).startswith("equal: 2 outputs, largest difference ")
    assert type(layer) is Layer
    assert check_patch(layer, layer, inputs).largest == 0


@pytest.mark.parametrize(
    ("patched", "text"),
    [
        (Wrong, "The replacement of Layer returns different values.\n  where: y\n"),
        (OtherConstant, "returns a different value.\n  where: kind\n  expected: linear\n  got: affine"),
        (OtherStructure, "returns a different structure."),
        (OtherSignature, "no parameter 'x'"),
    ],
)
def test_what_differs_is_named(patched, text):
    layer = Layer(4, 2)
    with pytest.raises(PatchError) as error:
        check_patch(layer, patched, torch.randn(3, 4))
    assert text in str(error.value)
    assert type(layer) is Layer


def test_the_tolerance_can_be_given():
    layer = Layer(4, 2)
    assert check_patch(layer, Wrong, torch.randn(3, 4), rtol=0.1, atol=0.1).largest > 0


def test_both_get_the_same_inputs_random_numbers_and_buffers():
    class Stateful(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x):
            self.calls += 1
            return nn.functional.dropout(x.add_(1), training=True) + self.calls

    model, x, state = Stateful(), torch.randn(8, 8), torch.get_rng_state()
    before = x.clone()
    assert check_patch(model, type("Again", (Stateful,), {}), x).largest == 0
    assert torch.equal(x, before)
    assert model.calls.item() == 0
    assert torch.equal(torch.get_rng_state(), state)


def test_nan_is_equal_to_nan_only():
    class Invalid(nn.Module):
        def forward(self, x):
            return x / 0

    class Zero(Invalid):
        def forward(self, x):
            return x * 0

    x = torch.zeros(2)
    assert check_patch(Invalid(), Invalid(), x).largest == 0
    with pytest.raises(PatchError):
        check_patch(Invalid(), Zero, x)


def test_only_modules_can_be_checked():
    with pytest.raises(InvalidTypeError):
        check_patch(lambda x: x, ByHand, torch.ones(1))
