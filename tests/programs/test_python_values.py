"""Python values of calls: those that a graph was exported with are accepted, all others are refused."""

import dataclasses
import json
import threading
from typing import Any

import pytest
import torch

import exportkit
from exportkit.calls.call import Call
from exportkit.calls.signature import Signature
from exportkit.errors import ArgumentError, ExportkitError, PlanError, UnregisteredClassError
from exportkit.programs.python_values import PythonValues
from exportkit.trees import flatten

X = torch.ones(2, 3)


def values_for(method, *recorded, lists=()):
    """The values for a graph that was traced with the first of the recorded calls, after a way through JSON."""
    signature = Signature.of(method)
    calls = [
        Call({name: flatten(value) for name, value in signature.bind(args, kwargs).items()}, signature)
        for args, kwargs in recorded
    ]
    found = PythonValues.of(signature, calls[0].arguments, calls, lists)
    return PythonValues.from_json(json.loads(json.dumps(found.to_json()))), signature


def refusal(method, recorded, *args, lists=(), **kwargs):
    """What the error says about a call; None if the call is accepted."""
    values, signature = values_for(method, *recorded, lists=lists)
    try:
        values.require(signature.bind(args, kwargs))
    except ArgumentError as error:
        return str(error)
    return None


def scaled(x, scale=1.0, mode="sum", y=None):
    """A method to bind calls to."""


def variadic(x, *rest, **options):
    """A method to bind calls to."""


def nested(data, bias=None):
    """A method to bind calls to."""


@dataclasses.dataclass
class Options:
    factor: float = 2.0
    layers: Any = (1, 2)


def test_the_recorded_value_is_accepted_in_any_way_of_giving_it():
    recorded = [((X, 2.0), {})]
    assert refusal(scaled, recorded, X, 2.0) is None
    assert refusal(scaled, recorded, x=X, scale=2.0, mode="sum", y=None) is None


@pytest.mark.parametrize("value", [2, True, None, 3.0, "2.0", torch.ones(1)])
def test_another_value_or_type_is_refused(value):
    assert "where: scale" in refusal(scaled, [((X, 2.0), {})], X, value)


def test_a_constant_that_is_left_out_has_its_default():
    text = refusal(scaled, [((X, 2.0, "mean"), {})], X)
    assert "These arguments must be passed" in text
    assert "give scale=2.0, mode='mean'." in text
    assert refusal(scaled, [((X, 1.0), {})], X) is None
    assert refusal(scaled, [((X,), {})], X, 1.0) is None


def test_arguments_that_no_recorded_call_gave_are_refused():
    assert "where: scale" in refusal(scaled, [((X,), {})], X, 3.0)
    assert "No recorded call gave this value" in refusal(variadic, [((X,), {})], X, flag=None)
    assert refusal(variadic, [((X,), {})], X, 3) is not None


def test_what_a_dict_of_keywords_lacks_is_nothing():
    recorded = [((X,), {"on": True})]
    assert refusal(variadic, recorded, X, on=True) is None
    assert "where: options.on" in refusal(variadic, recorded, X)
    assert "where: options.on" in refusal(variadic, recorded, X, on=1)


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({"x": X, "sizes": [1, 2]}, None),
        ({"x": X, "sizes": [1, 2, 3]}, "data.sizes[2]"),
        ({"x": X, "sizes": (1, 2)}, "data.sizes"),
        ({"x": X, "sizes": None}, "data.sizes"),
        ({"x": X}, "data.sizes"),
        ({"x": X, "sizes": [1, 2], "more": 1}, "data.more"),
        ({"sizes": [1, 2], "x": X}, None),
        (None, "data"),
    ],
)
def test_constants_beside_tensors_are_compared(given, where):
    text = refusal(nested, [(({"x": X, "sizes": [1, 2]},), {})], given)
    assert (text is None) if where is None else (f"where: {where}\n" in text)


def test_forms_that_were_recorded_are_accepted():
    recorded = [(([X, X],), {}), (([],), {}), ((None,), {})]
    assert refusal(nested, recorded, []) is None
    assert refusal(nested, recorded, None) is None
    assert refusal(nested, recorded[:1], []) is not None
    assert refusal(nested, recorded[:1], [X] * 5) is None  # whether there are inputs for them is not decided here
    assert refusal(nested, recorded[:1], [X], lists=["data"]) is None


def test_objects_are_compared_by_what_they_hold():
    recorded = [((X, Options()), {})]
    assert refusal(scaled, recorded, X, Options()) is None
    text = refusal(scaled, recorded, X, Options(layers=[1, 2]))
    assert "where: scale.layers\n  expected: (1, 2)\n  got: [1, 2]" in text


class Applies(torch.nn.Module):
    def forward(self, x, y):
        return y(x)


class Configured(torch.nn.Module):
    def forward(self, x, options):
        return x * options.factor


class Graph:
    def __init__(self, nodes):
        self.store = Options(nodes)


def exported(model, *calls):
    observer = exportkit.InputObserver()
    with observer(model.eval()):
        for call in calls:
            model(*call)
    return exportkit.export(model, observer)


@pytest.mark.runtime
def test_another_function_is_refused_also_by_a_loaded_graph(tmp_path):
    model = Applies()
    onnx_model = exported(model, (X, torch.relu), (torch.ones(4, 3), torch.relu)).save(tmp_path / "out")
    for graph in (onnx_model, exportkit.load(tmp_path / "out")):
        torch.testing.assert_close(graph(-X, torch.relu), model(-X, torch.relu))
        with pytest.raises(ArgumentError, match="a different value of this constant"):
            graph(-X, torch.tanh)
        assert graph.verify().ok


@pytest.mark.runtime
def test_a_configuration_that_changes_is_noticed(tmp_path):
    options = Options()
    onnx_model = exported(Configured(), (X, options), (torch.ones(4, 3), options)).to_onnx(tmp_path / "model.onnx")
    assert onnx_model(X, options).unique().tolist() == [2.0]
    options.factor = 3.0
    with pytest.raises(ArgumentError, match=r"where: options\.factor"):
        onnx_model(X, options)


def test_a_configuration_that_changed_since_it_was_recorded_cannot_be_exported():
    model, observer, options = Configured(), exportkit.InputObserver(), Options()
    with observer(model):
        model(X, options)
    options.factor = 3.0
    with pytest.raises(PlanError, match=r"was changed after it was recorded[\s\S]*where: options\.factor"):
        exportkit.export(model, observer)


def test_an_object_that_hides_tensors_cannot_be_exported():
    class Sums(torch.nn.Module):
        def forward(self, graph):
            return graph.store.factor.sum()

    graph = Graph(X)
    graph.lock = threading.Lock()
    with pytest.raises(UnregisteredClassError, match=r"with tensors in store\.factor"):
        exported(Sums(), (graph,))


@pytest.mark.runtime
def test_a_constant_that_changes_nothing_may_be_left_out(tmp_path):
    class Cached(torch.nn.Module):
        def forward(self, x, use_cache=None, clamped=False, scale=None):
            use_cache = True if use_cache is None else use_cache
            x = x.clamp(max=100) if clamped else x
            return (x * (1 if scale is None else scale), use_cache)

    calls = [(torch.ones(n, 3), True, True, 2) for n in (2, 4)]
    onnx_model = exported(Cached(), *calls).to_onnx(tmp_path / "model.onnx")
    assert onnx_model(X, clamped=True, scale=2)[1] is True
    for constants in ({"scale": 2}, {"clamped": True}, {"use_cache": False, "clamped": True, "scale": 2}):
        with pytest.raises(ExportkitError):
            onnx_model(X, **constants)


@pytest.mark.runtime
def test_a_constant_that_calls_gave_with_several_values_may_have_any_of_them_if_it_changes_nothing(tmp_path):
    class Passes(torch.nn.Module):
        def forward(self, x, mode=None, **kwargs):
            return x * (2 if mode == "double" else 1)

    observer = exportkit.InputObserver()
    model = Passes()
    with observer(model):
        for rows, step in ((2, None), (3, 1), (5, 1)):
            model(torch.ones(rows, 3), mode="double", step=step)
    onnx_model = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    assert onnx_model.verify().ok
    for step in (None, 1, 2):  # it is never read, so it may be another one of the same type
        assert torch.equal(onnx_model(X, mode="double", step=step), 2 * X)
    for constants in ({"mode": "double", "step": 2.0}, {"mode": None, "step": 1}):
        with pytest.raises(ExportkitError):
            onnx_model(X, **constants)


@pytest.mark.runtime
@pytest.mark.parametrize(
    "reads",
    [
        lambda x, step: x[: -step or None],
        lambda x, step: x * 2 if step > 100 else x,
        lambda x, step: x * 2 if isinstance(step, int) and step == 7 else x,
        lambda x, step: x + {100: 1.0}.get(step, 0.0),
        lambda x, step: x + torch.zeros(step).sum(),
        lambda x, step: x * 2 if str(step) == "7" else x,
        lambda x, step: x * 2 if step.real else x,
    ],
)
def test_a_number_that_the_model_reads_has_to_be_the_recorded_one(reads, tmp_path):
    class Reads(torch.nn.Module):
        def forward(self, x, **kwargs):
            return reads(x, kwargs["step"])

    observer, model = exportkit.InputObserver(), Reads()
    with observer(model):
        for rows in (2, 3):
            model(torch.ones(rows, 3), step=1, unread="a")
    onnx_model = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    assert torch.equal(onnx_model(X, step=1, unread="another"), model(X, step=1, unread="another"))
    with pytest.raises(ArgumentError, match=r"kwargs\.step"):
        onnx_model(X, step=7, unread="a")
