import unittest

from ...test_modeling_common import ModelTesterMixin


class DeltaModelTest(ModelTesterMixin, unittest.TestCase):
    def setUp(self):
        self.skipTest("Delta needs a file that is not there")


class DeltaFreeTest(unittest.TestCase):
    def test_of_delta(self):
        pass

    def test_forward(self):
        pass
