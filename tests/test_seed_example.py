"""Three basic examples of the observer: what is inferred from them, and that the result exports."""

import pytest
import torch

from exportkit import InputObserver, register_flattening_functions, string_type
from tests.models import HEAD_SIZE, Add, IdsDecoder, ImageDecoder, PastDecoder, ZerosDecoder, random_cache, random_ids

D = torch.export.Dim.DYNAMIC
DECODERS = [IdsDecoder, ZerosDecoder, PastDecoder]


def _ones(*shape):
    return torch.ones(shape, dtype=torch.int64)


def _observe_add():
    model, observer = Add(), InputObserver()
    with observer(model):
        model(torch.randn(2, 6), torch.randn(1, 6))
        model(torch.randn(3, 7), torch.randn(1, 7))
        model(torch.randn(4, 8), torch.randn(1, 8))
    return model, observer


def _observe_decoder(model):
    observer = InputObserver()
    with observer(model):
        model(random_ids(1, 10), attention_mask=_ones(1, 10), past_key_values=random_cache(10))
        model(random_ids(1, 1), attention_mask=_ones(1, 11), past_key_values=random_cache(11))
    return observer


def _observe_image_decoder():
    model, observer = ImageDecoder(), InputObserver(value_if_missing={"pixel_values": torch.empty((0, 3, 224, 224))})
    with observer(model):
        model(input_ids=random_ids(1, 20), pixel_values=torch.randn(1, 3, 224, 224), attention_mask=_ones(1, 20))
        for past in (20, 21):
            cache = random_cache(past)
            model(input_ids=random_ids(1, 1), attention_mask=_ones(1, past + 1), past_key_values=cache)
    return model, observer


def _input_shapes(program):
    """Shapes of the user's inputs in a program, with symbols for the dynamic axes."""
    names = set(program.graph_signature.user_inputs)
    nodes = (node for node in program.graph.nodes if node.name in names)
    return [tuple(node.meta["val"].shape) for node in nodes]


def _dynamic(shapes):
    return [[axis for axis, size in enumerate(shape) if not isinstance(size, int)] for shape in shapes]


def test_add_is_inferred_from_three_calls():
    _, observer = _observe_add()

    assert observer.num_obs() == 3
    assert observer.infer_dynamic_shapes() == ({0: D, 1: D}, {1: D})
    assert string_type(observer.infer_arguments(), with_shape=True) == "(T1s2x6,T1s1x6)"


def test_add_exports_with_the_inferred_shapes():
    model, observer = _observe_add()

    arguments = observer.infer_arguments(exportable=True)
    program = torch.export.export(model, arguments, dynamic_shapes=observer.infer_dynamic_shapes())

    assert _dynamic(_input_shapes(program)) == [[0, 1], [1]]
    x, y = torch.randn(9, 5), torch.randn(1, 5)
    assert torch.equal(program.module()(x, y), x + y)


def test_decoder_is_inferred_from_prefill_and_one_token():
    observer = _observe_decoder(IdsDecoder())

    assert observer.infer_dynamic_shapes(set_batch_dimension_for=True) == {
        "input_ids": {0: D, 1: D},
        "attention_mask": {0: D, 1: D},
        "past_key_values": [{0: D, 2: D}] * 4,
    }
    assert string_type(observer.infer_arguments(), with_shape=True) == (
        "dict(input_ids:T7s1x10,attention_mask:T7s1x10,past_key_values:DynamicCache("
        "key_cache=#2[T1s1x4x10x32,T1s1x4x10x32], value_cache=#2[T1s1x4x10x32,T1s1x4x10x32]))"
    )


@pytest.mark.parametrize("decoder", DECODERS)
def test_decoder_exports_with_the_inferred_shapes(decoder):
    model = decoder()
    observer = _observe_decoder(model)
    shapes = observer.infer_dynamic_shapes(set_batch_dimension_for=True)

    arguments = observer.infer_arguments(exportable=True)
    with register_flattening_functions():
        program = torch.export.export(model, (), arguments, dynamic_shapes=shapes)
        module = program.module()
        for batch, length, past in ((1, 1, 5), (3, 4, 7)):
            call = {
                "input_ids": random_ids(batch, length),
                "attention_mask": torch.randint(0, 2, (batch, past)).index_fill(1, torch.tensor([0]), 1),
                "past_key_values": random_cache(past, batch=batch),
            }
            torch.testing.assert_close(module(**call), model(**call))

    assert _dynamic(_input_shapes(program)) == [[0, 1], [0, 1], *[[0, 2]] * 4]


def test_image_decoder_is_inferred_although_only_the_prompt_has_images():
    _, observer = _observe_image_decoder()

    shapes = observer.infer_dynamic_shapes()

    assert list(shapes) == ["input_ids", "pixel_values", "attention_mask", "past_key_values"]
    assert shapes["pixel_values"] == {0: D}
    assert string_type(observer.infer_arguments(), with_shape=True) == (
        "dict(input_ids:T7s1x1,pixel_values:T1s0x3x224x224,attention_mask:T7s1x21,past_key_values:DynamicCache("
        "key_cache=#2[T1s1x4x20x32,T1s1x4x20x32], value_cache=#2[T1s1x4x20x32,T1s1x4x20x32]))"
    )


def test_image_decoder_exports_with_the_inferred_shapes():
    model, observer = _observe_image_decoder()
    shapes = observer.infer_dynamic_shapes(set_batch_dimension_for=True)

    arguments = observer.infer_arguments(exportable=True)
    with register_flattening_functions():
        program = torch.export.export(model, (), arguments, dynamic_shapes=shapes)
        module = program.module()
        for batch, images in ((1, 0), (2, 3)):
            call = {
                "input_ids": random_ids(batch, 2),
                "pixel_values": torch.randn(images, 3, 224, 224),
                "attention_mask": _ones(batch, 6),
                "past_key_values": random_cache(4, batch=batch),
            }
            output = module(**call)
            assert output.shape == (batch, 2, HEAD_SIZE)
            torch.testing.assert_close(output, model(**call))

    assert _dynamic(_input_shapes(program)) == [[0, 1], [0], [0, 1], *[[0, 2]] * 4]
