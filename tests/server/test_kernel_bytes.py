"""The server's meter against the kernel: bytes that really cross its network interface."""

import time

import numpy as np
import pytest
import torch.distributed as dist
from scipy.sparse import csr_matrix

from tests.net.test_kernel_bytes import in_hosts
from thinwire.net.launch import Worker
from thinwire.server import LinearProblem, asylpg
from thinwire.tools.lab import inside

OPTIONS = {
    "full": {"bits_up": 32, "bits_down": 32},
    "paper": {"mode": "paper", "bits_up": 8},
    "centered": {"mode": "centered", "bits_up": 8, "bits_down": 8},
    "sparse": {"mode": "centered", "variant": "sparse", "bits_down": 8},
}
SIZE = 30_000


def problem() -> LinearProblem:
    rng = np.random.default_rng(0)
    rows = csr_matrix(
        (rng.normal(size=4000), (rng.integers(0, 40, 4000), rng.integers(0, SIZE, 4000))), (40, SIZE)
    )
    return LinearProblem(rows, np.where(rng.random(40) < 0.5, 1.0, -1.0))


def measured(worker: Worker) -> dict[str, dict[str, tuple[int, int]]]:
    """By variant and way: what the kernel counts and what the meter says."""
    return {variant: counted(variant) for variant in OPTIONS}


def counted(variant: str) -> dict[str, tuple[int, int]]:
    given = problem()
    dist.barrier()
    time.sleep(0.3)
    before = inside.counters()
    options = {"epochs": 2, "epoch_length": 60, "lr": 1e-3, "prox": "l2", "strength": 0.1, **OPTIONS[variant]}
    meter = asylpg(given, name=variant, progress=False, **options).meter
    time.sleep(0.3)  # the last acknowledgements
    after = inside.counters()
    dist.barrier()
    assert before is not None
    assert after is not None
    return {
        "sent": (after.sent - before.sent, meter.sent_bytes),
        "received": (after.received - before.received, meter.received_bytes),
    }


@pytest.mark.slow
def test_the_servers_interface_carries_what_the_meter_says() -> None:
    for rank, by_variant in enumerate(in_hosts(measured, 3)):
        for variant, ways in by_variant.items():
            for way, (kernel, metered) in ways.items():
                ratio = kernel / metered
                assert 1.00 <= ratio <= 1.08, f"{variant}, rank {rank}, {way}: {ratio:.4f}, {ways}"
