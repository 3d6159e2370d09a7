import sys
import unittest

import pytest
from pytest import mark, skip as bail

from helpers import need
from tests.testing_tools import NEEDS_WINDOWS, harmless, require_python, skip_on_this_platform

leave_out = pytest.mark.skip
with_reason = pytest.mark.skip(reason="named mark")
OLD = sys.version_info < (3, 8)


@pytest.mark.skip
def test_not_called():
    pass


@pytest.mark.skip()
def test_no_reason():
    pass


@pytest.mark.skip("positional")
def test_positional():
    pass


@leave_out(reason="alias")
def test_alias():
    pass


@with_reason
def test_named():
    pass


@mark.skipif(True, reason="imported mark")
def test_imported_mark():
    pass


@pytest.mark.skipif("sys.version_info > (3,)")
def test_string_condition():
    pass


@pytest.mark.skipif("LIMIT == 2", reason="a name of the module")
def test_string_with_name():
    pass


LIMIT = 2


@pytest.mark.skipif(OLD, reason="old")
def test_runs_on_new():
    pass


@pytest.mark.skipif(False, False, reason="none")
def test_no_condition():
    pass


@pytest.mark.skipif(not OLD, reason="first")
@pytest.mark.skip(reason="second")
def test_both():
    pass


@NEEDS_WINDOWS
def test_mark_from_elsewhere():
    pass


@require_python(99, 0)
def test_decorator_with_arguments():
    pass


@require_python(3, 0)
def test_decorator_that_does_not_skip():
    pass


@skip_on_this_platform
def test_wrapper():
    pass


@harmless
def test_harmless_wrapper():
    pass


@harmless
@pytest.mark.skip(reason="below a wrapper")
def test_below_a_wrapper():
    pass


@unittest.skip("unittest's on a function")
def test_unittest_decorator():
    pass


@pytest.mark.xfail(reason="not a skip")
def test_xfail():
    assert False


def test_body():
    pytest.skip("body")


def test_imported_skip():
    bail("bailed out")


def test_helper():
    need("a helper")


def test_helper_with_argument():
    need("nothing", available=True)


def test_raise():
    raise pytest.skip.Exception("raised")


def test_either_way():
    if len(sys.argv) > 100:
        pytest.skip("one way")
    else:
        pytest.skip("other way")


def test_exception_is_not_caught():
    try:
        pytest.skip("no ordinary exception")
    except Exception:
        pass


def test_in_raises():
    with pytest.raises(pytest.skip.Exception):
        pytest.skip("expected")


def test_importorskip_missing():
    pytest.importorskip("a_package_that_nobody_has")


def test_importorskip_with_reason():
    pytest.importorskip("a_package_that_nobody_has", reason="nobody has it")


def test_importorskip_present():
    pytest.importorskip("json")


def test_comment():
    # pytest.skip("a comment")
    assert "pytest.skip('a text')"


@pytest.mark.nightly
def test_nightly():
    pass


@pytest.mark.skip(reason="async function")
async def test_async():
    pass


@pytest.mark.skip(reason="class mark")
class TestClassMark:
    def test_one(self):
        pass

    class TestNested:
        def test_two(self):
            pass


class TestMarkList:
    pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.skipif(1 == 1, reason="class list")]

    def test_one(self):
        pass


class TestInheritsMarks(TestMarkList):
    def test_two(self):
        pass


class TestSetupMethod:
    def setup_method(self):
        pytest.skip("set-up of a method")

    def test_one(self):
        pass


class TestSetupClass:
    @classmethod
    def setup_class(cls):
        pytest.skip("set-up of a class")

    def test_one(self):
        pass


@unittest.skip("has no effect on a plain class")
class TestPlain:
    def test_one(self):
        pass


class TestSelf:
    flag = True

    def test_attribute(self):
        if self.flag:
            pytest.skip("flag is set")

    @staticmethod
    def test_static():
        pytest.skip("static")


class TestWithInit:
    def __init__(self):
        pass

    def test_not_collected(self):
        pytest.skip("not collected")
