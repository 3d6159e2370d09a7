"""The documentation: its examples run, public names and errors have entries, and gallery examples are short."""

import doctest
import importlib
import re
import warnings
from pathlib import Path

import pytest
import torch

import exportkit
from exportkit import clear_patch_mapping, errors
from exportkit.programs.strategies import STRATEGIES
from tests.test_import import ROOMS

ROOT = Path(__file__).parents[1]
PAGES = sorted(path for path in (ROOT / "docs").glob("*.rst") if ">>> " in path.read_text())
SOURCES = sorted(path for path in (ROOT / "exportkit").rglob("*.py") if ">>> " in path.read_text())
GENERATED = "sg_execution_times"  # a page that a build leaves behind
FLAGS = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL | doctest.DONT_ACCEPT_TRUE_FOR_1  # as in sphinx


def failures(tests):
    """The failures of examples as text; empty if all of them print what they should."""
    assert any(test.examples for test in tests)
    said = []
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    with warnings.catch_warnings(action="ignore"):
        for test in tests:
            runner.run(test, out=said.append)
    clear_patch_mapping()
    return "".join(said)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_examples_of_a_page_print_what_it_says(path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    test = doctest.DocTestParser().get_doctest(path.read_text(), {"__name__": "__main__"}, path.name, str(path), 0)
    assert failures([test]) == ""


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).with_suffix("").as_posix())
def test_examples_of_docstrings_print_what_they_say(path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    module = importlib.import_module(name)
    names = {"torch": torch, **{name: getattr(exportkit, name) for name in exportkit.__all__}, **vars(module)}
    assert failures(doctest.DocTestFinder(exclude_empty=True).find(module, name, globs=names)) == ""


def test_every_public_name_has_an_entry():
    entries = re.findall(r"^\.\. auto\w+:: (\w+)$", (ROOT / "docs" / "api.rst").read_text(), flags=re.MULTILINE)
    assert sorted(entries) == sorted(set(exportkit.__all__) - {"ExportkitError"})


def test_every_error_has_an_entry_with_its_cause_and_its_fix():
    entries = re.split(r"^``(\w+)``.*\n", (ROOT / "docs" / "errors.rst").read_text(), flags=re.MULTILINE)
    texts = {}
    for name, text in zip(entries[1::2], entries[2::2], strict=True):
        texts[name] = texts.get(name, "") + text
    classes = {
        name for name, cls in vars(errors).items() if isinstance(cls, type) and cls.__module__ == errors.__name__
    }
    assert set(texts) == classes - {"ExportkitError"}
    assert [name for name, text in texts.items() if "*Cause" not in text or "*Fix:*" not in text] == []


def test_every_page_is_in_a_table_of_contents():
    listed = re.findall(r"^   ([\w/]+)$", (ROOT / "docs" / "index.rst").read_text(), flags=re.MULTILINE)
    assert {path.stem for path in (ROOT / "docs").glob("*.rst")} - {"index", GENERATED} <= set(listed)


@pytest.mark.parametrize("path", sorted((ROOT / "gallery").glob("plot_*.py")), ids=lambda path: path.stem)
def test_a_gallery_example_asks_one_question_in_less_than_sixty_lines(path):
    text = path.read_text()
    title, underline, question = re.match(r'"""\n(.+)\n(=+)\n\n(.+?)\n"""', text, flags=re.DOTALL).groups()
    assert len(text.splitlines()) < 60
    assert len(underline) == len(title)
    assert "?" in title + question


def test_files_named_in_the_guides_for_developers_exist():
    pages = ROOT / "docs" / "architecture.rst", ROOT / "docs" / "contributing.rst", ROOT / "CONTRIBUTING.md"
    named = {path for page in pages for path in re.findall(r"`+((?:\w+/)+(?:\w+\.\w+)?)`+", page.read_text())}
    assert len(named) > 30
    assert {path for path in named if not (ROOT / path).exists() and not (ROOT / "exportkit" / path).exists()} == set()


def test_architecture_lists_the_rooms_in_the_order_of_the_imports():
    facades = {"_callable_module", "export", "capture", "__init__", "cli", "__main__"}
    text = (ROOT / "docs" / "architecture.rst").read_text()
    rooms = re.findall(r"^``(\w+)``  ", text, flags=re.MULTILINE)
    assert rooms == [room for room in ROOMS if room not in facades]


def test_architecture_lists_the_strategies_in_order():
    text = (ROOT / "docs" / "architecture.rst").read_text()
    table = text[text.index("\nstrategy ") : text.index("To change X")]
    names = [re.split(r"  +", line)[0] for line in table.splitlines() if "  " in line and "====" not in line]
    assert names[1:] == [strategy.name for strategy in STRATEGIES]
