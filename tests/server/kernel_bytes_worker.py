"""One rank of test_kernel_bytes.py, in a namespace. Arguments: rank, size, address, variants."""

import json
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from scipy.sparse import csr_matrix

from thinwire.server import LinearProblem, asylpg

OPTIONS = {
    "full": {"bits_up": 32, "bits_down": 32},
    "paper": {"mode": "paper", "bits_up": 8},
    "centered": {"mode": "centered", "bits_up": 8, "bits_down": 8},
    "sparse": {"mode": "centered", "variant": "sparse", "bits_down": 8},
}
SIZE = 30_000


def counters() -> dict[str, int]:
    folder = Path("/sys/class/net/eth0/statistics")
    return {
        way: int((folder / f"{name}_bytes").read_text()) for way, name in (("sent", "tx"), ("received", "rx"))
    }


def problem() -> LinearProblem:
    rng = np.random.default_rng(0)
    rows = csr_matrix(
        (rng.normal(size=4000), (rng.integers(0, 40, 4000), rng.integers(0, SIZE, 4000))), (40, SIZE)
    )
    return LinearProblem(rows, np.where(rng.random(40) < 0.5, 1.0, -1.0))


def measure(variant: str) -> dict[str, int]:
    given = problem()
    dist.barrier()
    time.sleep(0.3)
    before = counters()
    options = {"epochs": 2, "epoch_length": 60, "lr": 1e-3, "prox": "l2", "strength": 0.1, **OPTIONS[variant]}
    result = asylpg(given, name=variant, progress=False, **options)
    time.sleep(0.3)  # the last acknowledgements
    after = counters()
    dist.barrier()
    return {
        "kernel sent": after["sent"] - before["sent"],
        "kernel received": after["received"] - before["received"],
        "metered sent": result.meter.sent_bytes,
        "metered received": result.meter.received_bytes,
    }


def main() -> None:
    rank, size, address, *variants = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{address}:29500",
        rank=int(rank),
        world_size=int(size),
        timeout=timedelta(seconds=60),
    )
    print(json.dumps({variant: measure(variant) for variant in variants}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
