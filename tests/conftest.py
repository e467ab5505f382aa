"""Settings for all tests."""

import hypothesis
import torch

# One thread: the tests run beside worker processes, and oversubscribed cores make small kernels crawl.
torch.set_num_threads(1)
hypothesis.settings.register_profile("thinwire", deadline=None, derandomize=True, max_examples=60)
hypothesis.settings.load_profile("thinwire")
