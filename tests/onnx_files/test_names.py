"""Names of graph inputs and outputs."""

import pytest

from exportkit.onnx_files.contract import input_names, output_names


@pytest.mark.parametrize(
    ("path", "as_input", "as_output"),
    [
        ("input_ids", "input_ids", "output.input_ids"),
        ("past_key_values.layers[0].keys", "past_key_values.0.key", "present.0.key"),
        ("past_key_values.layers[11].values", "past_key_values.11.value", "present.11.value"),
        (
            "past_key_values.self_attention_cache.layers[1].keys",
            "past_key_values.1.decoder.key",
            "present.1.decoder.key",
        ),
        (
            "past_key_values.cross_attention_cache.layers[1].values",
            "past_key_values.1.encoder.value",
            "present.1.encoder.value",
        ),
        ("cache_params.layers[0].conv_states[0]", "cache_params.0.conv_states.0", "present.0.conv_states.0"),
        ("data.inner.scale", "data.inner.scale", "output.data.inner.scale"),
        ("extras[0]", "extras.0", "output.extras.0"),
        ("data['a b']", "data.a b", "output.data.a b"),
    ],
)
def test_names_are_those_of_the_clients(path, as_input, as_output):
    assert input_names([path]) == [as_input]
    assert output_names([path], inputs=[as_input]) == [as_output]


def test_a_single_tensor_and_a_tuple_are_called_output():
    assert output_names([""], ()) == ["output"]
    assert output_names(["[0]", "[1]"], ()) == ["output.0", "output.1"]


def test_outputs_keep_their_own_names_where_no_input_has_them():
    assert output_names(["logits", "past_key_values.layers[0].keys"], ["input_ids"]) == ["logits", "present.0.key"]


def test_names_that_would_clash_are_numbered():
    assert input_names(["a[0]", "a.0"]) == ["a.0", "a.0_2"]
