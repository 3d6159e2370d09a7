"""Replacements in force, in live models and for models that are built: what is swapped, and that all is put back."""

import concurrent.futures
import random
import sys
import types

import pytest
import torch
from torch import nn

from exportkit import apply_patches, capture, clear_patch_mapping, patch_output_recorders, register_patch_mapping
from exportkit.errors import InvalidTypeError, PatchError
from exportkit.swapping.swap import Swap
from tests import models


class Layer(nn.Linear):
    def forward(self, hidden, scale=1.0):
        return super().forward(hidden) * scale


class Negative(Layer):
    def forward(self, hidden, scale=1.0):
        return -super().forward(hidden, scale)


class Sibling(nn.Module):
    """No relative of Layer, with the same attributes."""

    def forward(self, hidden, scale=1.0):
        return hidden @ self.weight.T * scale


class Rebuilt(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, size))
        self.more = nn.Parameter(torch.ones(1))

    @classmethod
    def from_module(cls, original):
        return cls(original.in_features)

    def forward(self, hidden, scale=1.0):
        return hidden @ self.weight.T * scale * self.more


def stack(size=4, count=3):
    model = nn.Sequential(*(Layer(size, size) for _ in range(count)))
    return model.eval()


@pytest.fixture(autouse=True)
def _empty():
    clear_patch_mapping()
    yield
    clear_patch_mapping()


def test_live_modules_change_their_class_and_keep_their_weights():
    model, x = stack(), torch.randn(2, 4)
    weights, before = list(model.parameters()), model(x)
    register_patch_mapping({"Layer": Negative, "Missing": Negative})
    with apply_patches(model) as applied:
        assert [type(module) for module in model] == [Negative] * 3
        assert all(a is b for a, b in zip(model.parameters(), weights, strict=True))
        assert torch.equal(model[0](x), -nn.functional.linear(x, model[0].weight, model[0].bias))
    assert [type(module) for module in model] == [Layer] * 3
    assert torch.equal(model(x), before)
    assert applied.swaps[1] == Swap("1", Layer, Negative, "Layer", "class")
    assert applied.unused == ("Missing",)
    assert len(applied) == 3
    assert str(applied).splitlines()[2:] == [
        f"2: {__name__}.Layer -> {__name__}.Negative (class)",
        "unused: Missing",
    ]


def test_the_model_itself_and_classes_that_are_no_relatives_can_be_swapped():
    model, x = Layer(4, 4), torch.randn(2, 4)
    register_patch_mapping({"Layer": Sibling})
    with apply_patches(model) as applied:
        assert torch.equal(model(x), x @ model.weight.T)
    assert type(model) is Layer
    assert applied.swaps[0].where == ""


def test_modules_are_rebuilt_by_a_class_that_says_how_and_keep_their_weights():
    model, x = stack(), torch.randn(2, 4)
    model.again = model[1]
    originals = list(model)
    register_patch_mapping({"Layer": Rebuilt})
    with apply_patches(model) as applied:
        assert [type(module) for module in model][:3] == [Rebuilt] * 3
        assert model.again is model[1]
        assert model[0].weight is originals[0].weight
        assert model[0].training is False
        torch.testing.assert_close(model[0](x), x @ originals[0].weight.T)
    assert all(a is b for a, b in zip(model, originals, strict=False))
    assert model.again is originals[1]
    assert {swap.how for swap in applied.swaps} == {"rebuilt"}


def test_modules_in_shared_places_come_back_where_they_were():
    model = stack()
    model.append(model[0])
    register_patch_mapping({"Layer": Rebuilt})
    with apply_patches(model):
        assert model[3] is model[0]
    assert model[3] is model[0]
    assert type(model[0]) is Layer


def test_what_returns_no_module_or_has_no_place_is_refused():
    register_patch_mapping({"Layer": Rebuilt})
    with pytest.raises(PatchError, match="no module contains it"), apply_patches(Layer(4, 4)):
        pass
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rebuilt, "from_module", classmethod(lambda cls, original: 3))
        with pytest.raises(PatchError, match="did not return a module"), apply_patches(stack()):
            pass


class Renamed(Layer):
    def forward(self, hiden, scale=1.0):
        return hiden


class Demanding(Layer):
    def forward(self, hidden, scale=1.0, *, mask):
        return hidden


class Turned(Layer):
    def forward(self, scale=1.0, hidden=None):
        return hidden


class Narrow(Layer):
    def forward(self, hidden, *, scale=1.0):
        return hidden


class Anything(Layer):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


class More(Layer):
    def forward(self, hidden, scale=1.0, mask=None):
        return super().forward(hidden, scale)


class Nothing(nn.Module):
    pass


@pytest.mark.parametrize(
    ("replacement", "reason"),
    [
        (Renamed, "no parameter 'hidden' (nearest: 'hiden'); parameter 'hiden' has no default"),
        (Demanding, "parameter 'mask' has no default"),
        (Turned, "parameter 0 is 'scale' instead of 'hidden'; parameter 1 is 'hidden' instead of 'scale'"),
        (Narrow, "'scale' cannot be given by position"),
        (Nothing, "Nothing has no forward"),
    ],
)
def test_a_replacement_with_another_signature_is_refused_before_anything_changes(replacement, reason):
    model = nn.Sequential(nn.ReLU(), Layer(4, 4))
    register_patch_mapping({"ReLU": type("Same", (nn.ReLU,), {}), "Layer": replacement})
    with pytest.raises(PatchError) as error, apply_patches(model):
        pass
    assert f"where: {reason}\n" in str(error.value)
    assert "expected: forward(self, hidden, scale=1.0)" in str(error.value)
    assert [type(module) for module in model] == [nn.ReLU, Layer]


@pytest.mark.parametrize("replacement", [Anything, More])
def test_a_replacement_may_take_more(replacement):
    model = stack()
    register_patch_mapping({"Layer": replacement})
    with apply_patches(model):
        model(torch.ones(1, 4))


def test_a_module_whose_forward_is_replaced_on_the_instance_is_refused():
    model = stack()
    model[1].forward = lambda hidden: hidden
    register_patch_mapping({"Layer": Negative})
    with pytest.raises(PatchError, match="hides the `forward` of its class"), apply_patches(model):
        pass
    assert type(model[0]) is Layer


def test_blocks_nest_overlap_and_are_left_in_any_order():
    model = stack()
    for replacement in (Negative, Rebuilt):
        clear_patch_mapping()
        register_patch_mapping({"Layer": replacement})
        first, second = apply_patches(model), apply_patches(model)
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert type(model[0]) is replacement
        second.__exit__(None, None, None)
        assert type(model[0]) is Layer
    register_patch_mapping({"Layer": Negative}, overwrite=True)
    with apply_patches(model):
        register_patch_mapping({"Layer": More}, overwrite=True)
        with apply_patches(model):
            assert type(model[0]) is More
        assert type(model[0]) is Negative
    assert type(model[0]) is Layer


def test_a_thousand_blocks_with_random_exceptions_in_threads_leave_nothing():
    model = stack()
    register_patch_mapping({"Layer": Negative})

    def work(seed):
        dice = random.Random(seed)
        for _ in range(250):
            try:
                with apply_patches(model if dice.random() < 0.98 else None):
                    if dice.random() < 0.5:
                        raise KeyError
            except KeyError:
                pass

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work, seed) for seed in range(4)]:
            done.result()
    assert {type(module) for module in model} == {Layer}
    assert sys.modules[__name__].Layer is Negative.__base__


@pytest.fixture
def package():
    """A package of somebody else's, with two modules that share a class."""
    defining, using = types.ModuleType("somebody.defining"), types.ModuleType("somebody.using")
    defining.Block = using.Block = using.Renamed = type("Block", (nn.Module,), {"__module__": "somebody.defining"})
    sys.modules.update({"somebody.defining": defining, "somebody.using": using})
    yield defining, using
    for module in (defining, using):
        del sys.modules[module.__name__]


def test_classes_of_any_package_are_replaced_wherever_they_are_known(package):
    defining, using = package
    original = defining.Block
    register_patch_mapping({"somebody.defining.Block": Nothing})
    with apply_patches() as applied:
        assert defining.Block is using.Block is using.Renamed is Nothing
    assert defining.Block is using.Block is using.Renamed is original
    assert sorted(swap.where for swap in applied.swaps) == [
        "somebody.defining.Block",
        "somebody.using.Block",
        "somebody.using.Renamed",
    ]


def test_classes_are_put_back_after_an_exception_and_in_any_order(package):
    defining, _ = package
    original = defining.Block
    register_patch_mapping({"Block": Nothing})
    with pytest.raises(KeyError), apply_patches():
        raise KeyError
    assert defining.Block is original
    first, second = apply_patches(), apply_patches()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert defining.Block is Nothing
    second.__exit__(None, None, None)
    assert defining.Block is original


def test_a_class_that_is_named_in_full_is_replaced_by_one_of_its_signature_only():
    register_patch_mapping({f"{__name__}.Layer": Renamed})
    with pytest.raises(PatchError, match="a different signature"), apply_patches():
        pass
    assert sys.modules[__name__].Layer is Negative.__base__


def test_modules_that_take_a_replacement_during_a_block_give_it_back(package):
    defining, _ = package
    original, late = defining.Block, types.ModuleType("somebody.late")
    register_patch_mapping({"Block": Nothing})
    try:
        with apply_patches():
            sys.modules["somebody.late"] = late
            late.Block = defining.Block
        assert late.Block is original
    finally:
        del sys.modules["somebody.late"]


def test_models_built_in_a_block_have_the_replacement():
    import transformers.models.llama.modeling_llama as llama

    original = llama.LlamaMLP
    replacement = type("OtherMLP", (original,), {})
    register_patch_mapping({"LlamaMLP": replacement})
    with apply_patches():
        inside = models.tiny_llama()
    assert type(inside.model.layers[0].mlp) is replacement
    assert type(models.tiny_llama().model.layers[0].mlp) is original is llama.LlamaMLP


def test_live_models_of_transformers_are_swapped():
    from transformers.models.llama.modeling_llama import LlamaMLP

    class Doubled(LlamaMLP):
        def forward(self, x):
            return 2 * super().forward(x)

    model, ids = models.tiny_llama(), models.random_ids(1, 4)
    before = model(ids).logits
    register_patch_mapping({r"MLP$": Doubled})
    with apply_patches(model) as applied:
        assert not torch.allclose(model(ids).logits, before)
    assert torch.equal(model(ids).logits, before)
    assert [swap.where for swap in applied.swaps] == ["model.layers.0.mlp", "model.layers.1.mlp"]


def test_the_patches_of_transformers_work_beside_ours():
    from transformers import monkey_patching as theirs
    from transformers.models.llama import modeling_llama as llama

    original = llama.LlamaMLP
    mine, other = type("Mine", (original,), {}), type("Other", (llama.LlamaRMSNorm,), {})
    register_patch_mapping({"LlamaMLP": mine})
    theirs.register_patch_mapping({"LlamaRMSNorm": other})
    try:
        with theirs.apply_patches(), apply_patches():
            model = models.tiny_llama()
        with apply_patches(), theirs.apply_patches():
            again = models.tiny_llama()
    finally:
        theirs.clear_patch_mapping()
    for built in (model, again):
        assert type(built.model.layers[0].mlp) is mine
        assert type(built.model.norm) is other
    assert llama.LlamaMLP is original


def test_without_a_registration_nothing_happens():
    with apply_patches() as applied, apply_patches(stack()) as live:
        assert (len(applied), len(live)) == (0, 0)
    assert str(applied) == "nothing was swapped"


def test_only_modules_can_be_given():
    with pytest.raises(InvalidTypeError), apply_patches("model"):
        pass


class Declaring(nn.Sequential):
    _can_record_outputs = {"hidden_states": Layer, "named": ["Layer", nn.ReLU]}  # noqa: RUF012


def test_declarations_of_one_model_follow_the_registry_and_come_back():
    from transformers.utils.output_capturing import OutputRecorder as Theirs

    from exportkit import OutputRecorder

    model, fresh = Declaring(Negative(4, 4), Layer(4, 4)), Declaring(Layer(4, 4))
    model[1]._can_record_outputs = {"a": OutputRecorder(Layer, index=1), "b": Theirs(Layer), "c": None}
    register_patch_mapping({"Layer": Negative})
    before = dict(vars(model))
    patched = patch_output_recorders(model)
    assert model._can_record_outputs == {"hidden_states": Negative, "named": [Negative, nn.ReLU]}
    assert model[1]._can_record_outputs["a"] == OutputRecorder(Negative, index=1)
    assert model[1]._can_record_outputs["b"].target_class is Negative
    with capture(model) as captured:
        model(torch.ones(1, 4))
    assert len(captured["hidden_states"]) == 2
    assert (
        fresh._can_record_outputs
        == Declaring._can_record_outputs
        == {
            "hidden_states": Layer,
            "named": ["Layer", nn.ReLU],
        }
    )
    patched.undo()
    patched.undo()
    assert vars(model) == before
    assert model[1]._can_record_outputs["a"] == OutputRecorder(Layer, index=1)
    with pytest.raises(KeyError), patch_output_recorders(model):
        raise KeyError
    assert vars(model) == before
    first, second = patch_output_recorders(model), patch_output_recorders(model)
    first.undo()
    assert model._can_record_outputs["hidden_states"] is Negative
    second.undo()
    assert vars(model) == before
