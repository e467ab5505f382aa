"""Distributions learned with few bits: errors against bits, beside exact formulas and minimax rates."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from reproductions.base import Outcome, Reproduction, exponent
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
from thinwire.distributions.rates import bit_factor, minimax_l1, minimax_l2
from thinwire.distributions.spec import Model
from thinwire.tools.report.figures import Curve, lines

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
Learner = Callable[[I64, int], tuple[F64, int]]
"""Learns p from samples, with this seed of what is public; and the bits that all servers sent."""

DOMAINS = (64, 256, 1024, 4096)
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


def draw(p: F64, n: int, seed: int) -> NDArray[np.int64]:
    rng = np.random.default_rng(seed)
    cumulative = np.cumsum(p)
    return np.minimum(np.searchsorted(cumulative, rng.random(n), side="right"), len(p) - 1)


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


def run(context: Context) -> Outcome:
    quick = context.quick
    repeats = 2 if quick else 12
    outcome = Outcome(judged=not quick)
    settings = (64, 4096, 10) if quick else (256, 2**14, 200)
    _exactness(outcome, context.once(exactness, *settings), settings)
    sizes = (2**13, 2**15) if quick else (2**14, 2**16, 2**18, 2**20)
    curves = context.each(
        {domain: partial(sweep, domain, sizes, repeats) for domain in (DOMAINS[:2] if quick else DOMAINS)},
        "errors and bits, domain",
    )
    _slopes(outcome, curves[256])
    _rates(outcome, curves)
    _single_claims(
        outcome,
        context.once(one_more_bit, 256, 2**14, 4 if quick else 40),
        context.once(true_samples, 64, 2**14 if quick else 2**20),
    )
    samples = 2**15 if quick else 2**17
    found = context.each(
        {
            domain: partial(structured, domain, samples, repeats)
            for domain in ((4096,) if quick else (4096, 16_384, 65_536))
        },
        "structured protocols, domain",
    )
    _structured(outcome, [row for rows in found.values() for row in rows])
    few = 1 if quick else 4
    _many_samples(outcome, context.once(many_samples, 4096, 2**16, few))
    _models(outcome, context.once(many_samples, 4096, 2**16, few, (0.05, 0.1), MODELS))
    for domain, rows in curves.items():
        for norm, title in NORMS.items():
            outcome.figures[f"{title} against total bits, domain {domain}"] = _plot(domain, rows, norm)
        outcome.table(
            f"Errors, on Zipf unless stated otherwise, domain {domain}, n = {sizes[-1]:,}",
            {"protocol": "", "total bits": ",", "squared l2": ".2e", "l1": ".4f"},
            [(row.protocol, row.bits, row.l2, row.l1) for row in rows if row.n == sizes[-1]],
        )
    return outcome


def _exactness(outcome: Outcome, rows: Sequence[Exactness], settings: tuple[int, ...]) -> None:
    domain, n, repeats = settings
    worst = max(rows, key=lambda row: abs(row.ratio - 1.0))
    outcome.claim(
        "squared l2 error is what the formulas say",
        "ratio 1 (derived; a numerical check gave 0.90 to 1.04)",
        f"{min(r.ratio for r in rows):.3f} to {max(r.ratio for r in rows):.3f}",
        abs(worst.ratio - 1.0) < 0.1,
        f"domain {domain}, n = {n:,}, {repeats} runs each; farthest: {worst.protocol} on {worst.p}",
    )
    # If there is none, the squared mean of the errors is as large as chance makes it: about 1.
    biases = [row.bias for row in rows if not row.protocol.startswith("simulate")]
    outcome.claim(
        "estimates are unbiased before projection",
        "1 (the mean error is as large as chance makes it)",
        f"{min(biases):.2f} to {max(biases):.2f}",
        max(biases) < 3.0,
    )
    kinds = list(dict.fromkeys(row.p for row in rows))
    ratios = {(row.protocol, row.p): row.ratio for row in rows}
    outcome.table(
        f"Measured squared l2 error over the exact formula, domain {domain}",
        {"protocol": ""} | dict.fromkeys(kinds, ".3f"),
        [
            (name, *(ratios[name, kind] for kind in kinds))
            for name in dict.fromkeys(row.protocol for row in rows)
        ],
    )


def _slopes(outcome: Outcome, rows: Sequence[Point]) -> None:
    names = dict.fromkeys(row.protocol for row in rows if " on a " not in row.protocol)
    for norm, wanted, room in (("l2", -1.0, 0.1), ("l1", -0.5, 0.05)):
        slopes = [slope(rows, name, norm) for name in names]
        outcome.claim(
            f"{NORMS[norm].lower()} falls with the samples",
            f"as n^{wanted:g}",
            f"n^{min(slopes):.3f} to n^{max(slopes):.3f}",
            all(abs(each - wanted) < room for each in slopes),
            "all unstructured protocols, domain 256, Zipf",
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


def _single_claims(outcome: Outcome, more: Sequence[MoreBits], true: TrueSamples) -> None:
    outcome.claim(
        "one more bit divides grouping's squared l2 error",
        "by (2^(b+1) - 1) / (2^b - 1)",
        ", ".join(f"{row.measured:.2f} ({row.stated:.2f})" for row in more),
        max(abs(row.measured / row.stated - 1.0) for row in more) < 0.1,
        "b = 1 to 4, stated in brackets",
    )
    outcome.claim(
        "simulate-and-infer gives true samples",
        "accepted samples are distributed as p; at least a quarter of the rounds is accepted",
        f"chi-squared {true.z:+.1f} deviations from its mean; {100 * true.share:.0f} % accepted",
        abs(true.z) < 4 and true.share >= 0.25,
    )


def _structured(outcome: Outcome, rows: Sequence[Structured]) -> None:
    shortest = min(rows, key=lambda row: row.factor / row.promised)
    outcome.claim(
        "structured protocols beat raw samples at equal bits by what their bounds promise",
        f"{min(r.promised for r in rows):.2g} to {max(r.promised for r in rows):.2g} times",
        f"{min(r.factor for r in rows):.2g} to {max(r.factor for r in rows):.2g} times",
        all(row.factor >= row.promised for row in rows),
        f"closest to its bound: {shortest.task}, domain {shortest.domain}",
    )
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


def _many_samples(outcome: Outcome, rows: Sequence[ManySamples]) -> None:
    outcome.claim(
        "servers with many samples and few bits: tables of counts beat raw samples at equal bits",
        "squared l2 error at least 8 times smaller (our target; the paper has no experiments)",
        f"{min(r.l2_factor for r in rows):.3g} to {max(r.l2_factor for r in rows):.3g} times "
        f"(l1: {min(r.l1_factor for r in rows):.2g} to {max(r.l1_factor for r in rows):.2g} times)",
        all(row.l2_factor >= 8 and row.used <= row.bits for row in rows),
        f"domain 4,096, {SERVERS} servers of 65,536 samples; 0.25 to 1 bit per sample",
    )
    _many_samples_table(outcome, "Many samples and few bits: `learn` and raw samples", rows)


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
    outcome.claim(
        "with few bits, servers that read before they write learn better",
        "squared l2 error smaller than that of simultaneous messages, unless p is uniform (our expectation)",
        "; ".join(f"{model}: {min(g):.2g} to {max(g):.2g} times smaller" for model, g in gains.items()),
        all(min(g) > 1.0 for g in gains.values()),
        "0.05 and 0.1 bit per sample; Zipf and Dirichlet",
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
    title="Learning discrete distributions with few bits",
    paper="Diakonikolas, Grigorescu, Li, Natarajan, Onak, Schmidt, Communication-Efficient Distributed "
    "Learning of Discrete Probability Distributions, NIPS 2017; and protocols for one sample per player",
    run=run,
)
