"""Arguments as a caller writes them become values by parameter, and become such arguments again."""

import inspect

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exportkit.calls.call import shapes_text
from exportkit.calls.signature import Signature
from exportkit.errors import UnknownInputError


def plain(a, b, c=3): ...
def variadic(a, b=2, *rest, key=None, **extra): ...
def positional(a, b=2, /, c=3): ...
def keywords(a, *, b, c=3): ...
def catching(*rest, **extra): ...
def shadowing(a, b=2, /, **extra): ...
def nothing(): ...


FUNCTIONS = [plain, variadic, positional, keywords, catching, shadowing, nothing]


def _accepted(function, args, kwargs):
    """What the function would find in its parameters, or None if it would refuse the call."""
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return None
    return dict(bound.arguments)


CALLS = st.tuples(
    st.sampled_from(FUNCTIONS),
    st.lists(st.integers(), max_size=4).map(tuple),
    st.dictionaries(st.sampled_from(["a", "b", "c", "key", "other"]), st.integers(), max_size=4),
)


@given(CALLS)
def test_binding_finds_what_the_method_finds(call):
    function, args, kwargs = call
    expected = _accepted(function, args, kwargs)
    if expected is not None:
        assert Signature.of(function).bind(args, kwargs) == expected


@given(CALLS)
def test_binding_accepts_every_call(call):
    function, args, kwargs = call
    Signature.of(function).bind(args, kwargs)


@given(CALLS, st.booleans())
def test_unbinding_gives_a_call_with_the_same_meaning(call, by_name):
    function, args, kwargs = call
    expected = _accepted(function, args, kwargs)
    if expected is not None:
        signature = Signature.of(function)
        again = signature.unbind(expected, None if by_name else [n for n in expected if n in kwargs])
        assert signature.bind(*again) == {**_defaults_between(signature, expected, again), **expected}


def _defaults_between(signature, expected, again):
    """Parameters that were left out before others given by position: their defaults must be written out."""
    return {name: signature.defaults[name] for name in signature.bind(*again) if name not in expected}


def test_values_come_in_the_order_of_the_signature():
    bound = Signature.of(variadic).bind((1,), {"other": 5, "key": 4, "b": 3})

    assert list(bound.items()) == [("a", 1), ("b", 3), ("key", 4), ("extra", {"other": 5})]


def test_further_positions_are_kept_under_the_name_of_the_parameter():
    assert Signature.of(variadic).bind((1, 2, 3, 4), {}) == {"a": 1, "b": 2, "rest": (3, 4)}


def test_all_values_are_given_by_name_where_that_is_possible():
    assert Signature.of(plain).unbind({"a": 1, "c": 2}) == ((), {"a": 1, "c": 2})
    assert Signature.of(positional).unbind({"a": 1, "c": 2}) == ((1,), {"c": 2})


def test_values_before_further_positions_are_given_by_position():
    assert Signature.of(variadic).unbind({"a": 1, "rest": (3,), "key": 4}) == ((1, 2, 3), {"key": 4})


def test_names_given_by_name_stay_so():
    assert Signature.of(plain).unbind({"a": 1, "b": 2, "c": 3}, named={"b", "c"}) == ((1,), {"b": 2, "c": 3})


def test_parameters_of_a_method_leave_self_out():
    class Model:
        def forward(self, x, *, y=1): ...

    signature = Signature.of(Model().forward)

    assert signature.names == ("x", "y")
    assert signature.plain() == ("x", "y")
    assert signature.defaults == {"y": 1}


@pytest.mark.parametrize(("key", "name"), [("a", "a"), (0, "a"), (1, "b"), ("extra", "extra"), (4, "extra")])
def test_parameter_is_found_by_name_and_position(key, name):
    assert Signature.of(variadic).name_of(key) == name


@pytest.mark.parametrize("key", ["z", 5, -1, True, None])
def test_parameter_that_does_not_exist_is_refused_with_those_that_do(key):
    with pytest.raises(UnknownInputError, match="Unexpected keyword argument") as raised:
        Signature.of(variadic).name_of(key)
    assert "expected: one of a, b, rest, key, extra, or a position below 5" in str(raised.value)
    assert f"got: {key!r}" in str(raised.value)


def test_inputs_that_are_alike_are_named_once_in_a_message():
    keys = {f"cache.layers[{layer}].keys": torch.ones(2, 5) for layer in range(24)}
    given = {"x": torch.ones(2), **keys, "y": (2,), "cache.layers[24].keys": torch.ones(2, 7)}
    assert (
        shapes_text(given) == "x (2,), cache.layers[0].keys and 23 alike (2, 5), y (2,), cache.layers[24].keys (2, 7)"
    )
