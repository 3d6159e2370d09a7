"""How numbers are formatted, and how pages are written."""

import subprocess
import sys

import pytest

from exportkit.errors import DestinationError
from exportkit.files import write_text
from exportkit.plan.tables import count
from exportkit.report.render import difference, render, seconds, size


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (seconds(0.0012), "1.2 ms"),
        (seconds(0.2), "200 ms"),
        (seconds(3.25), "3.2 s"),
        (seconds(0.9999), "1.0 s"),
        (seconds(59.96), "1 min 0 s"),
        (seconds(119.7), "2 min 0 s"),
        (seconds(125), "2 min 5 s"),
        (seconds(None), "–"),
        (seconds(float("nan")), "–"),
        (size(0), "0 B"),
        (size(999), "999 B"),
        (size(1500), "1.5 kB"),
        (size(999_949), "999.9 kB"),
        (size(999_999), "1.0 MB"),
        (size(2e18), "2000000.0 TB"),
        (size(2_500_000_000), "2.5 GB"),
        (size(None), "–"),
        (difference(0.0), "0"),
        (difference(6e-8), "6.0e-08"),
        (difference("inf"), "inf"),
        (difference(None), "–"),
        (count(1, "call"), "1 call"),
        (count(0, "call"), "0 calls"),
        (count(2, "entry", "entries"), "2 entries"),
    ],
)
def test_numbers_are_formatted(shown, text):
    assert shown == text


def test_a_missing_template_value_is_an_error():
    import jinja2

    with pytest.raises(jinja2.UndefinedError, match="rows"):
        render("trace.html.j2", title="", problems=(), total=0, values="")


def test_a_page_is_written_to_a_new_folder(tmp_path):
    path = write_text(tmp_path / "new" / "page.html", "<p>é</p>", "The page")
    assert path.read_text(encoding="utf-8") == "<p>é</p>"


def test_a_page_that_cannot_be_written(tmp_path):
    with pytest.raises(DestinationError) as error:
        write_text(tmp_path, "", "The page")
    assert str(error.value) == f"The page cannot be written.\n  where: {tmp_path}\n  got: Is a directory"


def test_pages_need_neither_torch_nor_a_runtime():
    code = """
import sys, types
import exportkit.errors
for name in [name for name in sys.modules if name.partition(".")[0] in ("torch", "numpy", "transformers")]:
    sys.modules[name] = None
from exportkit.report.render import render
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
