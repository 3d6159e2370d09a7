"""exportkit's own rewrites in the registry: they are listed, put in force by name, reported, and undone."""

import pytest
import torch
from torch import nn

import exportkit
from exportkit import apply_patches, clear_patch_mapping, get_patch_mapping, register_patch_mapping
from exportkit.errors import InvalidRequestError
from exportkit.rewrites.table import BUILT_IN
from tests.arguments.generative import ids, padded_left
from tests.rewrites.test_table import mixtral, observed

EXPERTS = "experts as batched matrix products"
LISTS = "lists as one tensor"
LIBRARY = "transformers' own export patches"


class Quiet(nn.Linear):
    def forward(self, input):
        return super().forward(input)


@pytest.fixture(autouse=True)
def _empty():
    clear_patch_mapping()
    yield
    clear_patch_mapping()


def test_the_registry_lists_them_beside_what_users_registered():
    register_patch_mapping({"Linear": Quiet})
    everything = get_patch_mapping(built_in=True)
    assert next(iter(everything)) == "Linear"
    assert {EXPERTS, LISTS, LIBRARY} < set(everything)
    assert get_patch_mapping() == {"Linear": Quiet}
    clear_patch_mapping()
    assert list(get_patch_mapping(built_in=True)) == list(BUILT_IN)


def test_experts_can_be_exported_by_torch_alone_while_their_rewrite_is_in_force():
    model, tokens = mixtral(), ids(6, batch=3)
    before, expected = model.get_experts_implementation(), model(tokens).logits
    with apply_patches(model, built_in=[EXPERTS]) as applied, torch.no_grad():
        assert model.get_experts_implementation() == {"": "batched_mm"}
        assert torch.allclose(model(tokens).logits, expected, atol=1e-5)
        dynamic = {"input_ids": {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}, "use_cache": None}
        program = torch.export.export(model, (), {"input_ids": tokens, "use_cache": False}, dynamic_shapes=dynamic)
    assert model.get_experts_implementation() == before
    assert applied.built_in == (EXPERTS,)
    assert str(applied) == f"built-in: {EXPERTS}"
    other = ids(9, batch=2)
    assert torch.allclose(program.module()(input_ids=other, use_cache=False).logits, model(other).logits, atol=1e-5)


def test_experts_are_put_back_in_any_order_and_after_an_exception():
    model = mixtral()
    before = model.get_experts_implementation()
    first, second = (apply_patches(model, built_in=[EXPERTS]) for _ in range(2))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert model.get_experts_implementation() == {"": "batched_mm"}
    second.__exit__(None, None, None)
    assert model.get_experts_implementation() == before
    with pytest.raises(KeyError), apply_patches(model, built_in=[EXPERTS]):
        raise KeyError
    assert model.get_experts_implementation() == before


class Images(nn.Module):
    """Treats its images one after the other, as image encoders do."""

    def forward(self, images):
        return torch.cat(list(images)) * 2


def test_lists_of_images_can_be_exported_by_torch_alone_while_their_rewrite_is_in_force():
    model, images = Images(), torch.randn(3, 4, 5)
    with apply_patches(model, built_in=[LISTS]) as applied:
        program = torch.export.export(model, (images,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    assert applied.built_in == (LISTS,)
    assert "__iter__" in vars(torch.Tensor)
    more = torch.randn(7, 4, 5)
    assert torch.equal(program.module()(more), model(more))
    with pytest.raises(Exception, match="specialized"):
        torch.export.export(model, (images,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))


def test_the_patches_of_the_library_are_put_in_force_and_taken_back():
    from exportkit._torch_compat.transformers import exporter_patches

    targets = [target for target in exporter_patches("onnx") if isinstance(target[0], type)]
    before = [vars(owner).get(name) for owner, name, _ in targets]
    assert targets
    with apply_patches(mixtral(), built_in=[LIBRARY]):
        inside = [vars(owner).get(name) for owner, name, _ in targets]
    assert all(now is not then for now, then in zip(inside, before, strict=True))
    assert [vars(owner).get(name) for owner, name, _ in targets] == before


def test_a_rewrite_and_a_replacement_are_reported_together():
    register_patch_mapping({"Linear": Quiet, "Missing": Quiet})
    model = nn.Sequential(nn.Linear(2, 2))
    with apply_patches(model, built_in=[LISTS]) as applied:
        assert str(applied).splitlines() == [
            f"0: torch.nn.modules.linear.Linear -> {__name__}.Quiet (class)",
            f"built-in: {LISTS}",
            "unused: Missing",
        ]


def test_a_name_that_no_rewrite_has_names_the_nearest_and_changes_nothing():
    register_patch_mapping({"Linear": Quiet})
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(InvalidRequestError) as error, apply_patches(model, built_in=["experts as batched products"]):
        pass
    assert str(error.value).startswith("There is no built-in rewrite 'experts as batched products'.\n  hint: nearest: ")
    assert EXPERTS in str(error.value)
    assert type(model[0]) is nn.Linear


def test_a_rewrite_needs_a_model_and_no_arguments_of_a_trace():
    with pytest.raises(InvalidRequestError, match="needs the model"), apply_patches(built_in=[LISTS]):
        pass
    with (
        pytest.raises(InvalidRequestError, match=r"only works inside export\(\)"),
        apply_patches(nn.Linear(2, 2), built_in=["only uncached encoder states projected"]),
    ):
        pass


def test_an_export_says_which_rewrites_and_replacements_it_was_made_with():
    from transformers.models.mixtral.modeling_mixtral import MixtralRMSNorm

    class OtherNorm(MixtralRMSNorm):
        def forward(self, hidden_states):
            return super().forward(hidden_states)

    model = mixtral()
    observer = observed(model, padded_left(7))
    register_patch_mapping({"MixtralRMSNorm": OtherNorm})
    with apply_patches(model):
        exported = exportkit.export(model, observer)
    findings = [finding for finding in exported.plan.findings if finding.kind == "exported with"]
    assert [finding.text for finding in findings] == [
        f"exported with: {EXPERTS}, MixtralRMSNorm replaced by OtherNorm (5 modules)."
    ]
    assert type(model.model.norm) is MixtralRMSNorm


def test_an_export_without_rewrites_says_nothing_of_them():
    model = nn.Sequential(nn.Linear(4, 2)).eval()
    observer = exportkit.InputObserver()
    with observer(model):
        model(torch.ones(3, 4))
    assert not [finding for finding in exportkit.export(model, observer).plan.findings if "with" in finding.kind]
