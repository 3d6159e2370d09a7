"""Python numbers that vary between calls become inputs, where a model calculates with them or makes sizes of them."""

import pytest
import torch

import exportkit
from exportkit.errors import ArgumentError

pytestmark = pytest.mark.runtime


class Scales(torch.nn.Module):
    def forward(self, x, scale=1.0, step=0):
        return x * scale + torch.full_like(x, step) - step / 1000


class Branches(torch.nn.Module):
    def forward(self, x, scale):
        return x * scale if scale > 1 else x - scale


class Counts(torch.nn.Module):
    def forward(self, x, count):
        return sum(x * number for number in range(count))


class Nests(torch.nn.Module):
    def forward(self, x, count):
        for _ in range(count):
            x = x.unsqueeze(-1)
        return x


class Resizes(torch.nn.Module):
    def forward(self, x, *sizes, options):
        height, width = sizes
        x = torch.nn.functional.interpolate(x, (height, width)) * options["scale"]
        return x[..., : options["count"]] + torch.arange(options["count"]), height * 2


class AsksForTheType(torch.nn.Module):
    def forward(self, x, step):
        return x * step if isinstance(step, int) else x * 3


def onnx_model(model, folder, *calls):
    observer = exportkit.InputObserver()
    with observer(model):
        for args, kwargs in calls:
            model(*args, **kwargs)
    exported = exportkit.export(model, observer)
    exported.save(folder / "folder")
    return exported.to_onnx(folder / "model.onnx")


def test_numbers_that_a_model_calculates_with_are_inputs(tmp_path):
    model, x = Scales(), torch.randn(4, 6)
    calls = [((torch.randn(2, 3), 2.0), {"step": 3}), ((torch.randn(3, 5),), {"scale": 0.5})]
    runner = onnx_model(model, tmp_path, *calls)
    assert runner.split is None
    assert runner.verify().ok
    for each in (runner, exportkit.load(tmp_path / "folder")):
        for args, kwargs in (((x, -7.25), {"step": 900}), ((x,), {}), ((x,), {"step": -1})):
            got, wanted = each(*args, **kwargs), model(*args, **kwargs)
            assert got.dtype is wanted.dtype
            torch.testing.assert_close(got, wanted)
        for kwargs in ({"scale": 2}, {"step": True}, {"step": torch.tensor(3)}, {"step": 2**63}):
            with pytest.raises(ArgumentError, match="must be a Python number"):
                each(x, **kwargs)


def test_numbers_that_decide_are_inputs(tmp_path):
    model, x = Branches(), torch.randn(4, 5)
    runner = onnx_model(model, tmp_path, ((torch.randn(2, 5), 2.0), {}), ((torch.randn(3, 5), 0.5), {}))
    assert runner.split is None
    assert runner.verify().ok
    for number in (2.0, 0.5, 3.0, 1.0, -7.0):
        torch.testing.assert_close(runner(x, number), model(x, number))


def test_numbers_that_stay_constants_are_named_by_the_programs(tmp_path):
    model, x = Nests(), torch.randn(4, 5)
    runner = onnx_model(model, tmp_path, *[((torch.randn(n + 1, 5), n), {}) for n in (1, 2)])
    assert runner.split is not None
    for number in (1, 2):
        assert f"= {number})" in runner.split.text
        torch.testing.assert_close(runner(x, number), model(x, number))
    with pytest.raises(ArgumentError):
        runner(x, 3)


def test_numbers_of_turns_are_inputs(tmp_path):
    model, x = Counts(), torch.randn(4, 5)
    runner = onnx_model(model, tmp_path, ((torch.randn(2, 5), 2), {}), ((torch.randn(3, 5), 1), {}))
    assert runner.verify().ok
    for count in (1, 3, 7):
        torch.testing.assert_close(runner(x, count), model(x, count))
    with pytest.raises(ArgumentError, match="count = 0"):
        runner(x, 0)


def test_a_model_that_asks_for_the_type_of_a_number_gets_a_number(tmp_path):
    model, x = AsksForTheType(), torch.randn(4, 5)
    runner = onnx_model(model, tmp_path, ((torch.randn(2, 5), 1), {}), ((torch.randn(3, 5), 2), {}))
    for step in (1, 2):
        torch.testing.assert_close(runner(x, step), x * step)


def test_numbers_in_containers_that_make_sizes_are_inputs(tmp_path):
    model = Resizes()

    def call(rows, side, height, width, count, scale):
        return (torch.randn(rows, 3, side, side), height, width), {"options": {"scale": scale, "count": count}}

    runner = onnx_model(model, tmp_path, call(2, 5, 4, 7, 3, 0.5), call(3, 8, 6, 9, 5, 1.5))
    assert runner.split is None
    assert runner.verify().ok
    for each in (runner, exportkit.load(tmp_path / "folder")):
        assert each.session.shapes["options.count"] == ()
        for args, kwargs in (call(1, 6, 2, 8, 7, -2.0), call(4, 9, 11, 5, 1, 0.25)):
            got, wanted = each(*args, **kwargs), model(*args, **kwargs)
            torch.testing.assert_close(got[0], wanted[0])
            assert got[1] == wanted[1]
        (x, *_), kwargs = call(1, 6, 2, 8, 7, -2.0)
        with pytest.raises(ArgumentError, match="an int, 0 or larger"):
            each(x, -1, 8, **kwargs)


class LastRows(torch.nn.Module):
    def forward(self, x, rows=0, scale=1.0):
        return x[:, slice(-rows, None) if isinstance(rows, int) else rows] * scale


def test_numbers_that_vary_only_after_the_stored_calls_are_inputs(tmp_path):
    model, observer = LastRows(), exportkit.InputObserver()
    with observer(model):
        for length, rows in ((5, 2), (6, 2), (7, 2), (8, 3), (9, 1)):
            model(torch.randn(2, length, 4), rows=rows, scale=rows / 2)
    graph = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    assert graph.verify().ok
    x = torch.randn(3, 11, 4)
    for rows in (1, 4, 11):
        torch.testing.assert_close(graph(x, rows=rows, scale=0.3), model(x, rows=rows, scale=0.3))


def test_other_values_after_the_stored_calls_are_a_finding_if_the_graph_refuses_them(tmp_path):
    class Flags(torch.nn.Module):
        def forward(self, x, negated=False, unread="a"):
            return -x if negated else x

    model, observer = Flags(), exportkit.InputObserver()
    with observer(model):
        for length in (2, 3, 4):
            model(torch.randn(2, length))
        model(torch.randn(2, 5), unread="b")
        for _ in range(2):
            model(torch.randn(2, 6), negated=True)
    exported = exportkit.export(model, observer)
    assert [finding.text for finding in exported.plan.findings if finding.kind == "refused call"] == [
        "2 calls that were not stored gave negated=True, which the graph refuses; store more calls to serve it "
        "(store_n_calls)."
    ]
    graph = exported.to_onnx(tmp_path / "model.onnx")
    x = torch.randn(4, 9)
    assert torch.equal(graph(x, unread="b"), x)
    with pytest.raises(ArgumentError, match="negated"):
        graph(x, negated=True)


def test_an_input_that_only_calls_give_that_are_not_stored_is_a_finding():
    class Masked(torch.nn.Module):
        def forward(self, batch):
            return batch["x"] * batch["mask"] if "mask" in batch else batch["x"]

    model, observer = Masked(), exportkit.InputObserver()
    with observer(model):
        for length in (2, 3, 4, 5):
            mask = {"mask": torch.ones(length)} if length > 4 else {}
            model({"x": torch.randn(2, length), **mask})
    found = exportkit.export(model, observer).plan.findings
    assert [finding.text for finding in found if finding.kind == "refused call"] == [
        "1 call that was not stored gave batch.mask, which the graph refuses; store more calls to serve it "
        "(store_n_calls)."
    ]


def test_a_plan_says_which_numbers_an_export_makes_inputs():
    model, observer = Scales(), exportkit.InputObserver()
    with observer(model):
        model(torch.randn(2, 3), 2.0, step=3)
        model(torch.randn(3, 5), 0.5, step=3)
    text = str(observer.plan())
    assert "scale has several values; export(model, observer) makes it an input" in text
    assert "step has several values" not in text
