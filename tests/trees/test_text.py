"""One line says what a nested value holds."""

import collections

import pytest
import torch
from transformers import DynamicCache
from transformers.modeling_outputs import BaseModelOutput

from exportkit import make_dynamic_cache, make_encoder_decoder_cache, make_static_cache, string_type
from tests.trees.caches import filled, kinds

Pair = collections.namedtuple("Pair", ["first", "second"])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.ones(2, 6), "T1r2"),
        (torch.tensor(1), "T7r0"),
        (None, "None"),
        (True, "bool"),
        (1, "int"),
        (1.5, "float"),
        ("text", "str"),
        ([], "#0[]"),
        ([1, torch.ones(2)], "#2[int,T1r1]"),
        ((1, None), "(int,None)"),
        ((), "()"),
        ({"x": torch.ones(2), "y": [1]}, "dict(x:T1r1,y:#1[int])"),
        (collections.OrderedDict(x=1), "OrderedDict(x:int)"),
        (Pair(1, torch.ones(1)), "(int,T1r1)"),
        ({1, 2}, "set"),
        (torch.float32, "dtype"),
        (torch.nn.Linear(1, 1), "Linear"),
    ],
)
def test_value_is_described(value, text):
    assert string_type(value) == text


@pytest.mark.parametrize(
    ("dtype", "number"),
    [
        (torch.float32, 1),
        (torch.uint8, 2),
        (torch.int8, 3),
        (torch.uint16, 4),
        (torch.int16, 5),
        (torch.int32, 6),
        (torch.int64, 7),
        (torch.bool, 9),
        (torch.float16, 10),
        (torch.float64, 11),
        (torch.uint32, 12),
        (torch.uint64, 13),
        (torch.complex64, 14),
        (torch.complex128, 15),
        (torch.bfloat16, 16),
        (torch.float8_e4m3fn, 17),
        (torch.float8_e4m3fnuz, 18),
        (torch.float8_e5m2, 19),
        (torch.float8_e5m2fnuz, 20),
    ],
)
def test_dtype_has_its_number_in_onnx(dtype, number):
    import onnx

    assert string_type(torch.zeros(2, dtype=dtype)) == f"T{number}r1"
    name = onnx.TensorProto.DataType.Name(number).lower()
    plain = {"float": "float32", "double": "float64"}.get(name, name)
    assert plain == str(dtype).removeprefix("torch.").replace("_", "")


def test_shape_is_shown_on_request():
    assert string_type((torch.ones(2, 6), torch.tensor(1)), with_shape=True) == "(T1s2x6,T7s)"


def test_values_are_shown_on_request():
    values = [torch.tensor([1.5, -2.0]), torch.tensor([True, False]), torch.empty(0), torch.ones(1, dtype=torch.cfloat)]

    assert string_type(values, with_min_max=True) == "#4[T1r1[-2,1.5],T9r1[0,1],T1r1[empty],T14r1[complex]]"


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.bfloat16, torch.float8_e5m2])
def test_values_of_rare_dtypes_are_shown(dtype):
    assert string_type(torch.ones(2, dtype=dtype), with_min_max=True).endswith("r1[1,1]")


@pytest.mark.parametrize("tensor", [torch.ones(2, device="meta"), torch.ones(2, 2).to_sparse()])
def test_values_that_cannot_be_read_are_not_an_error(tensor):
    assert string_type(tensor, with_min_max=True).endswith("[?]")


def test_device_is_shown_on_request():
    assert string_type([torch.ones(1), torch.ones(1, device="meta")], with_device=True) == "#2[CT1r1,metaT1r1]"


def test_long_lists_are_cut():
    assert string_type(list(range(21))) == "#21[...]"
    assert string_type([[1, 2, 3]], limit=2) == "#1[#3[...]]"
    assert string_type([1, 2], limit=2) == "#2[int,int]"


def test_cache_is_shown_by_keys_and_values():
    pair = (torch.ones(1, 4, 10, 32), torch.ones(1, 4, 10, 32))

    assert string_type(make_dynamic_cache([pair, pair]), with_shape=True) == (
        "DynamicCache(key_cache=#2[T1s1x4x10x32,T1s1x4x10x32], value_cache=#2[T1s1x4x10x32,T1s1x4x10x32])"
    )
    assert string_type(make_static_cache([pair])) == "StaticCache(key_cache=#1[T1r4], value_cache=#1[T1r4])"
    assert string_type(DynamicCache()) == "DynamicCache(key_cache=#0[], value_cache=#0[])"


def test_encoder_decoder_cache_is_shown_by_its_halves():
    pair = (torch.ones(1, 1, 2, 3), torch.ones(1, 1, 2, 3))
    half = "DynamicCache(key_cache=#1[T1r4], value_cache=#1[T1r4])"

    assert string_type(make_encoder_decoder_cache([pair], [pair])) == (
        f"EncoderDecoderCache(self_attention_cache={half}, cross_attention_cache={half})"
    )


def test_states_of_linear_attention_are_shown():
    assert string_type(filled("LinearAttentionLayer"), with_shape=True) == (
        "Cache(key_cache=#0[], value_cache=#0[], conv_states=#2[T1s2x6x4,T1s2x6x4], "
        "recurrent_states=#2[T1s2x6x4,T1s2x6x4])"
    )


@pytest.mark.parametrize("kind", sorted(kinds()))
def test_cache_of_any_kind_is_described(kind):
    cache = filled(kind)

    assert string_type(cache, with_shape=True, with_min_max=True).startswith(f"{type(cache).__name__}(")


def test_registered_class_is_shown_by_its_children():
    assert string_type(BaseModelOutput(last_hidden_state=torch.ones(2)), with_shape=True) == (
        "BaseModelOutput(last_hidden_state:T1s2)"
    )
