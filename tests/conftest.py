"""What every test starts from: no network, one thread, fixed random numbers, and the ``slow`` marker.

The fast tests are the shortest ones of the last ``make durations`` that together took four minutes, or two on two
processes. All others are in ``durations.json`` and get the marker ``slow``; ``make test-fast`` leaves them out.
"""

import collections
import gc
import itertools
import json
import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported

import hypothesis
import pytest
import torch

torch.set_num_threads(1)
# The objects of all imported packages stay; going through them again and again takes a sixth of the time of the tests.
gc.set_threshold(700, 10, 100)

# The same examples in every run; how long one takes depends on the machine, so there is no deadline.
hypothesis.settings.register_profile("exportkit", deadline=None, derandomize=True, max_examples=60)
hypothesis.settings.load_profile("exportkit")

DURATIONS = Path(__file__).with_name("durations.json")
FAST = 240  # seconds that the fast tests take together: with imports, `make test-fast` stays below three minutes


def pytest_addoption(parser):
    parser.addoption("--write-durations", action="store_true", help="Write which tests are slow, and their seconds.")


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
        shortest_first = sorted(self._seconds, key=self._seconds.get)
        together = itertools.accumulate(self._seconds[test] for test in shortest_first)
        slow = [test for test, seconds in zip(shortest_first, together, strict=True) if seconds > FAST]
        DURATIONS.write_text(
            json.dumps({test: round(self._seconds[test], 1) for test in sorted(slow)}, indent=1) + "\n"
        )


@pytest.fixture(autouse=True)
def _same_random_numbers():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _nothing_stays_registered():
    yield
    left = [name for name in torch.utils._pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE if name.startswith("exportkit:")]
    assert not left, f"the test left classes registered with torch's pytree: {left}"
