"""Every protocol: unbiased, with exactly the stated error, not fooled by bytes that no encoder makes."""

import numpy as np
import pytest

from reproductions import distributions as study
from thinwire.distributions import (
    ExactCounts,
    Grouping,
    HaarSketch,
    HadamardResponse,
    Messages,
    Monotone,
    OneBitHadamard,
    PublicHash,
    QuantileCells,
    Raw,
    RecursiveHadamard,
    SimulateAndInfer,
    Sums,
)
from thinwire.distributions.hadamard_response import truth_of
from thinwire.distributions.rates import bit_factor
from thinwire.errors import ConfigError, PayloadError

CODED = [
    Raw(100),
    Grouping(100, 1),
    Grouping(100, 3),
    PublicHash(100, 1),
    PublicHash(100, 3),
    RecursiveHadamard(100, 1),
    RecursiveHadamard(100, 4),
    HadamardResponse(100, 1.0),
    OneBitHadamard(100, 1.0),
    SimulateAndInfer(100, 3),
    Monotone(100, 0.3),
    Monotone(100, 0.3, 2),
]


@pytest.fixture(scope="module")
def exact() -> list[study.Exactness]:
    return study.exactness(64, 2048, 200)


def test_squared_errors_are_within_a_tenth_of_the_formulas(exact: list[study.Exactness]):
    assert len({row.p for row in exact}) == 5
    off = {(row.protocol, row.p): row.ratio for row in exact if abs(row.ratio - 1) > 0.1}
    assert not off


def test_estimates_are_unbiased_before_projection(exact: list[study.Exactness]):
    """The squared mean of 200 errors is as large as chance makes it: 1 in this unit, 200 if all were bias."""
    off = {(row.protocol, row.p): row.bias for row in exact if row.bias > 3}
    assert not off


def test_the_formulas_hold_where_the_domain_is_no_power_of_two():
    p = study.distributions(100)["dirichlet"]
    for protocol in (RecursiveHadamard(100, 2), OneBitHadamard(100, 1.0), Grouping(100, 3)):
        runs = [study.errors(protocol, p, 3000, seed) for seed in range(200)]
        assert np.mean([run.l2 for run in runs]) == pytest.approx(protocol.expected_l2(p, 3000), rel=0.1)


def test_a_monotone_estimate_has_the_error_stated():
    p = study.distributions(200)["monotone"]
    for protocol in (Monotone(200, 0.3), Monotone(200, 0.3, 2)):
        runs = [study.errors(protocol, p, 2000, seed) for seed in range(200)]
        assert np.mean([run.l2 for run in runs]) == pytest.approx(protocol.expected_l2(p, 2000), rel=0.1)
        mean = np.mean([run.signed for run in runs], axis=0) + p
        flat = protocol.partition.flattened(p)
        assert np.abs(mean - flat).sum() < 0.1 * np.mean([run.l1 for run in runs])


def test_errors_fall_with_the_samples():
    rows = study.sweep(64, (2**12, 2**14, 2**16), 24)
    names = {row.protocol for row in rows if " on a " not in row.protocol}
    assert len(names) == 14
    for name in names:
        assert study.slope(rows, name, "l2") == pytest.approx(-1.0, abs=0.1), name
        assert study.slope(rows, name, "l1") == pytest.approx(-0.5, abs=0.05), name


def test_one_more_bit_divides_the_error():
    for row in study.one_more_bit(256, 2**14, 40):
        assert row.measured == pytest.approx(row.stated, rel=0.1)
    assert bit_factor(1) == 3


def test_simulated_samples_pass_a_chi_square_test():
    found = study.true_samples(64, 2**19)
    assert found.accepted > 5000
    assert found.share >= 0.25
    assert abs(found.z) < 4
    assert found.freedom > 50


def test_simulated_samples_of_something_else_would_fail_it():
    p, q = study.distributions(64)["dirichlet"], study.distributions(64)["uniform"]
    protocol = SimulateAndInfer(64, 4)
    accepted = protocol.samples(protocol.encode(study.draw(q, 2**19, 1), np.random.default_rng(2)))
    expected = p * len(accepted)
    assert ((np.bincount(accepted, minlength=64) - expected) ** 2 / expected).sum() > 1000


def test_at_least_a_quarter_of_the_rounds_yields_a_sample_even_if_all_samples_are_equal():
    protocol = SimulateAndInfer(10, 2)
    accepted = protocol.samples(protocol.encode(np.full(20_000, 7), np.random.default_rng(3)))
    assert set(accepted) == {7}
    assert len(accepted) / (20_000 // protocol.smallest) > 0.22
    assert protocol.acceptance(np.eye(10)[7]) == 0.25


@pytest.mark.parametrize("bits", [1, 2, 5])
def test_the_fast_decoder_of_hashes_counts_what_trying_every_symbol_counts(bits: int):
    domain, n = 50, 400
    protocol = PublicHash(domain, bits, seed=9)
    x = study.draw(study.distributions(domain)["zipf"], n, 4)
    sent = np.empty(n, np.int64)
    protocol.codes(x, 0, np.uint64(0), sent)
    fits = np.empty((domain, n), bool)
    for symbol in range(domain):
        would = np.empty(n, np.int64)
        protocol.codes(np.full(n, symbol), 0, np.uint64(0), would)
        fits[symbol] = would == sent
    buckets = 2**bits
    naive = (buckets * fits.sum(1) / n - 1) / (buckets - 1)
    np.testing.assert_allclose(protocol.estimate(protocol.encode(x)), naive, atol=1e-12)


def test_hashes_collide_as_often_as_they_should():
    protocol = PublicHash(64, 2, seed=1)
    n = 40_000
    a, b = np.empty(n, np.int64), np.empty(n, np.int64)
    for x, y in ((0, 1), (3, 35), (62, 63)):
        protocol.codes(np.full(n, x), 0, np.uint64(0), a)
        protocol.codes(np.full(n, y), 0, np.uint64(0), b)
        assert (a == b).mean() == pytest.approx(0.25, abs=0.01)


def test_hashes_that_would_take_too_long_to_decode_are_refused():
    protocol = PublicHash(1000, 8)
    with pytest.raises(ConfigError, match=r"additions.*use fewer bits, or Grouping"):
        protocol.estimate(Messages(np.zeros(10**7, np.uint8), 10**7))


def test_enough_bits_make_grouping_raw():
    x = study.draw(study.distributions(100)["zipf"], 1000, 0)
    grouping, raw = Grouping(100, 7), Raw(100)
    np.testing.assert_array_equal(grouping.estimate(grouping.encode(x)), raw.estimate(raw.encode(x)))


def test_a_private_answer_is_honest_as_often_as_epsilon_says_and_uniform_otherwise():
    domain, epsilon, n = 6, 1.5, 200_000
    protocol = HadamardResponse(domain, epsilon)
    sent = np.empty(n, np.int64)
    for symbol in range(domain):
        protocol.codes(np.full(n, symbol), 0, np.uint64(5 + symbol), sent)
        shares = np.bincount(sent, minlength=protocol.size) / n
        honest = np.array([(((symbol + 1) & y).bit_count() + 1) % 2 for y in range(protocol.size)], bool)
        half = protocol.size / 2
        np.testing.assert_allclose(shares[honest], truth_of(epsilon) / half, rtol=0.05)
        np.testing.assert_allclose(shares[~honest], (1 - truth_of(epsilon)) / half, rtol=0.05)
        assert shares.max() / shares.min() < np.exp(epsilon) * 1.1


def test_a_private_bit_is_honest_as_often_as_epsilon_says():
    protocol = OneBitHadamard(8, 1.0)
    honest, sent = np.empty(100_000, np.int64), np.empty(100_000, np.int64)
    x = np.full(100_000, 5)
    RecursiveHadamard(8, 1).codes(x, 0, np.uint64(0), honest)
    protocol.codes(x, 0, np.uint64(77), sent)
    assert (honest == sent).mean() == pytest.approx(truth_of(1.0), abs=0.01)


@pytest.mark.parametrize("protocol", CODED, ids=str)
def test_messages_have_the_bits_stated_and_do_not_depend_on_how_players_are_cut(protocol):
    p = study.distributions(100)["zipf"]
    x = study.draw(p, 70_001, 1)
    whole = protocol.encode(x, np.random.default_rng(3))
    assert whole.payload.nbytes == -(-protocol.bits_per_message * 70_001 // 8)
    parts, first = [], 0
    for piece in np.split(x.astype(np.int32), [1, 5000, 40_000]):
        parts.append(protocol.encode(piece, np.random.default_rng(3), first))
        first += len(piece)
    np.testing.assert_allclose(protocol.estimate(parts[::-1]), protocol.estimate(whole), atol=1e-12)


@pytest.mark.parametrize("protocol", [*CODED, ExactCounts(100), HaarSketch(100, 3, 128)], ids=str)
def test_bad_samples_are_refused(protocol):
    for bad, message in (
        ([100], "sample 100 is outside"),
        ([-1], "sample -1 is outside"),
        ([], "without samples"),
        ([0.5], "whole numbers"),
    ):
        with pytest.raises(ConfigError, match=message):
            protocol.encode(np.array(bad))


def test_bad_settings_are_refused():
    for make in (
        lambda: Raw(1),
        lambda: Raw(True),
        lambda: Raw(2**40),
        lambda: Grouping(100, 0),
        lambda: Grouping(100, 8),
        lambda: Grouping(100, 2.5),
        lambda: PublicHash(100, 9),
        lambda: RecursiveHadamard(100, 9),
        lambda: SimulateAndInfer(100, 7),
        lambda: HadamardResponse(100, 0.0),
        lambda: OneBitHadamard(100, float("nan")),
        lambda: Monotone(100, 0.0),
        lambda: Monotone(100, 0.1, 9),
        lambda: HaarSketch(100, 0, 128),
        lambda: HaarSketch(100, 3, 10),
        lambda: HaarSketch(100, 3, 128, rows=2),
        lambda: QuantileCells(100, 5, 4),
        lambda: ExactCounts(100, 16),
    ):
        with pytest.raises(ConfigError):
            make()


def test_too_few_messages_are_refused():
    for protocol in (Grouping(100, 1), RecursiveHadamard(100, 1), OneBitHadamard(100, 1.0)):
        with pytest.raises(ConfigError, match="too large for this budget"):
            protocol.estimate(protocol.encode(np.zeros(20, np.int64)))


def test_bytes_that_no_encoder_makes_are_refused():
    raw = Raw(100)
    with pytest.raises(PayloadError, match="do not fit"):
        raw.estimate(Messages(np.zeros(3, np.uint8), 4))
    with pytest.raises(PayloadError, match="code 127"):
        raw.estimate(Messages(np.full(7, 255, np.uint8), 8))
    grouping = Grouping(100, 3)  # 15 blocks of 7: the last has places beyond the domain
    with pytest.raises(PayloadError, match="beyond the domain"):
        grouping.estimate(Messages(np.full(30, 255, np.uint8), 80))
    with pytest.raises(ConfigError, match="no message from group"):
        grouping.estimate([Messages(np.zeros(3, np.uint8), 8, first) for first in (0, 15, 30, 45)])
    simulate = SimulateAndInfer(100, 3)
    with pytest.raises(PayloadError, match="missing or doubled"):
        simulate.samples([Messages(np.zeros(3, np.uint8), 8), Messages(np.zeros(3, np.uint8), 8)])
    counts = ExactCounts(100)
    with pytest.raises(PayloadError, match="add up"):
        counts.estimate(Sums(np.ones(100, np.int32), 99))
    with pytest.raises(PayloadError, match="a table of"):
        counts.estimate(Sums(np.ones(99, np.int32), 99))
    sketch = HaarSketch(100, 3, 128)
    with pytest.raises(PayloadError, match="not finite"):
        sketch.estimate(Sums(np.full((5, 128), np.nan, np.float32), 9))


def test_structured_protocols_beat_raw_samples_by_what_their_bounds_promise():
    for row in study.structured(4096, 2**16, 6):
        assert row.promised > 1.3, row
        assert row.factor >= row.promised, row
