"""Which protocol is expected to have the smallest error for the bits that may be spent."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

import numpy as np

from thinwire.distributions.cells import PILOT_PER_CELL, QuantileCells
from thinwire.distributions.counts import ExactCounts
from thinwire.distributions.grouping import Grouping
from thinwire.distributions.haar import HaarSketch, haar_terms
from thinwire.distributions.hadamard_response import HadamardResponse, OneBitHadamard
from thinwire.distributions.hashing import MOST_BITS, WORK_LIMIT, PublicHash
from thinwire.distributions.monotone import Monotone
from thinwire.distributions.protocol import I64, MEAN_MAGNITUDE, Additive, AnyProtocol, Coded, bits_for
from thinwire.distributions.raw import Raw
from thinwire.distributions.recursive_hadamard import RecursiveHadamard
from thinwire.distributions.spec import LearningSpec, Model
from thinwire.distributions.tables import (
    LARGEST_COUNT,
    BlackboardCounts,
    OneWayCounts,
    QuantisedCounts,
    ServerCounts,
)
from thinwire.distributions.tables import (
    WORK_LIMIT as TABLE_LIMIT,
)
from thinwire.distributions.tables import (
    predicted as predicted_table,
)
from thinwire.errors import ConfigError
from thinwire.net import costs

RATIOS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 1.0)
COUNT_LIMIT = 2**31
CELLS_PER_PIECE = 64
SKETCH_ROWS = 5
# No two distributions are farther apart.
WORST = {"l1": 2.0, "l2": math.sqrt(2.0)}
# Each round after the first must lower the error by so much to be worth the wait.
ROUND_PRICE = 0.01
# With a squared error above this over the domain, a fit to a table finds no structure in the noise.
NOISY = 0.5


@dataclass(frozen=True)
class Plan:
    """A protocol, how many samples of each shard it uses, the error to expect, and the bits."""

    protocol: AnyProtocol | QuantileCells
    quota: I64
    predicted: float
    bits: int

    @property
    def rounds(self) -> int:
        if isinstance(self.protocol, ServerCounts):
            return self.protocol.rounds
        return 2 if isinstance(self.protocol, QuantileCells) else 1

    @property
    def price(self) -> float:
        return self.predicted * (1.0 + ROUND_PRICE * (self.rounds - 1))


def plans(spec: LearningSpec, sizes: I64) -> list[Plan]:
    """All that the budget allows, best first."""
    found = list(_candidates(spec, sizes))
    least = min((plan.price for plan in found), default=0.0)
    found.sort(key=lambda plan: _rank(spec, plan, least))
    worst = WORST[spec.norm]
    if not found or found[0].predicted >= worst:
        best = f"the best protocol has {found[0].predicted:.2g}" if found else "no protocol fits the budget"
        raise ConfigError(
            f"a domain of {spec.domain:,} is too large for {spec.bits:g} bits for each of "
            f"{int(sizes.sum()):,} samples: no {spec.norm} error below {worst:.3g}, that of a guess, can be "
            f"expected ({best}). Use more bits or samples, norm='l2' if large entries are enough, or a "
            "structure"
        )
    return found


def _rank(spec: LearningSpec, plan: Plan, least: float) -> tuple[float, bool, int]:
    """By error and rounds; of those that are about the best, on a ring an all-reduce first; then by bits."""
    price = least if plan.price <= least * (1.0 + ROUND_PRICE) else plan.price
    gathers = spec.network == "ring" and not isinstance(plan.protocol, Additive | QuantileCells)
    return price, gathers, plan.bits


def _candidates(spec: LearningSpec, sizes: I64) -> Iterator[Plan]:
    for protocol in _coded(spec):
        plan = _coded_plan(spec, sizes, protocol)
        if plan is not None:
            yield plan
    if spec.epsilon is None:
        yield from _additive(spec, sizes)
        yield from _tables(spec, sizes)


def _coded(spec: LearningSpec) -> Iterator[Coded]:
    domain, epsilon = spec.domain, spec.epsilon
    if epsilon is not None:
        yield HadamardResponse(domain, epsilon)
        yield OneBitHadamard(domain, epsilon)
        return
    yield Raw(domain)
    for bits in range(1, bits_for(domain)):
        yield Grouping(domain, bits)
        yield RecursiveHadamard(domain, bits)
        if bits <= MOST_BITS:
            yield PublicHash(domain, bits, spec.seed)
    if spec.structure == "monotone":
        for ratio in RATIOS:
            full = Monotone(domain, ratio, increasing=spec.increasing)
            yield full
            for bits in range(1, full.bits_per_message):
                yield Monotone(domain, ratio, bits, spec.increasing)


def _coded_plan(spec: LearningSpec, sizes: I64, protocol: Coded) -> Plan | None:
    each = protocol.bits_per_message
    quota = np.minimum(sizes, np.floor(sizes * (spec.bits / each) + 1e-9).astype(np.int64))
    n = int(quota.sum())
    if n < protocol.smallest or (isinstance(protocol, PublicHash) and protocol.work(n) > WORK_LIMIT):
        return None
    return Plan(protocol, quota, predicted(spec, protocol, n), n * each)


def _additive(spec: LearningSpec, sizes: I64) -> Iterator[Plan]:
    room, servers, n = table_bits(spec, sizes), len(sizes), int(sizes.sum())
    domain, pieces = spec.domain, spec.pieces
    counts = ExactCounts(domain, 32 if n < COUNT_LIMIT else 64)
    if counts.bits_per_message <= room:
        yield Plan(counts, sizes, predicted(spec, counts, n), servers * counts.bits_per_message)
    if pieces is None:
        return
    if spec.norm == "l2":
        cols = min(int(room // (32 * SKETCH_ROWS)), 2**22)
        if 64 <= cols < domain:
            sketch = HaarSketch(domain, pieces, cols, SKETCH_ROWS, spec.seed)
            yield Plan(sketch, sizes, math.sqrt(sketch.predicted_l2(n)), servers * sketch.bits_per_message)
    elif spec.model == "blackboard":
        pilot_bits = PILOT_PER_CELL * bits_for(domain) / servers
        cells = min(int(room // (32 + pilot_bits)), CELLS_PER_PIECE * pieces, n // (2 * PILOT_PER_CELL))
        if 2 * pieces <= cells < domain and n < COUNT_LIMIT:
            protocol = QuantileCells(domain, pieces, cells)
            bits = servers * 32 * cells + protocol.pilot_samples * bits_for(domain)
            yield Plan(protocol, sizes, protocol.predicted_l1(n), bits)


def _tables(spec: LearningSpec, sizes: I64) -> Iterator[Plan]:
    servers, n = len(sizes), int(sizes.sum())
    if servers * spec.domain > TABLE_LIMIT or sizes.max() >= LARGEST_COUNT:
        return
    # Each model allows all that those before it allow. A server alone has nobody to read.
    allowed = 1 if servers == 1 else 1 + get_args(Model).index(spec.model)
    for kind in (QuantisedCounts, OneWayCounts, BlackboardCounts)[:allowed]:
        protocol = kind(spec.domain, spec.bits, servers, spec.seed)
        if not protocol.fits(int(sizes.min())):
            continue
        squared, bits = predicted_table(protocol, n)
        if spec.structure == "none" or spec.domain * squared < NOISY:
            yield Plan(protocol, sizes, predicted(spec, protocol, n), bits)


def table_bits(spec: LearningSpec, sizes: I64) -> float:
    """How large a table may be that all servers add up.

    At a referee: as large as what the server with the fewest samples may send. On a ring: as large as an
    all-reduce can be that moves no more bytes through a rank than a gather of all messages would.
    """
    servers = len(sizes)
    if spec.network == "referee" or servers == 1:
        return spec.bits * int(sizes.min())
    gather = costs.all_gather(servers, math.ceil(spec.bits * int(sizes.max()) / 8)).busiest
    per_byte = costs.all_reduce(servers, 1 << 20).busiest / (1 << 20)
    return 8.0 * gather / per_byte


def predicted(spec: LearningSpec, protocol: AnyProtocol, n: int) -> float:
    """The error after the fit that the structure asks for; a guess, made before any sample is seen."""
    l1 = spec.norm == "l1"
    if l1 and isinstance(protocol, Monotone):
        return protocol.predicted_l1(n)
    squared = protocol.predicted_l2(n)
    plain = MEAN_MAGNITUDE * math.sqrt(spec.domain * squared) if l1 else math.sqrt(squared)
    alike = 1.0 / squared  # raw samples that would be worth as much
    if spec.structure == "monotone" and l1:
        return min(plain, *(_isotonic(spec.domain, ratio, alike) for ratio in RATIOS))
    if spec.pieces is not None:
        if l1:
            return min(plain, MEAN_MAGNITUDE * math.sqrt(2.0 * spec.pieces / alike))
        return min(plain, math.sqrt(haar_terms(spec.domain, spec.pieces) / spec.domain / alike))
    return plain


def _isotonic(domain: int, ratio: float, n: float) -> float:
    """What `Monotone` with this ratio would expect: an isotonic fit finds such cells by itself."""
    cells = math.log1p(ratio * domain) / ratio + 1.0
    return MEAN_MAGNITUDE * math.sqrt(cells / n) + ratio / 4.0
