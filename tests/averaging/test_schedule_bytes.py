"""What really leaves a network interface under a schedule, by the kernel's counters."""

import pytest

from tests.net.test_kernel_bytes import in_hosts, measured

STEPS = 16
PQASGD = "pqasgd(every=4, bits=8)"


@pytest.mark.slow
def test_an_interface_sends_what_the_meter_says_and_far_less_than_dense() -> None:
    for rank, counted in enumerate(in_hosts(measured, 2, ("dense", PQASGD), STEPS)):
        dense, periodic = counted["dense"], counted[PQASGD]
        ratio = periodic["kernel"] / periodic["metered"]
        assert 1.00 <= ratio <= 1.08, f"rank {rank}: {ratio:.4f}, {periodic}"
        # 8 of 32 bits every 4 steps is 6.25 %, and what two ranks gather is half of what they reduce; biases
        # travel dense, and each interface carries acknowledgements.
        share = periodic["kernel"] / dense["kernel"]
        assert 0.06 < share < 0.075, f"rank {rank}: {share:.4f}"
