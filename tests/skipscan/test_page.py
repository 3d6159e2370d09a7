"""The HTML page: complete in itself, in the order of the result, and safe with any text."""

import html
import re
from html.parser import HTMLParser

from exportkit.skipscan import scan_skipped_tests


class Rows(HTMLParser):
    """Gathers the cells' values of each row of the first table."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.tags = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag == "tr":
            self.rows.append([])
        elif tag == "td" and "data-value" in dict(attributes):
            self.rows[-1].append(dict(attributes)["data-value"])


def test_a_row_for_each_test_most_skipped_first(suite):
    scan = scan_skipped_tests(suite)
    rows = [row for row in Rows(scan.to_html()).rows if row]
    assert rows == [[r.test, str(len(r.ran)), str(len(r.skipped)), str(r.proportion)] for r in scan.rows]


def test_every_reason_is_shown(suite):
    scan = scan_skipped_tests(suite)
    shown = html.unescape(scan.to_html())
    assert all(reason in shown for row in scan.rows for reason in row.reasons)


def test_nothing_is_loaded_from_elsewhere(suite):
    text = scan_skipped_tests(suite).to_html()
    assert not re.search(r"https?://|@import|url\(", text)
    loading = [(tag, values) for tag, values in Rows(text).tags if "src" in values or tag == "link"]
    assert loading == [("link", {"rel": "icon", "href": "data:,"})]


def test_dark_mode_and_phones_are_provided_for(suite):
    text = scan_skipped_tests(suite).to_html()
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text


def test_a_reason_with_markup_is_text(tmp_path):
    source = "import pytest\n@pytest.mark.skip('<script>alert(1)</script>')\ndef test_a(): ..."
    (tmp_path / "test_a.py").write_text(source)
    text = scan_skipped_tests(tmp_path).to_html()
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)" in text


def test_differences_to_a_run_are_shown(suite, truth):
    text = scan_skipped_tests(suite, "pytest", truth=truth[0]).to_html()
    assert "Where the run disagrees" in text
    assert "set later" in text
