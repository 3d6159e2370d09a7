"""The model, its exported program and its ONNX model are runners, and one loop says for which calls they agree."""

import onnx
import pytest
import torch

import exportkit
from exportkit.calls.call import Call
from exportkit.calls.signature import Signature
from exportkit.errors import ArgumentError, RuntimeFailure
from exportkit.probing.size_reads import SizeReads
from exportkit.running import eager
from exportkit.running.eager import EagerRunner
from exportkit.running.program import ProgramRunner
from exportkit.running.runner import compare_calls, recorded
from exportkit.running.session import Session, SessionRunner
from exportkit.trees import flatten


class Doubles(torch.nn.Module):
    """Doubles its input, but for three rows; one of no columns it does not take."""

    def forward(self, x):
        assert x.shape[1]
        return {"y": x * (1 if x.shape[0] == 3 else 2), "row": x.reshape(-1, x.shape[1])[:1]}


def call_of(*shape, outputs=None):
    arguments = {"x": flatten(torch.ones(*shape))}
    made = {} if outputs is None else {"outputs": flatten(outputs)}
    return Call(arguments, Signature.of(Doubles().forward), **made)


@pytest.fixture(scope="module")
def program():
    shapes = {"x": {0: torch.export.Dim.AUTO}}
    exported = torch.export.export(Doubles(), (torch.ones(4, 5),), dynamic_shapes=shapes)
    return ProgramRunner(exported, ["x"], ["y", "row"])


def test_runners_agree_but_for_the_calls_that_the_trace_did_not_see(program):
    calls = [call_of(2, 5), call_of(3, 5), call_of(4, 5)]

    outcomes = list(compare_calls(EagerRunner(Doubles(), "forward"), program, calls))

    assert [outcome.agrees for outcome in outcomes] == [True, False, True]
    assert [outcome.call for outcome in outcomes] == calls
    assert [(wrong.path, wrong.reason) for wrong in outcomes[1].wrong] == [("y", "1 became 2 at [0, 0]")]


def test_calls_that_the_model_does_not_accept_are_left_out(program):
    assert not list(compare_calls(EagerRunner(Doubles(), "forward"), program, [call_of(2, 0)]))


def test_an_error_of_the_second_runner_is_a_disagreement():
    def fails(call):
        raise ValueError(call.tensors()["x"].shape)

    (outcome,) = compare_calls(EagerRunner(Doubles(), "forward"), fails, [call_of(2, 5)])

    assert not outcome.agrees
    assert isinstance(outcome.error, ValueError)
    assert outcome.differences == ()


def test_what_came_back_from_a_call_can_stand_for_the_model():
    right = {"y": torch.full((2, 5), 2.0), "row": torch.ones(1, 5)}
    calls = [call_of(2, 5, outputs=right), call_of(2, 5, outputs=right | {"more": torch.ones(1)})]

    outcomes = list(compare_calls(recorded, EagerRunner(Doubles(), "forward"), calls))

    assert outcomes[0].agrees
    assert [(wrong.path, wrong.reason) for wrong in outcomes[1].wrong] == [("more", "only the model returns it")]


def test_other_ways_to_compare_can_be_given(program):
    found = compare_calls(EagerRunner(Doubles(), "forward"), program, [call_of(3, 5)], lambda *_: [])

    assert [outcome.agrees for outcome in found] == [True]


@pytest.mark.runtime
def test_an_onnx_model_is_a_runner():
    text = '<ir_version: 10, opset_import: ["" : 18]> g (float[N, 5] a) => (float[N, 5] b) { b = Add(a, a) }'
    session = Session(onnx.parser.parse_model(text).SerializeToString())
    runner = SessionRunner(session, {"a": "x"}, {"b": "y"})
    eager = EagerRunner(Doubles(), "forward")

    outcomes = compare_calls(
        lambda call: {"y": eager(call)["y"]},
        lambda call: runner.run(call.tensors()),
        [call_of(2, 5), call_of(3, 5), call_of(2, 4)],
    )

    assert [outcome.agrees for outcome in outcomes] == [True, False, False]
    with pytest.raises(RuntimeFailure, match="refused the call"):
        runner.run(call_of(2, 4).tensors())


def test_generators_of_random_numbers_are_as_they_were_after_a_run():
    class Noisy(torch.nn.Module):
        def forward(self, x, generator):
            return x + torch.rand(x.shape, generator=generator) + torch.rand(x.shape)

    given = torch.Generator().manual_seed(3)
    values = {"x": torch.ones(2), "generator": given}
    call = Call({name: flatten(value) for name, value in values.items()}, Signature.of(Noisy().forward))
    states = given.get_state(), torch.get_rng_state()

    first, again = (EagerRunner(Noisy(), "forward")(call) for _ in range(2))

    assert torch.equal(first[""], again[""])
    assert torch.equal(given.get_state(), states[0])
    assert torch.equal(torch.get_rng_state(), states[1])


@pytest.mark.parametrize(("given", "got"), [([[1.0] * 8], "list"), ("x", "str")])
def test_an_input_that_is_not_a_tensor_is_refused_as_such(given, got, tmp_path):
    model, observer = torch.nn.Linear(8, 4), exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for size in (2, 3):
            model(torch.randn(size, 8))
    graph = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    with pytest.raises(ArgumentError, match=f"not a tensor.*\n.*where: input\n.*expected: a tensor\n.*got: {got}"):
        graph(given)
    with pytest.raises(ArgumentError, match="A required input is missing"):
        graph()


class Halved(torch.nn.Module):
    """Divides by two until all numbers are small, which infinity never is."""

    def forward(self, x):
        while x.abs().max() > 1:
            x = x / 2
        return x


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_run_that_does_not_return_is_stopped(monkeypatch):
    monkeypatch.setattr(eager, "_LEAST_SECONDS", 0.5)
    model, observer = Halved(), exportkit.InputObserver()
    with observer(model):
        model(torch.full((2,), 8.0))
    runner, (call,) = EagerRunner(model, "forward"), observer.observation.calls
    endless = call.with_tensors({"x": torch.full((2,), torch.inf)})
    assert [result.tolist() for result in runner(call).values()] == [[1.0, 1.0]]
    for _ in range(2):
        with pytest.raises(TimeoutError, match="did not return within"):
            runner(endless)
    assert [result.tolist() for result in runner(call).values()] == [[1.0, 1.0]]
    assert runner(call.with_tensors({"x": torch.ones(10**7)}))  # so many more elements have no limit


def test_what_is_known_of_the_time_of_runs_is_not_taken_for_what_the_model_reads():
    runner = EagerRunner(torch.nn.Identity(), "forward")
    for rows in (2, 3, 2):
        call = Call({"input": flatten(torch.ones(rows, 4))}, Signature.of(runner.model.forward))
        with SizeReads() as reads:
            runner(call)
        assert reads.log == []
