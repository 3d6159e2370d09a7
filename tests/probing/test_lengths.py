"""How many frames a model takes for each state, found out by asking, and caches of what an encoder returned."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import exportkit
from exportkit.probing.lengths import frames_of_states
from tests import models

CONVOLUTIONS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 6)), min_size=1, max_size=3)


def states_of(frames, convolutions):
    for kernel, stride in convolutions:
        frames = (frames - kernel) // stride + 1
    return frames


@given(CONVOLUTIONS, st.integers(60, 3000))
def test_strides_of_any_encoder_are_found(convolutions, frames):
    states = states_of(frames, convolutions)
    if states < 1:
        return
    asked = []

    def accepts(frames, states):
        asked.append(frames)
        return states_of(frames, convolutions) <= states

    found = frames_of_states(accepts, frames, states, "states")
    assert found is not None
    assert found.evaluate({"states": states}) == frames
    for other in (states + 1, states + 7, 3 * states):
        assert states_of(found.evaluate({"states": other}), convolutions) == other
    assert len(asked) < 60


def test_a_model_that_takes_any_number_of_frames_has_no_relation():
    assert frames_of_states(lambda _frames, _states: True, 28, 7, "states") is None
    assert frames_of_states(lambda _frames, states: states >= 7, 28, 7, "states") is None


def test_a_model_that_takes_one_number_of_states_has_no_relation():
    assert frames_of_states(lambda frames, states: frames == 28 and states == 7, 28, 7, "states") is None


def test_frames_that_do_not_grow_evenly_with_the_states_have_no_relation():
    assert frames_of_states(lambda frames, states: frames <= states * states, 47, 7, "states") is None


@pytest.mark.parametrize("shapes", [[(2, 5), (3, 7)], [(2, 5), (3, 5)], [(1, 5), (1, 7)], [(3, 5), (1, 3), (1, 2)]])
@pytest.mark.parametrize("has_mask", [False, True])
def test_an_encoder_decoder_that_generates_from_several_batches_is_proven(shapes, has_mask, tmp_path):
    def mask(*shape):
        return {"attention_mask": torch.ones(shape, dtype=torch.int64)} if has_mask else {}

    model = models.tiny_t5()
    observer = exportkit.InputObserver()
    with observer(model, store_n_calls=16):
        for shape in shapes:
            model.generate(torch.randint(3, 60, shape), max_new_tokens=4, min_new_tokens=4, num_beams=1, **mask(*shape))
    exported = exportkit.export(model, observer)
    names = [variable.name for variable in exported.plan.variables]
    assert set(names) == {"batch", "sequence", "decoder_sequence", "past_encoder_sequence", "past_sequence"}
    assert exported.plan.variable("past_encoder_sequence").follows == "sequence"
    onnx_model = exported.to_onnx(tmp_path / "model.onnx")
    assert onnx_model.verify().ok
    ids = torch.randint(3, 60, (4, 6))
    expected = model.generate(ids, max_new_tokens=5, num_beams=1, **mask(4, 6))
    with onnx_model.in_place_of(model):
        assert torch.equal(model.generate(ids, max_new_tokens=5, num_beams=1, **mask(4, 6)), expected)


class PlainCache(torch.nn.Module):
    """Attention over a cache that is two plain tensors."""

    def forward(self, query, past_key, past_value):
        keys, values = (torch.cat([past, query], 2) for past in (past_key, past_value))
        return torch.nn.functional.scaled_dot_product_attention(query, keys, values, is_causal=True)


def test_keys_and_values_keep_one_length_where_the_kernel_does_not_look():
    observer = exportkit.InputObserver()
    model = PlainCache()
    with observer(model):
        for rows, past, new in ((2, 4, 3), (2, 2, 5), (3, 9, 1)):
            cache = [torch.randn(rows, 2, past, 8) for _ in range(2)]
            model(torch.randn(rows, 2, new, 8), *cache)
    by_path = observer.plan().by_path
    assert by_path["past_key"].sizes == by_path["past_value"].sizes
