"""export(): from observed calls to one program and one ONNX file."""

import builtins
import os
import threading
import warnings

import pytest
import torch

import exportkit
from exportkit.errors import (
    ArgumentError,
    DestinationError,
    ExportError,
    InvalidRequestError,
    InvalidTypeError,
    MissingPackageError,
    NoCallsError,
    ObservationError,
    PlanError,
    RuntimeFailure,
    UnregisteredClassError,
)


class Nested(torch.nn.Module):
    """Nested inputs and outputs, and an optional input."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Sequential(torch.nn.Linear(6, 64), torch.nn.Linear(64, 4))

    def forward(self, data, extras, bias=None):
        result = self.linear(data["x"]) * data["inner"]["scale"]
        if bias is not None:
            result = torch.cat([result, bias], dim=1)
        return {"result": result, "pair": (result.sum(dim=1), extras[0] * 2)}


class Variadic(torch.nn.Module):
    """*args and **kwargs with tensors, and a constant among them."""

    def forward(self, x, *args, **kwargs):
        for value in args:
            x = x + value
        return x * kwargs["scale"] if kwargs.get("on", False) else x


class Branching(torch.nn.Module):
    """What torch cannot trace."""

    def forward(self, x):
        rows = {number: row * 2 if row.sum() > 0 else row - 1 for number, row in enumerate(x)}
        return torch.stack([*rows.values()])


class Doubles(torch.nn.Module):
    """A method other than forward."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(6, 6)

    def encode(self, x, *, flip=False):
        return self.linear(x).flip(-1) if flip else self.linear(x)

    def forward(self, x):
        return x


def nested_call(batch, length, bias=None):
    data = {"x": torch.randn(batch, length, 6), "inner": {"scale": torch.randn(batch, length, 1)}}
    call = {"data": data, "extras": [torch.randn(batch, length + 2, 4)]}
    return call if bias is None else {**call, "bias": torch.randn(batch, bias, 4)}


def observe(model, *calls, **options):
    observer = exportkit.InputObserver()
    with observer(model, store_n_calls=len(calls) or 3, **options):
        for args, kwargs in calls:
            getattr(model, options.get("method_name", "forward"))(*args, **kwargs)
    return observer


@pytest.fixture(scope="module")
def nested(tmp_path_factory):
    """A nested model, its observer, and what was exported."""
    torch.manual_seed(0)
    model = Nested()
    calls = [nested_call(2, 5, 3), nested_call(3, 7), nested_call(3, 6, 2)]
    observer = observe(model, *(((), call) for call in calls))
    exported = exportkit.export(model, observer)
    return model, exported, exported.to_onnx(tmp_path_factory.mktemp("nested") / "model.onnx")


def test_the_onnx_model_is_called_like_the_model_and_returns_its_structure(nested):
    model, _, onnx_model = nested
    call = nested_call(4, 9, 5)
    expected, got = model(**call), onnx_model(**call)
    assert got.keys() == expected.keys()
    assert isinstance(got["pair"], tuple)
    torch.testing.assert_close(got, expected)


def test_arguments_may_be_given_by_position(nested):
    model, _, onnx_model = nested
    call = nested_call(1, 4, 2)
    torch.testing.assert_close(onnx_model(*call.values()), model(*call.values()))


def test_an_optional_input_may_be_left_out(nested):
    model, _, onnx_model = nested
    call = nested_call(5, 3)
    torch.testing.assert_close(onnx_model(**call), model(**call))
    torch.testing.assert_close(onnx_model(**call, bias=None), model(**call))


def test_inputs_outputs_and_axes_have_the_names_of_the_plan(nested):
    _, _, onnx_model = nested
    assert list(onnx_model.session.inputs) == ["data.x", "data.inner.scale", "extras.0", "bias"]
    assert onnx_model.session.outputs == ["result", "pair.0", "pair.1"]
    assert onnx_model.session.shapes["data.x"] == ("batch", "data_x_axis_1", 6)
    assert onnx_model.contract.output_axes["result"] == ("batch", "bias_axis_1 + data_x_axis_1", 4)


def test_weights_are_external_data(nested):
    _, _, onnx_model = nested
    files = sorted(os.listdir(onnx_model.path.parent))
    assert files == ["model.onnx", "model.onnx.data"]
    assert onnx_model.size > onnx_model.path.stat().st_size


def test_an_export_prints_in_one_line(nested):
    _, exported, _ = nested
    start = "Exported(Nested.forward, 4 inputs, variables: batch, data_x_axis_1, bias_axis_1, "
    assert repr(exported).startswith(start)
    assert "\n" not in repr(exported)


def test_the_program_is_called_like_the_model(nested):
    model, exported, _ = nested
    call = nested_call(4, 9, 5)
    torch.testing.assert_close(exported.program.module()(**call), model(**call))


@pytest.mark.parametrize(
    ("change", "where", "expected", "got"),
    [
        ({"bias": torch.zeros(2, 3, 5)}, "bias", "float32 (batch, bias_axis_1, 4)", "float32 (2, 3, 5)"),
        ({"bias": torch.zeros(2, 3, 4).double()}, "bias", "float32", "float64"),
        ({"extras": [torch.zeros(2, 3, 4), torch.zeros(1)]}, "extras[1]", "data.x", "(1,)"),
        ({"data": {"x": torch.zeros(2, 5, 6)}}, "data.inner.scale", None, "data.x"),
    ],
)
def test_arguments_that_do_not_fit_are_an_error_that_says_where(nested, change, where, expected, got):
    _, _, onnx_model = nested
    with pytest.raises(ArgumentError) as caught:
        onnx_model(**{**nested_call(2, 5, 3), **change})
    text = str(caught.value)
    assert f"where: {where}" in text
    assert got in text
    assert expected is None or expected in text


def test_an_unknown_input_is_an_error(nested):
    _, _, onnx_model = nested
    with pytest.raises(ArgumentError, match="no input 'typo'"):
        onnx_model(**nested_call(2, 5, 3), typo=1)


def test_variadic_tensors_and_constants_are_exported(tmp_path):
    model = Variadic()
    calls = [((torch.randn(n, 6), torch.randn(n, 6)), {"scale": torch.randn(n, 1), "on": True}) for n in (2, 3)]
    onnx_model = exportkit.export(model, observe(model, *calls)).to_onnx(tmp_path / "model.onnx")
    args, kwargs = (torch.randn(5, 6), torch.randn(5, 6)), {"scale": torch.randn(5, 1), "on": True}
    torch.testing.assert_close(onnx_model(*args, **kwargs), model(*args, **kwargs))
    del kwargs["on"]  # the model reads it, so a call has to give it
    with pytest.raises(ArgumentError, match="This argument must be passed"):
        onnx_model(*args, **kwargs)


def test_another_value_of_a_baked_constant_is_an_error(tmp_path):
    model = Variadic()
    calls = [((torch.randn(n, 6),), {"scale": torch.randn(n, 1), "on": True}) for n in (2, 3)]
    onnx_model = exportkit.export(model, observe(model, *calls)).to_onnx(tmp_path / "model.onnx")
    with pytest.raises(ArgumentError) as caught:
        onnx_model(torch.randn(2, 6), scale=torch.randn(2, 1), on=False)
    assert "where: kwargs.on" in str(caught.value)
    assert "expected: True" in str(caught.value)


def test_another_method_than_forward_is_exported(tmp_path):
    model = Doubles()
    observer = observe(model, *(((torch.randn(n, 6),), {"flip": True}) for n in (1, 1)), method_name="encode")
    onnx_model = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    x = torch.randn(4, 6)
    torch.testing.assert_close(onnx_model(x, flip=True), model.encode(x, flip=True))


def test_a_plan_without_its_calls_is_refused():
    model = torch.nn.Linear(4, 2)
    plan = observe(model, ((torch.ones(3, 4),), {})).plan()
    assert exportkit.export(model, plan).sizes == {"batch": 3}

    with pytest.raises(PlanError, match="is not bound to the calls"):
        exportkit.export(model, plan.plan)


def test_exporting_leaves_the_model_as_it_was():
    model = Nested()
    observer = observe(model, ((), nested_call(2, 5)), ((), nested_call(3, 7)))
    before = dict(vars(model))
    exportkit.export(model, observer)
    assert vars(model) == before
    with observer(model):
        exportkit.export(model, observer)
        assert "forward" in vars(model)
    assert vars(model) == before
    assert observer.num_obs() == 2


def test_a_failing_export_leaves_the_model_as_it_was_and_says_what_torch_said():
    model = Branching()
    observer = observe(model, *(((torch.randn(n, 6),), {}) for n in (2, 3)))
    with pytest.raises(ExportError, match="could not trace the model") as caught:
        exportkit.export(model, observer)
    assert "forward" not in vars(model)
    assert "data-dependent" in str(caught.value)
    assert caught.value.__cause__ is not None


def test_nothing_observed_is_an_error():
    model = torch.nn.Linear(4, 2)
    with pytest.raises(NoCallsError, match="No inputs were captured"):
        exportkit.export(model, exportkit.InputObserver())
    with pytest.raises(NoCallsError, match="with observer"):
        exportkit.export(model, observe(model))


def test_calls_that_all_failed_are_an_error_that_tells_why():
    model, observer = torch.nn.Linear(4, 2), exportkit.InputObserver()
    with observer(model), pytest.raises(RuntimeError):
        model(torch.ones(3, 5))
    with pytest.raises(ObservationError, match="Every observed call raised") as caught:
        exportkit.export(model, observer)
    assert "mat1 and mat2" in str(caught.value)


@pytest.mark.parametrize(("model", "source"), [("model", None), (torch.nn.Linear(4, 2), {"x": 1})])
def test_wrong_types_are_errors(model, source):
    with pytest.raises(InvalidTypeError):
        exportkit.export(model, source)


def test_a_model_that_was_not_observed_is_an_error():
    observer = observe(torch.nn.Bilinear(4, 4, 2), ((torch.ones(3, 4), torch.ones(3, 4)), {}))
    with pytest.raises(InvalidRequestError, match="does not take input1, input2") as caught:
        exportkit.export(torch.nn.Linear(4, 2), observer)
    assert "Linear.forward(input)" in str(caught.value)
    assert "a model like Bilinear" in str(caught.value)


class Holder:
    """An object with tensors that cannot be built again."""

    def __init__(self, tensor):
        self.tensor, self.lock = tensor, threading.Lock()


class TakesHolder(torch.nn.Module):
    def forward(self, x, holder):
        return x + holder.tensor


def test_an_object_that_cannot_be_built_again_is_an_error_with_a_hint():
    model = TakesHolder()
    observer = observe(model, ((torch.ones(2, 3), Holder(torch.ones(2, 3))), {}))
    with pytest.raises(UnregisteredClassError) as caught:
        exportkit.export(model, observer)
    text = str(caught.value)
    assert "where: holder" in text
    assert "tensors in tensor" in text
    assert "register_pytree_node" in text


@pytest.fixture
def linear():
    model = torch.nn.Linear(4, 2)
    return exportkit.export(model, observe(model, ((torch.ones(3, 4),), {})))


def test_a_directory_is_no_destination(linear, tmp_path):
    with pytest.raises(DestinationError, match="directory"):
        linear.to_onnx(tmp_path)


def test_a_path_below_a_file_is_no_destination(linear, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DestinationError, match="cannot be written"):
        linear.to_onnx(tmp_path / "file" / "model.onnx")


def test_a_missing_onnxruntime_is_an_error_with_a_hint(linear, tmp_path, monkeypatch):
    onnx_model = linear.to_onnx(tmp_path / "model.onnx")
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    with pytest.raises(MissingPackageError, match=r"exportkit\[runtime\]"):
        onnx_model(torch.ones(2, 4))


def test_a_damaged_file_is_an_error_that_names_it(linear, tmp_path):
    onnx_model = linear.to_onnx(tmp_path / "model.onnx")
    onnx_model.path.write_bytes(b"not ONNX")
    with pytest.raises(RuntimeFailure) as caught:
        onnx_model(torch.ones(2, 4))
    assert str(onnx_model.path) in str(caught.value)


def test_an_unsupported_element_type_is_an_error(tmp_path):
    class Scaled(torch.nn.Module):
        def forward(self, x, scale):
            return x * scale.float()

    model = Scaled()
    scale = torch.ones(3, 4).to(torch.float8_e5m2)
    observer = observe(model, ((torch.ones(3, 4), scale), {}))
    with pytest.raises(exportkit.ExportkitError):
        exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")(torch.ones(2, 4), scale[:2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_float_types_go_through(dtype, tmp_path):
    class Scaled(torch.nn.Module):
        def forward(self, x):
            return (x.float() * 2).to(x.dtype)  # onnxruntime multiplies no bfloat16 on the CPU

    model = Scaled()
    onnx_model = exportkit.export(model, observe(model, ((torch.ones(3, 4).to(dtype),), {}))).to_onnx(
        tmp_path / "m.onnx"
    )
    x = torch.randn(5, 4).to(dtype)
    torch.testing.assert_close(onnx_model(x), x * 2)


def test_libraries_stay_quiet(tmp_path, capfd):
    model = Nested()
    observer = observe(model, ((), nested_call(2, 5)), ((), nested_call(3, 7)))
    with warnings.catch_warnings(action="error"):
        exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx").verify()
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")


class Returns(torch.nn.Module):
    """Returns its input, the same tensor twice, constants, and nothing."""

    def forward(self, x):
        doubled = x * 2
        return {"same": x, "twice": (doubled, doubled), "count": 3, "nothing": None}


def test_inputs_repeated_tensors_and_constants_are_returned_as_they_are(tmp_path):
    model = Returns()
    observer = observe(model, ((torch.randn(2, 3),), {}), ((torch.randn(4, 3),), {}))
    onnx_model = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    x = torch.randn(5, 3)
    torch.testing.assert_close(onnx_model(x), model(x))
    assert onnx_model.verify().ok


def test_inputs_that_the_model_changes_are_changed_by_the_graph_too(tmp_path):
    class InPlace(torch.nn.Module):
        def forward(self, x):
            return x.add_(1) * 2

    model = InPlace()
    observer = observe(model, ((torch.zeros(2, 3),), {}), ((torch.zeros(4, 3),), {}))
    onnx_model = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    x = torch.zeros(5, 3)
    assert onnx_model(x).unique().tolist() == [2.0]
    assert x.unique().tolist() == [1.0]


def test_training_mode_is_a_finding():
    model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Dropout()).train()
    exported = exportkit.export(model, observe(model, ((torch.ones(3, 4),), {})))
    assert any("training mode" in finding.text for finding in exported.plan.findings)


def test_an_edited_plan_is_exported(tmp_path):
    model = torch.nn.Linear(4, 2)
    plan = observe(model, ((torch.ones(3, 4),), {})).plan().rename("batch", "rows").range("rows", 1, 16)
    exported = exportkit.export(model, plan)
    (allowed,) = exported.program.range_constraints.values()
    assert allowed.upper == 16
    onnx_model = exported.to_onnx(tmp_path / "model.onnx")
    assert onnx_model.session.shapes["input"] == ("rows", 4)
    report = onnx_model.verify()
    assert report.ok
    assert max(row.sizes["rows"] for row in report.rows) <= 16


def test_a_batch_made_static_is_static(tmp_path):
    model = torch.nn.Linear(4, 2)
    plan = observe(model, ((torch.ones(3, 4),), {})).plan().static("batch")
    assert exportkit.export(model, plan).to_onnx(tmp_path / "model.onnx").session.shapes["input"] == (3, 4)


def test_a_length_that_only_the_trace_fixes_is_static_and_said_to_be_so(tmp_path):
    class Loop(torch.nn.Module):
        """Accepts any number of tokens, and a trace unrolls the loop over them."""

        def forward(self, ids):
            totals = [ids[:, 0]]
            for step in range(1, ids.shape[1]):
                totals.append(totals[step // 2] + ids[:, step])
            return totals[-1]

    model = Loop()
    exported = exportkit.export(model, observe(model, ((torch.ones(2, 5, dtype=torch.int64),), {})))
    assert [str(size) for size in exported.plan.leaves[0].sizes] == ["batch", "5"]
    assert any("fixed sequence" in finding.text for finding in exported.plan.findings)
    assert exported.to_onnx(tmp_path / "model.onnx").verify().ok


def test_a_size_that_python_reads_as_a_number_is_traced_strictly(tmp_path):
    class Scaled(torch.nn.Module):
        def forward(self, data):
            return data["x"] * builtins.int(data["x"].shape[1])  # a plain int is kept symbolic by a rewrite

    model = Scaled()
    calls = [(({"x": torch.randn(rows, length)},), {}) for rows, length in ((2, 5), (3, 7))]
    exported = exportkit.export(model, observe(model, *calls))
    assert exported.rules == ("traced from bytecode (strict)",)
    assert exported.to_onnx(tmp_path / "model.onnx").verify().ok


def test_parameters_need_gradients_again_afterwards(tmp_path):
    model = torch.nn.Linear(4, 2)
    exportkit.export(model, observe(model, ((torch.ones(3, 4),), {}))).to_onnx(tmp_path / "model.onnx")
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_decision_by_values_whose_error_the_model_catches_is_not_exported():
    class Tries(torch.nn.Module):
        def forward(self, x):
            try:
                if x.min() > 0:
                    return x * 2
            except Exception:
                pass
            return x * 3

    model, observer = Tries(), exportkit.InputObserver()
    with observer(model):
        for rows in (2, 3):
            model(torch.randn(rows, 5))
    with pytest.raises(ExportError, match=r"catches the error that this raises in a trace\.\n.*test_export\.py"):
        exportkit.export(model, observer)


def test_a_size_that_a_view_leaves_open_is_written_out_where_it_never_varies():
    class Heads(torch.nn.Module):
        def forward(self, x):
            return x.view(*x.shape[:2], -1, 4)  # open if there are no rows, for which torch raises

    model = Heads()
    program = exportkit.export(model, observe(model, *[((torch.randn(n, n + 3, 8),), {}) for n in (2, 3)])).program
    (view,) = program.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default)
    assert view.args[1][2:] == [2, 4]


def test_a_submodule_that_jit_traced_is_exported(tmp_path):
    torch.manual_seed(0)
    traced = torch.jit.trace(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), torch.rand(2, 3, 4))
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), traced, torch.nn.Linear(4, 2))
    observer = observe(model, ((torch.rand(2, 5, 4),), {}), ((torch.rand(3, 6, 4),), {}))
    assert exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx").verify().ok
