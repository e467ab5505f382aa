"""Servers with many samples and few bits: tables of counts, rounded as finely as the budget allows and coded.

Three protocols write the same kind of table and differ in what a server has read before it writes.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from thinwire.core import checks
from thinwire.distributions import coder
from thinwire.distributions.counts import counted
from thinwire.distributions.protocol import F64, I64, U8, Messages, Protocol
from thinwire.errors import ConfigError, PayloadError

# Steps are 1 (exact), 2^(1/8), 2^(2/8), ...; written out, so that all machines have the same ones.
_ROOTS = (
    1.0,
    1.0905077326652577,
    1.189207115002721,
    1.2968395546510096,
    1.4142135623730951,
    1.5422108254079407,
    1.681792830507429,
    1.8340080864093424,
)
LAST_STEP = 255
# The step is looked for with so many symbols; of a larger domain, with every second, third, ...
SEARCHED = 1 << 14
# Bits kept free for the coins, times the root of the number of symbols.
MARGIN = 1.5
LARGEST_COUNT = 1 << 31
# Entries that all tables may have together, for `learn` to use them: some seconds on one core.
WORK_LIMIT = 2**25
# An error is predicted by playing the protocol with so many symbols and servers.
_MODEL_DOMAIN, _MODEL_SERVERS = 4096, 8


def step_of(index: int) -> float:
    return float(1 << (index // 8)) * _ROOTS[index % 8]


@dataclass(frozen=True, eq=False)
class Rounding:
    """Counts rounded to multiples of a step, with public coins u, uniform in [0, 1): floor(count / step + u).

    Unbiased in both ways to read it. Subtracting u leaves an error that is uniform over a step, so its
    variance is step^2 / 12 whatever the count. Without that, a count is rounded up as often as its fraction
    says: zeros stay zeros, and a single sample survives with probability 1 / step. This is better where
    most counts are small against the step. `density` is the mean count. A step of 1 is exact.
    """

    step: float
    density: float
    dither: F64

    @property
    def exact(self) -> bool:
        return self.step == 1.0

    @property
    def subtracts(self) -> bool:
        return not self.exact and self.step**2 < 12.0 * self.density * (self.step - 1.0)

    @property
    def noise(self) -> float:
        """The variance that is added to an entry, roughly where nothing is subtracted."""
        if self.subtracts:
            return self.step**2 / 12.0
        return 0.0 if self.exact else min(self.density * (self.step - 1.0), self.step**2 / 6.0)

    def noise_of(self, counts: I64) -> F64:
        """The variance that is added to each of these counts."""
        if self.exact or self.subtracts:
            return np.full(len(counts), self.noise)
        fraction = counts / self.step % 1.0
        return self.step**2 * fraction * (1.0 - fraction)

    def places(self, counts: F64 | I64) -> F64:
        """Where counts lie between the levels, which are whole numbers."""
        return counts / self.step + (0.0 if self.exact else self.dither)

    def values(self, levels: I64) -> F64:
        return self.step * (levels + (0.5 - self.dither) if self.subtracts else levels.astype(np.float64))


@dataclass(frozen=True, eq=False)
class Expected:
    """What everybody expects of counts before they are written: means, and the variances around them.

    Levels are written as differences from the level of the mean, by an adaptive code whose probabilities
    depend on how large the variance is against the step and on how near the mean is to the next level.
    """

    mean: F64
    spread: F64

    def of(self, symbols: slice | I64) -> Expected:
        return Expected(self.mean[symbols], self.spread[symbols])

    def _levels(self, rounding: Rounding) -> tuple[I64, I64]:
        """The level of each mean, and its context."""
        places = rounding.places(self.mean)
        levels = np.floor(places)
        _, exponent = np.frexp(self.spread / (rounding.step * rounding.step))
        sure = np.clip((exponent + 7) // 2, 0, coder.CONTEXTS // 4 - 1)
        return levels.astype(np.int64), (4 * sure + np.floor(4.0 * (places - levels))).astype(np.int64)

    def encode(self, counts: I64, rounding: Rounding, limit: int) -> U8 | None:
        """None if more than `limit` bytes are needed."""
        levels, contexts = self._levels(rounding)
        off = np.floor(rounding.places(counts)).astype(np.int64) - levels
        return coder.encode(np.where(off >= 0, 2 * off, -2 * off - 1), contexts, limit)

    def decode(self, packed: U8, rounding: Rounding, count: int, whole: bool) -> F64:
        """The counts of `count` samples, or some of them if the table is not whole, as read."""
        levels, contexts = self._levels(rounding)
        codes = coder.decode(packed, contexts)
        found = levels + np.where(codes & 1, -(codes >> 1) - 1, codes >> 1)
        if found.min(initial=0) < 0 or found.max(initial=0) > count / rounding.step + 1.0:
            raise PayloadError(f"a count beyond 0..{count:,}, the number of samples")
        values = rounding.values(found)
        excess, room = math.fsum(values) - count, 0.0 if rounding.exact else rounding.step * len(values)
        if excess > room or (whole and excess < -room):
            raise PayloadError(f"the counts do not add up to {count:,}, the number of samples")
        return values


class Board:
    """All that has been written so far, added up: tables weighted by their accuracy."""

    def __init__(self, domain: int) -> None:
        self.domain = domain
        self.total, self.weight = np.zeros(domain), np.zeros(domain)
        self.sampling, self.rounding = np.zeros(domain), np.zeros(domain)
        self.used: dict[int, list[int]] = {}
        """The bytes of each message that a server has written."""

    def add(self, symbols: I64, values: F64, count: int, noise: float, true_noise: F64 | float) -> None:
        """A table. Its weight is one over the variance that its entries would have if p were even."""
        weight = 1.0 / (1.0 / (count * self.domain) + noise / count**2)
        self.total[symbols] += values * (weight / count)
        self.weight[symbols] += weight
        self.sampling[symbols] += weight * weight / count
        self.rounding[symbols] += (weight / count) ** 2 * true_noise

    def estimate(self) -> F64:
        """p, before projection."""
        if not self.weight.all():
            missing = int(np.flatnonzero(self.weight == 0.0)[0])
            raise PayloadError(f"nobody has reported symbol {missing}")
        return self.total / self.weight

    def variance(self, p: F64) -> F64:
        """Of each entry of the estimate."""
        return (p * (1.0 - p) * self.sampling + self.rounding) / self.weight**2

    def expected(self, count: int) -> Expected:
        """What a server with so many samples will count: by the estimate, drawn towards even if noisy.

        Entries are only added, multiplied and divided, and sums are exact, so that the result is the
        same on every machine: what one encodes with it, another decodes.
        """
        even = 1.0 / self.domain
        if not self.used:
            return Expected(np.full(self.domain, count * even), np.full(self.domain, count * even))
        p = self.estimate()
        sampling = self.sampling / self.weight**2
        variance = np.maximum(p, 0.0) * sampling + self.rounding / self.weight**2
        energy = math.fsum((p - even) ** 2)
        trust = max(0.0, 1.0 - math.fsum(variance) / energy) if energy else 0.0
        p = np.maximum(even + trust * (p - even), 0.0)
        return Expected(count * p, count * (p + sampling) + count**2 * trust * variance)


@dataclass(frozen=True)
class ServerCounts(Protocol[Messages]):
    """What the three protocols share.

    A server rounds its counts (see `Rounding`), with the finest step that keeps its messages within the
    budget, and writes the levels as differences from what everybody expects (see `Expected`), with an
    adaptive range coder that takes about as many bits as their entropy. A message is one byte for the step,
    and the code. With N_j samples at server j, and weights w_j that sum to 1,

        E |p^ - p|_2^2 = sum of w_j^2 ((1 - |p|_2^2) / N_j + domain step_j^2 / (12 N_j^2))

    where dither is subtracted. `expected_l2` plays the protocol with counts drawn from p to find the steps.
    In `Messages`, `first` is the number of the server and `count` that of its samples.
    """

    bits: float
    servers: int
    seed: int = 0
    pilot: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        checks.positive(name, "bits", self.bits)
        checks.whole(name, "servers", self.servers, 1)

    @property
    def bits_per_message(self) -> int:
        """At most so many for each sample."""
        return math.ceil(self.bits)

    @property
    def smallest(self) -> int:
        return self.servers

    @property
    def rounds(self) -> int:
        """How many messages must be waited for, one after the other."""
        return 1

    @abstractmethod
    def turns(self) -> Iterator[Sequence[int]]:
        """Which servers write at the same time, turn after turn."""

    def symbols(self, server: int, written: int) -> I64:
        """What a server reports in its next message, if it has written so many."""
        return np.arange(self.domain)

    def fits(self, fewest: int) -> bool:
        """Whether a server with so few samples can write a table, and the margin for its coins is enough."""
        return fewest * self.bits * (self.pilot or 1.0) >= 160 + self.domain / 1024

    def longest(self, count: int) -> int:
        """The bytes of the longest message of a server with so many samples."""
        return int(self.bits * count) // 8

    def _budget(self, count: int, used: Sequence[int]) -> int:
        """Bytes that a server may write next."""
        share = self.pilot if self.pilot and not used else 1.0
        return int(self.bits * count * share) // 8 - sum(used)

    def _rounding(self, index: int, server: int, count: int, written: int) -> Rounding:
        key = [self.seed & (2**64 - 1), server, written]
        dither = np.random.Generator(np.random.PCG64(key)).random(self.domain)
        return Rounding(step_of(index), count / self.domain, dither[self.symbols(server, written)])

    def encode(
        self, samples: Any, rng: np.random.Generator | None = None, first: int = 0, board: Board | None = None
    ) -> Messages:
        """The next message of server number `first`, which has read the board."""
        return self._encode(counted(samples, self.domain), first, board or Board(self.domain))[0]

    def _encode(self, counts: I64, server: int, board: Board) -> tuple[Messages, Rounding]:
        used, count = board.used.get(server, []), int(counts.sum())
        if count >= LARGEST_COUNT:
            raise ConfigError(f"{count:,} samples at one server: split them into shards of fewer than 2^31")
        symbols = self.symbols(server, len(used))
        counts, expected = counts[symbols], board.expected(count).of(symbols)
        limit = self._budget(count, used) - 1
        finest = self._rounding(0, server, count, len(used))
        first = self._search(counts, expected, finest.density, limit) if self.fits(count) else LAST_STEP + 1
        for index in range(first, LAST_STEP + 1):
            rounding = replace(finest, step=step_of(index))
            packed = expected.encode(counts, rounding, limit)
            if packed is not None:
                payload = np.concatenate((np.array([index], np.uint8), packed))
                return Messages(payload, count, server), rounding
        raise ConfigError(
            f"{self.bits:g} bits for each of {count:,} samples are too few for a table of {self.domain:,} "
            "counts: use more bits, or Grouping"
        )

    @staticmethod
    def _search(counts: I64, expected: Expected, density: float, limit: int) -> int:
        """The finest step that most likely fits; of a large domain, for some of the symbols.

        Tried with other coins than those that are used then: a step that depended on how they fall would
        bias the estimate. So there is a margin for what the coins change.
        """
        stride = max(1, -(-len(counts) // SEARCHED))
        counts, expected = counts[::stride], expected.of(slice(None, None, stride))
        dither = np.random.Generator(np.random.PCG64(len(counts))).random(len(counts))
        margin = math.ceil(MARGIN * math.sqrt(len(counts)) / 8)
        low, high = 0, LAST_STEP
        while low < high:
            middle = (low + high) // 2
            room = limit // stride - (margin if middle else 0)
            if expected.encode(counts, Rounding(step_of(middle), density, dither), room) is None:
                low = middle + 1
            else:
                high = middle
        return low

    def read(
        self, board: Board, turn: Iterable[Messages], true_noise: Mapping[int, F64] | None = None
    ) -> None:
        """Add to the board what was written in one turn. Bytes that no server writes are a PayloadError."""
        tables: list[tuple[Messages, I64, Rounding, F64]] = []
        for part in sorted(turn, key=lambda part: part.first):
            used, size = board.used.get(part.first, []), part.payload.size
            if not 0 <= part.first < self.servers or not 0 < part.count < LARGEST_COUNT:
                raise PayloadError(f"a table of {part.count} samples by server {part.first}")
            if part.payload.ndim != 1 or not 1 <= size <= self._budget(part.count, used):
                raise PayloadError(f"a table in {size} bytes, where {self.bits:g} bits a sample are allowed")
            symbols = self.symbols(part.first, len(used))
            rounding = self._rounding(int(part.payload[0]), part.first, part.count, len(used))
            expected = board.expected(part.count).of(symbols)
            whole = len(symbols) == self.domain
            values = expected.decode(part.payload[1:], rounding, part.count, whole)
            tables.append((part, symbols, rounding, values))
        for part, symbols, rounding, values in tables:
            noise = rounding.noise if true_noise is None else true_noise[part.first]
            board.add(symbols, values, part.count, rounding.noise, noise)
            board.used.setdefault(part.first, []).append(part.payload.size)

    def _estimate(self, parts: list[Messages]) -> F64:
        """Messages of a server are in the order in which it wrote them."""
        return self.board(parts).estimate()

    def board(self, parts: Sequence[Messages]) -> Board:
        """All tables, read in the order in which they were written."""
        board, waiting = Board(self.domain), list(parts)
        for part in parts:
            if not 0 <= part.first < self.servers:
                raise PayloadError(f"a table of server {part.first}, where there are {self.servers}")
        for turn in self.turns():
            now: dict[int, Messages] = {}
            later: list[Messages] = []
            for part in waiting:
                if part.first in turn and part.first not in now:
                    now[part.first] = part
                else:
                    later.append(part)
            self.read(board, now.values())
            waiting = later
        if waiting:
            raise PayloadError(f"server {waiting[0].first} writes when it is not its turn")
        return board

    def _variance(self, p: F64, n: int) -> F64:
        times = max(1, min(32, 8192 // self.domain))  # small tables differ more from draw to draw
        return np.mean([self.rehearse(p, n, seed).variance(p) for seed in range(times)], axis=0)

    def rehearse(self, p: F64, n: int, seed: int) -> Board:
        """Play the protocol with counts drawn from p, to see what it writes."""
        rng = np.random.default_rng([self.domain, seed])
        tables = [rng.multinomial(max(1, n // self.servers), p / p.sum()) for _ in range(self.servers)]
        board = Board(self.domain)
        for turn in self.turns():
            messages: list[Messages] = []
            noise: dict[int, F64] = {}
            for server in turn:
                symbols = self.symbols(server, len(board.used.get(server, [])))
                message, rounding = self._encode(tables[server], server, board)
                messages.append(message)
                noise[server] = rounding.noise_of(tables[server][symbols])
            self.read(board, messages, noise)
        return board

    def predicted_l2(self, n: int) -> float:
        """For a distribution drawn at random from all there are."""
        return predicted(self, n)[0]


@lru_cache(maxsize=256)
def predicted(protocol: ServerCounts, n: int) -> tuple[float, int]:
    """The squared l2 error to expect for a distribution drawn at random from all, and the bits in all.

    Played with fewer symbols and servers; the samples and the errors are scaled.
    """
    small, servers = min(protocol.domain, _MODEL_DOMAIN), min(protocol.servers, _MODEL_SERVERS)
    symbols, crowd = protocol.domain / small, protocol.servers / servers
    p = np.random.default_rng(small).dirichlet(np.ones(small))
    model = replace(protocol, domain=small, servers=servers)
    try:
        board = model.rehearse(p, round(n / symbols / crowd), 0)
    except ConfigError:
        return 2.0, 0
    used = 8 * sum(sum(sizes) for sizes in board.used.values())
    return float(board.variance(p).sum()) / symbols / crowd, round(used * symbols * crowd)


@dataclass(frozen=True)
class QuantisedCounts(ServerCounts):
    """Simultaneous: every server writes its rounded counts, and knows nothing of the others.

    Args:
        domain: samples are in 0..domain - 1.
        bits: that a server may write for each of its samples.
        servers: how many there are.
        seed: of the dither: public.

    Reference: Ziv 1985 and Zamir, Feder 1992 for dithered quantisation with an entropy coder.
    Differences from the paper: the coder is adaptive, so that nothing need be known of the counts.
    """

    def turns(self) -> Iterator[Sequence[int]]:
        yield range(self.servers)


@dataclass(frozen=True)
class OneWayCounts(ServerCounts):
    """One-way: servers write one after the other, each only how its counts differ from the estimate so far.

    The better the estimate, the fewer bits a count takes and the finer the step. The first server is no
    better off than with `QuantisedCounts`. There are as many rounds as servers.

    Args:
        domain: samples are in 0..domain - 1.
        bits: that a server may write for each of its samples.
        servers: how many there are.
        seed: of the dither: public.

    Reference: Diakonikolas, Grigorescu, Li, Natarajan, Onak, Schmidt 2017 for the model.
    Differences from the paper: it has no such protocol.
    """

    @property
    def rounds(self) -> int:
        return self.servers

    def turns(self) -> Iterator[Sequence[int]]:
        for server in range(self.servers):
            yield [server]


@dataclass(frozen=True)
class BlackboardCounts(ServerCounts):
    """Blackboard: a pilot in which each symbol is reported by an eighth of the servers, then all the rest.

    The pilot shows where the mass is. In the second round all servers write the counts that they have not
    written yet, as differences from that estimate. A count costs about log2(deviation / step) bits, so bits
    go where the estimated variance is, and rare symbols cost next to nothing.

    Args:
        domain: samples are in 0..domain - 1.
        bits: that a server may write for each of its samples, over both rounds.
        servers: how many there are.
        seed: of the dither: public.

    Reference: Diakonikolas, Grigorescu, Li, Natarajan, Onak, Schmidt 2017 for the model.
    Differences from the paper: it has no such protocol.
    """

    pilot: ClassVar[float] = 0.3

    @property
    def rounds(self) -> int:
        return 2

    def turns(self) -> Iterator[Sequence[int]]:
        yield range(self.servers)
        yield range(self.servers)

    def symbols(self, server: int, written: int) -> I64:
        in_pilot = (np.arange(self.domain) - server) % self.servers < -(-self.servers // 8)
        return np.flatnonzero(in_pilot if written == 0 else ~in_pilot)
