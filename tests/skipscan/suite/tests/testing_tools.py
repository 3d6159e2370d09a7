"""Decorators and conditions that a suite has of its own."""

import functools
import sys
import unittest

import pytest

HAS_ACCELERATOR = False
NEEDS_WINDOWS = pytest.mark.skipif(sys.platform != "win32", reason="needs Windows")


def is_accelerator_available():
    return HAS_ACCELERATOR


def require_accelerator(test_case):
    """Marks a test that needs an accelerator."""
    return unittest.skipUnless(is_accelerator_available(), "test requires an accelerator")(test_case)


def require_python(major, minor):
    def decorator(test_case):
        return unittest.skipUnless(sys.version_info >= (major, minor), f"test requires Python {major}.{minor}")(test_case)

    return decorator


def slow(test_case):
    run_slow = False
    if not run_slow:
        return pytest.mark.skip(reason="test is slow")(test_case)
    return test_case


def skip_on_this_platform(test):
    @functools.wraps(test)
    def wrapper(*args, **kwargs):
        if sys.platform != "no platform":
            pytest.skip(f"not on {'this'} platform")
        return test(*args, **kwargs)

    return wrapper


def harmless(test):
    @functools.wraps(test)
    def wrapper(*args, **kwargs):
        return test(*args, **kwargs)

    return wrapper
