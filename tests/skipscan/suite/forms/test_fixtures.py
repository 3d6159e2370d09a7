import pytest


@pytest.fixture(name="renamed")
def _hidden():
    pytest.skip("renamed fixture")


def test_asks(database):
    pass


def test_asks_for_one_that_asks(table):
    pass


def test_after(harmless):
    pass


def test_renamed(renamed):
    pass


@pytest.mark.usefixtures("database")
def test_uses():
    pass


class TestAutomatic:
    @pytest.fixture(autouse=True)
    def _always(self):
        pytest.skip("automatic fixture")

    def test_one(self):
        pass


class TestOverrides:
    @pytest.fixture
    def database(self):
        return 1

    def test_one(self, database):
        pass
