"""Tables of counts: unbiased, with the error stated, within the budget, and not fooled by hostile bytes."""

import numpy as np
import pytest
import torch

from reproductions import distributions as study
from thinwire.distributions import (
    BlackboardCounts,
    Board,
    LearningSpec,
    Messages,
    OneWayCounts,
    QuantisedCounts,
    Raw,
    choose,
    coder,
    learn,
    learning,
    rates,
)
from thinwire.distributions.learn import _Ranks
from thinwire.distributions.tables import LAST_STEP, ServerCounts, step_of
from thinwire.drivers import Lockstep
from thinwire.errors import ConfigError, PayloadError

KINDS = (QuantisedCounts, OneWayCounts, BlackboardCounts)
DOMAIN, SERVERS, SAMPLES = 512, 4, 1500


def written(protocol: ServerCounts, shards: list[np.ndarray]) -> list[Messages]:
    board, messages = Board(protocol.domain), []
    for turn in protocol.turns():
        now = [protocol.encode(shards[server], None, server, board) for server in turn]
        protocol.read(board, now)
        messages += now
    return messages


def drawn(p: np.ndarray, seed: int, servers: int = SERVERS, samples: int = SAMPLES) -> list[np.ndarray]:
    return [study.draw(p, samples, 1000 * seed + server) for server in range(servers)]


# -- the coder ---------------------------------------------------------------------------------------------


def test_numbers_come_back_and_take_about_their_entropy():
    rng = np.random.default_rng(1)
    for drawn_values in (rng.poisson(16, 4096), rng.geometric(0.05, 4096), rng.random(50_000) < 0.001):
        values = drawn_values.astype(np.int64)
        contexts = np.zeros(len(values), np.int64)
        packed = coder.encode(values, contexts, 10**6)
        assert packed is not None
        np.testing.assert_array_equal(coder.decode(packed, contexts), values)
        counts = np.unique(values, return_counts=True)[1]
        entropy = -(counts * np.log2(counts / len(values))).sum()
        assert entropy < 8 * packed.size < 1.05 * entropy + 32


def test_any_numbers_in_any_contexts_come_back_and_limits_are_exact():
    rng = np.random.default_rng(2)
    for _ in range(1000):
        values = rng.integers(0, 2 ** rng.integers(1, 35), rng.integers(0, 40))
        contexts = rng.integers(0, coder.CONTEXTS, len(values))
        packed = coder.encode(values, contexts, 10**4)
        assert packed is not None
        np.testing.assert_array_equal(coder.decode(packed, contexts), values)
        assert coder.encode(values, contexts, packed.size) is not None
        if packed.size:
            assert coder.encode(values, contexts, packed.size - 1) is None
        for wrong in (np.append(packed, np.uint8(0)), np.append(packed, np.uint8(7))):
            with pytest.raises(PayloadError, match="no coded numbers"):
                coder.decode(wrong, contexts)


def test_a_long_run_of_one_number_takes_next_to_nothing():
    for value in (0, 1):
        values, contexts = np.full(2**20, value), np.zeros(2**20, np.int64)
        packed = coder.encode(values, contexts, 800)
        assert packed is not None
        np.testing.assert_array_equal(coder.decode(packed, contexts), values)


# -- the protocols -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [0.4, 0.8, 2.0])
@pytest.mark.parametrize("name", ["uniform", "zipf", "dirichlet"])
def test_estimates_are_unbiased_and_have_the_error_stated(kind: type[ServerCounts], bits: float, name: str):
    p, runs = study.distributions(DOMAIN)[name], 100
    off = np.empty((runs, DOMAIN))
    for seed in range(runs):  # public coins differ from run to run
        protocol = kind(DOMAIN, bits, SERVERS, seed)
        off[seed] = protocol.estimate(written(protocol, drawn(p, seed))) - p
    measured = (off**2).sum(1).mean()
    assert measured == pytest.approx(kind(DOMAIN, bits, SERVERS).expected_l2(p, SERVERS * SAMPLES), rel=0.1)
    # In standard errors: 1 if the mean is off by chance, 100 if all the error were bias.
    assert (off.mean(0) ** 2).sum() * runs / measured < 2.0
    sums = off.sum(1)  # a step that follows the coins would shift all entries the same way
    assert abs(sums.mean()) < 3.5 * sums.std() / runs**0.5 + 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_messages_keep_to_the_budget_down_to_the_smallest(kind: type[ServerCounts]):
    for domain in (2, 64, 5000):
        for p in (np.eye(domain)[domain // 2], np.full(domain, 1 / domain)):
            for samples in (100, 20_000):
                shards = drawn(p, 1, 3, samples)
                for bits in (0.001, 0.01, 0.1, 1.0, 8.0):
                    protocol = kind(domain, bits, 3)
                    if not protocol.fits(samples):
                        continue
                    messages = written(protocol, shards)
                    for server in range(3):
                        used = sum(m.payload.nbytes for m in messages if m.first == server)
                        assert 8 * used <= bits * samples


def test_counts_that_fit_are_exact():
    p = study.distributions(DOMAIN)["zipf"]
    shards = drawn(p, 3)
    for kind in KINDS:
        protocol = kind(DOMAIN, 8.0, SERVERS)
        found = protocol.estimate(written(protocol, shards))
        together = np.bincount(np.concatenate(shards), minlength=DOMAIN) / (SERVERS * SAMPLES)
        np.testing.assert_allclose(found, together, rtol=1e-12)


def test_steps_grow_by_an_eighth_of_an_octave():
    for index in range(LAST_STEP + 1):
        assert step_of(index) == pytest.approx(2 ** (index / 8), rel=1e-15)


def test_what_others_wrote_makes_messages_shorter_or_steps_finer():
    p = study.distributions(4096)["dirichlet"]
    shards = drawn(p, 4, 8, 2**16)
    sizes = {}
    for kind in KINDS:
        sizes[kind] = sum(m.payload.nbytes for m in written(kind(4096, 1.0, 8), shards))
    assert sizes[OneWayCounts] < 0.8 * sizes[QuantisedCounts]
    assert sizes[BlackboardCounts] < 0.85 * sizes[QuantisedCounts]
    alone = QuantisedCounts(4096, 0.05, 8).expected_l2(p, 2**19)
    assert OneWayCounts(4096, 0.05, 8).expected_l2(p, 2**19) < 0.5 * alone
    assert BlackboardCounts(4096, 0.05, 8).expected_l2(p, 2**19) < 0.6 * alone


# -- hostile bytes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [0.4, 2.0])
def test_damaged_messages_are_refused_or_still_tables_of_counts(kind: type[ServerCounts], bits: float):
    protocol = kind(DOMAIN, bits, SERVERS)
    good = written(protocol, drawn(study.distributions(DOMAIN)["zipf"], 5))
    rng = np.random.default_rng(6)
    refused = 0
    for trial in range(300):
        bad = list(good)
        which = trial % len(bad)
        payload = bad[which].payload.copy()
        match trial % 4:
            case 0:
                payload[rng.integers(payload.size)] ^= 1 << rng.integers(8)
            case 1:
                payload = payload[: rng.integers(payload.size)]
            case 2:
                payload = rng.integers(0, 256, payload.size).astype(np.uint8)
            case _:
                payload = np.append(payload, rng.integers(0, 256, 3).astype(np.uint8))
        bad[which] = Messages(payload, bad[which].count, bad[which].first)
        try:
            found = protocol.estimate(bad)
        except PayloadError:
            refused += 1
        else:
            assert np.isfinite(found).all()
            assert np.abs(found).max() < 1.0 + 2.0 * step_of(int(payload[0])) / SAMPLES
    assert refused > (270 if bits == 2.0 else 100)


@pytest.mark.parametrize("kind", KINDS)
def test_what_no_server_writes_is_refused(kind: type[ServerCounts]):
    protocol = kind(DOMAIN, 1.0, SERVERS)
    good = written(protocol, drawn(study.distributions(DOMAIN)["zipf"], 7))
    payload, count = good[0].payload, good[0].count
    for bad, words in (
        (Messages(payload, count, SERVERS), "server 4"),
        (Messages(payload, count, -1), "server -1"),
        (Messages(payload, 0, 0), "0 samples"),
        (Messages(payload, 2**31, 0), "samples"),
        (Messages(payload[:0], count, 0), "0 bytes"),
        (Messages(np.zeros(count, np.uint8), count, 0), "bytes, where 1 bits"),
        (Messages(payload.reshape(1, -1), count, 0), "bytes"),
        (Messages(payload, count - 1, 0), "no coded|add up|beyond|bytes"),
    ):
        with pytest.raises(PayloadError, match=words):
            protocol.estimate([bad, *good[1:]])
    if kind is not BlackboardCounts:
        protocol = kind(DOMAIN, 8.0, SERVERS)  # large enough for any table
        good = written(protocol, drawn(study.distributions(DOMAIN)["zipf"], 7))
        own = np.bincount(drawn(study.distributions(DOMAIN)["zipf"], 7)[0], minlength=DOMAIN)
        for index, change, words in (
            (0, [1, 0], "add up"),
            (0, [-1 - own[0], 1 + own[0]], "beyond"),
            (0, [count + 9 - own[0], 0], "beyond"),
            (8, [-9 - own[0], 0], "beyond"),
            (8, np.full(DOMAIN, 6), "add up"),
            (8, -own, "add up"),
        ):
            false = own.copy()
            false[: len(change)] += change
            expected = Board(DOMAIN).expected(count)
            packed = expected.encode(false, protocol._rounding(index, 0, count, 0), 10**4)
            assert packed is not None
            bad = Messages(np.append(np.uint8(index), packed), count, 0)
            with pytest.raises(PayloadError, match=words):
                protocol.estimate([bad, *good[1:]])
    with pytest.raises(PayloadError, match="not its turn"):
        protocol.estimate([*good, good[0]])
    if kind is BlackboardCounts:
        with pytest.raises(PayloadError, match="nobody has reported symbol"):
            protocol.estimate(good[1:SERVERS])


def test_bad_settings_and_budgets_are_told():
    for make in (
        lambda: QuantisedCounts(1, 1.0, 2),
        lambda: QuantisedCounts(64, 0.0, 2),
        lambda: OneWayCounts(64, float("nan"), 2),
        lambda: BlackboardCounts(64, 1.0, 0),
    ):
        with pytest.raises(ConfigError):
            make()
    with pytest.raises(ConfigError, match="too few for a table of 5,000 counts"):
        QuantisedCounts(5000, 0.1, 1).encode(np.arange(100))
    with pytest.raises(ConfigError, match="model"):
        learn([np.arange(10)], 10, model="shouting")


# -- learn -------------------------------------------------------------------------------------------------


def test_learn_is_eight_times_better_than_subsamples():
    """At 4,096 symbols, 8 servers of 65,536 samples, and 0.25, 0.5 and 1 bit for each."""
    rows = study.many_samples(4096, 2**16, 1)
    assert len(rows) == 9
    for row in rows:
        assert row.used <= row.bits
        assert row.l2_factor > 8, row
        assert row.l1_factor > 3, row
        assert row.l2 == pytest.approx(row.expected, rel=0.25)  # one run; Zipf's largest entry has most of it


@pytest.mark.parametrize(
    ("name", "options"),
    [("monotone", {"structure": "monotone"}), ("histogram", {"structure": "histogram", "pieces": 8})],
)
def test_structure_is_learned_better_from_tables(name: str, options: dict, monkeypatch: pytest.MonkeyPatch):
    p = study.distributions(4096)[name]
    parts = drawn(p, 11, 8, 2**16)
    answer = learn(parts, 4096, bits=0.1, **options)
    assert isinstance(answer.protocol, KINDS)
    assert not answer.warnings
    monkeypatch.setattr(choose, "TABLE_LIMIT", 0)
    other = learn(parts, 4096, bits=0.1, **options)
    assert not isinstance(other.protocol, KINDS)
    assert np.abs(answer.p - p).sum() < 0.5 * np.abs(other.p - p).sum()


def test_learn_may_only_use_what_the_model_allows():
    parts = drawn(study.distributions(256)["dirichlet"], 8, 6, 4000)
    for model, kinds in (
        ("simultaneous", QuantisedCounts),
        ("one-way", OneWayCounts),
        ("blackboard", OneWayCounts | BlackboardCounts),
    ):
        answer = learn(parts, 256, bits=0.2, model=model)
        assert isinstance(answer.protocol, kinds)
        assert type(answer.protocol).__name__ in answer.reason
        assert ("rounds" in answer.reason) is (model != "simultaneous")
    cells = learn(parts, 256, structure="histogram", pieces=4, bits=0.5, model="simultaneous")
    assert "QuantileCells" not in cells.reason


@pytest.mark.parametrize("model", ["simultaneous", "one-way", "blackboard"])
def test_the_bits_are_those_of_the_bytes_sent(model: str):
    parts = drawn(study.distributions(256)["dirichlet"], 9, 3, 4000)
    spec = LearningSpec(256, 0.2, "none", None, "l1", None, False, 0, "referee", model)
    driver = Lockstep(3)
    results: list[list] = [[] for _ in parts]
    driver.run(
        [learning(x, spec, r, out) for x, r, out in zip(parts, driver.rank_infos, results, strict=True)]
    )
    greeting = sum(8 + 1 for _ in parts)  # how many samples there are, and that they are fine
    assert 8 * (sum(meter.payload_bytes for meter in driver.meters) - greeting) == results[0][0].bits
    alone = learn(parts, 256, bits=0.2, model=model)
    assert alone.bits == results[0][0].bits <= 0.2 * 3 * 4000
    np.testing.assert_array_equal(alone.p, results[0][0].p)


def test_writing_out_of_turn_is_refused(monkeypatch: pytest.MonkeyPatch):
    polite = _Ranks._take_turn

    async def rude(self, protocol, sizes, turn):
        if self.rank_info.rank == 1:
            await self._gather([torch.ones(3, dtype=torch.uint8)], [protocol.longest(int(sizes.max()))])
        return await polite(self, protocol, sizes, turn)

    monkeypatch.setattr(_Ranks, "_take_turn", rude)
    parts = drawn(study.distributions(256)["dirichlet"], 9, 2, 4000)
    spec = LearningSpec(256, 0.2, "none", None, "l1", None, False, 0, "referee", "one-way")
    driver = Lockstep(2)
    with pytest.raises(PayloadError, match="rank 1 writes when it is not its turn"):
        driver.run([learning(x, spec, r, []) for x, r in zip(parts, driver.rank_infos, strict=True)])


# -- bounds ------------------------------------------------------------------------------------------------


def test_bounds_agree_where_they_meet():
    for domain, bits, n in ((64, 1, 5000), (256, 4, 10**5), (4096, 12, 10**6)):
        assert rates.servers_l2(domain, n, 1, bits) == pytest.approx(rates.minimax_l2(domain, bits, n))
    assert rates.blackboard_l1(256, rates.blackboard_bits(256, 0.1)) == pytest.approx(0.1)
    # Raw samples in as many bits as the bound asks for have an l1 error of epsilon, up to a constant.
    n = int(rates.blackboard_bits(256, 0.1) / 8)
    assert 0.5 < Raw(256).expected_l1(np.full(256, 1 / 256), n) / 0.1 < 1.0
    assert rates.servers_l2(4096, 8, 65_536, 10**6) == 1 / (8 * 65_536)
    assert rates.servers_l1(4096, 8, 65_536, 100) == 2.0
    assert rates.monotone_l1(4096, 10**6) < rates.servers_l1(4096, 1, 10**6, 10**6)


@pytest.mark.parametrize("bits", [0.05, 0.25, 1.0, 8.0])
@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_no_answer_is_far_below_its_bound_nor_very_far_above(bits: float, norm: str):
    p = study.distributions(1024)["uniform"]
    answer = learn(drawn(p, 10, 4, 2**14), 1024, bits=bits, norm=norm)
    off = np.linalg.norm(answer.p - p, 1 if norm == "l1" else 2)
    assert answer.bound / 3 < off < 10 * answer.bound
    assert f"{answer.bound:.2g}" in answer.reason
