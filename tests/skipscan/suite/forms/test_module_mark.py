import pytest

pytestmark = pytest.mark.skipif("os.name in ('posix', 'nt', 'java')", reason="every system")


def test_one():
    pass


class TestOne:
    def test_two(self):
        pass
