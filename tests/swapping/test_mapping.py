"""The registry of replacements: which key means which class, and that a bad registration changes nothing."""

import re
import threading

import pytest
from torch import nn

from exportkit import clear_patch_mapping, get_patch_mapping, register_patch_mapping, unregister_patch_mapping
from exportkit.errors import InvalidRequestError, InvalidTypeError
from exportkit.swapping.mapping import entries, entry_for


class LlamaMLP(nn.Module):
    pass


class MLP(nn.Module):
    pass


class Llama2Attention(nn.Module):
    pass


class New(nn.Module):
    pass


class Newer(nn.Module):
    pass


@pytest.fixture(autouse=True)
def _empty():
    clear_patch_mapping()
    yield
    clear_patch_mapping()


def chosen(cls):
    entry = entry_for(entries(), cls)
    return None if entry is None else entry.replacement


def test_something_else_than_a_mapping_is_refused():
    with pytest.raises(InvalidTypeError, match="given as a mapping"):
        register_patch_mapping(3)


def test_a_name_means_classes_of_exactly_that_name():
    register_patch_mapping({"MLP": New})
    assert chosen(MLP) is New
    assert chosen(LlamaMLP) is None


def test_a_name_with_dots_means_one_class():
    register_patch_mapping({f"{__name__}.MLP": New})
    assert chosen(MLP) is New
    assert chosen(type("MLP", (nn.Module,), {"__module__": "elsewhere"})) is None


@pytest.mark.parametrize(
    ("key", "matches"),
    [
        ("MLP$", [MLP, LlamaMLP]),
        ("^MLP$", [MLP]),
        (".*Attention$", [Llama2Attention]),
        (r"^Llama\d+Attention$", [Llama2Attention]),
        ("Llama.*", [LlamaMLP, Llama2Attention]),
        (re.compile("mlp", re.IGNORECASE), [MLP, LlamaMLP]),
        (r"swapping\.test_mapping\.L", [LlamaMLP, Llama2Attention]),
        ("swapping.*MLP", []),
    ],
)
def test_any_other_key_is_an_expression_for_the_name_or_with_an_escaped_dot_for_the_whole_name(key, matches):
    register_patch_mapping({key: New})
    assert [cls for cls in (MLP, LlamaMLP, Llama2Attention) if chosen(cls) is New] == matches


def test_names_come_before_expressions_and_those_in_the_order_of_registration():
    register_patch_mapping({".*MLP": New, "M.P": Newer})
    assert chosen(MLP) is New
    register_patch_mapping({"MLP": Newer})
    assert chosen(MLP) is Newer
    assert chosen(LlamaMLP) is New


def test_what_replaces_others_is_not_replaced_itself():
    register_patch_mapping({".*MLP": MLP, "New.*": Newer})
    assert chosen(LlamaMLP) is MLP
    assert chosen(MLP) is None
    assert chosen(Newer) is None


def test_a_registration_that_fails_changes_nothing():
    register_patch_mapping({"A": New})
    for bad in ({"B": New, "C": 3}, {"B": New, "A": Newer}, {"B": New, "C(": New}, {"B": New, 3: New}, {"B": int}):
        with pytest.raises((InvalidTypeError, InvalidRequestError)):
            register_patch_mapping(bad)
        assert get_patch_mapping() == {"A": New}
    with pytest.raises(InvalidRequestError):
        unregister_patch_mapping(["A", "B"])
    assert get_patch_mapping() == {"A": New}


def test_a_second_registration_needs_overwrite():
    register_patch_mapping({"A": New})
    with pytest.raises(ValueError, match="overwrite=True"):
        register_patch_mapping({"A": Newer})
    register_patch_mapping({"A": Newer}, overwrite=True)
    assert get_patch_mapping() == {"A": Newer}


def test_a_replacement_is_a_module_class():
    for wrong in (3, int, New(), lambda module: module):
        with pytest.raises(TypeError, match=r"must be a subclass of nn\.Module"):
            register_patch_mapping({"A": wrong})


def test_an_expression_that_does_not_compile_names_the_classes_that_are_near():
    with pytest.raises(InvalidRequestError) as error:
        register_patch_mapping({"Llama2Attention(": New})
    assert str(error.value).startswith(
        "The key 'Llama2Attention(' is neither the name of a class nor a regular expression: missing ), unterminated"
    )
    assert "hint: nearest classes: Llama2Attention" in str(error.value)


def test_unregistering_what_is_not_there_names_what_is():
    register_patch_mapping({"Attention": New})
    with pytest.raises(ValueError, match="Cannot unregister 'Atention'") as error:
        unregister_patch_mapping(["Atention"])
    assert "hint: nearest: Attention." in str(error.value)


def test_the_mapping_is_a_copy():
    register_patch_mapping({"A": New})
    get_patch_mapping()["B"] = New
    assert get_patch_mapping() == {"A": New}
    unregister_patch_mapping(["A"])
    assert get_patch_mapping() == {}


def test_threads_may_register_and_read_at_once():
    def write(letter):
        for i in range(100):
            register_patch_mapping({f"{letter}{i}": New})

    threads = [threading.Thread(target=write, args=(letter,)) for letter in "abcd"]
    for thread in threads:
        thread.start()
    sizes = [len(get_patch_mapping()) for _ in range(100)]
    for thread in threads:
        thread.join()
    assert sizes == sorted(sizes)
    assert len(get_patch_mapping()) == 400
