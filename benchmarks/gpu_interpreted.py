"""`python -m benchmarks.gpu_interpreted PART`: the cases with this in their name in Triton's interpreter.

It prints a line of JSON for each.

Bytes are the difference between two sizes, so what a kernel moves once for any size (histograms, samples)
does not count. Samples are shortened, or the tensors would have to be too large for the interpreter.
"""

from __future__ import annotations

import json
import sys

from benchmarks.common import Action
from benchmarks.gpu_cases import CASES
from benchmarks.gpu_recorder import Record, recording
from thinwire.kernels import dispatch
from thinwire.kernels.triton import _candidates, _launch, sketch

SMALL, LARGE = 131072, 262144
TILE = 32768


def main() -> None:
    dispatch.BACKENDS["cpu"] = "thinwire.kernels.triton"
    _launch.TILE, _candidates.RUNS, sketch.SAMPLE_BLOCKS = TILE, 1024, 256
    for case in [case for case in CASES if sys.argv[1] in case.name]:
        small, large = _run(case.make(SMALL), SMALL), _run(case.make(LARGE), LARGE)
        each = 4 * (LARGE - SMALL)
        line = {
            "name": case.name,
            "passes": (large.tensor_bytes - small.tensor_bytes) / each,
            "lists": (large.list_bytes - small.list_bytes) / each,
            "cpu": case.cpu,
            "launches": large.launches,
        }
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


def _run(action: Action, size: int) -> Record:
    with recording(4 * size) as record:
        action()
    return record


if __name__ == "__main__":
    main()
