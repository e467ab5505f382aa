"""What every protocol is: servers encode samples into messages, a referee estimates p from them.

A player is a server with one sample; a server with several samples plays several players. Players are
numbered from 0 over all servers, because what a player reports may depend on its number.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from thinwire.core import checks
from thinwire.distributions import kernels
from thinwire.distributions.partition import F64, I64, Partition
from thinwire.distributions.simplex import onto_simplex
from thinwire.errors import ConfigError, PayloadError

U8 = NDArray[np.uint8]
Norm = Literal["l1", "l2"]

LARGEST_DOMAIN = 2**30
# Codes are handled in pieces that stay in the cache; a multiple of 8, so that each begins at a byte.
CHUNK = 1 << 15
# E|z| of a Gaussian: what an l1 error is made of.
MEAN_MAGNITUDE = math.sqrt(2.0 / math.pi)


@dataclass(frozen=True)
class Messages:
    """What some players send: `count` codes packed into bytes; the players are numbered from `first`."""

    payload: U8
    count: int
    first: int = 0


@dataclass(frozen=True)
class Sums:
    """What a server sends where messages are added up: a table, and how many samples are in it."""

    table: NDArray[Any]
    count: int


Message = TypeVar("Message", Messages, Sums)


def listed(messages: Message | Sequence[Message]) -> list[Message]:
    return [messages] if isinstance(messages, Messages | Sums) else list(messages)


def total_count(parts: Sequence[Messages | Sums]) -> int:
    return sum(part.count for part in parts)


def check_samples(samples: Any, domain: int) -> NDArray[np.integer[Any]]:
    """A flat array of whole numbers in 0..domain - 1, not empty; a ConfigError otherwise."""
    if isinstance(samples, torch.Tensor):
        samples = samples.detach().cpu().numpy()
    x = np.asarray(samples).reshape(-1)
    if not x.size:
        raise ConfigError("a shard without samples: leave it out, or give it some")
    if x.dtype.kind not in "iu":
        raise ConfigError(f"samples must be whole numbers, not {x.dtype}: convert them to bin numbers first")
    least, most = int(x.min()), int(x.max())
    if least < 0 or most >= domain:
        wrong = least if least < 0 else most
        raise ConfigError(f"sample {wrong} is outside the domain 0..{domain - 1}")
    return x


def probabilities(p: F64, domain: int) -> F64:
    p = np.asarray(p, np.float64)
    if p.shape != (domain,):
        raise ConfigError(f"p must have one entry for each of the {domain} symbols, not shape {p.shape}")
    return p


def bits_for(values: int) -> int:
    """How many bits tell `values` things apart; at least one."""
    return max(1, (values - 1).bit_length())


@dataclass(frozen=True)
class Protocol(ABC, Generic[Message]):
    """How a distribution over 0..domain - 1 is learned from messages.

    `estimate` is before any projection onto the simplex, so that it can be unbiased.
    """

    domain: int
    private_coins: ClassVar[bool] = False

    def __post_init__(self) -> None:
        checks.whole(type(self).__name__, "domain", self.domain, 2, LARGEST_DOMAIN)

    @property
    @abstractmethod
    def bits_per_message(self) -> int:
        """What one message costs."""

    @abstractmethod
    def encode(self, samples: Any, rng: np.random.Generator | None = None, first: int = 0) -> Message:
        """The messages of players first, first + 1, ...; `rng` tosses their private coins, if they have any.

        Without `rng` private coins come from the operating system.
        """

    def estimate(self, messages: Message | Sequence[Message]) -> F64:
        """p, before projection. Bytes that no encoder makes are a PayloadError."""
        parts = listed(messages)
        self.check_count(total_count(parts))
        return self._estimate(parts)

    @abstractmethod
    def _estimate(self, parts: list[Message]) -> F64: ...

    def variance(self, p: F64, n: int) -> F64:
        """The expected squared error of each entry of the estimate from n messages."""
        return self._variance(probabilities(p, self.domain), n)

    @abstractmethod
    def _variance(self, p: F64, n: int) -> F64: ...

    @abstractmethod
    def predicted_l2(self, n: int) -> float:
        """The expected squared l2 error for the uniform distribution; costs the same for every domain."""

    @property
    def smallest(self) -> int:
        """With fewer messages there is no estimate."""
        return 1

    def expected_l2(self, p: F64, n: int) -> float:
        """The expected squared l2 error of the estimate from n messages."""
        return float(self.variance(p, n).sum())

    def expected_l1(self, p: F64, n: int) -> float:
        """The expected l1 error if the entries' errors are Gaussian, as they are for many messages."""
        return MEAN_MAGNITUDE * float(np.sqrt(self.variance(p, n)).sum())

    def cell_masses(self, messages: Sequence[Message], n: int) -> tuple[Partition, F64, F64]:
        """The cells that the protocol sees, their estimated masses, and the variances of those."""
        values = self.estimate(messages)
        return Partition.of_symbols(self.domain), values, self.variance(onto_simplex(values), n)

    def check_count(self, n: int) -> None:
        """Raise `ConfigError` if n messages are too few for an estimate."""
        if n < self.smallest:
            raise ConfigError(
                f"{self} needs {self.smallest:,} messages or more, not {n:,}: the domain of {self.domain:,} "
                "is too large for this budget. Use more bits per message, or more samples"
            )


AnyProtocol = Protocol[Any]


@dataclass(frozen=True)
class Coded(Protocol[Messages]):
    """A protocol whose messages are codes of a fixed number of bits."""

    def encode(self, samples: Any, rng: np.random.Generator | None = None, first: int = 0) -> Messages:
        x = check_samples(samples, self.domain)
        key = np.uint64(0)
        if self.private_coins:
            rng = np.random.default_rng() if rng is None else rng
            key = np.uint64(rng.integers(2**63))
        bits, n = self.bits_per_message, len(x)
        payload = np.empty((bits * n + 7) // 8, np.uint8)
        buffer = np.empty(min(CHUNK, n), np.int64)
        for low in range(0, n, CHUNK):
            piece = x[low : low + CHUNK].astype(np.int64, copy=False)
            codes = buffer[: len(piece)]
            self.codes(piece, first + low, key, codes)
            kernels.pack(codes, bits, payload[low * bits // 8 : ((low + len(piece)) * bits + 7) // 8])
        return Messages(payload, n, first)

    def _estimate(self, parts: list[Messages]) -> F64:
        return self.finish(self.tally(parts), parts)

    def tally(self, parts: Sequence[Messages]) -> I64:
        """What all messages add up to."""
        parts = sorted(parts, key=lambda part: part.first)
        bits = self.bits_per_message
        for part in parts:
            needed = (bits * part.count + 7) // 8
            if part.count < 0 or part.first < 0 or part.payload.shape != (needed,):
                size = part.payload.size
                raise PayloadError(f"{part.count} messages of {bits} bits do not fit {size} bytes")
        tally = self.empty(parts)
        buffer = np.empty(CHUNK, np.int64)
        for part in parts:
            for low in range(0, part.count, CHUNK):
                high = min(low + CHUNK, part.count)
                codes = buffer[: high - low]
                largest = kernels.unpack(part.payload[low * bits // 8 : (high * bits + 7) // 8], bits, codes)
                if largest >= self.code_limit:
                    raise PayloadError(f"code {largest} where {self} has only {self.code_limit}")
                self.add(codes, part.first + low, tally)
        return tally

    @property
    def code_limit(self) -> int:
        """Codes are below this number."""
        return 1 << self.bits_per_message

    @property
    @abstractmethod
    def tally_size(self) -> int:
        """The number of counters that the decoder needs."""

    def empty(self, parts: Sequence[Messages]) -> I64:
        """A tally of nothing, to which these messages can be added."""
        return np.zeros(self.tally_size, np.int64)

    @abstractmethod
    def codes(self, x: I64, first: int, key: np.uint64, out: I64) -> None:
        """Codes of the samples of players first, first + 1, ..."""

    @abstractmethod
    def add(self, codes: I64, first: int, tally: I64) -> None:
        """Add the codes of players first, first + 1, ... to the tally."""

    @abstractmethod
    def finish(self, tally: I64, parts: Sequence[Messages]) -> F64:
        """The estimate from the tally."""


@dataclass(frozen=True)
class FewBits(Coded):
    """Codes of as many bits as one likes, up to `most_bits`."""

    bits: int

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.whole(type(self).__name__, "bits", self.bits, 1, self.most_bits)

    @property
    @abstractmethod
    def most_bits(self) -> int:
        """More bits would be of no use."""

    @property
    def bits_per_message(self) -> int:
        return self.bits


def visits(first: int, count: int, groups: int) -> I64:
    """How many of the players first .. first + count are in each group i mod groups."""
    sizes = np.full(groups, count // groups, np.int64)
    extra = count % groups
    sizes[(first + np.arange(extra)) % groups] += 1
    return sizes


def group_sizes(parts: Sequence[Messages], groups: int) -> I64:
    """How many players of each group i mod groups have sent something; every group must have one."""
    sizes = np.zeros(groups, np.int64)
    for part in parts:
        sizes += visits(part.first, part.count, groups)
    if not sizes.all():
        missing = int(np.flatnonzero(sizes == 0)[0])
        raise ConfigError(f"no message from group {missing} of {groups}: number players without gaps from 0")
    return sizes


@dataclass(frozen=True)
class Additive(Protocol[Sums]):
    """A protocol whose messages are tables that add up: one all-reduce, whatever the number of samples."""

    @abstractmethod
    def empty(self) -> NDArray[Any]:
        """A table of zeros."""

    def _estimate(self, parts: list[Sums]) -> F64:
        return self.estimate_sum(self.added(parts))

    @abstractmethod
    def estimate_sum(self, sums: Sums) -> F64:
        """The estimate from the sum of all tables."""

    def added(self, parts: Sequence[Sums]) -> Sums:
        """The sum of all tables, checked."""
        table = self.empty()
        for part in parts:
            if part.table.shape != table.shape or part.table.dtype != table.dtype:
                got = f"{part.table.dtype} {part.table.shape}"
                raise PayloadError(f"a table of {got} where {self} has {table.dtype} {table.shape}")
            table += part.table
        return Sums(table, total_count(parts))
