import sys

import pytest

if sys.version_info > (3, 0):
    pytest.skip("whole module", allow_module_level=True)


def test_one():
    pass


class TestOther:
    def test_two(self):
        pass
