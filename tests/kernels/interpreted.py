"""A pytest plugin: the tests of the CPU kernels, run on the Triton kernels in Triton's interpreter.

For a process with TRITON_INTERPRET=1. Tiles and samples are small, so that small tensors have several tiles
and take the same paths as large ones. The programs that ran go to the file THINWIRE_LAUNCHES.
"""

import json
import os
from pathlib import Path

import hypothesis
import numpy as np
import pytest

from benchmarks.gpu_recorder import recording
from thinwire.kernels import dispatch
from thinwire.kernels.triton import _candidates, _launch, sketch

dispatch.BACKENDS["cpu"] = "thinwire.kernels.triton"
_launch.TILE = 512
_candidates.RUNS = 16
_candidates.STEP = 32768
sketch.SAMPLE_BLOCKS = 4
np.seterr(all="ignore")  # a device does not warn of infinity times zero


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session):
    with recording() as record:
        result = yield
    if path := os.environ.get("THINWIRE_LAUNCHES"):
        Path(path).write_text(json.dumps(record.launches))
    return result


def pytest_collection(session):
    """After tests/conftest.py has chosen its own: the interpreter is a thousand times slower."""
    hypothesis.settings.register_profile("interpreted", deadline=None, derandomize=True, max_examples=3)
    hypothesis.settings.load_profile("interpreted")
