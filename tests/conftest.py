"""Settings for all tests."""

import itertools
import os
from types import SimpleNamespace

import hypothesis
import pytest
import torch

from thinwire import kernels
from thinwire.net import launch
from thinwire.predict import mirror, player, sync_rounds

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


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart() -> None:
    """Once, before the clock of the first test and before workers start: on a new clone it takes minutes."""
    kernels.prepare()


@pytest.fixture
def counted_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that predictions measure takes 10 us between two looks at the clock, on a busy machine as well."""
    looks = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: 1e-5 * next(looks))
    for module in (mirror, player, sync_rounds):
        monkeypatch.setattr(module, "time", clock)
