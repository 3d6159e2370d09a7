"""What only a run tells: the scan reports a condition, or nothing."""

import os
import random
import unittest

import pytest


def test_of_a_file():
    if os.path.exists(os.sep):
        pytest.skip("the root exists")


def test_of_chance():
    if random.random() > 2:
        pytest.skip("never")


@pytest.mark.skipif(os.path.isdir("no such folder"), reason="no such folder")
def test_of_a_folder():
    pass


class Made(unittest.TestCase):
    def test_one(self):
        pass


setattr(Made, "test_one", unittest.skip("set later")(Made.test_one))
