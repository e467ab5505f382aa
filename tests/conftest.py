"""Settings for all tests."""

import os

import hypothesis
import torch

# One thread: the tests run beside worker processes, and oversubscribed cores make small kernels crawl.
torch.set_num_threads(1)
hypothesis.settings.register_profile("thinwire", deadline=None, derandomize=True, max_examples=60)
hypothesis.settings.load_profile("thinwire")
# Two ranks to a host, also in the workers that tests start, for `hierarchical` with its default options.
os.environ.setdefault("LOCAL_WORLD_SIZE", "2")
