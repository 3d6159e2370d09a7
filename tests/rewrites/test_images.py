"""Encoders of images: any number of them, grids and sizes that differ, in one graph that equals eager."""

import builtins

import pytest
import torch

import exportkit
from exportkit.onnx_files import decompositions
from exportkit.probing.simplify import as_simplified
from exportkit.rewrites import images as rewrites_of_images
from exportkit.rewrites.attention import packed_attention
from exportkit.rewrites.grids import grids_in_graph
from exportkit.rewrites.lengths import symbolic_lengths
from exportkit.rewrites.positions import get_rope_index, padded_table
from exportkit.rewrites.table import library_patches, matching_rewrites
from exportkit.trees import flatten
from tests.arguments.generative import IMAGE_TOKEN, TEXT, qwen2_5_vl

VIT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32}
SQUARE, WIDE, HIGH = (1, 4, 4), (1, 4, 8), (1, 8, 4)


def llava(vision=None, **changes):
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    vision = vision or CLIPVisionConfig(**VIT, patch_size=16)
    return LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=LlamaConfig(**TEXT), image_token_index=IMAGE_TOKEN, **changes)
    ).eval()


def pixtral():
    from transformers import PixtralVisionConfig

    changes = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
    return llava(PixtralVisionConfig(**VIT, patch_size=8), **changes)


def llava_next():
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaNextConfig, LlavaNextForConditionalGeneration

    config = LlavaNextConfig(
        vision_config=CLIPVisionConfig(**VIT, patch_size=16),
        text_config=LlamaConfig(**TEXT),
        image_token_index=IMAGE_TOKEN,
        image_grid_pinpoints=[[32, 64], [64, 32], [64, 64]],
    )
    return LlavaNextForConditionalGeneration(config).eval()


def qwen():
    return qwen2_5_vl()[0].eval()


def patches(*grids):
    grid = torch.tensor(grids)
    return {"pixel_values": torch.randn(int(grid.prod(-1).sum()), 96), "image_grid_thw": grid}


def images(count):
    return {"pixel_values": torch.randn(count, 3, 32, 32)}


def padded(*sizes):
    return images(len(sizes)) | {"image_sizes": torch.tensor(sizes)}


def tiled(*sizes):
    return {"pixel_values": torch.randn(len(sizes), 3, 3, 32, 32), "image_sizes": torch.tensor(sizes)}


def exported_features(model, calls):
    observer = exportkit.InputObserver()
    with observer(model, method_name="get_image_features"), torch.no_grad():
        for call in calls:
            model.get_image_features(**call)
    return exportkit.export(model, observer)


def joined(exported, result):
    return as_simplified(flatten(result).tensors(), exported.traced.joined_outputs, ())


CASES = {
    "llava": (llava, [images(2), images(3)], [images(1), images(5)], {"lists as one tensor"}),
    "qwen2_5_vl": (
        qwen,
        [patches(SQUARE, SQUARE), patches(WIDE, SQUARE, HIGH)],
        [patches(SQUARE), patches((1, 8, 8), SQUARE, WIDE, HIGH), patches((2, 4, 4), SQUARE)],
        {"packed images as one masked attention", "grids of patches read in the graph", "lists as one tensor"},
    ),
    "pixtral": (
        pixtral,
        [padded((16, 32), (32, 32)), padded((16, 32), (32, 16), (24, 24))],
        [padded((8, 16)), padded((32, 32), (8, 24), (16, 16), (32, 8))],
        {"images selected out of their padding", "lists as one tensor"},
    ),
    "llava_next": (
        llava_next,
        [tiled((32, 64), (32, 64)), tiled((32, 64), (64, 32), (20, 50))],
        [tiled((64, 32)), tiled((64, 20), (32, 64), (30, 60), (64, 32))],
        {"tiles of images packed by one selection", "lists as one tensor"},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_features_of_any_number_of_images_of_any_size(name, tmp_path):
    build, seen, unseen, rules = CASES[name]
    torch.manual_seed(0)
    model = build()
    exported = exported_features(model, seen)
    assert {*exported.rules} == rules
    onnx_model = exported.to_onnx(tmp_path / "model.onnx")
    report = onnx_model.verify()
    assert report.ok, str(report)
    for call in unseen:
        with torch.no_grad():
            expected = joined(exported, model.get_image_features(**call))
        got = joined(exported, onnx_model(**call))
        assert expected.keys() == got.keys()
        for path, tensor in expected.items():
            torch.testing.assert_close(got[path], tensor, rtol=1e-4, atol=1e-5, msg=lambda text, p=path: f"{p}: {text}")


def test_a_list_whose_parts_are_equally_long_comes_back_as_the_model_returns_it(tmp_path):
    model = llava()
    exported = exported_features(model, [images(2), images(3)])
    call = images(4)
    with torch.no_grad():
        expected = model.get_image_features(**call).pooler_output
    got = exported.to_onnx(tmp_path / "model.onnx")(**call).pooler_output
    assert [tuple(part.shape) for part in got] == [tuple(part.shape) for part in expected] == [(4, 32)] * 4
    assert exported.traced.joined_outputs == ("pooler_output",)


def prompt(rows):
    """Token ids in which each grid of a row has its run of image tokens, and what belongs to them."""
    runs = [[t for t, h, w in row for t in [IMAGE_TOKEN] * (t * h * w // 4) + [7]] for row in rows]
    tokens = torch.randint(10, 90, (len(rows), max(map(len, runs)) + 3))
    for row, run in zip(tokens, runs, strict=True):
        row[1 : 1 + len(run)] = torch.tensor(run)
    grids = [grid for row in rows for grid in row]
    types = (tokens == IMAGE_TOKEN).int()
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "mm_token_type_ids": types} | patches(
        *grids
    )


def test_a_call_with_pixels_is_one_graph(tmp_path):
    torch.manual_seed(0)
    model = qwen2_5_vl()[0].eval()
    observer = exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for rows in ([[SQUARE], [WIDE]], [[HIGH, SQUARE], [SQUARE], [WIDE]]):
            model(**prompt(rows))
    with exportkit.register_flattening_functions(patch_transformers=True):
        exported = exportkit.export(model, observer)
        assert type(model.model.rope_deltas) is torch.Tensor  # none of those of the trace
        onnx_model = exported.to_onnx(tmp_path / "model.onnx")
        call = prompt([[WIDE, WIDE], [SQUARE], [SQUARE, (1, 8, 8)], [HIGH]])
        with torch.no_grad():
            expected = model(**call).logits
        torch.testing.assert_close(onnx_model(**call).logits, expected, rtol=1e-4, atol=1e-5)
    assert [(p.value, p.rows, p.per) for p in exported.plan.placeholders] == [(IMAGE_TOKEN, "pixel_values", 4)]
    assert [grid.path for grid in exported.plan.grids] == ["image_grid_thw"]
    assert [marker.path for marker in exported.plan.markers] == ["mm_token_type_ids"]
    assert exportkit.Plan.from_json(exported.plan.to_json()).grids == exported.plan.grids


@pytest.mark.parametrize("grids", [[SQUARE], [SQUARE, WIDE, HIGH], [(2, 4, 8), (1, 8, 8)], [(3, 12, 20)]])
def test_an_encoder_returns_the_same_with_grids_read_in_the_graph(grids):
    model = qwen2_5_vl()[0].eval()
    call = patches(*grids)
    with torch.no_grad():
        expected = model.get_image_features(**call).pooler_output
        with grids_in_graph(model), packed_attention(model):
            got = model.get_image_features(**call).pooler_output
        again = model.get_image_features(**call).pooler_output
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))


@pytest.mark.parametrize("hidden", [0, 2])
def test_positions_of_image_tokens_are_those_of_the_model(hidden):
    model = qwen2_5_vl()[0].eval().model
    call = prompt([[SQUARE, WIDE], [HIGH], [(1, 8, 8)]])
    mask = call["attention_mask"].clone()
    mask[1, mask.shape[1] - hidden :] = 0
    given = {name: call[name] for name in ("input_ids", "mm_token_type_ids", "image_grid_thw")} | {
        "attention_mask": mask
    }
    for expected, got in zip(model.get_rope_index(**given), get_rope_index(model, **given), strict=True):
        assert torch.equal(expected, got)


def test_tables_of_positions_are_resized_as_torch_resizes_them():
    table, shapes = torch.randn(6, 6, 3), [(3, 5), (6, 6), (1, 14), (12, 2)]
    got = padded_table(table, torch.tensor(shapes), 40)
    for (height, width), positions in zip(shapes, got, strict=True):
        resized = torch.nn.functional.interpolate(
            table.permute(2, 0, 1)[None], size=(height, width), mode="bilinear", align_corners=False, antialias=True
        )
        expected = resized[0].flatten(1).T
        torch.testing.assert_close(positions[: height * width], expected, atol=1e-5, rtol=1e-5)
        assert positions[height * width :].eq(positions[0]).all()


def test_tiles_are_packed_as_the_model_packs_them():
    model = llava_next().model
    sizes = [(32, 64), (64, 32), (33, 64), (20, 64), (64, 50), (100, 31), (31, 200), (400, 400), (7, 5)]
    assert rewrites_of_images._packs_the_same(model, torch.tensor(sizes))


def test_a_decoder_of_features_needs_no_rewrite_for_images():
    model, inputs = qwen2_5_vl()
    names = [rewrite.name for rewrite in matching_rewrites(model, {"input_ids": inputs["input_ids"]})]
    assert not any("image" in name or "grids" in name for name in names)


@pytest.mark.parametrize("rewrite", [library_patches, symbolic_lengths])
def test_rewrites_of_the_last_resort_leave_nothing_behind(rewrite):
    model = llava()
    with rewrite(model):
        pass
    places = [torch, torch.Tensor, torch.nn.functional, __import__(type(model).__module__, fromlist=["_"])]
    before = [dict(vars(place)) for place in places]
    with pytest.raises(KeyError), rewrite(model):  # noqa: PT012 - the exception leaves the context
        assert [dict(vars(place)) for place in places] != before
        raise KeyError
    assert [dict(vars(place)) for place in places] == before


class Rows(torch.nn.Module):
    """Takes a Python int out of the batch, as some detection models do."""

    def forward(self, x):
        return torch.cat([x, torch.zeros(len(x), 1)], dim=1)


def test_a_length_taken_by_python_is_kept_symbolic(tmp_path):
    model, observer = Rows(), exportkit.InputObserver()
    with observer(model):
        for batch in (2, 3):
            model(torch.randn(batch, 4))
    exported = exportkit.export(model, observer)
    assert exported.rules == ("lengths of tensors kept symbolic",)
    assert any("lengths of tensors kept symbolic" in finding.text for finding in exported.plan.findings)
    report = exported.to_onnx(tmp_path / "model.onnx").verify()
    assert report.ok, str(report)


class Resized(torch.nn.Module):
    """Rounds the size of an image with ``int``, as models of depth do: torch traces on with the number."""

    def forward(self, images):
        height, width = images.shape[2:]
        size = int(height // 4 * 4), int(width * 0.5)
        assert isinstance(size[0], int | torch.SymInt)
        return torch.nn.functional.interpolate(images, size=size, mode="bilinear", align_corners=False)


def test_a_size_rounded_by_int_is_kept_symbolic(tmp_path):
    model, observer = Resized(), exportkit.InputObserver()
    with observer(model):
        for height, width in ((16, 24), (24, 16)):
            model(torch.randn(2, 3, height, width))
    exported = exportkit.export(model, observer)
    assert exported.rules == ("lengths of tensors kept symbolic",)
    assert not any(finding.kind == "fixed branch" for finding in exported.plan.findings)
    report = exported.to_onnx(tmp_path / "model.onnx").verify()
    assert report.ok, str(report)


def test_int_is_a_type_still_while_lengths_are_kept():
    with symbolic_lengths(Resized()):  # this module defines the class, so it is int here, too
        assert int is not builtins.int
        assert int("ff", 16) == 255
        assert type(int(2.5)) is builtins.int
        assert isinstance(3, int)
        assert isinstance(3, int | None)
        assert not isinstance("3", int)
        assert issubclass(bool, int)


class Masked(torch.nn.Module):
    """Subtracts integers from a float, which torch.onnx translates only in the form that transformers gives it."""

    def forward(self, x, mask):
        return x * (1.0 - mask)


def test_transformers_patches_are_tried_where_the_translation_fails(tmp_path, monkeypatch):
    monkeypatch.delitem(decompositions._DECOMPOSITIONS, torch.ops.aten.rsub.Scalar)  # exportkit has no form, too
    model, observer = Masked(), exportkit.InputObserver()
    with observer(model):
        for batch in (2, 3):
            model(torch.randn(batch, 4), torch.ones(batch, 4, dtype=torch.int64))
    onnx_model = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    assert onnx_model.exported.rules == ("transformers' own export patches",)
    report = onnx_model.verify()
    assert report.ok, str(report)
    assert any("transformers' own export patches" in finding for finding in report.findings)
