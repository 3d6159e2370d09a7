"""Comparing traces: what is matched with what, and what is said of it."""

import json
import textwrap

import pytest
import torch
from torch import nn

from exportkit import Trace, trace_model
from exportkit.errors import InvalidRequestError
from exportkit.report.traces import comparison_page


class Layer(nn.Module):
    """Two projections and a way around them."""

    def __init__(self, scale=1.0):
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(6, 12), nn.Linear(12, 6), scale

    def forward(self, x, mask=None):
        return x + self.scale * self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layers, self.head = nn.Embedding(20, 6), nn.ModuleList([Layer(), Layer()]), nn.Linear(6, 20)

    def forward(self, input_ids, attention_mask=None):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class PortedLayer(nn.Module):
    """The same with other names, in another order, and called with names."""

    def __init__(self, layer):
        super().__init__()
        self.shrink, self.grow = layer.down, layer.up

    def forward(self, hidden):
        return self.shrink(input=torch.tanh(self.grow(input=hidden))) + hidden


class Ported(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.tokens, self.output = model.embed, model.head
        self.blocks = nn.Sequential(*map(PortedLayer, model.layers))

    def forward(self, input_ids):
        return {"logits": self.output(self.blocks(self.tokens(input_ids)))}


class Wrapped(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids):
        return self.model(input_ids)


IDS = torch.arange(10).reshape(2, 5)


def traced(model, values="all", **changes):
    with torch.no_grad(), trace_model(model, values=values) as trace:
        model(**{"input_ids": IDS} | changes)
    return trace


def test_a_changed_weight_is_named_with_what_it_adds():
    right, wrong = Model(), Model()
    wrong.layers[1].up.weight.data[3] = 0

    found = traced(right).compare(traced(wrong))

    first = found.first
    assert (first.path, first.class_name, first.tensor, first.base) == ("layers.1.up", "Linear", "outputs", 0.0)
    assert first.error > 0.01
    assert found.modules[0] == first
    assert next(row.index for row in found.tensors if row.verdict == "differs")[-1] == 3
    assert {row.verdict for row in found.tensors} == {"equal", "differs", "carried"}
    assert not found.ok


def test_what_a_layer_computes_by_itself_is_its_fault():
    wrong = Model()
    wrong.layers[0].scale = 0.9

    found = traced(Model()).compare(traced(wrong))

    assert (found.first.path, found.first.class_name) == ("layers.0", "Layer")


def test_other_inputs_are_no_fault_of_a_module():
    found = traced(Model()).compare(traced(Model(), input_ids=IDS + 1))

    assert found.first.path is None
    assert found.verdict() == "The runs differ in the inputs of the model."


def test_equal_runs_say_so():
    found = traced(Model()).compare(traced(Model()))

    assert str(found) == "The runs are equal."
    assert found.ok


def test_a_port_with_other_names_is_matched_by_order():
    right, wrong = Model(), Ported(Model())
    assert traced(right).compare(traced(wrong)).ok
    wrong.blocks[1].grow.weight.data *= 1.01

    found = traced(right).compare(traced(wrong))

    assert (found.first.path, found.first.other_path) == ("layers.1.up", "blocks.1.grow")
    assert found.only_first == ()
    assert found.only_second == ("blocks",)


def test_a_port_is_matched_by_names_that_are_given():
    names = {"^tokens$": "embed", "^output$": "head", "^blocks": "layers", "shrink": "down", "grow": "up"}
    wrong = Ported(Model())
    wrong.tokens.weight.data *= 1.01

    found = traced(Model()).compare(traced(wrong), names=names)

    assert (found.first.path, found.first.other_path) == ("embed", "tokens")


@pytest.mark.parametrize("swap", [False, True])
def test_a_wrapper_around_a_model_is_looked_through(swap):
    plain, wrapped = Model(), Wrapped(Model())
    wrapped.model.layers[0].down.bias.data += 0.1
    first, second = (wrapped, plain) if swap else (plain, wrapped)

    found = traced(first).compare(traced(second))

    assert {found.first.path, found.first.other_path} == {"layers.0.down", "model.layers.0.down"}


def test_another_element_type_is_no_fault():
    lower = Model().to(torch.bfloat16)

    found = traced(Model()).compare(traced(lower))

    assert found.ok
    assert found.verdict() == "The runs agree, up to rounding."


def test_padded_positions_do_not_count():
    class Padded(Model):
        def __init__(self, filled):
            super().__init__()
            self.filled = filled

        def forward(self, input_ids, attention_mask):
            hidden = self.layers[0](self.embed(input_ids))
            return self.head(hidden.masked_fill(attention_mask[..., None] == 0, self.filled))

    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    right, wrong = (traced(Padded(filled), attention_mask=mask) for filled in (0.0, 5.0))

    assert right.compare(wrong).ok


def test_without_values_statistics_tell_as_far_as_they_carry():
    wrong = Model()
    wrong.head.weight.data *= 2

    found = traced(Model(), None).compare(traced(wrong, None))

    assert found.first.path == "head"
    assert found.notes == (
        "18 of 18 tensors were compared by statistics and hash alone: their errors are lower bounds; for values record "
        'both runs with values="all"',
    )


def test_a_run_that_failed_is_compared_as_far_as_it_went():
    class Failing(Layer):
        def forward(self, x):
            self.up(x)
            raise ValueError("no more")

    model = Model()
    model.layers[1] = Failing()
    model.layers[1].load_state_dict(Model().layers[1].state_dict())
    with pytest.raises(ValueError, match="no more"), trace_model(model, values="all") as wrong:
        model(input_ids=IDS)

    found = traced(Model()).compare(wrong)

    assert found.only_first == ("layers.1.down", "head")
    assert found.notes[0] == "the second run failed in the model (Model): ValueError: no more"


def test_traces_without_a_call_in_common_are_refused():
    with trace_model(nn.Identity()) as empty:
        pass

    with pytest.raises(InvalidRequestError) as error:
        traced(Model()).compare(empty)

    assert str(error.value) == (
        "These traces have no module call in common.\n"
        "  expected: the model, embed, layers.0, layers.0.up, ...\n"
        "  got: no call\n"
        '  hint: map paths of the second trace to paths of the first: names={"^model[.]": "", "query": "q_proj"}.'
    )


def test_names_must_be_regular_expressions():
    with pytest.raises(InvalidRequestError, match="Invalid regular expression for paths"):
        traced(Model()).compare(traced(Model()), names={"(": ""})


def test_the_printed_form_names_module_error_and_place(tmp_path):
    wrong = Model()
    wrong.layers[1].up.weight.data = wrong.layers[1].up.weight.data.flip(0)

    lines = str(traced(Model()).compare(traced(wrong))).splitlines()

    assert lines[0] == "The runs differ in layers.1.up (Linear)."
    assert [line.split()[0] for line in lines[1:4]] == ["tensor", "error", "reason"]
    assert lines[4].split() == ["module", "class", "adds", "from", "to", "verdict"]
    assert lines[6].split()[:2] == ["layers.1.up", "Linear"]
    assert lines[6].split()[-1] == "differs"


def test_the_printed_place_is_that_of_the_printed_tensor():
    class Two(nn.Module):
        def __init__(self, small=0.0, large=0.0):
            super().__init__()
            self.small, self.large = small, large

        def forward(self, input_ids):
            one, two = torch.ones(4, 5), torch.ones(4, 5)
            one[0, 0] += self.small
            two[2, 3] += self.large
            return one, two

    found = traced(Two()).compare(traced(Two(0.1, 5.0)))

    assert (found.first.tensor, found.first.index) == ("outputs[1]", (2, 3))
    assert "5 at most at [2, 3]" in str(found).splitlines()[2]


def test_json_holds_everything_and_is_valid():
    wrong = Model()
    wrong.head.bias.data[0] = float("nan")

    data = json.loads(traced(Model()).compare(traced(wrong)).as_json())

    assert data["first"]["path"] == "head"
    assert data["first"]["error"] == "inf"
    assert data["first"]["reason"] == "NaN or infinite in only one of the runs"
    assert data["ok"] is False
    assert len(data["tensors"]) == 18


def test_a_saved_trace_compares_as_well(tmp_path):
    traced(Model()).save(tmp_path / "a")

    assert Trace.load(tmp_path / "a").compare(traced(Model())).ok


def test_the_page_shows_the_module_and_loads_nothing():
    wrong = Model()
    wrong.layers[0].up.weight.data *= 3

    page = comparison_page(traced(Model()).compare(traced(wrong)), "a & b")

    assert "<title>a &amp; b</title>" in page
    assert "The runs differ in layers.0.up (Linear)." in page
    assert page.count("<circle") == 9
    assert 'class="differs"' in page
    assert "prefers-color-scheme: dark" in page
    assert "http" not in textwrap.dedent(page).replace("http-equiv", "")
