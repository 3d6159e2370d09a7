"""Plans from sizes alone, for the shapes that models really get."""

import pytest
import torch

import exportkit
from exportkit.errors import PlanError
from exportkit.plan.infer import infer_plan
from exportkit.plan.leaves import CallTable, Constant, Leaf


def leaf(path, *shapes, dtype="float32", growing=None):
    return Leaf(path, path.split(".", maxsplit=1)[0], dtype, shapes, growing)


def sizes_of(plan):
    return {leaf.path: tuple(map(str, leaf.sizes)) for leaf in plan.leaves}


def generate(batch, outputs=True):
    """The calls of generate: a prompt of 7 tokens, then two of one token."""
    leaves = (
        leaf("input_ids", (batch, 7), (batch, 1), (batch, 1), dtype="int64"),
        leaf("attention_mask", (batch, 7), (batch, 8), (batch, 9), dtype="int64"),
        leaf("past_key_values.layers[0].keys", None, (batch, 2, 7, 8), (batch, 2, 8, 8), growing=2),
    )
    shapes = tuple(((batch, 1, 99), (batch, 2, length, 8)) for length in (7, 8, 9))
    return CallTable(leaves, shapes if outputs else ())


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_generate_gives_batch_sequence_past_and_total_whatever_the_batch(batch):
    plan = infer_plan(generate(batch))
    assert sizes_of(plan) == {
        "input_ids": ("batch", "sequence"),
        "attention_mask": ("batch", "past_sequence + sequence"),
        "past_key_values.layers[0].keys": ("batch", "2", "past_sequence", "8"),
    }
    assert {v.name: v.role for v in plan.variables} == {
        "batch": "batch",
        "sequence": "sequence",
        "past_sequence": "past",
    }


def test_a_batch_that_never_changed_is_called_unconfirmed():
    plan = infer_plan(generate(1))
    assert "not confirmed" in plan.variable("batch").evidence


def test_no_batch_is_guessed_when_no_output_leads_with_it():
    assert sizes_of(infer_plan(CallTable((leaf("weight", (4, 6)),), (((9,),),)))) == {"weight": ("4", "6")}


def test_a_leading_axis_of_one_stays_one_where_the_batch_varies():
    plan = infer_plan(CallTable((leaf("x", (2, 6), (3, 6)), leaf("row", (1, 6), (1, 6))), (((2, 6),), ((3, 6),))))
    assert sizes_of(plan) == {"x": ("batch", "6"), "row": ("1", "6")}


def test_two_calls_with_one_token_each_still_tell_the_past_from_the_total():
    plan = infer_plan(
        CallTable(
            (
                leaf("input_ids", (1, 1), (1, 1), dtype="int64"),
                leaf("attention_mask", (1, 8), (1, 9), dtype="int64"),
                leaf("past.layers[0].keys", (1, 2, 7, 8), (1, 2, 8, 8), growing=2),
            ),
            (((1, 1, 99),),) * 2,
        )
    )
    assert sizes_of(plan)["attention_mask"] == ("batch", "past_sequence + 1")


def test_encoder_inputs_share_batch_and_sequence():
    plan = infer_plan(CallTable(tuple(leaf(n, (2, 7), (3, 9), dtype="int64") for n in ("input_ids", "attention_mask"))))
    assert set(sizes_of(plan).values()) == {("batch", "sequence")}


def test_images_vary_in_height_and_width():
    plan = infer_plan(CallTable((leaf("pixel_values", (2, 3, 32, 48), (3, 3, 64, 32)),)))
    assert sizes_of(plan) == {"pixel_values": ("batch", "3", "height", "width")}


def test_other_axes_are_named_after_their_place():
    plan = infer_plan(CallTable((leaf("data.x", (2, 5, 6), (3, 7, 6)), leaf("extras", (4, 1), (8, 1)))))
    assert sizes_of(plan) == {"data.x": ("batch", "data_x_axis_1", "6"), "extras": ("extras_axis_0", "1")}


def test_an_optional_part_is_empty_when_it_is_absent():
    plan = infer_plan(
        CallTable(
            (
                leaf("x", (2, 5, 6), (3, 7, 6), (3, 6, 6)),
                leaf("bias", (2, 3, 4), None, (3, 2, 4)),
                leaf("mask", (2, 8, 1), (3, 7, 1), (3, 8, 1)),
            )
        )
    )
    assert sizes_of(plan)["mask"] == ("batch", "x_axis_1 + bias_axis_1", "1")


def test_constants_and_a_single_call_are_findings():
    plan = infer_plan(
        CallTable((leaf("x", (2, 6)),), (((2, 6),),)), [Constant("keep", "keep", 1), Constant("n", "n", None)]
    )
    assert [finding.text for finding in plan.findings] == [
        "keep=1 is baked into the graph.",
        "only one call was recorded, so it is not known which sizes vary.",
    ]


def test_another_rank_in_another_call_is_an_error_that_names_the_calls():
    with pytest.raises(PlanError) as caught:
        CallTable((leaf("x", (2, 6), (2, 6, 1)),))
    assert str(caught.value) == (
        "An input has different ranks in different calls; one graph has one rank for each input.\n"
        "  where: x\n"
        "  expected: the same number of axes in every call\n"
        "  got: call 0: (2, 6), call 1: (2, 6, 1)\n"
        "  hint: observe each kind of call with an observer of its own."
    )


def test_a_plan_prints_as_a_table():
    assert str(infer_plan(generate(2))) == (
        "input                           type     shape                              seen\n"
        "input_ids                       int64    (batch, sequence)                  2x7 2x1\n"
        "attention_mask                  int64    (batch, past_sequence + sequence)  2x7 2x8 2x9\n"
        "past_key_values.layers[0].keys  float32  (batch, 2, past_sequence, 8)       absent 2x2x7x8 2x2x8x8\n"
        "\n"
        "variable       evidence\n"
        "sequence       sizes 7, 1, 1\n"
        "past_sequence  length of the cache: 0, 7, 8\n"
        "batch          leading axis of every input and of an output, always 2; not confirmed by a run"
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.Generator(), "value: the graph ignores generators, so any generator is accepted."),
        ("Generator(cpu)", "value='Generator(cpu)' is baked into the graph."),
    ],
)
def test_a_generator_is_not_baked_in_and_a_text_that_looks_like_one_is(value, text):
    class Doubles(torch.nn.Module):
        def forward(self, x, value=None):
            return x * 2

    model, observer = Doubles(), exportkit.InputObserver()
    with observer(model):
        model(torch.ones(2), value=value)
    assert text in [finding.text for finding in observer.plan().findings]
