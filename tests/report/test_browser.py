"""Pages in a browser, if one is installed: scripts run without errors, tables sort, nothing is wider than a phone."""

import pytest
import torch

import exportkit
from exportkit.skipscan import scan_skipped_tests
from tests import models
from tests.report.pages import CHROMIUM, browser_messages

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")

# Clicks the heads of a table, and notes what a person would see.
_PROBE = """
<script>
const heads = [...document.querySelectorAll("table.sortable th button")];
heads[0].click();
const rows = [...document.querySelector("table.sortable tbody").rows];
const first = rows.map(row => row.cells[0].textContent.trim());
document.body.dataset.sorted = JSON.stringify(first.map(text => text.split(" ")[0]));
document.body.dataset.overflow = document.documentElement.scrollWidth - document.documentElement.clientWidth;
</script>
</body>"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A page of each kind."""
    place = tmp_path_factory.mktemp("pages")
    model, observer = models.Classifier().eval(), exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for batch in (2, 4):
            model(torch.ones(batch, 6))
    export = exportkit.export(model, observer).report(place / "export.html")
    source = "import pytest\ndef test_b(): ...\ndef test_c(): ...\n@pytest.mark.skip('later')\ndef test_a(): ..."
    (place / "test_x.py").write_text(source)
    skips = place / "skips.html"
    skips.write_text(scan_skipped_tests(place).to_html())
    return {"export": export, "skips": skips}


@pytest.mark.runtime
@pytest.mark.parametrize("name", ["export", "skips"])
def test_no_console_message(pages, name, tmp_path):
    messages, document = browser_messages(pages[name], tmp_path)
    assert messages == []
    assert "Made by exportkit." in document


@pytest.mark.runtime
def test_console_messages_are_detected(pages, tmp_path):
    broken = tmp_path / "broken.html"
    broken.write_text(pages["skips"].read_text().replace("</body>", "<script>missing()</script></body>"))
    messages, _ = browser_messages(broken, tmp_path / "profile")
    assert "missing is not defined" in messages[0]


@pytest.mark.runtime
def test_a_click_sorts_a_table_and_nothing_is_too_wide(pages, tmp_path):
    probed = tmp_path / "probed.html"
    probed.write_text(pages["skips"].read_text().replace("</body>", _PROBE))
    messages, document = browser_messages(probed, tmp_path / "profile", width=500)
    assert messages == []
    assert 'data-sorted="[&quot;test_a&quot;,&quot;test_b&quot;,&quot;test_c&quot;]"' in document
    assert 'data-overflow="0"' in document
