"""Encoding ten million samples over a domain of a million costs less than ten copies of them."""

import time

import numpy as np
import pytest

from thinwire.distributions import (
    ExactCounts,
    Grouping,
    HaarSketch,
    HadamardResponse,
    Monotone,
    OneBitHadamard,
    PublicHash,
    QuantileCells,
    QuantisedCounts,
    Raw,
    RecursiveHadamard,
    SimulateAndInfer,
)

DOMAIN, N = 10**6, 10**7
CELLS = QuantileCells(DOMAIN, 8, 256).refine(np.full(DOMAIN, 1 / DOMAIN))


@pytest.mark.slow
@pytest.mark.parametrize(
    "protocol",
    [
        Raw(DOMAIN),
        Grouping(DOMAIN, 1),
        Grouping(DOMAIN, 8),
        PublicHash(DOMAIN, 1),
        PublicHash(DOMAIN, 8),
        RecursiveHadamard(DOMAIN, 1),
        RecursiveHadamard(DOMAIN, 8),
        SimulateAndInfer(DOMAIN, 8),
        HadamardResponse(DOMAIN, 1.0),
        OneBitHadamard(DOMAIN, 1.0),
        Monotone(DOMAIN, 0.1),
        ExactCounts(DOMAIN),
        HaarSketch(DOMAIN, 8, 4096),
        CELLS,
    ],
    ids=lambda protocol: str(protocol).partition("edges")[0],
)
def test_encoding_takes_less_than_ten_copies(protocol):
    assert copies_to_encode(protocol) < 10


@pytest.mark.slow
def test_tables_of_rounded_counts_take_less_than_forty_copies():
    assert copies_to_encode(QuantisedCounts(DOMAIN, 1.0, 8)) < 40


def copies_to_encode(protocol) -> float:
    rng = np.random.default_rng(1)
    x = rng.integers(0, DOMAIN, N)
    other = np.empty_like(x)
    protocol.encode(x[: N // 4], rng)
    copies, runs = [], []
    for _ in range(9):  # in turn, so that what disturbs one disturbs the other; and only time of this process
        begin = time.process_time()
        np.copyto(other, x)
        middle = time.process_time()
        protocol.encode(x, rng)
        copies.append(middle - begin)
        runs.append(time.process_time() - middle)
    return min(runs) / min(copies)
