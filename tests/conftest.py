"""What every test starts from: no network, one thread, fixed random numbers, and the ``slow`` marker.

Tests that took two seconds or longer when ``make durations`` last measured them are in ``durations.json`` and get the
marker ``slow``; ``make test-fast`` leaves them out.
"""

import collections
import json
import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported

import hypothesis
import pytest
import torch

torch.set_num_threads(1)

# The same examples in every run; how long one takes depends on the machine, so there is no deadline.
hypothesis.settings.register_profile("exportkit", deadline=None, derandomize=True, max_examples=60)
hypothesis.settings.load_profile("exportkit")

DURATIONS = Path(__file__).with_name("durations.json")
SLOW = 2.0  # seconds; with this limit the fast tests take about a tenth of the time of all


def pytest_addoption(parser):
    parser.addoption("--write-durations", action="store_true", help=f"Write the tests that take {SLOW:g} s or longer.")


def pytest_configure(config):
    if config.getoption("--write-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Durations())


def pytest_collection_modifyitems(items):
    slow = json.loads(DURATIONS.read_text())
    for item in items:
        if item.nodeid in slow:
            item.add_marker("slow")


class _Durations:
    """Adds up setup, call and teardown of each test, also of those that ran in other processes."""

    def __init__(self):
        self._seconds = collections.Counter()

    def pytest_runtest_logreport(self, report):
        self._seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self):
        slow = {test: round(seconds, 1) for test, seconds in sorted(self._seconds.items()) if seconds >= SLOW}
        DURATIONS.write_text(json.dumps(slow, indent=1) + "\n")


@pytest.fixture(autouse=True)
def _same_random_numbers():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _nothing_stays_registered():
    yield
    left = [name for name in torch.utils._pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE if name.startswith("exportkit:")]
    assert not left, f"the test left classes registered with torch's pytree: {left}"
