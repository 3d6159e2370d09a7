"""Classes are found by name, and naming one loads no module from elsewhere."""

import sys

import pytest

from exportkit.errors import TreeError
from exportkit.trees.lookup import class_name, find_class
from exportkit.trees.objects import load_part


class Outer:
    class Inner:
        pass


def test_class_is_found_by_its_name():
    assert find_class(class_name(Outer.Inner)) is Outer.Inner


def test_module_that_is_not_loaded_stays_so(tmp_path, monkeypatch):
    (tmp_path / "never_loaded.py").write_text("class Cache: ...")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(TreeError) as raised:
        load_part({"class": "never_loaded:Cache", "items": []})
    assert str(raised.value) == (
        "Class Cache belongs to a module that is not there.\n"
        "  where: module never_loaded\n"
        "  got: not loaded, and reading a file loads no module from elsewhere\n"
        "  hint: import never_loaded first, in the version that was there when the file was written."
    )
    assert "never_loaded" not in sys.modules


def test_function_is_no_class():
    with pytest.raises(TreeError, match="No such class can be found by its name: class_name"):
        load_part({"type": "exportkit.trees.lookup:class_name"})
