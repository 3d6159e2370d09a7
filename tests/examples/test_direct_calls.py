"""Multimodal models called directly: one graph for the first call with pixels and for later calls without."""

import pytest
import torch

import exportkit
from tests.arguments.generative import qwen2_5_vl
from tests.examples.test_multimodal_loop import GRID, IMAGE, gemma3, llava


def pixels_of(count, seed=0):
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


def prompt(batch, text, images=1, seed=1):
    """Token ids with the given number of images at the beginning of each row."""
    ids = torch.randint(3, 90, (batch, text), generator=torch.Generator().manual_seed(seed))
    return torch.cat([torch.full((batch, 4 * images), IMAGE), ids], dim=1)


def loop(model, first, steps, masked=True):
    """Returns the logits of a first call with an image, and of the single tokens after it."""
    out = model(**first, use_cache=True)
    logits, mask = [out["logits"]], first["attention_mask"]
    for _ in range(steps):
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        more = {"attention_mask": mask} if masked else {}
        token = out["logits"][:, -1:].argmax(-1)
        out = model(input_ids=token, past_key_values=out["past_key_values"], use_cache=True, **more)
        logits.append(out["logits"])
    return torch.cat(logits, dim=1)


def llava_inputs(batch, text, images=1):
    ids = prompt(batch, text, images)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels_of(batch * images)}


def gemma3_inputs(batch, text, images=1):
    given = llava_inputs(batch, text, images)
    return {**given, "token_type_ids": (given["input_ids"] == IMAGE).long()}


def qwen_inputs(batch, text, images=1):
    ids = torch.cat([torch.full((batch, 1), 95), prompt(batch, text, images)], dim=1)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == IMAGE).int(),
        "pixel_values": torch.randn(batch * images * 16, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(0)),
        "image_grid_thw": torch.tensor([GRID] * batch * images),
    }


def exported(build, inputs, masked=True):
    torch.manual_seed(0)
    model, observer = build().eval(), exportkit.InputObserver()
    with torch.no_grad(), observer(model):
        loop(model, inputs(2, 5), 2, masked)
    return model, exportkit.export(model, observer)


@pytest.mark.parametrize(("build", "inputs"), [(llava, llava_inputs), (gemma3, gemma3_inputs)])
def test_one_graph_serves_a_call_with_images_and_calls_without(build, inputs, tmp_path):
    model, export = exported(build, inputs)
    assert isinstance(export, exportkit.Exported)
    assert not [finding for finding in export.plan.findings if finding.kind == "missing input"]
    onnx_model = export.to_onnx(tmp_path / "model.onnx")
    report = onnx_model.verify()
    assert report.ok, report
    assert {row.status for row in report.rows} <= {"proven", "outside", "no call"}
    assert {row.sizes["images"] for row in report.rows} >= {0, 2}
    for batch, text, images in ((1, 6, 1), (3, 4, 1), (1, 5, 3)):
        given = inputs(batch, text, images)
        with torch.no_grad():
            expected = loop(model, given, 3)
        torch.testing.assert_close(loop(onnx_model, given, 3), expected, atol=1e-4, rtol=1e-3)


def test_a_model_that_takes_a_mask_only_in_the_first_call_needs_two_programs(tmp_path):
    """Qwen2.5-VL computes positions from the grids of the first call, and continues from a state that it keeps."""
    model, export = exported(lambda: qwen2_5_vl()[0], qwen_inputs, masked=False)
    assert list(export.programs) == ["prefill", "decode"]
    programs = export.save(tmp_path / "out")
    report = programs.verify()
    assert report.ok, report
    for batch, text in ((1, 6), (3, 4)):
        given = qwen_inputs(batch, text)
        with torch.no_grad():
            expected = loop(model, given, 3, masked=False)
        for runner in (programs, exportkit.load(tmp_path / "out")):
            torch.testing.assert_close(loop(runner, given, 3, masked=False), expected, atol=1e-4, rtol=1e-3)
