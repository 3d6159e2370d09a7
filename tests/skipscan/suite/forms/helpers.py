import unittest

import pytest

LIMIT = 3


def need(feature, available=False):
    if not available:
        pytest.skip(f"needs {feature}")


class SkippingBase(unittest.TestCase):
    __test__ = False

    def setUp(self):
        super().setUp()
        raise unittest.SkipTest("base set-up")
