"""Exported.save and load: a folder that is called like the model, and proven, where there is no model."""

import json
import os
import subprocess
import sys

import pytest
import torch

import exportkit
from exportkit.errors import ArgumentError, DestinationError, InvalidRequestError, TreeError
from exportkit.folder import folder as folder_module
from exportkit.folder import manifest
from tests.sealed import accept_files, change_json


class Nested(torch.nn.Module):
    """Nested inputs and outputs, an optional input, and a constant."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Sequential(torch.nn.Linear(6, 64), torch.nn.Linear(64, 4))

    def forward(self, data, bias=None, scale=1.0):
        result = self.linear(data["x"]) * scale
        if bias is not None:
            result = torch.cat([result, bias], dim=1)
        return {"result": result, "pair": (result.sum(dim=1), None)}


def call(batch, length, bias=None):
    given = {"data": {"x": torch.randn(batch, length, 6)}, "scale": 2.0}
    return given if bias is None else {**given, "bias": torch.randn(batch, bias, 4)}


def exported_nested():
    model, observer = Nested(), exportkit.InputObserver()
    with observer(model):
        for given in (call(2, 5, 3), call(3, 7), call(3, 6, 2)):
            model(**given)
    return model, exportkit.export(model, observer)


@pytest.fixture(scope="module")
def nested(tmp_path_factory):
    """A model, its export, and the folder that it was saved to."""
    torch.manual_seed(0)
    model, exported = exported_nested()
    folder = tmp_path_factory.mktemp("nested") / "out"
    return model, exported, exported.save(folder), folder


@pytest.fixture
def copied(nested, tmp_path):
    """A folder of one's own to damage."""
    import shutil

    return shutil.copytree(nested[3], tmp_path / "copied")


def names(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


class TestSave:
    def test_the_folder_holds_graph_plan_manifest_report_and_calls(self, nested):
        *_, folder = nested
        assert names(folder) == [
            "calls/observation.json",
            "calls/tensors.safetensors",
            "manifest.json",
            "model.onnx",
            "model.onnx.data",
            "plan.json",
            "report.json",
            "report.txt",
            "unseen/observation.json",
            "unseen/tensors.safetensors",
        ]

    def test_it_returns_something_to_call_that_the_model_proves(self, nested):
        model, _, onnx_model, folder = nested
        given = call(4, 9, 5)
        torch.testing.assert_close(onnx_model(**given), model(**given))
        assert onnx_model.path == folder / "model.onnx"
        assert onnx_model.verify().ok

    def test_the_report_is_the_proof_of_what_is_in_the_folder(self, nested):
        *_, folder = nested
        report = json.loads((folder / "report.json").read_text())
        assert (folder / "report.txt").read_text().endswith("\nproven\n")
        assert report["ok"] is True
        kinds = [row["kind"] for row in report["rows"]]
        assert len(kinds) >= 7
        assert kinds == ["recorded"] * 3 + ["unseen"] * (len(kinds) - 3)
        assert report["rows"][0]["sizes"] == {"batch": 2, "data_x_axis_1": 5, "bias_axis_1": 3}

    def test_the_manifest_says_what_the_graph_takes_and_returns(self, nested):
        *_, folder = nested
        data = json.loads((folder / "manifest.json").read_text())
        program = data["program"]
        assert (data["format"], data["version"]) == ("exportkit-folder", 3)
        assert data["written_by"]["torch"] == torch.__version__
        assert program["file"] == "model.onnx"
        assert program["inputs"] == [
            {"name": "data.x", "path": "data.x", "dtype": "float32", "axes": ["batch", "data_x_axis_1", "6"]},
            {"name": "bias", "path": "bias", "dtype": "float32", "axes": ["batch", "bias_axis_1", "4"]},
        ]
        assert [output["name"] for output in program["outputs"]] == ["result", "pair.0"]
        assert program["domain"]["constants"]["scale"] == 2.0
        assert program["opset"] >= 18
        assert "scale=2.0 is baked into the graph." in program["findings"]

    def test_the_manifest_lists_every_other_file_with_its_digest(self, nested):
        *_, folder = nested
        files = json.loads((folder / "manifest.json").read_text())["files"]
        assert sorted([*files, "manifest.json"]) == names(folder)
        assert files["model.onnx"]["bytes"] == (folder / "model.onnx").stat().st_size

    def test_other_files_are_not_overwritten(self, nested, tmp_path):
        _, exported, *_ = nested
        (tmp_path / "notes.txt").write_text("mine")
        with pytest.raises(DestinationError) as error:
            exported.save(tmp_path)
        assert str(error.value) == (
            "An exported model cannot be written over other files.\n"
            f"  where: {tmp_path}\n"
            "  expected: a new or empty directory, or one that holds an exported model\n"
            "  got: notes.txt\n"
            "  hint: choose a different directory, or empty this one."
        )
        assert names(tmp_path) == ["notes.txt"]

    def test_a_path_below_a_file_is_refused(self, nested, tmp_path):
        _, exported, *_ = nested
        (tmp_path / "file").write_text("mine")
        with pytest.raises(DestinationError, match="cannot be written to"):
            exported.save(tmp_path / "file" / "out")

    def test_saving_again_replaces_the_old_files_and_keeps_those_of_others(self, nested, copied):
        _, exported, *_ = nested
        (copied / "tokenizer.json").write_text("{}")
        (copied / "calls" / "notes.txt").write_text("mine")
        exported.save(copied, values=False, verify=False)
        assert names(copied) == [
            "calls/notes.txt",
            "calls/observation.json",
            "manifest.json",
            "model.onnx",
            "model.onnx.data",
            "plan.json",
            "tokenizer.json",
        ]

    def test_a_save_that_fails_leaves_the_old_folder_as_it_was(self, nested, copied, monkeypatch):
        _, exported, *_ = nested
        before = {name: (copied / name).read_bytes() for name in names(copied)}
        monkeypatch.setattr(folder_module, "dump_graph", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            exported.save(copied)
        assert {name: (copied / name).read_bytes() for name in names(copied)} == before

    def test_a_save_that_fails_leaves_no_new_folder(self, nested, tmp_path, monkeypatch):
        _, exported, *_ = nested
        monkeypatch.setattr(folder_module, "dump_graph", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            exported.save(tmp_path / "new")
        assert os.listdir(tmp_path) == []

    def test_what_is_not_proven_is_saved_with_a_warning(self, nested, tmp_path):
        model, exported, *_ = nested
        before = model.linear[1].bias.detach().clone()
        with torch.no_grad():
            model.linear[1].bias += 1  # the program shares its weights, and the recorded calls had others
        try:
            with pytest.warns(RuntimeWarning, match="out was saved, and is NOT PROVEN: recorded call 0: differs"):
                exported.save(tmp_path / "out")
        finally:
            with torch.no_grad():
                model.linear[1].bias.copy_(before)
        assert "NOT PROVEN" in (tmp_path / "out" / "report.txt").read_text()

    def test_a_proof_may_be_left_for_later(self, nested, tmp_path):
        _, exported, *_ = nested
        exported.save(tmp_path / "out", verify=False)
        assert not (tmp_path / "out" / "report.txt").exists()
        report = exportkit.load(tmp_path / "out").verify()
        assert report.ok
        assert [row.status for row in report.rows[3:7]] == ["proven"] * 4
        assert {(row.kind, row.status) for row in report.rows[3:]} == {("unseen", "proven")}

    def test_an_unknown_runtime_is_refused(self, nested, tmp_path):
        _, exported, *_ = nested
        with pytest.raises(InvalidRequestError, match="expected: 'genai'"):
            exported.save(tmp_path / "out", runtime="tensorrt")
        assert os.listdir(tmp_path) == []


class TestLoad:
    def test_it_is_called_like_the_model_and_returns_its_structure(self, nested):
        model, *_, folder = nested
        onnx_model = exportkit.load(folder)
        for given in (call(4, 9, 5), call(1, 2)):
            expected, got = model(**given), onnx_model(**given)
            assert got["pair"][1] is None
            torch.testing.assert_close(got["result"], expected["result"])
            torch.testing.assert_close(got["pair"][0], expected["pair"][0])

    def test_another_constant_is_refused(self, nested):
        *_, folder = nested
        with pytest.raises(ArgumentError, match="exported with a different value"):
            exportkit.load(folder)(**{**call(2, 3), "scale": 3.0})

    def test_it_proves_recorded_and_unseen_calls_without_the_model(self, nested):
        *_, onnx_model, folder = nested
        with_model, without = onnx_model.verify(), exportkit.load(folder).verify()
        assert without.ok, str(without)
        assert [(r.kind, r.label, r.status) for r in without.rows] == [
            (r.kind, r.label, r.status) for r in with_model.rows
        ]

    def test_another_process_proves_it_without_the_model_s_class(self, nested):
        *_, folder = nested
        code = "import sys, exportkit; print(exportkit.load(sys.argv[1]).verify().verdict())"
        done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=True)
        assert done.stdout == "proven\n"

    def test_without_values_there_is_nothing_to_compare_with(self, nested, tmp_path):
        model, exported, *_ = nested
        exported.save(tmp_path / "out", values=False)
        onnx_model = exportkit.load(tmp_path / "out")
        given = call(4, 9)
        torch.testing.assert_close(onnx_model(**given)["result"], model(**given)["result"])
        report = onnx_model.verify()
        assert report.problems() == ("no recorded call was checked",)
        assert "saved without the values of the recorded calls" in report.findings[-1]

    def test_calls_that_are_too_large_to_keep_are_named_and_left_out(self, nested, tmp_path, monkeypatch):
        _, exported, *_ = nested
        monkeypatch.setattr(manifest, "_MOST_BYTES", 0)
        exported.save(tmp_path / "out")
        report = exportkit.load(tmp_path / "out").verify()
        unseen = [row for row in report.rows if row.kind == "unseen"]
        assert {(row.status, row.where) for row in unseen} == {("no call", "its tensors are too large to keep")}
        assert report.problems() == ("only 0 of 3 unseen combinations of sizes could be proven",)

    def test_calls_after_one_that_is_too_large_are_kept(self, nested, tmp_path, monkeypatch):
        _, exported, *_ = nested
        monkeypatch.setattr(manifest, "_MOST_BYTES", 20_000)
        exported.save(tmp_path / "out")
        report = exportkit.load(tmp_path / "out").verify()
        assert {row.where for row in report.rows if row.status == "no call"} == {"its tensors are too large to keep"}
        assert [row.kind for row in report.rows if row.status == "proven"].count("unseen") == 8

    def test_a_wrong_graph_whose_digest_fits_is_found_by_the_proof(self, copied):
        weights = bytearray((copied / "model.onnx.data").read_bytes())
        weights[2:1026:4] = b"\x00" * 256
        (copied / "model.onnx.data").write_bytes(weights)
        accept_files(copied)
        assert not exportkit.load(copied).verify().ok

    def test_a_changed_file_is_refused(self, copied):
        weights = bytearray((copied / "model.onnx.data").read_bytes())
        weights[0] ^= 1
        (copied / "model.onnx.data").write_bytes(weights)
        with pytest.raises(DestinationError) as error:
            exportkit.load(copied)
        assert "A file of an exported model has changed since it was saved." in str(error.value)
        assert f"where: {copied / 'model.onnx.data'}" in str(error.value)

    def test_a_report_may_be_edited(self, copied):
        (copied / "report.txt").write_text("read and approved")
        with pytest.warns(RuntimeWarning, match="report.txt was edited since the folder was saved"):
            report = exportkit.load(copied).verify()
        assert report.ok
        assert report.findings[-1] == "report.txt was edited since the folder was saved."

    def test_a_missing_file_is_named(self, copied):
        (copied / "model.onnx.data").unlink()
        with pytest.raises(DestinationError, match=r"is missing.\n  where: .*model.onnx.data"):
            exportkit.load(copied)

    def test_no_folder_at_all(self, tmp_path):
        with pytest.raises(DestinationError) as error:
            exportkit.load(tmp_path)
        assert "No exported model can be read here." in str(error.value)
        assert "a folder with manifest.json" in str(error.value)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda data: data.update(version=1), "expected: exportkit-folder 3\n  got: exportkit-folder 1"),
            (lambda data: data.pop("program"), "damaged"),
            (lambda data: data["program"].pop("outputs"), "damaged"),
            (lambda data: data["files"].update({"../../etc/passwd": {"xxh3_128": "0", "bytes": 1}}), "outside"),
            (lambda data: data["program"].update(file="../../model.onnx"), "outside"),
            (lambda data: data["program"].update(home="../"), "outside"),
        ],
    )
    def test_a_damaged_manifest_is_refused(self, copied, change, message):
        change_json(copied / "manifest.json", change)
        with pytest.raises(DestinationError, match=message):
            exportkit.load(copied)

    def test_a_manifest_that_is_no_json_is_refused(self, copied):
        (copied / "manifest.json").write_text("{")
        with pytest.raises(DestinationError, match="damaged"):
            exportkit.load(copied)

    def test_a_class_that_is_not_there_is_named(self, copied):
        def replaced(data):
            return json.loads(json.dumps(data).replace('"tuple": [', '"fields": "nowhere:Pair", "items": ['))

        change_json(copied / "manifest.json", replaced)
        with pytest.raises(TreeError, match="module nowhere"):
            exportkit.load(copied)
