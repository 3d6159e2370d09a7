"""Edits, explanations and the JSON form of a plan."""

import enum
import json
import math
from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings

from exportkit.errors import ExportkitError, PlanError
from exportkit.plan.infer import infer_plan
from exportkit.plan.leaves import CallTable, Constant, Leaf, Variable
from exportkit.plan.plan import Plan
from exportkit.plan.sizes import choose_sizes, unseen_sizes
from exportkit.trees import fingerprint
from tests.mutations import mutated


def leaf(path, *shapes, dtype="float32", growing=None):
    return Leaf(path, path.split(".", maxsplit=1)[0], dtype, shapes, growing)


@pytest.fixture
def plan():
    """What generate gives: a prompt of 7 tokens, then two of one token, with a cache of two layers."""
    cache = None, (1, 2, 7, 8), (1, 2, 8, 8)
    table = CallTable(
        (
            leaf("input_ids", (1, 7), (1, 1), (1, 1), dtype="int64"),
            leaf("attention_mask", (1, 7), (1, 8), (1, 9), dtype="int64"),
            leaf("past.layers[0].keys", *cache, growing=2),
            leaf("past.layers[1].keys", *cache, growing=2),
        ),
        (((1, 1, 99),),) * 3,
    )
    return infer_plan(table)


NUMBERS = {"high": math.inf, "low": -math.inf, "none": math.nan, "half": 0.5}


def sizes_of(plan):
    return {leaf.path: tuple(map(str, leaf.sizes)) for leaf in plan.leaves}


def test_a_plan_of_some_calls_takes_over_what_varies_among_all(plan):
    table = CallTable(
        (leaf("input_ids", (1, 7), dtype="int64"), leaf("attention_mask", (1, 7), dtype="int64")), (((1, 1, 99),),)
    )
    prompt = infer_plan(table).widened(plan)
    assert sizes_of(prompt) == {"input_ids": ("batch", "sequence"), "attention_mask": ("batch", "sequence")}
    assert prompt.variable("sequence").seen == (7,)
    assert prompt.variable("sequence").role == "sequence"


def test_a_plan_that_says_all_already_is_left_as_it_is(plan):
    assert plan.widened(plan) == plan


def test_rename_reaches_expressions(plan):
    renamed = plan.rename("past_sequence", "stored")
    assert sizes_of(renamed)["attention_mask"] == ("batch", "stored + sequence")
    assert [v.name for v in renamed.variables] == ["sequence", "stored", "batch"]
    assert sizes_of(plan)["attention_mask"] == ("batch", "past_sequence + sequence")


def test_a_variable_with_one_size_can_be_static(plan):
    assert sizes_of(plan.static("batch"))["attention_mask"] == ("1", "past_sequence + sequence")
    assert plan.static("batch").with_role("batch") is None


def test_a_static_part_of_a_sum_becomes_a_constant(plan):
    one = replace(
        plan, variables=tuple(replace(v, seen=(1, 1, 1)) if v.name == "sequence" else v for v in plan.variables)
    )
    assert sizes_of(one.static("sequence"))["attention_mask"] == ("batch", "past_sequence + 1")


def test_one_axis_can_be_static_in_all_leaves_of_a_container(plan):
    edited = plan.static("past", 0)
    assert [sizes[0] for path, sizes in sizes_of(edited).items() if path.startswith("past")] == ["1", "1"]
    assert sizes_of(edited)["input_ids"][0] == "batch"


def test_dynamic_gives_a_static_axis_a_variable(plan):
    edited = plan.dynamic("past", 1, "heads")
    assert sizes_of(edited)["past.layers[1].keys"] == ("batch", "heads", "past_sequence", "8")
    assert edited.variable("heads").seen == (None, 2, 2)


def test_split_and_tie_undo_each_other(plan):
    apart = plan.split("batch", "past")
    assert sizes_of(apart)["past.layers[0].keys"][0] == "batch_2"
    assert sizes_of(apart)["input_ids"][0] == "batch"
    assert sizes_of(apart.tie("batch", "batch_2")) == sizes_of(plan)


def test_variables_that_are_tied_keep_what_both_allow(plan):
    apart = plan.split("batch", "past").range("batch_2", 1, 4)
    follower = Variable("more", "other", (1, 1, 1), "made up", follows="batch_2")
    apart = apart.with_variable(follower, [("past.layers[1].keys", 1)])
    tied = apart.tie("batch", "batch_2")
    merged = tied.variable("batch")
    assert (merged.minimum, merged.maximum, merged.required, merged.role) == (1, 4, True, "batch")
    assert tied.variable("more").follows == "batch"
    assert [variable.name for variable in tied.variables] == ["sequence", "past_sequence", "batch", "more"]
    assert Plan.from_json(tied.to_json()) == tied


def test_variables_that_no_call_showed_together_are_tied_with_the_sizes_of_both():
    plan = infer_plan(CallTable((leaf("a", (2, 5), (2, 6), None, None), leaf("b", None, None, (2, 7), (2, 8)))))
    tied = plan.tie("a_axis_1", "b_axis_1")
    assert tied.variable("a_axis_1").seen == (5, 6, 7, 8)
    with pytest.raises(PlanError, match="leaves out sizes that were recorded"):
        plan.range("b_axis_1", 7, 9).tie("a_axis_1", "b_axis_1")


def test_a_variable_that_followed_a_static_axis_is_free(plan):
    follower = Variable("cached", "past", (None, 7, 8), "made up", follows="heads")
    followed = plan.dynamic("past.layers[0].keys", 1, "heads")
    followed = followed.with_variable(follower, [("past.layers[1].keys", 2)])
    edited = followed.static("past.layers[0].keys", 1)
    assert edited.variable("cached").follows is None
    assert unseen_sizes(edited, choose_sizes(edited))


def test_a_range_is_kept(plan):
    limited = plan.range("sequence", 1, 16)
    assert (limited.variable("sequence").minimum, limited.variable("sequence").maximum) == (1, 16)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda p: p.static("sequence"), "seen with several sizes.\n  got: 7, 1, 1"),
        (lambda p: p.static("input_ids", 1), "Axis 1 of input_ids cannot be static"),
        (lambda p: p.static("input_ids", 2), "input_ids has no axis 2.\n  expected: 0 to 1"),
        (lambda p: p.static("nobody"), "no variable 'nobody'.\n  expected: sequence, past_sequence, batch"),
        (lambda p: p.dynamic("input_ids", 1), "varies already.\n  got: sequence"),
        (lambda p: p.dynamic("nobody", 1), "no input 'nobody'"),
        (lambda p: p.dynamic("past", 1, "batch"), "already has a variable 'batch'"),
        (lambda p: p.split("batch", "nobody"), "none of them"),
        (lambda p: p.split("past_sequence", "past"), "all of them"),
        (
            lambda p: p.tie("sequence", "past_sequence"),
            "where: call 0\n  expected: sequence = past_sequence\n  got: 7 and 0",
        ),
        (lambda p: p.range("sequence", 2), "leaves out sizes that were recorded"),
        (lambda p: p.range("sequence", 9, 3), "Not a valid range"),
        (lambda p: p.rename("batch", "sequence"), "plan.tie('sequence', 'batch')"),
        (lambda p: p.rename("batch", "2 b"), "not a valid name for a variable"),
        (lambda p: p.rename("batch", "class"), "not a valid name for a variable"),
        (lambda p: p.rename("batch", "my__batch"), "not a valid name for a variable"),
        (lambda p: p.dynamic("past", 1, "my heads"), "not a valid name for a variable"),
        (lambda p: p.dynamic("past", 1, ""), "not a valid name for a variable"),
        (lambda p: p.tie("sequence", "sequence"), "cannot be tied to itself"),
    ],
)
def test_edits_that_the_calls_contradict_are_refused_with_a_reason(plan, edit, message):
    with pytest.raises(PlanError) as caught:
        edit(plan)
    assert message in str(caught.value)


def test_explanations_are_sentences(plan):
    assert plan.explain("input_ids", 1) == (
        "Axis 1 of input_ids is the variable sequence. It was 7, 1, 1 in the calls. Evidence: sizes 7, 1, 1. "
        "Part of the size of axis 1 of attention_mask."
    )
    assert plan.explain("attention_mask", 1) == (
        "Axis 1 of attention_mask is past_sequence + sequence. It was 7, 8, 9 in the calls, "
        "where past_sequence was 0, 7, 8 and sequence was 7, 1, 1."
    )
    assert plan.explain("past", 3) == (
        "Axis 3 of past.layers[0].keys is static, 8. It was 8 in every call that had it (2 of 3)."
    )
    assert plan.range("past_sequence", 0, 99).explain("past", 2) == (
        "Axis 2 of past.layers[0].keys is the variable past_sequence. It was 0, 7, 8 in the calls. "
        "Evidence: length of the cache: 0, 7, 8. Shared with axis 2 of past.layers[1].keys. "
        "Part of the size of axis 1 of attention_mask. Allowed sizes: 0 to 99."
    )


def test_a_plan_survives_json(plan):
    edited = replace(plan.range("sequence", 1, 16), structure={"a": ("input_ids", [None, {"k": "attention_mask"}])})
    assert Plan.from_json(edited.to_json()) == edited


class Kind(enum.Enum):
    TEXT = 1


def test_constants_and_keys_that_json_cannot_hold_are_kept_as_text(plan):
    constants = tuple(Constant(name, name, value, fingerprint(value)) for name, value in NUMBERS.items())
    structure = {"a": {Kind.TEXT: "input_ids", ("x", 1): "attention_mask", math.inf: None}}
    read = Plan.from_json(replace(plan, constants=constants, structure=structure).to_json())
    assert [constant.value for constant in read.constants] == ["inf", "-inf", "nan", 0.5]
    assert [constant.fingerprint for constant in read.constants] == [constant.fingerprint for constant in constants]
    assert [*read.structure["a"]] == ["<Kind.TEXT: 1>", "('x', 1)", "inf"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "got: list"),
        ('{"format": "exportkit-plan", "version": 99}', "exportkit-plan 99"),
        ('{"format": "exportkit-plan", "version": 1, "leaves": [{}]}', "damaged"),
    ],
)
def test_text_that_is_not_a_plan_raises(text, message):
    with pytest.raises(PlanError) as caught:
        Plan.from_json(text)
    assert message in str(caught.value)


def test_whatever_the_text_of_a_plan_says_there_is_no_other_error(plan):
    outcomes = {"read": 0, "refused": 0}

    @settings(max_examples=1500, deadline=None, database=None, derandomize=True, phases=[Phase.generate])
    @given(mutated(json.loads(plan.to_json())))
    def load(data):
        try:
            read = Plan.from_json(json.dumps(data))
            str(read), read.source(), read.to_json()
            read.shapes(choose_sizes(read))
            outcomes["read"] += 1
        except ExportkitError:
            outcomes["refused"] += 1

    load()
    assert outcomes["refused"] > outcomes["read"] > 0
