"""What every test starts from: no network, one thread, the same random numbers; and what no test may leave behind."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported

import hypothesis
import pytest
import torch

torch.set_num_threads(1)

# The same examples in every run; how long one takes depends on the machine, so there is no deadline.
hypothesis.settings.register_profile("exportkit", deadline=None, derandomize=True, max_examples=60)
hypothesis.settings.load_profile("exportkit")


@pytest.fixture(autouse=True)
def _same_random_numbers():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _nothing_stays_registered():
    yield
    left = [name for name in torch.utils._pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE if name.startswith("exportkit:")]
    assert not left, f"the test left classes registered with torch's pytree: {left}"
