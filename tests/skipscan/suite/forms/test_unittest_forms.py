import sys
import unittest
import unittest as ut
from unittest import SkipTest, skipIf as sk, skipUnless

from helpers import SkippingBase


class Decorators(unittest.TestCase):
    @unittest.skip("called")
    def test_called(self):
        pass

    @unittest.skip
    def test_not_called(self):
        pass

    @ut.skip(reason="keyword")
    def test_module_alias(self):
        pass

    @sk(True, "alias")
    def test_alias(self):
        pass

    @skipUnless(0, "zero")
    def test_unless(self):
        pass

    @unittest.skipIf(
        sys.version_info >= (3, 0)
        and not sys.platform.startswith("nothing"),
        reason="several\tlines",
    )
    def test_several_lines(self):
        pass

    @unittest.skip("outer")
    @unittest.skip("inner")
    def test_stacked(self):
        pass

    @unittest.skipIf(condition=1 > 0, reason="keywords")
    def test_keywords(self):
        pass

    @unittest.skipIf(sys.version_info < (3, 8), "old")
    def test_runs_on_new(self):
        pass

    @unittest.skipUnless(True, "never")
    def test_runs_unless(self):
        pass

    @unittest.expectedFailure
    def test_fails(self):
        self.fail()


class Bodies(unittest.TestCase):
    def test_skip_test(self):
        self.skipTest("in the body")

    def test_raise(self):
        raise SkipTest("raised")

    def test_raise_uncalled(self):
        raise unittest.SkipTest

    def test_after_work(self):
        total = sum(range(4))
        if total == 6:
            self.skipTest(f"total is {total}")

    def test_in_with(self):
        with open(__file__):
            self.skipTest("in with")

    def test_in_loop(self):
        for name in ("a", "b"):
            if name == "b":
                self.skipTest("reached b")

    def test_caught(self):
        try:
            raise SkipTest("caught")
        except SkipTest:
            pass

    def test_asserted(self):
        with self.assertRaises(unittest.SkipTest):
            self.skipTest("expected")

    def test_missing_package(self):
        try:
            import a_package_that_nobody_has  # noqa: F401
        except ImportError:
            self.skipTest("package is missing")

    def test_present_package(self):
        try:
            import json  # noqa: F401
        except ImportError:
            self.skipTest("no json")

    def test_returns_first(self):
        return
        self.skipTest("not reached")

    def test_helper(self):
        self._check()

    def _check(self):
        self.skipTest("in a helper")

    def test_nested_function(self):
        def inner():
            self.skipTest("never called")

        assert inner

    @property
    def ready(self):
        return False

    def test_property(self):
        if not self.ready:
            self.skipTest("not ready")


@unittest.skip("whole class")
class WholeClass(unittest.TestCase):
    @unittest.skip("method")
    def test_one(self):
        pass

    def test_two(self):
        pass


class InheritsTheSkip(WholeClass):
    def test_three(self):
        pass


@unittest.skipIf(False, "not the class")
class NotTheClass(unittest.TestCase):
    def test_one(self):
        pass


class SetUpClass(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        raise unittest.SkipTest("class set-up")

    def test_one(self):
        pass


class FromBase(SkippingBase):
    __test__ = True

    def test_one(self):
        pass


class WithoutBaseSetUp(SkippingBase):
    __test__ = True

    def setUp(self):
        pass

    def test_one(self):
        pass


class Async(unittest.IsolatedAsyncioTestCase):
    async def asyncSetUp(self):
        pass

    @unittest.skip("async decorated")
    async def test_decorated(self):
        pass

    async def test_body(self):
        self.skipTest("async body")

    async def test_runs(self):
        pass


class Mixin:
    reason = "mixin's reason"

    def test_from_mixin(self):
        self.skipTest(self.reason)


class First(Mixin, unittest.TestCase):
    pass


class Second(Mixin, unittest.TestCase):
    reason = "second"
    test_copy = Mixin.test_from_mixin
