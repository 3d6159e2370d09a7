"""Encoders that loop over grids of patches in Python: one graph that is right for grids that were never recorded."""

import pytest
import torch

import exportkit
from exportkit.errors import ExportkitError
from exportkit.rewrites.grids import get_vision_nearest_position_ids, grids_in_graph, is_in_encoder
from exportkit.rewrites.table import matching_rewrites
from exportkit.trees import flatten

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "patch_size": 4}
SQUARE, WIDE, HIGH, FRAMES = (1, 4, 4), (1, 4, 10), (1, 12, 2), (3, 2, 6)
RAGGED = [[SQUARE], [WIDE, HIGH], [FRAMES, SQUARE, HIGH, FRAMES], [(1, 2, 2), (2, 2, 2)], [(1, 18, 22)]]


def convolving():
    from transformers import Lfm3VlVisionConfig, Lfm3VlVisionModel

    layers = ["conv", "full_attention", "conv"]
    changes = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    return Lfm3VlVisionModel(Lfm3VlVisionConfig(**(SMALL | changes), layer_types=layers, temporal_patch_size=2))


def resizing():
    from transformers import Cosmos3EdgeVisionConfig, Cosmos3EdgeVisionModel

    return Cosmos3EdgeVisionModel(Cosmos3EdgeVisionConfig(**SMALL, num_attention_heads=4, num_patches=36))


def shuffling():
    from transformers import MuseSparkVisionConfig, MuseSparkVisionModel

    layers = ["window_attention", "full_attention"]
    changes = {"hidden_size": 64, "num_attention_heads": 4, "layer_types": layers}
    return MuseSparkVisionModel(MuseSparkVisionConfig(**(SMALL | changes), pos_emb_height=4, pos_emb_width=4))


def merging(layer=0):
    from transformers import MiniCPMOcrVisionConfig, MiniCPMOcrVisionModel

    config = MiniCPMOcrVisionConfig(**SMALL, num_attention_heads=2, image_size=24, insert_layer_id=layer)
    return MiniCPMOcrVisionModel(config)


def pooling():
    from transformers import Kimi_K25VisionConfig, Kimi_K25VisionModel

    config = Kimi_K25VisionConfig(**SMALL, num_attention_heads=2, pos_emb_height=6, pos_emb_width=6)
    return Kimi_K25VisionModel(config)


def patches(*shape):
    def call(grids):
        grid = torch.tensor(grids)
        return {"pixel_values": torch.randn(int(grid.prod(-1).sum()), *shape), "grid_thw": grid}

    return call


def strip(grids):
    """Images as one row of patches, four by four; each frame is an image."""
    sizes = [grid[1:] for grid in grids for _ in range(grid[0])]
    count = sum(height * width for height, width in sizes)
    return {"pixel_values": torch.randn(1, 3, 4, 4 * count), "target_sizes": torch.tensor(sizes, dtype=torch.int32)}


CASES = {
    "convolving": (convolving, patches(96), "images convolved on one canvas"),
    "resizing": (resizing, patches(48), "tables of positions resized in the graph"),
    "shuffling": (shuffling, patches(96), "grids of patches read in the graph"),
    "merging": (merging, strip, "grids of patches read in the graph"),
}


def exported(model, calls, tmp_path):
    observer = exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for call in calls:
            model(**call)
    result = exportkit.export(model, observer)
    onnx_model = result.to_onnx(tmp_path / "model.onnx")
    report = onnx_model.verify()
    assert report.ok, str(report)
    return result, onnx_model


def assert_equal(model, onnx_model, call):
    with torch.no_grad():
        expected = flatten(model(**call)).tensors()
    got = flatten(onnx_model(**call)).tensors()
    assert {*got} == {*expected}
    for path, tensor in expected.items():
        torch.testing.assert_close(got[path], tensor, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_an_encoder_recorded_with_equal_grids_takes_any_grids(name, tmp_path):
    build, call, rule = CASES[name]
    torch.manual_seed(0)
    model = build().eval()
    result, onnx_model = exported(model, [call([SQUARE] * 2), call([SQUARE] * 3)], tmp_path)
    assert rule in result.rules
    for grids in RAGGED:
        assert_equal(model, onnx_model, call(grids))


def test_frames_are_pooled_if_all_images_have_as_many(tmp_path):
    torch.manual_seed(0)
    model, call = pooling().eval(), patches(3, 4, 4)
    _, onnx_model = exported(model, [call([SQUARE] * 2), call([SQUARE] * 3)], tmp_path)
    for grids in ([SQUARE, WIDE, HIGH], [FRAMES], [(2, 4, 4), (2, 2, 10)], [(4, 2, 2)]):
        assert_equal(model, onnx_model, call(grids))
    for grids in ([FRAMES, SQUARE], [SQUARE, FRAMES], [(1, 3, 4)], [(5, 4, 4)]):
        with pytest.raises(ExportkitError):
            onnx_model(**call(grids))


def test_grids_that_cannot_be_merged_are_refused_and_not_answered(tmp_path):
    """The model returns mixed up embeddings for some of them, and raises for others."""
    model, call = resizing().eval(), patches(48)
    _, onnx_model = exported(model, [call([SQUARE] * 2), call([SQUARE] * 3)], tmp_path)
    for grids in ([(1, 3, 4)], [(1, 3, 3)], [SQUARE, (1, 2, 3), (1, 3, 2)]):
        with pytest.raises(ExportkitError):
            onnx_model(**call(grids))
    for other in ([SQUARE, (1, 2, 2)], [SQUARE]):  # fewer patches and fewer images than the rows
        with pytest.raises(ExportkitError):
            onnx_model(**(call([SQUARE] * 2) | {"grid_thw": torch.tensor(other)}))


@pytest.mark.parametrize("layer", [0, 6])
def test_sizes_without_frames_are_grids(layer):
    """With a merger of windows after the first layer, and without one."""
    torch.manual_seed(0)
    model = merging(layer).eval()
    for grids in RAGGED:
        call = strip(grids)
        with torch.no_grad():
            expected = model(**call).last_hidden_state
            with grids_in_graph(model):
                got = model(**call).last_hidden_state
        assert "grids of patches read in the graph" in [rule.name for rule in matching_rewrites(model, call)]
        torch.testing.assert_close(got, expected)


class Interrupted(torch.nn.Module):
    def forward(self, pixel_values, grid_thw):
        raise KeyboardInterrupt  # as an attempt that is given up; torch runs no hook then


def test_a_call_that_is_given_up_leaves_nothing_behind():
    model = Interrupted()
    with pytest.raises(KeyboardInterrupt), grids_in_graph(model):
        model(torch.ones(3, 4), torch.tensor([SQUARE]))
    assert not is_in_encoder()


def test_the_nearest_entries_of_a_table_are_exactly_those_of_the_model():
    """A place between two entries is on their border for many sizes, so rounding decides."""
    from transformers.vision_utils import get_vision_nearest_position_ids as original

    for side in (1, 2, 3, 5, 6, 7, 10, 14, 16, 27, 32, 70):
        sizes = [*range(1, 40), *(side * factor for factor in (2, 3, 7)), 97, 140]
        targets = torch.tensor([*zip(sizes, reversed(sizes), strict=True)], dtype=torch.int32)
        assert torch.equal(get_vision_nearest_position_ids(targets, side), original(targets, side)), side


def get_vision_cu_seqlens(grid_thw, merge_temporal=False, kwargs=None):
    """A function of a name that transformers has, which gives something else."""
    return torch.nn.functional.pad(grid_thw[:, 0].cumsum(0), (1, 0))


class Counting(torch.nn.Module):
    def forward(self, rows, grid_thw):
        return get_vision_cu_seqlens(grid_thw)


def test_a_function_that_gives_something_else_is_left_alone():
    model, call = Counting(), {"rows": torch.randn(40, 2), "grid_thw": torch.tensor([SQUARE, HIGH])}
    with grids_in_graph(model):
        assert model(**call).tolist() == [0, 1, 2]


class Convolving(torch.nn.Module):
    """Convolves image by image what a layer with a bias returns, twice; patches come row by row."""

    def __init__(self, divides=False):
        super().__init__()
        self.enter = torch.nn.Linear(6, 8)
        self.wide = torch.nn.Conv2d(8, 8, 5, padding=2)
        self.narrow = torch.nn.Conv2d(8, 8, 3, padding=1, groups=4)
        self.divides = divides

    def forward(self, hidden_states, grid_thw):
        states, start, found = self.enter(hidden_states), 0, []
        for frames, height, width in grid_thw:
            count = frames * height * width
            image = states[start : start + count].view(frames, height, width, 8).permute(0, 3, 1, 2)
            image = self.narrow(self.wide(image).cos())
            image = image / height if self.divides else image
            found.append(image.permute(0, 2, 3, 1).reshape(count, 8))
            start += count
        return torch.cat(found)


class Encoder(torch.nn.Module):
    def __init__(self, convolving):
        super().__init__()
        self.convolving = convolving

    def forward(self, pixel_values, grid_thw):
        from transformers.vision_utils import get_vision_position_ids

        places = get_vision_position_ids(grid_thw, 1)
        return self.convolving(pixel_values, grid_thw.tolist()) + places.sum(-1, keepdim=True)


def test_images_are_convolved_as_if_each_were_alone(tmp_path):
    torch.manual_seed(0)
    model, call = Encoder(Convolving()).eval(), patches(6)
    result, onnx_model = exported(model, [call([SQUARE] * 2), call([SQUARE] * 3)], tmp_path)
    assert "images convolved on one canvas" in result.rules
    for grids in (*RAGGED, [(1, 1, 1), (1, 1, 7)], [(1, 3, 5), (2, 7, 1)]):
        assert_equal(model, onnx_model, call(grids))


def test_a_convolution_whose_result_depends_on_the_size_is_left_alone():
    call = patches(6)([SQUARE, HIGH])
    for divides in (False, True):
        rules = [rule.name for rule in matching_rewrites(Encoder(Convolving(divides)).eval(), call)]
        assert ("images convolved on one canvas" in rules) is not divides
