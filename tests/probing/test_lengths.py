"""How many frames a model takes for each state, found out by asking."""

from hypothesis import given
from hypothesis import strategies as st

from exportkit.probing.lengths import frames_of_states

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
