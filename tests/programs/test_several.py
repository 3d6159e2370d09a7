"""Several programs where one graph cannot serve all calls: why, how each call finds its own, and the folder of them."""

import json
import re
import shutil

import pytest
import torch
from typer.testing import CliRunner

import exportkit
from exportkit import cli
from exportkit.errors import ArgumentError, ExportError, InvalidRequestError
from tests.programs.failing import Positive


class TwoKernels(torch.nn.Module):
    """Computes one token with other weights than several, as no kernel should."""

    def __init__(self):
        super().__init__()
        self.one, self.several = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x, state=None):
        if state is None:
            state = x.new_zeros(x.shape[0], 1, x.shape[2])
        if x.shape[1] == 1:
            result = self.one(x) + state
            return result, result
        result = self.several(x).cumsum(1) + state
        return result, result[:, -1:]


class OtherStart(torch.nn.Module):
    """Begins with other weights than it goes on with, for which an empty past does not stand."""

    def __init__(self):
        super().__init__()
        self.begin, self.go_on = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x, past=None):
        if past is None:
            return {"y": self.begin(x), "past": torch.tanh(self.begin(x))}
        past = torch.cat([past, self.go_on(x)], dim=1)
        return {"y": self.go_on(x) + past.mean(1, keepdim=True), "past": past}


class OneByOne(torch.nn.Module):
    """Takes a prompt as a whole, and then single tokens: several of them on a filled cache it refuses."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x, past=None):
        if past is None:
            return {"y": self.linear(x), "past": x}
        if x.shape[1] != 1:
            raise ValueError("one token at a time")
        past = torch.cat([past, x], dim=1)
        return {"y": self.linear(x) + past.mean(1, keepdim=True), "past": past}


class CacheOfItsOwn(torch.nn.Module):
    """Keeps keys in a cache of transformers, and begins with another kernel."""

    def __init__(self):
        super().__init__()
        self.begin, self.go_on = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x, cache):
        layer = self.go_on if cache.get_seq_length() else self.begin
        states = layer(x)[:, None]
        keys, values = cache.update(states, states * 2, 0)
        return {"y": (keys + values).sum(2) + states.mean(2), "cache": cache}


class AnyRank(torch.nn.Module):
    """Takes rows, or rows of tokens."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 4)

    def forward(self, x):
        return self.linear(x) if x.ndim == 2 else self.linear(x).sum(1)


class Modes(torch.nn.Module):
    """Does what a constant says."""

    def forward(self, x, mode="add"):
        return x + 1 if mode == "add" else x * 2


class Unservable(torch.nn.Module):
    """Fails in both of its paths; each decides by a value."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Positive(), Positive()

    def forward(self, x, bias=None):
        return self.first(x) if bias is None else self.second(x + bias)


class Served(torch.nn.Module):
    """Takes two paths that are one graph."""

    def forward(self, x, bias=None):
        return x * 2 if bias is None else x * 2 + bias


def generate(model):
    state = model(torch.randn(2, 5, 8))[1]
    for _ in range(2):
        state = model(torch.randn(2, 1, 8), state=state)[1]


def go_on(model):
    past = model(torch.randn(2, 5, 8))["past"]
    for _ in range(2):
        past = model(torch.randn(2, 1, 8), past=past)["past"]


def with_cache(model):
    from transformers import DynamicCache

    cache = model(torch.randn(2, 5, 8), DynamicCache())["cache"]
    for _ in range(2):
        cache = model(torch.randn(2, 1, 8), cache)["cache"]


def exported_of(model, run):
    torch.manual_seed(0)
    observer = exportkit.InputObserver()
    with torch.no_grad(), observer(model.eval()):
        run(model)
    return exportkit.export(model, observer)


def calls_of(*calls):
    def run(model):
        for call in calls:
            model(**call)

    return run


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """A model with two kernels, its export, and the folder that it was saved to."""
    torch.manual_seed(0)
    model = TwoKernels()
    exported = exported_of(model, generate)
    folder = tmp_path_factory.mktemp("kernels") / "out"
    return model, exported, exported.save(folder), folder


class TestSplit:
    def test_a_kernel_for_one_token_makes_two_programs_and_says_why(self, kernels):
        exported = kernels[1]
        assert repr(exported) == "Exported(TwoKernels.forward, 2 programs: without_state, with_state)"
        text = exported.plan.findings[-1].text
        start = "one graph failed, so 2 programs: without_state, with_state. The cause: recorded call 1: differs, [0]: "
        assert text.startswith(start)
        assert [(a.strategy, a.outcome) for a in exported.attempts] == [
            ("plain trace", "succeeded"),
            ("several programs", "succeeded"),
        ]

    def test_a_model_that_takes_one_token_at_a_time_has_a_program_for_them(self, tmp_path):
        exported = exported_of(OneByOne(), go_on)
        assert list(exported.programs) == ["without_past", "with_past"]
        assert "one token at a time" in exported.plan.findings[-1].text
        assert exported.save(tmp_path / "out").verify().ok

    def test_each_call_is_proven_through_the_dispatch_and_each_program_at_unseen_sizes(self, kernels):
        report = kernels[2].verify()
        assert report.ok, report
        assert [row.label for row in report.rows] == ["0 (without_state)", "1 (with_state)", "2 (with_state)"]
        assert list(report.parts) == ["without_state", "with_state"]
        for part in report.parts.values():
            assert sum(row.kind == "unseen" and row.status == "proven" for row in part.rows) >= 3

    def test_further_calls_are_proven_with_the_program_that_they_reach(self, kernels):
        model, _, programs, _ = kernels
        data = exportkit.InputObserver()
        with torch.no_grad(), data(model):
            model(torch.randn(3, 6, 8))
            model(torch.randn(4, 1, 8), torch.randn(4, 1, 8))
        given = [row for row in programs.verify(unseen=False, data=data).rows if row.kind == "given"]
        assert [row.status for row in given] == ["proven", "proven"]
        assert [sorted(row.sizes.values()) for row in given] == [[3, 6], [4]]

    @pytest.mark.parametrize(("batch", "length"), [(1, 1), (3, 1), (4, 9)])
    def test_programs_return_what_the_model_returns_at_sizes_nobody_has_run(self, kernels, batch, length):
        model, _, programs, _ = kernels
        x, state = torch.randn(batch, length, 8), torch.randn(batch, 1, 8)
        call = {"x": x, "state": state} if length == 1 else {"x": x}
        for expected, got in zip(model(**call), programs(**call), strict=True):
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)

    def test_an_unproven_boundary_is_no_promise(self, kernels):
        """One token without a state was never seen, and the program for several computes it otherwise."""
        with pytest.raises(ArgumentError) as caught:
            kernels[2](torch.randn(2, 1, 8))
        assert re.sub(r" {2,}", " ", str(caught.value)) == (
            "No program fits this call.\n"
            " where: x (2, 1, 8)\n"
            " expected: a call like those that were recorded\n"
            " got: without_state: An input is out of range. where: x expected: x_axis_1 at least 2 got: 1\n"
            " with_state: A required input is missing. where: state got: x (2, 1, 8)\n"
            " hint: observe a call like this one too, then export again."
        )

    def test_a_path_for_which_nothing_stands_in_makes_two_programs(self, tmp_path):
        model = OtherStart()
        programs = exported_of(model, go_on).to_onnx(tmp_path / "model.onnx")
        assert list(programs.graphs) == ["without_past", "with_past"]
        assert programs.verify().ok
        assert sorted(path.name for path in tmp_path.glob("*.onnx")) == [
            "model.with_past.onnx",
            "model.without_past.onnx",
        ]
        x, past = torch.randn(3, 4, 8), torch.randn(3, 6, 8)
        torch.testing.assert_close(programs(x, past=past)["y"], model(x, past=past)["y"], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(programs(x)["y"], model(x)["y"], atol=1e-5, rtol=1e-4)

    def test_programs_of_a_model_with_a_cache_are_prefill_and_decode(self, tmp_path):
        from transformers import DynamicCache

        model = CacheOfItsOwn()
        exported = exported_of(model, with_cache)
        assert list(exported.programs) == ["prefill", "decode"]
        programs = exported.to_onnx(tmp_path / "model.onnx")
        assert programs.verify().ok
        caches = DynamicCache(), DynamicCache()
        for length in (7, 1, 1):
            x = torch.randn(4, length, 8)
            expected, got = model(x, caches[0]), programs(x, caches[1])
            torch.testing.assert_close(got["y"], expected["y"], atol=1e-5, rtol=1e-4)
            caches = expected["cache"], got["cache"]

    def test_another_rank_makes_two_programs(self, tmp_path):
        model = AnyRank()
        calls = [{"x": torch.randn(*shape)} for shape in ((2, 8), (2, 5, 8), (3, 6, 8), (3, 8), (4, 9, 8))]
        exported = exported_of(model, calls_of(*calls[:3]))
        assert list(exported.programs) == ["x_of_rank_2", "x_of_rank_3"]
        programs = exported.to_onnx(tmp_path / "model.onnx")
        assert programs.verify().ok
        for call in calls:
            torch.testing.assert_close(programs(**call), model(**call), atol=1e-5, rtol=1e-4)

    def test_recorded_calls_are_checked_each_with_its_program(self, tmp_path):
        model, observer = AnyRank(), exportkit.InputObserver()
        with torch.no_grad(), observer(model):
            for shape in ((2, 5, 8), (2, 8), (3, 6, 8)):
                model(torch.randn(*shape))
        programs = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
        rows = observer.check_discrepancies(programs)
        assert [(row["index"], row["SUCCESS"]) for row in rows] == [(0, True), (1, True), (2, True)]

    def test_another_constant_makes_two_programs(self, tmp_path):
        model, x = Modes(), torch.randn(2, 8)
        programs = exported_of(model, calls_of({"x": x, "mode": "add"}, {"x": x, "mode": "double"})).to_onnx(
            tmp_path / "model.onnx"
        )
        assert programs.verify().ok
        for mode in ("add", "double"):
            assert torch.equal(programs(x, mode=mode), model(x, mode=mode))

    def test_where_programs_fail_too_the_error_is_about_one_graph(self):
        x = torch.rand(2, 6)
        with pytest.raises(ExportError) as caught:
            exported_of(Unservable(), calls_of({"x": x}, {"x": x, "bias": x}))
        assert "it branches on the values of a tensor" in str(caught.value)
        assert "(Positive)" in str(caught.value)
        assert len(str(caught.value).splitlines()) < 15

    def test_a_model_that_one_graph_serves_is_traced_once(self, monkeypatch):
        count = []
        real = torch.export.export
        monkeypatch.setattr(torch.export, "export", lambda *args, **kwargs: count.append(1) or real(*args, **kwargs))
        x = torch.randn(2, 6)
        exported = exported_of(Served(), calls_of({"x": x}, {"x": x, "bias": x}))
        assert list(exported.programs) == [""]
        assert [str(attempt) for attempt in exported.attempts] == ["plain trace: succeeded"]
        assert len(count) == 1

    def test_a_plan_is_for_one_graph(self):
        torch.manual_seed(0)
        model, observer = AnyRank(), exportkit.InputObserver()
        with observer(model):
            model(torch.randn(2, 8))
        assert list(exportkit.export(model, observer.plan()).programs) == [""]


def test_lists_of_several_lengths_have_a_program_for_each(tmp_path):
    class Stacks(torch.nn.Module):
        def forward(self, parts):
            return torch.stack(parts).softmax(0)

    def parts(rows, count):
        return [torch.randn(rows, 4) for _ in range(count)]

    model, observer = Stacks(), exportkit.InputObserver()
    with observer(model):
        for rows, count in ((2, 3), (3, 5)):
            model(parts(rows, count))
    onnx_model = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    assert onnx_model.verify().ok
    for rows, count in ((4, 3), (1, 5)):
        given = parts(rows, count)
        torch.testing.assert_close(onnx_model(given), model(given))
    with pytest.raises(ArgumentError):
        onnx_model(parts(2, 4))


class TestFolder:
    def test_a_folder_holds_all_programs_and_says_why(self, kernels):
        folder = kernels[3]
        names = {path.name for path in folder.iterdir()}
        assert {"model.without_state.onnx", "model.with_state.onnx", "manifest.json", "report.txt"} <= names
        manifest = json.loads((folder / "manifest.json").read_text())
        assert list(manifest["programs"]) == ["without_state", "with_state"]
        assert manifest["split"]["reason"].startswith("recorded call 1: differs")
        assert "one graph failed, so 2 programs" in (folder / "report.txt").read_text()

    def test_a_loaded_folder_is_called_like_the_model_and_proven(self, kernels):
        model, _, _, folder = kernels
        loaded = exportkit.load(folder)
        x, state = torch.randn(3, 1, 8), torch.randn(3, 1, 8)
        torch.testing.assert_close(loaded(x, state)[0], model(x, state)[0], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(loaded(x.expand(3, 6, 8))[0], model(x.expand(3, 6, 8))[0], atol=1e-5, rtol=1e-4)
        assert loaded.verify().ok

    def test_the_command_proves_the_folder(self, kernels):
        done = CliRunner().invoke(cli.app, ["verify", str(kernels[3])])
        assert done.exit_code == 0, done.stderr
        assert "one graph failed, so 2 programs" in done.stdout

    def test_a_changed_file_is_refused(self, kernels, tmp_path):
        folder = shutil.copytree(kernels[3], tmp_path / "copied")
        with (folder / "model.with_state.onnx").open("ab") as file:
            file.write(b" ")
        with pytest.raises(exportkit.ExportkitError, match="has changed since it was saved"):
            exportkit.load(folder).verify()

    def test_a_runtime_for_one_graph_is_refused(self, kernels, tmp_path):
        with pytest.raises(InvalidRequestError, match="This runtime needs a single graph"):
            kernels[1].save(tmp_path / "out", runtime="genai")
        assert not (tmp_path / "out").exists()

    def test_scripts_are_written_for_each_program(self, kernels, tmp_path):
        folder = kernels[1].repro(tmp_path)
        assert (folder / "with_state" / "repro.py").exists()


class OtherMode(torch.nn.Module):
    def forward(self, x, mode="plain"):
        return -x if mode == "negated" and x.shape[1] > 100 else x


@pytest.mark.runtime
def test_constants_that_matter_at_larger_sizes_have_programs_of_their_own(tmp_path):
    model, observer = OtherMode(), exportkit.InputObserver()
    with observer(model):
        for length, mode in ((5, "plain"), (7, "negated")):
            model(torch.randn(2, length), mode=mode)
    exported = exportkit.export(model, observer)
    assert len(exported.programs) == 2
    graphs = exported.to_onnx(tmp_path / "model.onnx")
    assert graphs.verify().ok
    x = torch.randn(3, 150)
    assert torch.equal(graphs(x, mode="plain"), x)
    with pytest.raises(ArgumentError, match="x_axis_1 <= 100"):
        graphs(x, mode="negated")


@pytest.mark.runtime
def test_other_constants_after_the_stored_calls_are_no_finding_if_a_program_serves_them(tmp_path):
    model, observer = OtherMode(), exportkit.InputObserver()
    with observer(model, store_n_calls=2):
        for length, mode in ((5, "plain"), (7, "negated"), (6, "plain"), (8, "negated")):
            model(torch.randn(2, length), mode=mode)
    exported = exportkit.export(model, observer)
    assert len(exported.programs) == 2
    findings = [finding for traced in exported.programs.values() for finding in traced.plan.findings]
    assert [finding.text for finding in findings if finding.kind == "refused call"] == []


class Sides(torch.nn.Module):
    """Chooses its weights by a length, and for long inputs by another one."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        if x.shape[1] > 8:
            return self.layers[0](x) if x.shape[0] < x.shape[1] else self.layers[1](x)
        return self.layers[2](x)


def test_calls_on_both_sides_of_conditions_on_sizes_have_programs_of_their_own(tmp_path):
    model = Sides()
    exported = exportkit.export(model, served(model, (2, 5), (3, 12), (20, 11), (4, 7)))
    graph = exported.to_onnx(tmp_path / "model.onnx")
    assert graph.verify().ok
    exported.save(tmp_path / "folder")
    for runner in (graph, exportkit.load(tmp_path / "folder")):
        assert len(runner.split.kinds) == 3
        assert re.search(r"not \(\w+ (<=|>=) \d\)", runner.split.text)
        for batch, length in ((1, 1), (9, 8), (3, 9), (9, 9), (30, 14)):
            x = torch.randn(batch, length, 8)
            torch.testing.assert_close(runner(x), model(x))


class Streaming(torch.nn.Module):
    """Pads the first chunk of a stream, and puts what is left of the one before in front of the others."""

    def forward(self, x, cache):
        x = torch.nn.functional.pad(x, (0, 0, 2, 0)) if cache.shape[1] == 0 else torch.cat([cache, x], 1)
        return x[:, 2:] - x[:, :-2], x[:, -2:]


@pytest.mark.runtime
def test_calls_with_an_empty_tensor_have_a_program_of_their_own_if_the_model_asks_whether_it_is(tmp_path):
    model, observer = Streaming(), exportkit.InputObserver()
    with observer(model, store_n_calls=4):
        for batch, length, cached in ((1, 5, 0), (1, 5, 2), (2, 6, 0), (2, 6, 2)):
            model(torch.randn(batch, length, 3), torch.randn(batch, cached, 3))
    graph = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    assert graph.verify().ok
    for length, cached in ((4, 0), (9, 2)):
        call = torch.randn(3, length, 3), torch.randn(3, cached, 3)
        torch.testing.assert_close(graph(*call), model(*call))


def test_loops_of_different_lengths_have_no_program_for_each():
    class Halves(torch.nn.Module):
        def forward(self, x):
            length = x.shape[1]
            while length > 1:
                x, length = x + 1, length // 2
            return x

    with pytest.raises(ExportError, match="serves less than the plan promises"):
        exportkit.export(Halves(), served(Halves(), (2, 6), (3, 9)))


def served(model, *shapes):
    observer = exportkit.InputObserver()
    with observer(model, store_n_calls=len(shapes)):
        for shape in shapes:
            model(torch.randn(*shape, 8))
    return observer
