"""The decorator on any module's forward: what it adds to results of every type, and what it refuses."""

import pickle
from collections import OrderedDict, namedtuple
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from exportkit import OutputRecorder, capture_outputs
from exportkit.errors import CaptureError, InvalidRequestError
from tests.module_outputs.models import Frozen, InPlace, Layer, Returning, Stack, States, assert_same, states_of, traces

Pair = namedtuple("Pair", "first second")


def returning(make, **declared):
    """A stack whose result is what ``make`` makes of its last states."""

    class Model(Stack):
        _can_record_outputs = declared or {"hidden_states": Layer}

        @capture_outputs
        def forward(self, x):
            return make(self.run(x))

    return Model()


def test_without_a_request_the_result_is_that_of_the_forward():
    model, x = Stack(), torch.randn(2, 4)
    assert torch.equal(model(x), states_of(model, x)[-1])
    assert torch.equal(model(x, output_hidden_states=False), model(x, output_hidden_states=None))


def test_a_tensor_becomes_a_named_tuple():
    model, x = Stack(), torch.randn(2, 4)
    result = model(x, output_hidden_states=True)
    assert result._fields == ("output", "hidden_states")
    assert_same(result.hidden_states, states_of(model, x))
    assert torch.equal(result[0], model(x))


@pytest.mark.parametrize(
    ("make", "fields"),
    [
        (lambda h: (h, h + 1), ("output_0", "output_1", "hidden_states")),
        (lambda h: [h, h + 1], ("output_0", "output_1", "hidden_states")),
        (lambda h: Pair(h, h + 1), ("first", "second", "hidden_states")),
    ],
)
def test_a_tuple_gets_the_values_at_its_end(make, fields):
    model, x = returning(make), torch.randn(2, 4)
    result = model(x, output_hidden_states=True)
    assert result._fields == fields
    assert_same(result[2], states_of(model, x))


@pytest.mark.parametrize("cls", [dict, OrderedDict])
def test_a_dict_keeps_its_class(cls):
    model, x = returning(lambda h: cls(logits=h)), torch.randn(2, 4)
    result = model(x, output_hidden_states=True)
    assert type(result) is cls
    assert list(result) == ["logits", "hidden_states"]
    assert_same(result["hidden_states"], states_of(model, x))


def test_a_dict_that_the_model_keeps_is_not_changed():
    kept = {}
    model = returning(lambda h: kept)
    assert "hidden_states" in model(torch.ones(1, 4), output_hidden_states=True)
    assert kept == {}


@pytest.mark.parametrize("make", [States, Frozen])
def test_a_dataclass_gets_a_field_or_an_attribute(make):
    model, x = returning(make), torch.randn(2, 4)
    result = model(x, output_hidden_states=True)
    assert type(result) is make
    assert_same(result.hidden_states, states_of(model, x))


def test_output_classes_of_transformers_keep_their_class():
    from transformers.modeling_outputs import BaseModelOutput

    model, x = returning(lambda h: BaseModelOutput(last_hidden_state=h)), torch.randn(2, 4)
    result = model(x, output_hidden_states=True)
    assert type(result) is BaseModelOutput
    assert_same(result.hidden_states, states_of(model, x))
    assert_same(result["hidden_states"], states_of(model, x))


def test_what_nothing_can_be_added_to_is_an_error():
    model = returning(lambda h: 3)
    with pytest.raises(CaptureError, match="cannot be added"):
        model(torch.ones(1, 4), output_hidden_states=True)
    assert model(torch.ones(1, 4)) == 3


def test_results_of_the_model_can_be_pickled_as_plain_tuples():
    result = Stack()(torch.ones(1, 4), output_hidden_states=True, return_dict=False)
    assert type(result) is tuple
    assert len(pickle.loads(pickle.dumps(result))[1]) == 4


@pytest.mark.parametrize(
    ("make", "length"), [(States, 2), (lambda h: {"a": h, "b": None}, 2), (lambda h: [h, h], 3), (lambda h: h, 2)]
)
def test_return_dict_false_makes_a_tuple(make, length):
    result = returning(make)(torch.ones(1, 4), output_hidden_states=True, return_dict=False)
    assert type(result) is tuple
    assert len(result) == length
    assert len(result[-1]) == 4


def test_return_dict_may_come_from_the_config():
    model = returning(States)
    model.config = SimpleNamespace(return_dict=False)
    assert type(model(torch.ones(1, 4))) is tuple
    assert type(model(torch.ones(1, 4), return_dict=True)) is States


def test_a_flag_may_come_from_the_config_and_an_argument_wins():
    model, x = Stack(), torch.randn(2, 4)
    for config in (SimpleNamespace(output_hidden_states=True), {"output_hidden_states": True}):
        model.config = config
        assert len(model(x).hidden_states) == 4
        assert isinstance(model(x, output_hidden_states=False), torch.Tensor)


def test_a_flag_that_is_a_parameter_counts_wherever_it_is_given():
    class Model(Stack):
        @capture_outputs
        def forward(self, x, output_hidden_states=None):
            assert output_hidden_states in (None, True)
            return self.run(x)

    for result in (Model()(torch.ones(1, 4), True), Model()(torch.ones(1, 4), output_hidden_states=True)):
        assert len(result.hidden_states) == 4


def test_attentions_ask_for_cross_attentions_too():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.self_attn, self.cross_attn = Returning(lambda *o: o), Returning(lambda *o: o)

        def forward(self, x):
            return self.cross_attn(self.self_attn(x)[0])[0]

    def model_with(declared):
        class Model(Stack):
            _can_record_outputs = declared

            @capture_outputs
            def forward(self, x):
                return {"logits": self.run(x)}

        torch.manual_seed(0)
        return Model(Block(), Block())

    own, cross = (OutputRecorder(Returning, index=1, layer_name=name) for name in ("self_attn", "cross_attn"))
    x = torch.randn(2, 4)
    results = [
        model_with(declared)(x, output_attentions=True)
        for declared in ({"attentions": own, "cross_attentions": cross}, {"attentions": [own, cross]})
    ]
    for result in results:
        assert (len(result["attentions"]), len(result["cross_attentions"])) == (2, 2)
        assert not torch.equal(result["attentions"][0], result["cross_attentions"][0])
    for key in ("attentions", "cross_attentions"):
        assert_same(results[0][key], results[1][key])


def test_attentions_ask_for_those_of_a_mask_decoder_too():
    model, x = returning(lambda h: {"logits": h}, mask_decoder_attentions=OutputRecorder(Layer)), torch.ones(1, 4)

    assert len(model(x, output_attentions=True)["mask_decoder_attentions"]) == 3
    assert model(x).keys() == {"logits"}
    model.config = SimpleNamespace(output_attentions=True)
    assert len(model(x)["mask_decoder_attentions"]) == 3


def test_cross_attentions_that_a_model_lacks_are_empty_unless_asked_for():
    model = returning(
        lambda h: {"logits": h}, attentions=OutputRecorder(Layer), cross_attentions=OutputRecorder(nn.Conv1d)
    )
    assert model(torch.ones(1, 4), output_attentions=True)["cross_attentions"] == ()


@pytest.mark.parametrize(
    ("selection", "kept"),
    [(0, {0}), (-1, {3}), ([0, -1], {0, 3}), ([1, 2], {1, 2}), ((-4, -2), {0, 2}), ([9, -9], set()), ([], None)],
)
def test_hidden_states_can_be_selected_by_position(selection, kept):
    model, x = Stack(), torch.randn(2, 4)
    result = model(x, output_hidden_states=selection)
    if kept is None:
        assert isinstance(result, torch.Tensor)
        return
    for position, (got, want) in enumerate(zip(result.hidden_states, states_of(model, x), strict=True)):
        assert (got is not None) == (position in kept)
        assert got is None or torch.equal(got, want)


def test_the_last_hidden_state_stands_in_for_that_of_the_last_layer():
    model, x = returning(lambda h: States(h * 2)), torch.randn(2, 4)
    result = model(x, output_hidden_states=True)
    assert result.hidden_states[-1] is result.last_hidden_state
    assert model(x, output_hidden_states=[1]).hidden_states[-1] is None
    model.config = SimpleNamespace(tie_last_hidden_states=False)
    assert_same(model(x, output_hidden_states=True).hidden_states, states_of(model, x))


def test_vision_hidden_states_stand_in_first():
    model = returning(lambda h: {"last_hidden_state": h, "vision_hidden_states": h * 2})
    result = model(torch.ones(1, 4), output_hidden_states=True)
    assert result["hidden_states"][-1] is result["vision_hidden_states"]


def test_the_decorator_can_untie_the_last_hidden_state():
    class Model(Stack):
        @capture_outputs(tie_last_hidden_states=False)
        def forward(self, x):
            return {"last_hidden_state": self.run(x) * 2}

    model, x = Model(), torch.randn(2, 4)
    assert_same(model(x, output_hidden_states=True)["hidden_states"], states_of(model, x))


def test_the_first_state_can_be_left_out():
    model = returning(lambda h: {"logits": h}, hidden_states=OutputRecorder(Layer, capture_initial_hidden_state=False))
    assert len(model(torch.ones(1, 4), output_hidden_states=True)["hidden_states"]) == 3


def test_a_decorated_module_inside_another_has_states_of_its_own():
    class Outer(nn.Module):
        _can_record_outputs = {"hidden_states": Layer}  # noqa: RUF012

        def __init__(self):
            super().__init__()
            self.before, self.inner = nn.ModuleList([Layer(), Layer(), Layer()]), Stack()

        @capture_outputs
        def forward(self, x, **kwargs):
            for layer in self.before:
                x = layer(x)
            inner = self.inner(x, **kwargs)
            return {"logits": inner[0], "inner": inner.hidden_states}

    result = Outer()(torch.randn(2, 4), output_hidden_states=True)
    assert (len(result["hidden_states"]), len(result["inner"])) == (7, 4)
    assert_same(result["inner"], result["hidden_states"][3:])


def test_flags_pass_through_a_module_that_declares_nothing():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Stack()

        @capture_outputs
        def forward(self, x, **kwargs):
            return self.inner(x, **kwargs)

    assert len(Outer()(torch.ones(1, 4), output_hidden_states=True).hidden_states) == 4
    with pytest.raises(InvalidRequestError, match="cannot return 'attentions'"):
        Outer()(torch.ones(1, 4), output_attentions=True)


def test_in_place_layers_do_not_change_states():
    model = Stack(InPlace(), InPlace(), InPlace())
    model._can_record_outputs = {"hidden_states": InPlace}
    assert [s.item() for s in model(torch.zeros(1), output_hidden_states=True).hidden_states] == [0, 1, 2, 3]


def test_what_is_not_declared_is_refused_before_the_forward_runs():
    model = returning(lambda h: pytest.fail("the forward ran"))
    before = traces(model)
    with pytest.raises(InvalidRequestError) as error:
        model(torch.ones(1, 4), output_hiden_states=True)
    assert str(error.value) == (
        "Model cannot return 'hiden_states': it is not declared in `_can_record_outputs`.\n"
        "  expected: output_hidden_states\n"
        "  got: output_hiden_states=True\n"
        "  hint: nearest: hidden_states."
    )
    assert traces(model) == before


def test_what_is_declared_and_matches_nothing_is_refused():
    model = returning(lambda h: h, hidden_states=nn.Conv1d)
    with pytest.raises(InvalidRequestError, match="No module matches"):
        model(torch.ones(1, 4), output_hidden_states=True)


def test_an_exception_of_the_forward_leaves_nothing():
    model = Stack()
    before = traces(model)
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 5), output_hidden_states=True)
    assert traces(model) == before


def test_the_signature_shows_that_any_flag_may_be_given():
    import inspect

    assert str(inspect.signature(Stack.forward)) == "(self, x, **kwargs)"
    assert Stack.forward.__name__ == "forward"
