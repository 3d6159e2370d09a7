"""Graphs in place of a model: what calls the model goes on unchanged, and nothing stays on it."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from transformers import DynamicCache

import exportkit
from exportkit.errors import ArgumentError, InvalidRequestError, InvalidTypeError, UnknownMethodError
from exportkit.report.export import export_page
from tests.models import Add, tiny_llama, tiny_t5

pytestmark = pytest.mark.runtime
IDS = torch.arange(10, 43).reshape(3, 11)


def exported(model, run, folder, **options):
    observer = exportkit.InputObserver()
    with observer(model, **options), torch.no_grad():
        run()
    return exportkit.export(model, observer).to_onnx(folder / "model.onnx")


def generate(model, ids=IDS, **options):
    return model.generate(ids, **{"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, **options})


@pytest.fixture(scope="module")
def llama():
    return tiny_llama()


@pytest.fixture(scope="module")
def llama_graph(llama, tmp_path_factory):
    return exported(llama, lambda: generate(llama, IDS[:2, :7]), tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"do_sample": True}, {"attention_mask": (IDS > 13).long()}],
    ids=["greedy", "beams", "sampling", "padding"],
)
def test_generate_returns_the_same_tokens(llama, llama_graph, options):
    before = dict(vars(llama))
    compared = exportkit.compare_runs(lambda: generate(llama, **options), llama, llama_graph)
    assert compared.equal
    assert compared.first_step is None
    assert (compared.inside, compared.outside, compared.steps) == (6, 0, 6)
    assert vars(llama) == before


def test_a_cache_of_the_caller_is_filled(llama, llama_graph):
    expected, cache = DynamicCache(config=llama.config), DynamicCache(config=llama.config)
    generate(llama, past_key_values=expected)
    with llama_graph.in_place_of(llama):
        generate(llama, past_key_values=cache)
    assert cache.get_seq_length() == expected.get_seq_length() == 16
    torch.testing.assert_close(cache.layers[1].keys, expected.layers[1].keys)


@pytest.mark.parametrize("way", ["assistant", "prompt lookup"])
def test_assisted_generation_returns_the_same_tokens(llama, way, tmp_path):
    assisted = {"prompt_lookup_num_tokens": 3}
    if way == "assistant":
        assisted = {"assistant_model": tiny_llama(num_hidden_layers=1)}

    def run():
        return generate(llama, IDS[:1], **assisted), generate(llama, IDS[1:])

    graph = exported(llama, run, tmp_path)
    compared = exportkit.compare_runs(run, llama, graph)
    assert compared.equal
    assert compared.outside == 0


def test_a_static_cache_is_used_as_by_the_model(llama, tmp_path):
    def run():
        return generate(llama, IDS[:2, :7], cache_implementation="static")

    compared = exportkit.compare_runs(run, llama, exported(llama, run, tmp_path))
    assert compared.equal
    assert compared.outside == 0


def test_weights_of_the_model_are_not_needed(llama, llama_graph):
    with torch.device("meta"):
        empty = type(llama)(llama.config).eval()
    with llama_graph.in_place_of(empty):
        assert torch.equal(generate(empty), generate(llama))


def test_several_threads_generate_at_once(llama, llama_graph):
    prompts = [IDS[:1, : 3 + number] for number in range(8)]
    expected = [generate(llama, prompt) for prompt in prompts]
    with llama_graph.in_place_of(llama) as calls, ThreadPoolExecutor(8) as threads:
        got = list(threads.map(lambda prompt: generate(llama, prompt), prompts))
    assert all(map(torch.equal, got, expected))
    new = sum(tokens.shape[1] - prompt.shape[1] for tokens, prompt in zip(expected, prompts, strict=True))
    assert (calls.inside, calls.outside) == (new, 0)


def test_the_encoder_of_an_encoder_decoder_model_runs_on_its_graph(tmp_path):
    model = tiny_t5()
    graph = exported(model, lambda: generate(model, IDS[:2, :5]), tmp_path, parts="auto")
    compared = exportkit.compare_runs(lambda: generate(model, num_beams=2), model, graph)
    assert compared.equal
    assert compared.inside == compared.steps + 1


def test_a_saved_folder_takes_the_place_of_the_model(tmp_path):
    model, observer = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), exportkit.InputObserver()
    with observer(model[0], method_name="forward"):
        model(torch.ones(3, 4))
    exportkit.export(model[0], observer).save(tmp_path / "out")
    x = torch.randn(5, 4)
    with exportkit.load(tmp_path / "out").in_place_of(model[0]) as calls:
        torch.testing.assert_close(model(x), model[1](nn.functional.linear(x, model[0].weight, model[0].bias)))
    assert calls.inside == 1


def test_a_model_takes_the_place_of_the_only_one_in_a_dict(tmp_path):
    model, x = nn.Linear(4, 2), torch.ones(3, 4)
    observer = exportkit.InputObserver()
    with observer({"linear": model}):
        model(x)
    graph = exportkit.export({"linear": model}, observer).save(tmp_path / "out")
    with graph.in_place_of(model) as calls:
        model(x)
    assert calls.inside == 1


@pytest.mark.parametrize(
    "given", [lambda models: models["a"], lambda models: {"a": models["a"]}], ids=["module", "dict"]
)
def test_one_module_does_not_serve_as_two(given, tmp_path):
    models, x, observer = {"a": nn.Linear(4, 2), "b": nn.Linear(4, 2)}, torch.ones(3, 4), exportkit.InputObserver()
    with observer(models):
        models["a"](x), models["b"](x)
    graph = exportkit.export(models, observer).save(tmp_path / "out")
    with pytest.raises(InvalidRequestError, match=r"a\.forward and b\.forward are methods of different modules"):
        graph.in_place_of(given(models))
    with pytest.raises(InvalidRequestError, match="one module was given for both"):
        exportkit.export(given(models), observer)


def test_another_method_than_forward(tmp_path):
    class Codec(nn.Module):
        def decode(self, x):
            return x * 2

        def forward(self, x):
            return self.decode(x) + 1

    model = Codec()
    graph = exported(model, lambda: model(torch.ones(2, 3)), tmp_path, method_name="decode")
    with graph.in_place_of(model) as calls:
        assert torch.equal(model(torch.ones(4, 3)), torch.full((4, 3), 3.0))
    assert calls.inside == 1


def test_hooks_that_are_part_of_the_graph_run_once(tmp_path):
    model = Add()
    model.register_forward_hook(lambda module, args, result: result * 10)
    x, y = torch.ones(4, 3), torch.ones(1, 3)
    graph = exported(model, lambda: model(torch.ones(2, 3), y), tmp_path)
    with graph.in_place_of(model):
        assert torch.equal(model(x, y), torch.full((4, 3), 20.0))


def test_hooks_that_the_caller_adds_later_run(tmp_path):
    model, seen = Add(), []
    graph = exported(model, lambda: model(torch.ones(2, 3), torch.ones(1, 3)), tmp_path)
    model.register_forward_hook(lambda module, args, result: seen.append(result.shape))
    with graph.in_place_of(model):
        model(torch.ones(4, 3), torch.ones(1, 3))
    assert seen == [(4, 3)]


class TestOutsideOfTheDomain:
    @pytest.fixture
    def model(self):
        return Add()

    @pytest.fixture
    def graph(self, model, tmp_path):
        return exported(model, lambda: model(torch.ones(2, 3), torch.ones(1, 3)), tmp_path)

    def test_a_call_raises(self, model, graph):
        before = dict(vars(model))
        with pytest.raises(ArgumentError, match="float64"), graph.in_place_of(model) as calls:
            model(torch.ones(2, 3).double(), torch.ones(1, 3).double())
        assert (calls.inside, calls.outside) == (0, 1)
        assert vars(model) == before

    def test_the_model_runs_where_that_is_asked_for(self, model, graph):
        with graph.in_place_of(model, outside="eager") as calls:
            assert model(torch.ones(2, 3).double(), torch.ones(1, 3).double()).dtype == torch.float64
            model(torch.ones(2, 3), torch.ones(1, 3))
        assert repr(calls) == "InPlace(1 call inside, 1 outside)"
        assert "float64" in str(calls.last_refusal)

    def test_comparing_runs_says_which_calls_the_model_ran(self, model, graph):
        def run():
            return [model(torch.ones(2, 3).to(dtype), torch.ones(1, 3).to(dtype)) for dtype in (None, torch.float64)]

        compared = exportkit.compare_runs(run, model, graph, outside="eager")
        assert compared.equal
        assert "calls: 1 on the graphs, 1 outside of their domain" in str(compared)
        assert "float64" in str(compared)


def test_blocks_may_end_in_any_order(tmp_path):
    model, x = nn.Linear(3, 3), torch.ones(2, 3)
    graph = exported(model, lambda: model(x), tmp_path)
    before = dict(vars(model))
    observer = exportkit.InputObserver()
    first, second = graph.in_place_of(model), observer(model)
    first.__enter__()
    second.__enter__()
    model(x)
    first.__exit__(None, None, None)
    model(x)
    second.__exit__(None, None, None)
    assert (first.inside, observer.num_obs()) == (1, 2)
    assert vars(model) == before


def test_a_difference_is_found_with_its_first_token_and_call(llama, llama_graph):
    other = tiny_llama()
    with torch.no_grad():
        other.lm_head.weight.neg_()
    compared = exportkit.compare_runs(lambda: {"tokens": generate(other), "text": "same"}, other, llama_graph)
    assert not compared.equal
    assert compared.first_step == 0
    lines = str(compared).splitlines()
    assert lines[0] == "DIFFERENT, 2 values compared"
    assert "tokens" in lines[1]
    assert "at [0, 11]" in lines[1]


class TestAComparisonInTheReport:
    @pytest.fixture
    def model(self):
        return nn.Linear(3, 3)

    @pytest.fixture
    def export(self, model):
        observer = exportkit.InputObserver()
        with observer(model):
            model(torch.ones(2, 3))
        return exportkit.export(model, observer)

    def test_the_latest_one_has_a_row(self, model, export, tmp_path):
        graph = export.to_onnx(tmp_path / "model.onnx")
        exportkit.compare_runs(lambda: model(torch.rand(4, 3)), model, graph)
        report = graph.verify()
        assert report.ok
        row = report.rows[-1]
        assert (row.kind, row.status) == ("application", "proven")
        assert row.where == "the result is equal; calls: 1 on the graphs, 0 outside of their domain"
        assert row.eager_seconds > 0
        assert "application run" in str(report)

    def test_a_folder_keeps_it(self, model, export, tmp_path):
        graph = export.to_onnx(tmp_path / "model.onnx")
        compared = exportkit.compare_runs(lambda: model(torch.rand(4, 3)), model, graph)
        export.save(tmp_path / "out", compared=compared)
        assert "application run" in (tmp_path / "out" / "report.txt").read_text()
        assert exportkit.load(tmp_path / "out").verify().rows[-1].where == compared.row.text
        assert "application run" in export_page(tmp_path / "out")

    def test_a_run_that_differs_is_not_proven(self, model, export, tmp_path):
        graph, runs = export.to_onnx(tmp_path / "model.onnx"), []

        def run():
            runs.append(None)
            return model(torch.rand(4, 3)) * len(runs)

        assert not exportkit.compare_runs(run, model, graph).equal
        report = graph.verify()
        assert not report.ok
        assert report.problems()[0].startswith("application call run: differs, result: ")

    def test_anything_else_is_refused(self, export, tmp_path):
        with pytest.raises(InvalidTypeError, match="the RunComparison that compare_runs returned"):
            export.save(tmp_path / "out", compared=True)
        assert not (tmp_path / "out").exists()


def test_states_of_random_numbers_are_restored(tmp_path):
    model, x = nn.Linear(3, 3), torch.ones(2, 3)
    graph = exported(model, lambda: model(x), tmp_path)
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    assert exportkit.compare_runs(lambda: model(torch.rand(4, 3)), model, graph).equal
    assert torch.equal(torch.rand(2), expected)


@pytest.mark.parametrize(
    ("run", "graph", "error", "text"),
    [
        (lambda: nn.Linear(3, 3)(torch.ones(2, 3)), None, InvalidRequestError, "did not call the model"),
        (None, None, InvalidTypeError, "a callable"),
        (print, "model.onnx", InvalidTypeError, "an OnnxModel"),
    ],
    ids=["another model", "no function", "a path"],
)
def test_wrong_arguments_of_a_comparison(run, graph, error, text, tmp_path):
    model, x = nn.Linear(3, 3), torch.ones(2, 3)
    made = exported(model, lambda: model(x), tmp_path)
    before = dict(vars(model))
    with pytest.raises(error, match=text):
        exportkit.compare_runs(run, model, made if graph is None else graph)
    assert vars(model) == before


class Tokens(nn.Module):
    def decode(self, ids, skip_special_tokens=True):
        return ids


@pytest.mark.parametrize(
    ("model", "options", "error", "text"),
    [
        (nn.ReLU(), {"outside": "ignore"}, InvalidRequestError, "'raise' or 'eager'"),
        (print, {}, InvalidTypeError, "in_place_of\\(pipe.model\\)"),
        (nn.ReLU(), {}, UnknownMethodError, "decode"),
        (Tokens(), {}, InvalidRequestError, "its decode does not take x"),
    ],
    ids=["outside", "no module", "another model", "another method of this name"],
)
def test_wrong_arguments(model, options, error, text, tmp_path):
    class Codec(nn.Module):
        def decode(self, x):
            return x * 2

    codec = Codec()
    graph = exported(codec, lambda: codec.decode(torch.ones(2, 3)), tmp_path, method_name="decode")
    with pytest.raises(error, match=text):
        graph.in_place_of(model, **options)
