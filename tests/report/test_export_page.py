"""The page of an export: its content, that it is self-contained, and that names are escaped."""

import json
import shutil

import pytest
import torch

import exportkit
from exportkit.errors import DestinationError
from exportkit.report.export import export_page
from tests.report.pages import check_page
from tests.sealed import accept_files, change_json

HOSTILE = "<script>alert('x')</script>&\""


class Scaled(torch.nn.Module):
    """Two inputs, one of them optional and nested, a constant, and a decision by size."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(6, 4)

    def forward(self, data, bias=None, scale=1.0):
        result = self.linear(data["x"]) * scale
        if result.shape[1] > 5000:
            result = result + 1
        return {"result": result if bias is None else torch.cat([result, bias], dim=1)}


@pytest.fixture(scope="module")
def exported():
    torch.manual_seed(0)
    model, observer = Scaled(), exportkit.InputObserver()
    with observer(model):
        model({"x": torch.randn(2, 5, 6)}, torch.randn(2, 3, 4), scale=2.0)
        model({"x": torch.randn(3, 7, 6)}, scale=2.0)
        model({"x": torch.randn(3, 6, 6)}, torch.randn(3, 2, 4), scale=2.0)
    return exportkit.export(model, observer)


@pytest.fixture(scope="module")
def folder(exported, tmp_path_factory):
    place = tmp_path_factory.mktemp("scaled") / "out"
    exported.save(place)
    return place


@pytest.fixture
def copied(folder, tmp_path):
    """A copy that a test may change."""
    return shutil.copytree(folder, tmp_path / "copied")


def edited(folder, name, change):
    if name in ("manifest.json", "calls/observation.json"):
        change_json(folder / name, change)
    else:
        data = json.loads((folder / name).read_text())
        change(data)
        (folder / name).write_text(json.dumps(data))
    accept_files(folder)
    return folder


@pytest.mark.runtime
class TestExportPage:
    def test_it_is_well_formed_and_loads_nothing(self, folder):
        check_page(export_page(folder))

    def test_every_section_is_there(self, folder):
        page = check_page(export_page(folder))
        assert {"calls", "plan", "axes", "domain", "verification", "strategies", "cost", "findings", "versions"} <= {
            *page.ids
        }

    def test_the_stages_and_the_verdict(self, folder):
        text = check_page(export_page(folder)).text
        assert text.startswith(
            "Scaled.forward exportkit report of out Scaled .forward proven onnxruntime returns what the model returns"
        )
        assert "observe 3 calls plan 3 variables" in text
        calls = len(json.loads((folder / "report.json").read_text())["rows"])
        assert f"verify {calls} of {calls} calls proven" in text

    def test_calls_plan_and_evidence(self, exported, folder):
        text = check_page(export_page(folder)).text
        assert "data_x_axis_1" in text
        for variable in exported.plan.variables:
            assert f"{variable.name} {variable.evidence}" in text
        assert exported.plan.explain("data.x", 1) in text
        assert "( batch, data_x_axis_1, 6 )".replace("( ", "(").replace(" )", ")") in text
        assert "scale 2.0" in text

    def test_the_picture_names_every_axis(self, exported, folder):
        page = check_page(export_page(folder))
        labels = [values["aria-label"] for tag, values in page.tags if tag == "svg"]
        assert labels[:3] == [
            f"Sizes of {v.name}: {', '.join('absent' if s is None else str(s) for s in v.seen)}"
            for v in exported.plan.variables
        ]
        assert "Axes of data.x" in labels
        assert "Axes of bias" in labels

    def test_conditions_name_the_line_of_the_model(self, folder):
        text = check_page(export_page(folder)).text
        assert "in the model's own code" in text
        assert "test_export_page.py:" in text

    def test_each_proven_call_and_where_the_differences_are(self, folder):
        text = check_page(export_page(folder)).text
        rows = json.loads((folder / "report.json").read_text())["rows"]
        assert all(f"{row['kind']} {row['label']}" in text for row in rows)
        assert all(set(row["outputs"]) == {"result"} for row in rows)
        assert "Where the differences are" in text
        assert text.count(" in result ") + text.count(": equal in result") >= len(rows)

    def test_what_was_tried(self, folder):
        text = check_page(export_page(folder)).text
        assert "strategy outcome reason plain trace succeeded" in text

    def test_time_memory_and_versions(self, folder):
        text = check_page(export_page(folder)).text
        manifest = json.loads((folder / "manifest.json").read_text())
        assert manifest["peak_bytes"] > 10_000_000
        assert set(manifest["program"]["seconds"]) == {"plan", "arguments", "export", "domain", "onnx", "verify"}
        assert "Peak memory of the process" in text
        assert f"torch {torch.__version__}" in text
        assert all(finding in text for finding in manifest["program"]["findings"])

    def test_a_difference_is_shown_with_its_place(self, copied):
        def spoil(data):
            where = "result: 0.5 became 0.9 at [0, 0, 1]"
            data.update(ok=False, problems=[f"recorded call 1: differs, {where}"])
            data["rows"][1].update(status="differs", where=where, absolute=0.4, outputs={"result": 0.4})

        text = check_page(export_page(edited(copied, "report.json", spoil))).text
        assert "NOT PROVEN recorded call 1: differs, result: 0.5 became 0.9 at [0, 0, 1]" in text
        assert "result 4.0e-01 recorded 1" in text
        assert "recorded 1: 4.0e-01 in result" in text

    def test_what_could_not_be_compared_comes_first(self, copied):
        def spoil(data):
            data["rows"][0]["outputs"] = {"result": 1e-8, "other": None}

        text = check_page(export_page(edited(copied, "report.json", spoil))).text
        assert "other not comparable recorded 0" in text
        assert text.index("other not comparable") < text.index("recorded 0: 1.0e-08 in result")

    def test_hostile_names_are_text(self, copied):
        edited(copied, "manifest.json", lambda data: data["program"].update(model=HOSTILE, rules=[HOSTILE]))

        def rename(data):
            data["findings"].append({"kind": "x", "where": "", "text": HOSTILE})
            data["structure"]["data"]["dict"][0][1] = data["leaves"][0]["path"] = HOSTILE
            data["variables"][0]["evidence"] = HOSTILE

        edited(copied, "plan.json", rename)
        edited(copied, "report.json", lambda data: data["rows"][0].update(where=HOSTILE, label=HOSTILE))
        text = export_page(copied)
        page = check_page(text)
        assert "<script>alert" not in text
        assert page.text.count("<script>alert('x')</script>") >= 5

    def test_a_folder_without_a_proof(self, exported, tmp_path):
        exported.save(tmp_path / "out", verify=False, values=False)
        text = check_page(export_page(tmp_path / "out")).text
        assert "not verified The graph has not been compared with the model yet" in text
        assert "Verification Not verified." in text

    def test_a_folder_of_an_older_version_has_its_page_too(self, copied):
        def older(data):
            data.pop("peak_bytes")
            for name in ("seconds", "domain", "sizes"):
                data["program"].pop(name)

        def older_rows(data):
            for row in data["rows"]:
                row.pop("outputs")

        edited(copied, "manifest.json", older)
        edited(copied, "report.json", older_rows)
        text = check_page(export_page(copied)).text
        assert "Where the differences are" not in text
        assert "Peak memory" not in text
        assert "Unknown: the folder was saved by an older version." in text

    @pytest.mark.parametrize(
        ("name", "change"),
        [
            ("report.json", lambda data: data["rows"][0].pop("status")),
            ("report.json", lambda data: data["rows"][0].pop("where")),
            ("manifest.json", lambda data: data["program"].pop("outputs")),
            ("calls/observation.json", lambda data: data.pop("calls")),
        ],
    )
    def test_a_damaged_folder_is_an_error(self, copied, name, change):
        edited(copied, name, change)
        with pytest.raises(DestinationError, match="This exported model is damaged"):
            export_page(copied)

    def test_a_missing_file_is_an_error(self, copied):
        (copied / "plan.json").unlink()
        with pytest.raises(DestinationError, match=r"missing(.|\n)*plan.json"):
            export_page(copied)

    def test_exported_report_proves_and_writes_only_the_page(self, exported, tmp_path):
        path = exported.report(tmp_path / "pages" / "scaled.html")
        assert [item.name for item in tmp_path.rglob("*") if item.is_file()] == ["scaled.html"]
        assert " proven onnxruntime returns what the model returns" in check_page(path.read_text()).text


@pytest.mark.runtime
def test_parts_have_sections_of_their_own(tmp_path):
    from tests import models

    model, observer = models.tiny_t5(), exportkit.InputObserver()
    with observer(model, parts="auto"), torch.no_grad():
        prompt = torch.arange(3, 10)[None]
        model.generate(input_ids=prompt, attention_mask=(prompt < 9).long(), max_new_tokens=4, do_sample=False)
    exportkit.export(model, observer).save(tmp_path / "t5")
    page = check_page(export_page(tmp_path / "t5"))
    assert {"encoder-plan", "encoder-axes", "encoder-verification"} <= {*page.ids}
    assert "past_key_values.self_attention_cache.layers[0].keys and 3 alike" in page.text
    assert "assembled 0 from encoder 0" in page.text
