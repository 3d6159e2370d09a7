import pytest

CASES = [1, pytest.param(2, marks=pytest.mark.skip(reason="two"))]


@pytest.mark.parametrize("value", CASES)
def test_param(value):
    pass


@pytest.mark.parametrize("a", ["x", pytest.param("y", marks=[pytest.mark.skipif(True, reason="y's")], id="why")])
@pytest.mark.parametrize(("b", "c"), [(1.5, None), (True, {})])
def test_product(a, b, c):
    pass


@pytest.mark.parametrize("number", [1, 2, 3])
def test_body_of_parameter(number):
    if number == 2:
        pytest.skip(f"not {number}")


@pytest.mark.parametrize("nothing", [])
def test_empty(nothing):
    pass


@pytest.mark.parametrize("same", ["a", "a", "b"])
@pytest.mark.skip(reason="all of them")
def test_all(same):
    pass


@pytest.mark.parametrize("kind", [int, str], ids=["whole", "text"])
class TestClass:
    def test_one(self, kind):
        if kind is str:
            pytest.skip("text")


@pytest.mark.parametrize("wide", range(3))
def test_range(wide):
    if wide > 1:
        pytest.skip("too wide")


@pytest.mark.parametrize("made", [i * 2 for i in range(3)])
def test_made(made):
    pytest.skip("whatever it is")
