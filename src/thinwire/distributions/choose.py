"""Which protocol promises the smallest error for the bits that may be spent."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from thinwire.distributions.cells import PILOT_PER_CELL, QuantileCells
from thinwire.distributions.counts import ExactCounts
from thinwire.distributions.grouping import Grouping
from thinwire.distributions.haar import HaarSketch, haar_terms
from thinwire.distributions.hadamard_response import HadamardResponse, OneBitHadamard
from thinwire.distributions.hashing import MOST_BITS, WORK_LIMIT, PublicHash
from thinwire.distributions.monotone import Monotone
from thinwire.distributions.protocol import I64, MEAN_MAGNITUDE, AnyProtocol, Coded, bits_for
from thinwire.distributions.question import Question
from thinwire.distributions.raw import Raw
from thinwire.distributions.recursive_hadamard import RecursiveHadamard
from thinwire.errors import ConfigError
from thinwire.net import costs

RATIOS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 1.0)
COUNT_LIMIT = 2**31
CELLS_PER_PIECE = 64
SKETCH_ROWS = 5
# No two distributions are farther apart.
WORST = {"l1": 2.0, "l2": math.sqrt(2.0)}


@dataclass(frozen=True)
class Plan:
    """A protocol, how many samples of each shard it uses, the error to expect, and the bits."""

    protocol: AnyProtocol | QuantileCells
    quota: I64
    predicted: float
    bits: int


def plans(question: Question, sizes: I64) -> list[Plan]:
    """All that the budget allows, best first."""
    found = sorted(_candidates(question, sizes), key=lambda plan: (plan.predicted, plan.bits))
    worst = WORST[question.norm]
    if not found or found[0].predicted >= worst:
        best = f"the best promise is {found[0].predicted:.2g}" if found else "none gets an estimate at all"
        raise ConfigError(
            f"a domain of {question.domain:,} is too large for {question.bits:g} bits for each of "
            f"{int(sizes.sum()):,} samples: no protocol promises an {question.norm} error below {worst:.3g}, "
            f"which any guess has ({best}). Use more bits or samples, norm='l2' if large entries are "
            "enough, or a structure"
        )
    return found


def _candidates(question: Question, sizes: I64) -> Iterator[Plan]:
    for protocol in _coded(question):
        plan = _coded_plan(question, sizes, protocol)
        if plan is not None:
            yield plan
    if question.epsilon is None:
        yield from _additive(question, sizes)


def _coded(question: Question) -> Iterator[Coded]:
    domain, epsilon = question.domain, question.epsilon
    if epsilon is not None:
        yield HadamardResponse(domain, epsilon)
        yield OneBitHadamard(domain, epsilon)
        return
    yield Raw(domain)
    for bits in range(1, bits_for(domain)):
        yield Grouping(domain, bits)
        yield RecursiveHadamard(domain, bits)
        if bits <= MOST_BITS:
            yield PublicHash(domain, bits, question.seed)
    if question.structure == "monotone":
        for ratio in RATIOS:
            full = Monotone(domain, ratio, increasing=question.increasing)
            yield full
            for bits in range(1, full.bits_per_message):
                yield Monotone(domain, ratio, bits, question.increasing)


def _coded_plan(question: Question, sizes: I64, protocol: Coded) -> Plan | None:
    each = protocol.bits_per_message
    quota = np.minimum(sizes, np.floor(sizes * (question.bits / each) + 1e-9).astype(np.int64))
    n = int(quota.sum())
    if n < protocol.smallest or (isinstance(protocol, PublicHash) and protocol.work(n) > WORK_LIMIT):
        return None
    return Plan(protocol, quota, predicted(question, protocol, n), n * each)


def _additive(question: Question, sizes: I64) -> Iterator[Plan]:
    room, servers, n = table_bits(question, sizes), len(sizes), int(sizes.sum())
    domain, pieces = question.domain, question.pieces
    counts = ExactCounts(domain, 32 if n < COUNT_LIMIT else 64)
    if counts.bits_per_message <= room:
        yield Plan(counts, sizes, predicted(question, counts, n), servers * counts.bits_per_message)
    if pieces is None:
        return
    if question.norm == "l2":
        cols = min(int(room // (32 * SKETCH_ROWS)), 2**22)
        if 64 <= cols < domain:
            sketch = HaarSketch(domain, pieces, cols, SKETCH_ROWS, question.seed)
            yield Plan(sketch, sizes, math.sqrt(sketch.predicted_l2(n)), servers * sketch.bits_per_message)
    else:
        pilot_bits = PILOT_PER_CELL * bits_for(domain) / servers
        cells = min(int(room // (32 + pilot_bits)), CELLS_PER_PIECE * pieces, n // (2 * PILOT_PER_CELL))
        if 2 * pieces <= cells < domain and n < COUNT_LIMIT:
            protocol = QuantileCells(domain, pieces, cells)
            bits = servers * 32 * cells + protocol.pilot_samples * bits_for(domain)
            yield Plan(protocol, sizes, protocol.predicted_l1(n), bits)


def table_bits(question: Question, sizes: I64) -> float:
    """How large a table may be that all servers add up.

    At a referee: as large as what the server with the fewest samples may send. On a ring: as large as an
    all-reduce can be that moves no more bytes through a rank than a gather of everybody's messages would.
    """
    servers = len(sizes)
    if question.network == "referee" or servers == 1:
        return question.bits * int(sizes.min())
    gather = costs.all_gather(servers, math.ceil(question.bits * int(sizes.max()) / 8)).busiest
    per_byte = costs.all_reduce(servers, 1 << 20).busiest / (1 << 20)
    return 8.0 * gather / per_byte


def predicted(question: Question, protocol: AnyProtocol, n: int) -> float:
    """The error after the fit that the structure asks for; a guess, made before any sample is seen."""
    squared = protocol.predicted_l2(n)
    plain = (
        math.sqrt(squared) if question.norm == "l2" else MEAN_MAGNITUDE * math.sqrt(question.domain * squared)
    )
    if isinstance(protocol, Monotone):
        return protocol.predicted_l1(n) if question.norm == "l1" else math.sqrt(squared)
    alike = 1.0 / squared  # raw samples that would be worth as much
    if question.structure == "monotone" and question.norm == "l1":
        return min(plain, *(_isotonic(question.domain, ratio, alike) for ratio in RATIOS))
    if question.structure == "histogram" and question.pieces is not None:
        if question.norm == "l1":
            return min(plain, MEAN_MAGNITUDE * math.sqrt(2.0 * question.pieces / alike))
        return min(plain, math.sqrt(haar_terms(question.domain, question.pieces) / question.domain / alike))
    return plain


def _isotonic(domain: int, ratio: float, n: float) -> float:
    """What `Monotone` with this ratio would promise: an isotonic fit finds such cells by itself."""
    cells = math.log1p(ratio * domain) / ratio + 1.0
    return MEAN_MAGNITUDE * math.sqrt(cells / n) + ratio / 4.0
