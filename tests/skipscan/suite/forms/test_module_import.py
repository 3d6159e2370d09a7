import pytest

missing = pytest.importorskip("a_package_that_nobody_has")


def test_one():
    missing.use()
