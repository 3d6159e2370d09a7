import pytest


@pytest.fixture
def database():
    pytest.skip("no database here")


@pytest.fixture
def table(database):
    return database


@pytest.fixture
def harmless():
    yield 1
    pytest.skip("after the test")


def pytest_collection_modifyitems(items):
    for item in items:
        if "nightly" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="runs at night"))
