import unittest

try:
    import a_package_that_nobody_has
except ImportError:
    raise unittest.SkipTest("no package")


class One(unittest.TestCase):
    def test_one(self):
        a_package_that_nobody_has.use()
