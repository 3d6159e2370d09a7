"""Folders that were damaged, and folders that somebody made up: they are refused, with an error of exportkit."""

import json
import os
import random
import shutil
import subprocess
import sys
import time

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings

import exportkit
from exportkit.errors import DestinationError, ExportkitError
from exportkit.files import TEMPORARY
from tests.mutations import mutated
from tests.sealed import accept_files, change_json, write_json

PROPERTY = settings(
    max_examples=500,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


class Nested(torch.nn.Module):
    """Nested inputs and outputs, an optional input, and a constant."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(6, 64)

    def forward(self, data, bias=None, scale=1.0):
        result = self.linear(data["x"]) * scale
        return {"result": result if bias is None else result + bias, "pair": (result.sum(dim=1), None)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder, and the arguments of the calls that were recorded."""
    torch.manual_seed(0)
    model, observer = Nested(), exportkit.InputObserver()
    calls = [{"data": {"x": torch.randn(rows, 5, 6)}, "scale": 2.0} for rows in (2, 3)]
    calls[1]["bias"] = torch.randn(64)
    with observer(model):
        for call in calls:
            model(**call)
    folder = tmp_path_factory.mktemp("nested") / "out"
    exportkit.export(model, observer).save(folder)
    return folder, calls


@pytest.fixture
def copied(saved, tmp_path):
    return shutil.copytree(saved[0], tmp_path / "copied")


def files(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


EDITABLE = {"report.txt", "report.json"}


def is_found(folder, name):
    """Whether loading raises an error; for what may be edited, a warning is enough."""
    if name not in EDITABLE:
        with pytest.raises(ExportkitError):
            exportkit.load(folder)
        return
    with pytest.warns(RuntimeWarning, match=f"{name} was edited since the folder was saved"):
        exportkit.load(folder)


class TestDamage:
    def test_every_flipped_bit_in_every_file_is_found_when_the_folder_is_loaded(self, copied):
        numbers = random.Random(0)
        for name in files(copied):
            file = copied / name
            content = file.read_bytes()
            last = len(content) * 8 - 1
            for bit in {0, last, *(numbers.randint(0, last) for _ in range(25))}:
                flipped = bytearray(content)
                flipped[bit // 8] ^= 1 << bit % 8
                file.write_bytes(flipped)
                is_found(copied, name)
            file.write_bytes(content)
        exportkit.load(copied)

    def test_every_byte_of_the_manifest_counts(self, copied):
        file = copied / "manifest.json"
        content = file.read_bytes()
        for position in range(0, len(content), 7):
            file.write_bytes(content[:position] + bytes([content[position] ^ 0x20]) + content[position + 1 :])
            with pytest.raises(ExportkitError):
                exportkit.load(copied)

    def test_files_that_are_cut_short_or_grow_are_found(self, copied):
        for name in files(copied):
            file = copied / name
            content = file.read_bytes()
            for changed in (b"", content[:-1], content + b"\0"):
                file.write_bytes(changed)
                is_found(copied, name)
            file.write_bytes(content)

    def test_weights_may_stay_unread_until_the_proof(self, copied):
        weights = bytearray((copied / "model.onnx.data").read_bytes())
        weights[5] ^= 1
        (copied / "model.onnx.data").write_bytes(weights)
        loaded = exportkit.load(copied, check_weights=False)
        with pytest.raises(DestinationError, match=r"has changed since it was saved(.|\n)*model.onnx.data"):
            loaded.verify()

    def test_the_page_of_a_damaged_folder_is_refused(self, copied):
        from exportkit.report.export import export_page

        for name in ("manifest.json", "plan.json", "calls/observation.json"):
            file = copied / name
            content = file.read_bytes()
            file.write_bytes(content.replace(b"data.x", b"data.y", 1))
            with pytest.raises(DestinationError):
                export_page(copied)
            file.write_bytes(content)

    def test_the_page_says_that_the_proof_was_edited(self, copied):
        from exportkit.report.export import export_page

        file = copied / "report.json"
        file.write_text(file.read_text().replace('"recorded"', '"observed"', 1))
        assert "report.json was edited since the folder was saved." in export_page(copied)


@pytest.mark.runtime
class TestReplacedLater:
    """Files that change after a folder was loaded."""

    def test_before_onnxruntime_opens_them(self, saved, copied):
        loaded = exportkit.load(copied)
        weights = (copied / "model.onnx.data").read_bytes()
        (copied / "other").write_bytes(bytes(len(weights)))
        os.replace(copied / "other", copied / "model.onnx.data")
        with pytest.raises(DestinationError, match="has changed since it was saved"):
            loaded(**saved[1][0])

    def test_touched_files_are_read_again(self, saved, copied):
        loaded = exportkit.load(copied)
        time.sleep(0.02)
        (copied / "model.onnx.data").touch()
        loaded(**saved[1][0])

    def test_after_onnxruntime_has_opened_them(self, saved, copied):
        loaded = exportkit.load(copied)
        loaded(**saved[1][0])
        (copied / "model.onnx").write_bytes(b"no graph")
        with pytest.raises(DestinationError, match="has changed since it was saved"):
            loaded.verify()

    def test_a_proof_is_about_the_file_that_is_there(self, tmp_path):
        model, observer = torch.nn.Linear(4, 4), exportkit.InputObserver()
        with observer(model):
            model(torch.ones(3, 4))
        onnx_model = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
        assert onnx_model.verify().ok
        (tmp_path / "model.onnx").write_bytes(b"no graph")
        assert "onnxruntime cannot load the model" in str(onnx_model.verify())


class TestHostile:
    """Manifests, with digests that fit."""

    def test_whatever_a_manifest_says_there_is_no_other_error(self, saved, tmp_path_factory):
        original, calls = saved
        folder = shutil.copytree(original, tmp_path_factory.mktemp("hostile") / "folder")
        outcomes = {"loaded": 0, "refused": 0}

        @PROPERTY
        @given(mutated(json.loads((original / "manifest.json").read_text())))
        def load(data):
            try:
                write_json(folder / "manifest.json", data if isinstance(data, dict) else {})
            except UnicodeEncodeError:
                return
            try:
                loaded = exportkit.load(folder)
                str(loaded), str(loaded.domain)
                for call in calls:
                    loaded(**call)
                outcomes["loaded"] += 1
            except ExportkitError:
                outcomes["refused"] += 1

        load()
        assert outcomes["refused"] > 5 * outcomes["loaded"] / 2 > 0

    @pytest.mark.parametrize(
        "name", ["../copied/model.onnx", "a/../../x", "/etc/hostname", "linked/model.onnx", "model.onnx\0"]
    )
    def test_paths_that_lead_elsewhere(self, copied, tmp_path, name):
        shutil.copytree(copied, tmp_path / "elsewhere")
        (copied / "linked").symlink_to(tmp_path / "elsewhere")
        change_json(copied / "manifest.json", lambda data: data["program"].update(file=name))
        with pytest.raises(DestinationError, match=r"outside of the folder|does not list this file"):
            exportkit.load(copied)

    def test_a_value_that_the_dtype_of_its_input_cannot_hold(self, copied):
        change_json(copied / "manifest.json", lambda data: data["program"].update(fills={"bias": 1e300}))
        with pytest.raises(ExportkitError, match="a number that float32 can hold"):
            exportkit.load(copied)

    def test_links_to_files_are_followed(self, saved, copied, tmp_path):
        blob = tmp_path / "blob"  # as in the cache of the Hugging Face hub
        os.replace(copied / "plan.json", blob)
        (copied / "plan.json").symlink_to(blob)
        exportkit.load(copied)

    def test_a_graph_that_the_manifest_does_not_list(self, copied):
        change_json(copied / "manifest.json", lambda data: data["files"].pop("model.onnx"))
        with pytest.raises(DestinationError, match="does not list this file"):
            exportkit.load(copied)

    def test_nested_too_deeply(self, copied):
        deep = b"[" * 100_000 + b"]" * 100_000
        (copied / "manifest.json").write_bytes(deep)
        with pytest.raises(DestinationError, match="nested too deeply"):
            exportkit.load(copied)

    def test_numbers_that_json_lacks(self, copied):
        file = copied / "manifest.json"
        file.write_text(file.read_text().replace('"opset": ', '"opset": NaN, "other": '))
        with pytest.raises(DestinationError, match="NaN is not JSON"):
            exportkit.load(copied)

    def test_a_plan_that_contradicts_the_graph(self, copied):
        text = (copied / "plan.json").read_text()
        (copied / "plan.json").write_text(text.replace('"data.x"', '"data.z"'))
        accept_files(copied)
        with pytest.raises(DestinationError, match=r"expected inputs and variables of the plan, got data\.x"):
            exportkit.load(copied)


FULL_DISK = """
import resource, sys, torch, exportkit
from pathlib import Path
from exportkit.errors import DestinationError
target, model, observer = Path(sys.argv[1]), torch.nn.Linear(300, 300), exportkit.InputObserver()
with observer(model):
    for rows in (200, 300):
        model(torch.ones(rows, 300))
exported = exportkit.export(model, observer)
(target / "old").mkdir()
exported.to_onnx(target / "old" / "model.onnx")
before = (target / "old" / "model.onnx").stat()
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))  # no file may be larger, as on a disk that is nearly full
for write in (
    lambda: exported.to_onnx(target / "old" / "model.onnx"),
    lambda: exported.to_onnx(target / "new" / "model.onnx"),
    lambda: exported.save(target / "folder", verify=False),
    lambda: observer.observation.save(target / "calls"),
):
    try:
        write()
    except DestinationError as error:
        print("cannot be written here" in str(error))
assert (target / "old" / "model.onnx").stat() == before
print(*sorted(str(path.relative_to(target)) for path in target.rglob("*")))
"""


class TestSaving:
    def test_a_full_disk_is_an_error_and_leaves_nothing_behind(self, tmp_path):
        command = [sys.executable, "-c", FULL_DISK, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout.splitlines() == ["True"] * 4 + ["old old/model.onnx old/model.onnx.data"]

    def test_a_folder_that_a_killed_process_left_can_be_saved_to(self, saved, copied):
        left = copied / f"{TEMPORARY}left"
        left.mkdir()
        for name in ("manifest.json", "model.onnx"):  # killed before it had moved these
            os.replace(copied / name, left / name)
        with pytest.raises(DestinationError, match="No exported model can be read here"):
            exportkit.load(copied)

        model, observer = torch.nn.Linear(4, 4), exportkit.InputObserver()
        with observer(model):
            model(torch.ones(3, 4))
        exportkit.export(model, observer).save(copied, values=False, verify=False)
        assert files(copied) == [
            "calls/observation.json",
            "manifest.json",
            "model.onnx",
            "model.onnx.data",
            "plan.json",
        ]
        exportkit.load(copied)

    @pytest.mark.parametrize("version", [1, 2, 4])
    def test_a_folder_of_another_version_is_refused_and_can_be_saved_over(self, copied, version):
        change_json(copied / "manifest.json", lambda data: data.update(version=version))
        with pytest.raises(DestinationError) as raised:
            exportkit.load(copied)
        assert f"expected: exportkit-folder 3\n  got: exportkit-folder {version}" in str(raised.value)
        assert str(raised.value).endswith("Write it again with this version.")

        model, observer = torch.nn.Linear(4, 4), exportkit.InputObserver()
        with observer(model):
            model(torch.ones(3, 4))
        exportkit.export(model, observer).save(copied, verify=False)
        exportkit.load(copied)
