"""`learn`: the same answer wherever the servers are, within the budget, honest about what it cannot do."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
import torch

from reproductions.distributions import distributions
from reproductions.distributions_draw import draw
from thinwire.distributions import (
    BlackboardCounts,
    CellCounts,
    Estimate,
    ExactCounts,
    Grouping,
    HaarSketch,
    LearningSpec,
    Monotone,
    OneWayCounts,
    QuantisedCounts,
    Raw,
    choose,
    crossover,
    learn,
    learning,
)
from thinwire.drivers import Lockstep
from thinwire.errors import ConfigError
from thinwire.net.launch import Worker, run_local

DOMAIN = 256
CASES = {
    "counts": {"bits": 4.0},
    "messages": {"bits": 0.2},
    "tables": {"bits": 0.2, "model": "simultaneous"},
    "one-way": {"bits": 0.2, "model": "one-way"},
    "blackboard": {"bits": 0.5, "domain": 4096, "count": 50_000},
    "monotone": {"bits": 0.5, "structure": "monotone"},
    "cells": {"bits": 0.5, "structure": "histogram", "pieces": 8, "domain": 4096, "count": 20_000},
    "sketch": {
        "bits": 0.05,
        "structure": "histogram",
        "pieces": 8,
        "norm": "l2",
        "domain": 4096,
        "count": 1_500_000,
    },
}
KINDS = {"monotone": "monotone", "cells": "histogram", "sketch": "histogram"}
# Tables of counts would be better here: what is to be chosen if there are none.
WITHOUT_TABLES = {"messages", "monotone", "cells", "sketch"}
EXPECTED = {
    "counts": ExactCounts,
    "messages": Raw,
    "tables": QuantisedCounts,
    "one-way": OneWayCounts,
    "blackboard": BlackboardCounts,
    "monotone": Monotone,
    "cells": CellCounts,
    "sketch": HaarSketch,
}


def shards(case: str, servers: int) -> tuple[list[np.ndarray], dict, np.ndarray]:
    options = dict(CASES[case])
    domain, count = options.pop("domain", DOMAIN), options.pop("count", 4000)
    p = distributions(domain)[KINDS.get(case, "zipf")]
    parts = [draw(p, count + 17 * rank, 50 + rank) for rank in range(servers)]
    return parts, {"domain": domain, **options}, p


def spec_of(domain: int, bits: float, **changes: object) -> LearningSpec:
    plain = {
        "structure": "none",
        "pieces": None,
        "norm": "l1",
        "epsilon": None,
        "increasing": False,
        "seed": 0,
    }
    return LearningSpec(domain, bits, **{**plain, "network": "ring", **changes})


@contextmanager
def choices(case: str) -> Iterator[None]:
    with mock.patch.object(choose, "TABLE_LIMIT", 0 if case in WITHOUT_TABLES else choose.TABLE_LIMIT):
        yield


def in_lockstep(case: str, servers: int) -> list[Estimate]:
    parts, options, _ = shards(case, servers)
    driver = Lockstep(servers)
    results: list[list[Estimate]] = [[] for _ in range(servers)]
    spec = spec_of(**options)
    with choices(case):
        driver.run(
            [
                learning(part, spec, rank_info, result)
                for part, rank_info, result in zip(parts, driver.rank_infos, results, strict=True)
            ]
        )
    return [result[0] for result in results]


def _on_rank(worker: Worker) -> list[Estimate]:
    found = []
    for case in CASES:
        parts, options, _ = shards(case, worker.size)
        with choices(case):
            found.append(learn(torch.from_numpy(parts[worker.rank]), **options))
    return found


@pytest.fixture(scope="module")
def on_ranks() -> list[list[Estimate]]:
    return run_local(_on_rank, 3)


@pytest.mark.parametrize("case", CASES)
def test_one_process_lockstep_and_ranks_give_the_same_answer(case: str, on_ranks: list[list[Estimate]]):
    parts, options, p = shards(case, 3)
    with choices(case):
        alone = learn(parts, **options, network="ring")
    assert isinstance(alone.protocol, EXPECTED[case])
    number = list(CASES).index(case)
    for other in (*in_lockstep(case, 3), *(rank[number] for rank in on_ranks)):
        assert str(other.protocol) == str(alone.protocol)
        assert other.bits == alone.bits
        assert other.reason == alone.reason
        np.testing.assert_allclose(other.p, alone.p, atol=1e-7 if case == "sketch" else 1e-13)
    assert alone.p.min() >= 0
    assert alone.p.sum() == pytest.approx(1.0)
    off = np.abs(alone.p - p).sum() if alone.norm == "l1" else ((alone.p - p) ** 2).sum() ** 0.5
    assert off < 2 * alone.error
    assert not alone.warnings


def test_ranks_meter_what_they_send(on_ranks: list[list[Estimate]]):
    for number, case in enumerate(CASES):
        answer = on_ranks[0][number]
        assert answer.wire_bytes > answer.bits / 8 / 3, case


@pytest.mark.parametrize("bits", [0.05, 0.5, 1, 3, 8, 20])
def test_at_a_referee_the_budget_is_kept(bits: float):
    parts, _, _ = shards("counts", 4)
    answer = learn(parts, DOMAIN, bits=bits)
    assert answer.bits <= bits * sum(map(len, parts))
    more = learn(parts, DOMAIN, bits=2 * bits)
    assert more.error <= answer.error * 1.01


def test_servers_of_one_sample_send_no_more_than_they_may():
    x = draw(distributions(64)["zipf"], 5000, 1)
    answer = learn(list(x.reshape(-1, 1)), 64, bits=3)
    assert isinstance(answer.protocol, Grouping)
    assert answer.protocol.bits == 3
    assert answer.bits == 15_000
    assert "grouping" in answer.reason.lower()


def test_exact_counts_from_the_crossover_on():
    for servers, bits in ((4, 2), (16, 1)):
        from_here = crossover(DOMAIN, bits, servers)
        assert from_here == 64 * DOMAIN / (bits * servers)
        p = distributions(DOMAIN)["uniform"]
        for count, exact in ((int(from_here * 0.9), False), (int(from_here * 1.1), True)):
            parts = [draw(p, count, rank) for rank in range(servers)]
            answer = learn(parts, DOMAIN, bits=bits, network="ring")
            assert isinstance(answer.protocol, ExactCounts) is exact
            assert ("do not fit" in answer.reason) is not exact


def test_privacy_costs_accuracy_and_uses_private_coins():
    x = draw(distributions(16)["zipf"], 40_000, 1)
    strict, loose = learn([x], 16, bits=8, epsilon=0.5), learn([x], 16, bits=8, epsilon=4.0)
    assert strict.error > 3 * loose.error
    assert not np.array_equal(learn([x], 16, bits=8, epsilon=0.5).p, strict.p)
    fixed = [learn([x], 16, epsilon=0.5, rng=np.random.default_rng(1)).p for _ in range(2)]
    np.testing.assert_array_equal(*fixed)


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("histogram", {"structure": "monotone"}, "not falling"),
        ("monotone", {"structure": "monotone", "increasing": True}, "not rising"),
        ("monotone", {"structure": "histogram", "pieces": 2}, "no histogram of 2 pieces"),
        ("monotone", {"structure": "histogram", "pieces": 2, "norm": "l2"}, "no histogram of 2 pieces"),
    ],
)
@pytest.mark.parametrize("bits", [0.2, 8])
def test_a_poor_fit_is_told_and_still_the_best_approximation(
    kind: str, options: dict, words: str, bits: float
):
    p = distributions(4096)[kind]
    parts = [draw(p, 100_000, rank) for rank in range(4)]
    answer = learn(parts, 4096, bits=bits, **options)
    assert len(answer.warnings) == 1
    assert words in answer.warnings[0]
    assert answer.p.sum() == pytest.approx(1.0)
    norm = 1 if answer.norm == "l1" else 2
    off = np.linalg.norm(answer.p - p, norm)
    assert off / 4 < answer.misfit < 1.1 * off
    assert off < np.linalg.norm(1 / 4096 - p, norm) * 1.05 or options.get("increasing")


def test_a_good_fit_is_not_complained_about():
    for kind, options in (
        ("monotone", {"structure": "monotone"}),
        ("histogram", {"structure": "histogram", "pieces": 8}),
    ):
        parts = [draw(distributions(4096)[kind], 50_000, rank) for rank in range(4)]
        for bits in (0.2, 1, 8):
            assert not learn(parts, 4096, bits=bits, **options).warnings


def test_bad_input_is_told():
    good = np.arange(10)
    for message, call in (
        ("shard 1: sample 10 is outside", lambda: learn([good, good + 1], 10)),
        ("shard 1: a shard without samples", lambda: learn([good, good[:0]], 10)),
        ("shard 0: samples must be whole numbers", lambda: learn([good + 0.5], 10)),
        ("no shards", lambda: learn([], 10)),
        ("bits", lambda: learn([good], 10, bits=0)),
        ("bits", lambda: learn([good], 10, bits=float("nan"))),
        ("bits", lambda: learn([good], 10, bits=True)),
        ("bits", lambda: learn([good], 10, bits="4")),
        ("domain", lambda: learn([good], 1)),
        ("structure", lambda: learn([good], 10, structure="smooth")),
        ("norm", lambda: learn([good], 10, norm="l3")),
        ("needs pieces", lambda: learn([good], 10, structure="histogram")),
        ("pieces belong", lambda: learn([good], 10, pieces=3)),
        ("epsilon", lambda: learn([good], 10, epsilon=-1.0)),
        ("too large for 1 bits", lambda: learn([good[:1]] * 20, 10**6, bits=1)),
    ):
        with pytest.raises(ConfigError, match=message):
            call()


def test_one_array_or_a_plain_list_of_numbers_is_one_shard():
    x = [0, 1, 1, 3] * 50
    np.testing.assert_array_equal(learn(x, 4).p, [0.25, 0.5, 0, 0.25])
    np.testing.assert_array_equal(learn(torch.tensor(x), 4).p, [0.25, 0.5, 0, 0.25])


def _bad_rank(worker: Worker) -> list[str]:
    told = []
    x = np.arange(64) % 8
    attempts = (
        lambda: learn(x + (worker.rank == 1), 8),
        lambda: learn(x[: 0 if worker.rank == 1 else None], 8),
        lambda: learn(x, 8, bits=2 + worker.rank),
        lambda: learn([x, x], 8, process_group=torch.distributed.group.WORLD),
        lambda: learn(x, 8),
    )
    for attempt in attempts:
        try:
            told.append(str(attempt().p.tolist()))
        except (ConfigError, RuntimeError) as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


def test_a_mistake_on_one_rank_is_an_error_on_all_and_nobody_hangs():
    for told in run_local(_bad_rank, 2, timeout=400):
        assert "ConfigError: rank 1: sample 8 is outside the domain 0..7" in told[0]
        assert "ConfigError: rank 1: a shard without samples" in told[1]
        assert "DisagreementError" in told[2]
        assert "learn: bits" in told[2]
        assert "each rank gives one array" in told[3]
        assert told[4] == str([0.125] * 8)
