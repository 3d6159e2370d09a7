"""What a scan by regular expressions misses or takes for a skip wrongly: a test for each."""

import textwrap

import pytest


def test_a_decorator_over_several_lines(verdicts):
    source = """
        import unittest
        class A(unittest.TestCase):
            @unittest.skip(
                reason="over "
                # a comment (with a parenthesis
                "lines"
            )
            def test_a(self): ...
    """
    assert verdicts(source) == {"A::test_a": "skipped: over lines"}


def test_a_decorator_of_a_class(verdicts):
    source = """
        import unittest
        @unittest.skip("all of it")
        class A(unittest.TestCase):
            def test_a(self): ...
        class B(A):
            def test_b(self): ...
    """
    assert set(verdicts(source).values()) == {"skipped: all of it"}
    assert len(verdicts(source)) == 3


def test_an_asynchronous_test(verdicts):
    source = """
        import unittest
        class A(unittest.IsolatedAsyncioTestCase):
            @unittest.skip("decorated")
            async def test_a(self): ...
            async def test_b(self): self.skipTest("body")
    """
    assert verdicts(source) == {"A::test_a": "skipped: decorated", "A::test_b": "skipped: body"}


@pytest.mark.parametrize("statement", ['self.skipTest("x")', 'pytest.skip("x")', 'raise unittest.SkipTest("x")'])
def test_a_skip_in_the_body(verdicts, statement):
    source = f"""
        import pytest, unittest
        class A(unittest.TestCase):
            def test_a(self):
                self.assertTrue(True)
                {statement}
    """
    assert verdicts(source) == {"A::test_a": "skipped: x"}


@pytest.mark.parametrize(
    ("body", "verdict"),
    [
        ("try:\n    return\nfinally:\n    pytest.skip('x')", "skipped: x"),
        ("try:\n    pytest.skip('x')\nfinally:\n    return", "ran"),
        ("try:\n    pytest.skip('x')\nfinally:\n    print()", "skipped: x"),
        ("try:\n    import not_there\nfinally:\n    pytest.skip('x')", "skipped: x"),
        (
            "try:\n    import not_there\nexcept ImportError:\n    pass\nfinally:\n    known = True\n"
            "if known:\n    pytest.skip('x')",
            "skipped: x",
        ),
        ("try:\n    if poll():\n        return\nfinally:\n    print()\npytest.skip('x')", [("x", "not (poll())")]),
    ],
)
def test_finally_is_followed_however_the_statement_is_left(verdicts, body, verdict):
    source = "import pytest\nfrom elsewhere import poll\ndef test_a():\n" + textwrap.indent(body, "    ")
    assert verdicts(source) == {"test_a": verdict}


def test_finally_after_a_yield_belongs_to_the_teardown_of_a_fixture(verdicts):
    source = """
        import pytest
        @pytest.fixture
        def value():
            try:
                yield 1
            finally:
                pytest.skip("after the test")
        def test_a(value): ...
    """
    assert verdicts(source) == {"test_a": "ran"}


@pytest.mark.parametrize(
    ("statement", "condition"),
    [
        ("while poll():\n                pytest.skip('x')", "poll()"),
        ("match poll():\n                case 1:\n                    pytest.skip('x')", "poll() matches 1"),
    ],
)
def test_a_skip_in_a_loop_or_a_match_is_conditional(verdicts, statement, condition):
    source = f"""
        import pytest
        from elsewhere import poll
        def test_a():
            {statement}
    """
    (verdict,) = verdicts(source).values()
    assert verdict == [("x", condition)]


@pytest.mark.parametrize("method", ["setUp", "setUpClass", "asyncSetUp"])
def test_a_skip_in_the_set_up_of_a_base_class(verdicts, method):
    base = f"""
        import unittest
        class Base(unittest.IsolatedAsyncioTestCase):
            {"@classmethod" if method == "setUpClass" else ""}
            def {method}(self): raise unittest.SkipTest("set-up")
    """
    source = "from base import Base\nclass A(Base):\n    def test_a(self): ..."
    assert verdicts(source, base=base) == {"A::test_a": "skipped: set-up"}


def test_a_skipped_parameter(verdicts):
    source = """
        import pytest
        @pytest.mark.parametrize("x", [1, pytest.param(2, marks=pytest.mark.skip("not two"))])
        def test_a(x): ...
    """
    assert verdicts(source) == {"test_a[1]": "ran", "test_a[2]": "skipped: not two"}


class TestNamedMarks:
    source = """
        from elsewhere import require_device, slow
        @slow
        def test_slow(): ...
        @require_device("any")
        def test_device(): ...
    """

    def test_with_a_reason_they_skip(self, verdicts):
        marks = {"slow": "test is slow", "require_*": "needs more"}
        assert verdicts(self.source, marks) == {
            "test_slow": "skipped: test is slow",
            "test_device": "skipped: needs more",
        }

    def test_without_one_they_skip_under_a_condition(self, verdicts):
        condition = [("require_device", "not available: require_device")]
        assert verdicts(self.source) == {"test_slow": "ran", "test_device": condition}

    def test_with_an_empty_one_they_never_skip(self, verdicts):
        assert verdicts(self.source, {"require_device": ""}) == {"test_slow": "ran", "test_device": "ran"}


def test_a_decorator_of_the_suite_is_followed(verdicts):
    tools = """
        import unittest
        def require_more(test):
            return unittest.skipUnless(has_more(), "needs more")(test)
        def has_more():
            return False
    """
    source = "from tools import require_more\n@require_more\ndef test_a(): ..."
    assert verdicts(source, tools=tools) == {"test_a": "skipped: needs more"}


@pytest.mark.parametrize(
    "decorator", ["skipIf(False, 'x')", "skipUnless(1, 'x')", "skipIf(sys.version_info < (3, 8), 'x')"]
)
def test_a_condition_that_does_not_hold_is_no_skip(verdicts, decorator):
    source = f"""
        import sys, unittest
        class A(unittest.TestCase):
            @unittest.{decorator}
            def test_a(self): ...
    """
    assert verdicts(source) == {"A::test_a": "ran"}


def test_text_is_no_skip(verdicts):
    source = '''
        import unittest
        class A(unittest.TestCase):
            def test_a(self):
                """Like test_b:
                @unittest.skip("no")
                def test_a(self): self.skipTest("no")
                """
                # self.skipTest("no")
                "self.skipTest('no')"
    '''
    assert verdicts(source) == {"A::test_a": "ran"}


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ("\"Bert's test isn't\"", "Bert's test isn't"),
        ("'a \"quoted\" one'", 'a "quoted" one'),
        ('"one " \'two \' """three"""', "one two three"),
        ('f"{NAME} {1 + 1}"', "BERT 2"),
        ('f"{NAME!r:>8}|{NAME.lower()}"', "  'BERT'|bert"),
        ("__name__ or 1", "{__name__ or 1}"),
        ('f"on {device()}"', "on {device()}"),
        ('NAME + " is " + unknown', "BERT is {unknown}"),
        ('"%s: %d" % (NAME, 3)', "BERT: 3"),
        ('"{0}{name}".format(1, name="x")', "1x"),
        ("unknown", "{unknown}"),
        ('"long" if len(NAME) > 3 else "short"', "long"),
        ("NAME[:2]", "BE"),
    ],
)
def test_a_reason_is_what_python_makes_of_it(verdicts, written, reason):
    source = f'import pytest\nNAME = "BERT"\n@pytest.mark.skip(reason={written})\ndef test_a(): ...'
    assert verdicts(source) == {"test_a": f"skipped: {reason}"}


@pytest.mark.parametrize(
    "statements",
    [
        "ready = False\nready += unknown",
        "ready = False\nwhile unknown: ready = True",
        "ready = False\nfor ready in unknown: pass",
        "ready = False\nmatch unknown:\n    case 1: ready = True",
        "ready = False\nif unknown: ready = True",
        "ready = False\ntry: ready = unknown()\nexcept ValueError: pass",
    ],
)
def test_a_name_that_may_have_changed_decides_nothing(verdicts, statements):
    source = f"import pytest\n{statements}\n@pytest.mark.skipif(not ready, reason='not ready')\ndef test_a(): ..."
    assert verdicts(source) == {"test_a": [("not ready", "not ready")]}


@pytest.mark.parametrize(
    "condition",
    [
        "sys.version_info[:2] >= (3, 8)",
        "sys.version_info.major == 3",
        "os.environ.get('NO_SUCH_VARIABLE') is None",
        "os.getenv('NO_SUCH_VARIABLE', 'no') == 'no'",
        "platform.python_implementation() == sys.implementation.name.replace('cpython', 'CPython')",
        "importlib.util.find_spec('no_such_package') is None",
    ],
)
def test_conditions_on_the_environment_are_evaluated(verdicts, condition):
    source = (
        f"import importlib, os, platform, pytest, sys\n@pytest.mark.skipif({condition}, reason='x')\ndef test_a(): ..."
    )
    assert verdicts(source) == {"test_a": "skipped: x"}


class TestConditions:
    def test_what_only_a_run_tells_is_a_condition(self, verdicts):
        source = """
            import pytest
            @pytest.mark.skipif(device() == "cpu", reason="too slow")
            def test_a(): ...
        """
        assert verdicts(source) == {"test_a": [("too slow", "device() == 'cpu'")]}

    def test_a_skip_after_an_open_return_is_one_too(self, verdicts):
        source = """
            import pytest
            def test_a():
                if ready():
                    return
                pytest.skip("not ready")
        """
        assert verdicts(source) == {"test_a": [("not ready", "not (ready())")]}

    def test_two_open_branches_that_both_skip_are_certain(self, verdicts):
        source = """
            import pytest
            def test_a():
                if ready():
                    pytest.skip("one")
                else:
                    pytest.skip("two")
        """
        assert verdicts(source) == {"test_a": "skipped: one or two"}

    def test_attributes_are_those_of_the_class_that_inherits(self, verdicts):
        source = """
            import unittest
            class Mixin:
                fast = True
                def test_a(self):
                    if not self.fast: self.skipTest("slow")
            class A(Mixin, unittest.TestCase): ...
            class B(Mixin, unittest.TestCase): fast = False
            class C(Mixin, unittest.TestCase):
                def setUp(self): self.fast = ask()
        """
        expected = {"A::test_a": "ran", "B::test_a": "skipped: slow", "C::test_a": [("slow", "not self.fast")]}
        assert verdicts(source) == expected

    def test_the_class_of_an_inherited_test_is_that_of_self(self, verdicts):
        source = """
            import unittest
            class Mixin:
                def test_a(self): self.skipTest(f"{type(self).__name__} {self.__class__.__name__}")
            class A(Mixin, unittest.TestCase): ...
            class B(Mixin, unittest.TestCase): ...
        """
        assert verdicts(source) == {"A::test_a": "skipped: A A", "B::test_a": "skipped: B B"}

    def test_a_later_base_class_does_not_hide_an_earlier_one(self, verdicts):
        source = """
            import unittest
            class Root(unittest.TestCase):
                def test_a(self): ...
            class Left(Root): ...
            class Right(Root):
                def test_a(self): self.skipTest("right")
            class A(Left, Right): ...
        """
        assert verdicts(source)["A::test_a"] == "skipped: right"
        assert verdicts(source)["Left::test_a"] == "ran"

    def test_a_circular_import_ends(self, verdicts):
        one = "from two import B\nclass A: reason = 'x'"
        two = "from one import A\nimport unittest\nclass B(A, unittest.TestCase): ..."
        source = "from two import B\nclass C(B):\n    def test_a(self): self.skipTest(self.reason)"
        assert verdicts(source, one=one, two=two)["C::test_a"] == "skipped: x"

    def test_names_imported_from_each_other_end(self, verdicts):
        one, two = "from two import mark\nfrom two import *", "from one import mark\nfrom one import *"
        source = "import pytest\nfrom one import mark, other\n@mark\ndef test_a():\n    if other: pytest.skip()"
        assert verdicts(source, one=one, two=two) == {"test_a": [("", "other")]}

    def test_helpers_that_call_each_other_many_times_end(self, verdicts):
        helpers = [f"def h{n}():\n    " + f"h{n + 1}();" * 20 for n in range(8)]
        source = "\n".join(
            ["import pytest", *helpers, "def h8(): ready() and pytest.skip('deep')", "def test_a(): h0()"]
        )
        assert verdicts(source) == {"test_a": "ran"}

    def test_recursion_ends(self, verdicts):
        source = "import pytest\ndef helper(): helper(); pytest.skip('deep')\ndef test_a(): helper()"
        assert verdicts(source) == {"test_a": "skipped: deep"}


def test_removed_and_switched_off_tests_are_not_there(verdicts):
    source = """
        import unittest
        class A(unittest.TestCase):
            def test_a(self): ...
            def test_b(self): ...
        class B(A):
            test_a = None
        class C(A):
            __test__ = False
    """
    assert sorted(verdicts(source)) == ["A::test_a", "A::test_b", "B::test_b"]


def test_nothing_of_the_suite_is_run(verdicts, tmp_path):
    touched = tmp_path / "touched"
    source = f"""
        import os, pathlib, pytest
        pathlib.Path({str(touched)!r}).touch()
        open({str(touched)!r}, "w")
        @pytest.mark.skipif(os.system("touch {touched}") == 0, reason=f"{{open({str(touched)!r}, 'w')}}")
        def test_a(): __import__("os").mkdir({str(touched)!r})
        @pytest.mark.skipif("__import__('os').mkdir({str(touched)!r}) is None", reason="x")
        def test_b(): ...
        LARGE = "x" * 99999 * 99999 + f"{{1:999999999}}" + "%999999999d" % 1 + "{{:999999999}}".format(1)
    """
    assert set(verdicts(source)) == {"test_a", "test_b"}
    assert not touched.exists()


def test_a_file_that_cannot_be_parsed_is_named_and_the_others_are_scanned(tmp_path):
    from exportkit.skipscan import scan_skipped_tests

    (tmp_path / "test_bad.py").write_text("def test_a(:")
    (tmp_path / "test_good.py").write_text("def test_b(): ...")
    scan = scan_skipped_tests(tmp_path)
    assert [test.id for test in scan.tests] == ["test_good.py::test_b"]
    assert scan.problems[0].startswith("test_bad.py: SyntaxError")
