"""Settings for all tests."""

import os

import hypothesis
import pytest
import torch

from thinwire import kernels
from thinwire.net import launch

# One thread: the tests run beside worker processes, and oversubscribed cores make small kernels crawl.
torch.set_num_threads(1)
hypothesis.settings.register_profile("thinwire", deadline=None, derandomize=True, max_examples=60)
hypothesis.settings.load_profile("thinwire")
# What all workers need is loaded once, before they are forked.
launch.PRELOADED.append("tests.preload")
# Two ranks to a host, also in the workers that tests start, for `hierarchical` with its default options.
os.environ.setdefault("LOCAL_WORLD_SIZE", "2")
# Decisions by a given link, not by one that is measured beside other tests.
os.environ.setdefault("THINWIRE_LINK", "1gbit")


@pytest.fixture(scope="session", autouse=True)
def compiled_kernels() -> None:
    """Once, before tests with timeouts begin: not in the workers, against the clock of a process group."""
    kernels.prepare()
