"""Distributions learned with few bits: the theorems' rates in domain, samples and bits, and lower bounds.

The paper has no experiments; what is judged are its theorems, and those that followed it. A theorem of a rate
is up to constants, some up to logarithms, so powers are fitted over a grid, on the uniform distribution.

Verdicts:
- One sample per player, b bits: squared l2 error k / (n 2^b), l1 error k / sqrt(n 2^b). Fails if a fitted
  exponent of k, n or 2^b is more than 0.15 (l2) or 0.1 (l1) from the theorem's, for any of three protocols,
  or if an error on Zipf is over 4 times the rate.
- Many samples per server, l bits each, l <= k: squared l2 error k / (m N l). Fails if a fitted exponent of k,
  N or l of what `learn` does is more than 0.3 from 1, -1, -1 (logarithms are allowed).
- Raw samples are optimal among blackboard protocols with one sample per server: (k / epsilon^2) log2 k bits.
  Fails if the constant of raw samples changes by more than 20 % with k, or if any protocol with one sample,
  on any grid point, needs fewer bits than half of what raw samples need for its error.
- "Reading before writing does not change the rate": fails if a one-way or a blackboard protocol beats the
  simultaneous one by more than 4 times on the uniform distribution. On Zipf it may, and is shown.
- Monotone: l1 error O((log2 k / n)^(1/3)) with Birge's partition. Fails if the fitted exponent of n is above
  -0.28, or if an error exceeds the rate with a constant of 1.
- Histograms: bits times error do not depend on k but through logarithms. Fails if bits times squared l1 error
  (or squared l2 error) of a structured protocol grows faster than k^0.25, where raw samples' grow as k.
- Simulate and infer: fails if accepted samples differ from p by more than 4 deviations of chi-squared, or if
  less than a quarter is accepted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np

from reproductions.base import Outcome, Reproduction, Section, exponent
from reproductions.distributions_draw import F64, I64, draw
from reproductions.distributions_rates import PROTOCOLS, monotone, one_sample, powers, raw_constants
from reproductions.distributions_rates import many_samples as rates_of_servers
from reproductions.parts import Context
from thinwire.distributions import (
    ExactCounts,
    Grouping,
    HaarSketch,
    HadamardResponse,
    Monotone,
    OneBitHadamard,
    PublicHash,
    QuantileCells,
    Raw,
    RecursiveHadamard,
    SimulateAndInfer,
    learn,
)
from thinwire.distributions.protocol import Coded
from thinwire.distributions.rates import (
    bit_factor,
    blackboard_bits,
    minimax_l1,
    minimax_l2,
    monotone_l1,
    servers_l2,
)
from thinwire.distributions.spec import Model
from thinwire.tools.report.figures import Curve, lines

Learner = Callable[[I64, int], tuple[F64, int]]
"""Learns p from samples, with this seed of what is public; and the bits that all servers sent."""

DOMAINS = (64, 256, 1024, 4096)
ONE_SAMPLE = ((64, 256, 1024, 4096), (2**16, 2**18), (2, 3, 4, 5), 6)
"""Domains, players, bits of a message, and repetitions."""
MANY = 16
"""Servers with many samples."""
PIECES = 8
SERVERS = 8
MODELS: tuple[Model, ...] = ("simultaneous", "one-way", "blackboard")
NORMS = {"l2": "Squared l2 error", "l1": "l1 error"}


def distributions(domain: int, seed: int = 0) -> dict[str, F64]:
    """One of each kind. Zipf is shuffled, so that it is not monotone."""
    rng = np.random.default_rng(seed)
    ranks = np.arange(1, domain + 1)
    cuts = np.sort(rng.choice(np.arange(1, domain), PIECES - 1, replace=False))
    lengths = np.diff(np.concatenate(([0], cuts, [domain])))
    found = {
        "uniform": np.ones(domain),
        "zipf": rng.permutation(1.0 / ranks),
        "dirichlet": rng.dirichlet(np.ones(domain)),
        "histogram": np.repeat(rng.dirichlet(np.ones(PIECES)) / lengths, lengths),
        "monotone": 1.0 / ranks**0.7,
    }
    return {name: p / p.sum() for name, p in found.items()}


def protocols(domain: int) -> dict[str, Callable[[int], Coded]]:
    """Protocols for unstructured distributions, by name; made from a seed of what is public."""
    found: dict[str, Callable[[int], Coded]] = {"raw": lambda _: Raw(domain)}
    for bits in (1, 2, 4):
        found[f"grouping, {bits} bit"] = lambda _, b=bits: Grouping(domain, b)
        found[f"public hash, {bits} bit"] = lambda seed, b=bits: PublicHash(domain, b, seed)
        found[f"recursive Hadamard, {bits} bit"] = lambda _, b=bits: RecursiveHadamard(domain, b)
    found["simulate and infer, 4 bit"] = lambda _: SimulateAndInfer(domain, 4)
    found["Hadamard response, epsilon 2"] = lambda _: HadamardResponse(domain, 2.0)
    found["one-bit Hadamard, epsilon 2"] = lambda _: OneBitHadamard(domain, 2.0)
    return found


class Errors(NamedTuple):
    """Squared l2 and l1 before projection, and the signed errors."""

    l2: float
    l1: float
    signed: F64


def errors(protocol: Coded, p: F64, n: int, seed: int) -> Errors:
    off = protocol.estimate(protocol.encode(draw(p, n, seed), np.random.default_rng(seed))) - p
    return Errors(float((off**2).sum()), float(np.abs(off).sum()), off)


# -- learners ----------------------------------------------------------------------------------------------


def by_counts(domain: int) -> Learner:
    return lambda x, _: _table(ExactCounts(domain), x)


def by_partition(protocol: Monotone) -> Learner:
    return lambda x, _: (protocol.estimate(protocol.encode(x)), len(x) * protocol.bits_per_message)


def by_cells(protocol: QuantileCells) -> Learner:
    def by_rounds(x: I64, _: int) -> tuple[F64, int]:
        first = protocol.pilot.encode(x[: protocol.pilot_samples])
        found, bits = _table(protocol.refine(protocol.pilot.estimate(first)), x)
        return found, bits + first.count * protocol.pilot.bits_per_message

    return by_rounds


def by_sketch(domain: int, cols: int) -> Learner:
    return lambda x, seed: _table(HaarSketch(domain, PIECES, cols, seed=seed), x)


def _table(protocol: Any, x: I64) -> tuple[F64, int]:
    return protocol.estimate(protocol.encode(x)), SERVERS * protocol.bits_per_message


# -- what is measured --------------------------------------------------------------------------------------


class Exactness(msgspec.Struct):
    """Measured over exact expected squared error, and the bias in its own standard errors."""

    p: str
    protocol: str
    ratio: float
    bias: float


def exactness(domain: int, n: int, repeats: int) -> list[Exactness]:
    rows: list[Exactness] = []
    for kind, p in distributions(domain).items():
        for name, make in protocols(domain).items():
            total, signed = 0.0, np.zeros(domain)
            for repeat in range(repeats):
                found = errors(make(repeat), p, n, 7919 * repeat + len(rows))
                total += found.l2 / repeats
                signed += found.signed / repeats
            expected = make(0).expected_l2(p, n)
            bias = float((signed**2).sum()) * repeats / expected
            rows.append(Exactness(kind, name, total / expected, bias))
    return rows


class Point(msgspec.Struct):
    """Mean errors of a protocol with n samples, and the bits that it took."""

    protocol: str
    n: int
    bits: int
    l2: float
    l1: float


def sweep(domain: int, sizes: tuple[int, ...], repeats: int) -> list[Point]:
    """Errors against total bits: on Zipf, and structured protocols on what has the structure."""
    kinds = distributions(domain)
    rows: list[Point] = []
    for n in sizes:
        for name, make in protocols(domain).items():
            runs = [errors(make(repeat), kinds["zipf"], n, 31 * repeat + n) for repeat in range(repeats)]
            l2, l1 = float(np.mean([run.l2 for run in runs])), float(np.mean([run.l1 for run in runs]))
            rows.append(Point(name, n, n * make(0).bits_per_message, l2, l1))
        counts = by_counts(domain)
        rows.append(_point(f"exact counts, {SERVERS} servers", n, repeats, kinds["zipf"], counts))
    for number, n in enumerate(sizes):  # tables grow with n
        cells = QuantileCells(domain, PIECES, min(domain // 2, 4 * PIECES * 2**number))
        sketch = by_sketch(domain, min(64 * 4**number, 4 * domain))
        partition = by_partition(Monotone(domain, 0.1))
        rows += [
            _point("Birge partition, on a monotone p", n, repeats, kinds["monotone"], partition),
            _point("quantile cells, on a histogram", n, repeats, kinds["histogram"], by_cells(cells)),
            _point("Haar sketch, on a histogram", n, repeats, kinds["histogram"], sketch),
        ]
    return rows


def _point(
    name: str, n: int, repeats: int, p: F64, learner: Learner, seeds: tuple[int, int] | None = None
) -> Point:
    step, first = seeds or (31, n)
    point = Point(name, n, 0, 0.0, 0.0)
    for repeat in range(repeats):
        found, point.bits = learner(draw(p, n, step * repeat + first), repeat)
        point.l2 += float(((found - p) ** 2).sum()) / repeats
        point.l1 += float(np.abs(found - p).sum()) / repeats
    return point


class MoreBits(msgspec.Struct):
    """By what one bit more divides the squared l2 error of grouping."""

    bits: int
    measured: float
    stated: float


def one_more_bit(domain: int, n: int, repeats: int) -> list[MoreBits]:
    p = distributions(domain)["uniform"]
    found = [
        float(np.mean([errors(Grouping(domain, bits), p, n, 101 * r + bits).l2 for r in range(repeats)]))
        for bits in range(1, 6)
    ]
    return [MoreBits(bits, found[bits - 1] / found[bits], bit_factor(bits)) for bits in range(1, 5)]


class TrueSamples(msgspec.Struct):
    """Accepted samples of simulate-and-infer against p: chi-squared, in deviations from its mean."""

    accepted: int
    share: float
    z: float
    freedom: int


def true_samples(domain: int, n: int) -> TrueSamples:
    p = distributions(domain)["dirichlet"]
    protocol = SimulateAndInfer(domain, 4)
    accepted = protocol.samples(protocol.encode(draw(p, n, 5), np.random.default_rng(6)))
    expected = p * len(accepted)
    # Rare symbols are judged together, as the test wants five of a kind.
    rare = expected < 5
    counts = np.bincount(accepted, minlength=domain)
    seen = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    chi, freedom = float(((seen - wanted) ** 2 / wanted).sum()), len(wanted) - 1
    z = (chi - freedom) / math.sqrt(2 * freedom)
    return TrueSamples(len(accepted), len(accepted) / (n // protocol.smallest), z, freedom)


class Structured(msgspec.Struct):
    """The errors of raw samples and of a structured protocol with the same number of bits.

    factor: by how much the protocol is better; promised: by how much at least, according to its bound.
    """

    task: str
    domain: int
    protocol: str
    bits: int
    raw: float
    structured: float
    factor: float
    promised: float


def structured(domain: int, samples: int, repeats: int) -> list[Structured]:
    kinds = distributions(domain)
    falling, histogram = kinds["monotone"], kinds["histogram"]
    n = SERVERS * samples
    partition = Monotone(domain, 0.1)
    cells = QuantileCells(domain, PIECES, 16 * PIECES)
    cols = min(2048, 3 * domain // 16)  # less than exact counts would take
    of_partition = math.sqrt(partition.cells / samples) + float(
        np.abs(partition.partition.flattened(falling) - falling).sum()
    )
    of_cells = math.sqrt(cells.cells / n) + 2 * (PIECES - 1) / cells.cells
    of_sketch = HaarSketch(domain, PIECES, cols).bound_l2(histogram, n)
    raw = Raw(domain)
    rows: list[Structured] = []
    for task, name, p, count, learner, seeds, bound in (
        ("monotone, l1", "Monotone", falling, samples, by_partition(partition), (13, 2), of_partition),
        ("histogram, l1", "QuantileCells", histogram, n, by_cells(cells), (19, 3), of_cells),
        ("histogram, l2²", "HaarSketch", histogram, n, by_sketch(domain, cols), (23, 4), of_sketch),
    ):
        point = _point(name, count, repeats, p, learner, seeds)
        affordable = point.bits // raw.bits_per_message
        theirs = [errors(raw, p, affordable, 17 * r + 1) for r in range(repeats)]
        if task.endswith("l1"):
            own, other = point.l1, float(np.mean([run.l1 for run in theirs]))
            promised = raw.expected_l1(p, affordable) / bound
        else:
            own, other = point.l2, float(np.mean([run.l2 for run in theirs]))
            promised = raw.expected_l2(p, affordable) / bound
        rows.append(Structured(task, domain, name, point.bits, other, own, other / own, promised))
    return rows


class ManySamples(msgspec.Struct):
    """What `learn` does with many samples and few bits for each, and raw samples in as many bits.

    Errors are l2 squared and l1; `expected` is the error that `learn` states; `used` are bits per sample.
    """

    p: str
    bits: float
    model: str
    protocol: str
    used: float
    l2: float
    expected: float
    rate: float
    l2_factor: float
    l1_factor: float


def many_samples(
    domain: int,
    samples: int,
    repeats: int,
    budgets: Sequence[float] = (0.25, 0.5, 1.0),
    models: Sequence[Model] = ("blackboard",),
) -> list[ManySamples]:
    raw, rows = Raw(domain), list[ManySamples]()
    for kind in ("uniform", "zipf", "dirichlet"):
        p = distributions(domain)[kind]
        for bits, model in itertools.product(budgets, models):
            few = int(samples * bits / raw.bits_per_message)
            found: list[tuple[float, ...]] = []
            name = ""
            for repeat in range(repeats):
                shards = [draw(p, samples, 1000 * repeat + server) for server in range(SERVERS)]
                answer = learn(shards, domain, bits=bits, norm="l2", seed=repeat, model=model)
                name = type(answer.protocol).__name__
                other = raw.estimate(raw.encode(np.concatenate([shard[:few] for shard in shards])))
                off, theirs = answer.p - p, other - p
                squares = float((off**2).sum()), float((theirs**2).sum())
                sums = float(np.abs(off).sum()), float(np.abs(theirs).sum())
                used = answer.bits / (SERVERS * samples)
                found.append((used, *squares, *sums, answer.error**2, answer.bound**2))
            used, own, its, own_l1, its_l1, expected, rate = np.mean(found, 0).tolist()
            factors = its / own, its_l1 / own_l1
            rows.append(ManySamples(kind, bits, model, name, used, own, expected, rate, *factors))
    return rows


def slope(rows: Sequence[Point], name: str, norm: str) -> float:
    """The exponent of n in the error of this protocol."""
    return exponent((row.n, getattr(row, norm)) for row in rows if row.protocol == name)


# -- the reproduction --------------------------------------------------------------------------------------


def _sweep(context: Context, outcome: Outcome) -> None:
    quick = context.quick
    sizes = (2**13, 2**15) if quick else (2**14, 2**16, 2**18, 2**20)
    curves = context.each(
        {
            domain: partial(sweep, domain, sizes, 2 if quick else 8)
            for domain in (DOMAINS[:2] if quick else DOMAINS)
        },
        "errors and bits, domain",
    )
    _rates(outcome, curves)
    for domain, rows in curves.items():
        for norm, title in NORMS.items():
            outcome.figures[f"{title} against total bits, domain {domain}"] = _plot(domain, rows, norm)
        outcome.table(
            f"Errors, on Zipf unless stated otherwise, domain {domain}, n = {sizes[-1]:,}",
            {"protocol": "", "total bits": ",", "squared l2": ".2e", "l1": ".4f"},
            [(row.protocol, row.bits, row.l2, row.l1) for row in rows if row.n == sizes[-1]],
        )


def _one_sample(context: Context, outcome: Outcome) -> None:
    grid = ((64, 256), (2**12, 2**14), (2, 4), 2) if context.quick else ONE_SAMPLE
    found = context.each({name: partial(one_sample, name, *grid) for name in PROTOCOLS}, "powers of")
    rows = {
        (name, norm): powers(own, norm, bits_doubled=True) for name, own in found.items() for norm in NORMS
    }
    outcome.table(
        "one sample per player: the powers of domain k, players n and messages 2^b in the error",
        {"protocol": "", "norm": ""} | dict.fromkeys(("k", "n", "2^b"), "+.3f"),
        [(*key, *own) for key, own in rows.items()],
    )
    for norm, stated, room in (("l2", (1.0, -1.0, -1.0), 0.15), ("l1", (1.0, -0.5, -0.5), 0.1)):
        off = max(
            abs(own - theirs)
            for (_, its), each in rows.items()
            if its == norm
            for own, theirs in zip(each, stated, strict=True)
        )
        outcome.claim(
            f"one sample per player: the powers of the {NORMS[norm].lower()}",
            "k / (n 2^b)" if norm == "l2" else "k / sqrt(n 2^b)",
            "; ".join(
                f"{name} k^{k:.2f} n^{n:.2f} (2^b)^{b:.2f}"
                for (name, its), (k, n, b) in rows.items()
                if its == norm
            ),
            off <= room,
        )


def _servers(context: Context, outcome: Outcome) -> None:
    grid = tuple(
        (domain, samples, bits)
        for domain in ((512, 1024) if context.quick else (512, 1024, 2048))
        for samples in (2**13, 2**15)
        for bits in (256, 512, 1024, 2048)
        if domain <= 4 * bits <= 4 * domain
    )
    found = context.each(
        {model: partial(rates_of_servers, model, MANY, grid, 1 if context.quick else 4) for model in MODELS},
        "many samples,",
    )
    rows = {model: powers(own, "l2", bits_doubled=False) for model, own in found.items()}
    over = {
        (row.domain, row.n // MANY, row.bits): row.l2 / servers_l2(row.domain, MANY, row.n / MANY, row.bits)
        for row in found["simultaneous"]
    }
    outcome.table(
        f"{MANY} servers with N samples and l bits: squared l2 error over k / (m N l), by l / k",
        ("k", "N", *(f"l = k / {part}" for part in (4, 2, 1))),
        [
            (
                f"{domain:,}",
                f"{samples:,}",
                *(
                    f"{over[key]:.2f}" if (key := (domain, samples, domain // p)) in over else "-"
                    for p in (4, 2, 1)
                ),
            )
            for domain, samples in dict.fromkeys(key[:2] for key in over)
        ],
    )
    k, n, own = rows["simultaneous"]
    outcome.claim(
        f"{MANY} servers, many samples, l <= k bits each: the powers of the squared l2 error of `learn`",
        "k / (m N l) (Yuan, Guo, Huang), up to logarithms",
        f"k^{k:.2f} N^{n:.2f} l^{own:.2f}",
        max(abs(k - 1), abs(n + 1), abs(own + 1)) <= 0.3,
        f"{min(over.values()):.1f} to {max(over.values()):.1f} times the rate. `learn` rounds a whole table "
        "of counts more coarsely; with fewer bits than symbols, servers that report shares of the symbols "
        "would come closer",
    )
    gains = {
        model: max(
            first.l2 / other.l2 for first, other in zip(found["simultaneous"], found[model], strict=True)
        )
        for model in ("one-way", "blackboard")
    }
    outcome.claim(
        "reading before writing does not change the rate",
        "interaction does not help in the worst case (theorem)",
        "; ".join(f"{model}: at most {gain:.2f} times smaller" for model, gain in gains.items()),
        max(gains.values()) <= 4,
    )
    repeats = 1 if context.quick else 4
    _models(outcome, context.once(many_samples, 4096, 2**16, repeats, (0.05, 0.1), MODELS))
    _many_samples_table(
        outcome,
        "Many samples and few bits: `learn` and raw samples",
        context.once(many_samples, 4096, 2**16, repeats),
    )


def _lower_bound(context: Context, outcome: Outcome) -> None:
    domains = DOMAINS[:2] if context.quick else (*DOMAINS, 16_384)
    raw = context.once(raw_constants, domains, 16, 2 if context.quick else 8)
    grid = ((64, 256), (2**12, 2**14), (2, 4), 2) if context.quick else ONE_SAMPLE
    others = context.each({name: partial(one_sample, name, *grid) for name in PROTOCOLS}, "powers of")
    constant = min(row.constant for row in raw)
    spread = max(row.constant for row in raw) / constant - 1
    least = min(
        row.n * row.bits / (constant * blackboard_bits(row.domain, row.l1))
        for own in others.values()
        for row in own
    )
    outcome.table(
        "bits of raw samples for an l1 error of epsilon, over (k / epsilon^2) log2 k",
        {"k": ",", "samples": ",", "constant": ".3f"},
        [msgspec.structs.astuple(row) for row in raw],
    )
    outcome.claim(
        "with one sample per server, raw samples are optimal, even among blackboard protocols",
        "Omega((k / epsilon^2) log k) bits (lower bound of the paper)",
        f"the constant of raw samples is {constant:.2f}, and changes by {100 * spread:.0f} % from k = "
        f"{domains[0]} to {domains[-1]:,}; other protocols need at least {least:.1f} times the bits of raw "
        "samples for their error",
        spread <= 0.2 and least >= 0.5,
    )


def _structures(context: Context, outcome: Outcome) -> None:
    quick = context.quick
    samples = 2**15 if quick else 2**17
    found = context.each(
        {
            domain: partial(structured, domain, samples, 2 if quick else 8)
            for domain in ((4096,) if quick else (4096, 16_384, 65_536))
        },
        "structured protocols, domain",
    )
    rows = [row for own in found.values() for row in own]
    _structured(outcome, rows)
    falling = context.once(
        monotone, (2**10, 2**14) if quick else (2**10, 2**14, 2**18), (2**12, 2**15, 2**18), 2 if quick else 6
    )
    by_n = max(
        exponent((row.n, row.l1) for row in falling if row.domain == domain)
        for domain in {row.domain for row in falling}
    )
    over = max(row.l1 / monotone_l1(row.domain, row.n) for row in falling)
    outcome.table(
        "a monotone distribution, cells by the number of samples: l1 error",
        {"domain": ",", "samples": ",", "total bits": ",", "l1": ".4f"},
        [msgspec.structs.astuple(row) for row in falling],
    )
    outcome.claim(
        "monotone: the l1 error falls with the samples and hardly grows with the domain",
        "(log2 k / n)^(1/3)",
        f"n^{by_n:.2f} or faster; at most {over:.2f} times the rate, from k = {falling[0].domain:,} to "
        f"{falling[-1].domain:,}",
        by_n <= -0.28 and over <= 1,
    )
    if not quick:
        _growth(outcome, rows)


def _growth(outcome: Outcome, rows: Sequence[Structured]) -> None:
    """How bits times error grow with the domain."""
    tasks = [task for task in dict.fromkeys(row.task for row in rows) if task.startswith("histogram")]
    found: dict[str, tuple[float, float]] = {}
    for task in tasks:
        power = 2.0 if task.endswith("l1") else 1.0
        own = [row for row in rows if row.task == task]
        found[task] = (
            exponent((row.domain, row.bits * row.structured**power) for row in own),
            exponent((row.domain, row.bits * row.raw**power) for row in own),
        )
    outcome.claim(
        "histograms: bits and error do not depend on the domain, but through logarithms",
        "Õ(m k) bits for k pieces (theorems of the paper; remembered)",
        "; ".join(
            f"{task}: bits times error grow as domain^{own:.2f}, with raw samples as domain^{raw:.2f}"
            for task, (own, raw) in found.items()
        ),
        all(own <= 0.25 for own, _ in found.values()),
    )


def _own_formulas(context: Context, outcome: Outcome) -> None:
    """A claim of a follow-up; and checks of thinwire's own formulas, which no paper claims."""
    settings = (64, 4096, 10) if context.quick else (256, 2**14, 60)
    _exactness(outcome, context.once(exactness, *settings), settings)
    more = context.once(one_more_bit, 256, 2**14, 4 if context.quick else 40)
    factors = ", ".join(f"{row.measured:.2f} ({row.stated:.2f})" for row in more)
    outcome.notes.append(
        f"One more bit divides the squared l2 error of grouping by {factors} from b = 1 to 4; expected in "
        "brackets."
    )
    _true_samples(outcome, context.once(true_samples, 64, 2**14 if context.quick else 2**20))


def _exactness(outcome: Outcome, rows: Sequence[Exactness], settings: tuple[int, ...]) -> None:
    domain, n, repeats = settings
    biases = [row.bias for row in rows if not row.protocol.startswith("simulate")]
    outcome.notes.append(
        f"Formulas of thinwire, domain {domain}, n = {n:,}, {repeats} runs each: the measured squared l2 "
        f"error is {min(r.ratio for r in rows):.3f} to {max(r.ratio for r in rows):.3f} of the exact one. "
        f"Before projection the mean error is {min(biases):.2f} to {max(biases):.2f} of what chance makes of "
        "no bias."
    )
    kinds = list(dict.fromkeys(row.p for row in rows))
    ratios = {(row.protocol, row.p): row.ratio for row in rows}
    outcome.table(
        f"Measured squared l2 error over thinwire's exact formula, domain {domain}",
        {"protocol": ""} | dict.fromkeys(kinds, ".3f"),
        [
            (name, *(ratios[name, kind] for kind in kinds))
            for name in dict.fromkeys(row.protocol for row in rows)
        ],
    )


def _rates(outcome: Outcome, curves: dict[int, list[Point]]) -> None:
    found: list[float] = []
    for domain, rows in curves.items():
        for row in rows:
            name, _, rest = row.protocol.partition(", ")
            if name in {"grouping", "public hash", "recursive Hadamard"}:
                found.append(row.l2 / minimax_l2(domain, int(rest.split()[0]), row.n))
    outcome.claim(
        "grouping, hashing and recursive Hadamard reach the minimax rate",
        "squared l2 within a constant of max(k / (n 2^b), 1 / n)",
        f"{min(found):.2f} to {max(found):.2f} times the rate",
        max(found) < 4.0,
        f"domains {', '.join(map(str, curves))}; b = 1, 2, 4; Zipf",
    )


def _true_samples(outcome: Outcome, true: TrueSamples) -> None:
    outcome.claim(
        "simulate-and-infer gives true samples",
        "accepted samples are distributed as p; at least a quarter of the rounds is accepted",
        f"chi-squared {true.z:+.1f} deviations from its mean; {100 * true.share:.0f} % accepted",
        abs(true.z) < 4 and true.share >= 0.25,
    )


def _structured(outcome: Outcome, rows: Sequence[Structured]) -> None:
    outcome.table(
        "Structured protocols and raw samples at equal bits",
        {"task": "", "domain": ",", "protocol": "", "total bits": ","}
        | dict.fromkeys(("raw", "structured", "factor", "promised"), ".3g"),
        [msgspec.structs.astuple(row) for row in rows],
    )
    outcome.notes.append(
        "Promised: the exact expected error of raw samples over an upper bound of the structured protocol's. "
        "monotone: sqrt(cells / n) and what flattening costs this p; histogram in l1: sqrt(cells / n) + "
        "2 (pieces - 1) / cells; histogram in l2: `HaarSketch.bound_l2`."
    )


def _many_samples_table(outcome: Outcome, title: str, rows: Sequence[ManySamples]) -> None:
    outcome.table(
        title,
        {"p": "", "bits per sample": "g", "model": "", "protocol": "", "bits used": ".3f"}
        | dict.fromkeys(("squared l2", "expected", "minimax rate", "l2 factor", "l1 factor"), ".3g"),
        [msgspec.structs.astuple(row) for row in rows],
    )


def _models(outcome: Outcome, rows: Sequence[ManySamples]) -> None:
    found = {(row.p, row.bits, row.model): row.l2 for row in rows if row.p != "uniform"}
    gains = {
        model: [found[p, bits, "simultaneous"] / l2 for (p, bits, its), l2 in found.items() if its == model]
        for model in ("one-way", "blackboard")
    }
    each = "; ".join(f"{model}: {min(g):.2g} to {max(g):.2g} times smaller" for model, g in gains.items())
    outcome.notes.append(
        "On Zipf and Dirichlet, at 0.05 and 0.1 bit per sample, servers that read before they write have a "
        f"squared l2 error that is, against simultaneous messages, {each}."
    )
    _many_samples_table(outcome, "Simultaneous, one-way and blackboard protocols", rows)


def _plot(domain: int, rows: Sequence[Point], norm: str) -> Any:
    curves: dict[str, Curve] = {}
    for name in dict.fromkeys(row.protocol for row in rows):
        own = [row for row in rows if row.protocol == name]
        curves[name] = [row.bits for row in own], [getattr(row, norm) for row in own]
    measured = len(curves)
    rate = minimax_l2 if norm == "l2" else minimax_l1
    sizes = sorted({row.n for row in rows})
    for bits in (1, 4):
        stated = [rate(domain, bits, n) for n in sizes]
        curves[f"minimax rate, {bits} bit (constant 1)"] = [n * bits for n in sizes], stated
    figure = lines(curves, "total bits", NORMS[norm], log_x=True, log_y=True, markers=True)
    for theory in figure["data"][measured:]:
        theory["mode"] = "lines"
    return figure


REPRODUCTION = Reproduction(
    "Learning discrete distributions with few bits",
    "Diakonikolas, Grigorescu, Li, Natarajan, Onak, Schmidt, Communication-Efficient Distributed "
    "Learning of Discrete Probability Distributions, NIPS 2017; and protocols for one sample per player",
    (
        Section("errors against bits, one sample per player, against the minimax rate", _sweep),
        Section("the powers of domain, players and bits, one sample per player", _one_sample),
        Section("the powers with many samples per server, and one-way and blackboard protocols", _servers),
        Section("the lower bound of blackboard protocols with one sample per server", _lower_bound),
        Section("monotone distributions and histograms: bits that do not depend on the domain", _structures),
        Section("true samples by simulate-and-infer", _own_formulas),
    ),
    __doc__ or "",
    takeaway="With one sample per player, raw samples are optimal and protocols of b bits follow the "
    "theorems; with many samples per server, give each server at least a bit per symbol.",
)
