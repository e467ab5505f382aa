"""The server's meter against the kernel: bytes that really cross its network interface."""

from pathlib import Path

import pytest

from tests.net.test_kernel_bytes import reports
from thinwire.tools.lab import namespaces

VARIANTS = ("full", "paper", "centered", "sparse")


@pytest.mark.slow
def test_the_servers_interface_carries_what_the_meter_says():
    reason = namespaces.unavailable()
    if reason:
        pytest.skip(reason)
    results = reports(Path(__file__).with_name("kernel_bytes_worker.py"), 3, *VARIANTS)
    for rank, by_variant in enumerate(results):
        for variant, counted in by_variant.items():
            for way in ("sent", "received"):
                ratio = counted[f"kernel {way}"] / counted[f"metered {way}"]
                assert 1.00 <= ratio <= 1.08, f"{variant}, rank {rank}, {way}: {ratio:.4f}, {counted}"
