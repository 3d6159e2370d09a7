"""What notebooks show of a plan, a domain, a report and a comparison: everything that the text has, in any colours."""

import re
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

import exportkit
from exportkit.proof.report import Report, Row


class Page(HTMLParser):
    """The text of each cell and line; raises if a tag is not closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.texts, self.tags = [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    torch.manual_seed(0)
    model, observer = nn.Linear(4, 2), exportkit.InputObserver()
    with observer(model):
        for rows in (2, 3):
            model(torch.ones(rows, 4))
    exported = exportkit.export(model, observer)
    graph = exported.to_onnx(tmp_path_factory.mktemp("notebook") / "model.onnx")
    compared = exportkit.compare_runs(lambda: model(torch.rand(5, 4)), model, graph)
    return {"plan": observer.plan(), "domain": exported.domain, "report": graph.verify(), "comparison": compared}


@pytest.mark.runtime
@pytest.mark.parametrize("name", ["plan", "domain", "report", "comparison"])
def test_it_says_what_the_text_says(shown, name):
    value = shown[name]
    texts = Page(value._repr_html_()).texts
    for line in str(value).splitlines():
        cells = [cell for cell in re.split(r"  +", line.removeprefix("note: ")) if cell.strip("- ")]
        assert all(cell in texts for cell in cells), (line, texts)


@pytest.mark.runtime
@pytest.mark.parametrize("name", ["plan", "domain", "report", "comparison"])
def test_text_and_background_are_those_of_the_notebook(shown, name):
    styles = "; ".join(re.findall(r'style="([^"]*)"', shown[name]._repr_html_()))
    assert set(re.findall(r"(?<![\w-])color: ([^;\"]+)", styles)) <= {"inherit"}
    assert set(re.findall(r"background[\w-]*: ([^;\"]+)", styles)) <= {"transparent"}


def test_text_is_escaped_and_parts_are_folded():
    row = Row("recorded", "0", {"batch": 2}, "differs", 0.5, "<script>alert(1)</script> & more")
    part = Report((row,), 0)
    text = Report((), 0, parts={"unet": part})._repr_html_()
    page = Page(text)
    assert "script" not in page.tags
    assert "<script>alert(1)</script> & more" in page.texts
    assert page.texts[0] == "NOT PROVEN: unet: recorded call 0: differs, <script>alert(1)</script> & more"
    assert page.tags.count("details") == 1
