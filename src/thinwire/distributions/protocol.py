"""What every protocol is: servers encode samples into messages, a referee estimates p from them.

A player is a server with one sample; a server with several samples plays several players. Players are
numbered from 0 over all servers, because what a player has to report may depend on its number.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray

from thinwire.distributions import kernels
from thinwire.errors import ConfigError, PayloadError

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]
Norm = Literal["l1", "l2"]

LARGEST_DOMAIN = 2**30
# Codes are worked on in pieces that stay in the cache; a multiple of 8, so that each begins at a byte.
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


def whole(value: object, least: int, most: int) -> bool:
    """Whether this is a whole number (not a bool) in least..most."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def check_domain(domain: int) -> None:
    if not whole(domain, 2, LARGEST_DOMAIN):
        raise ConfigError(f"domain must be a whole number in 2..{LARGEST_DOMAIN}, not {domain!r}")


def check_bits(bits: int, most: int, what: str) -> None:
    if not whole(bits, 1, most):
        raise ConfigError(f"{what} takes 1..{most} bits for a message, not {bits!r}")


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


def bits_for(values: int) -> int:
    """How many bits tell `values` things apart; at least one."""
    return max(1, (values - 1).bit_length())


def probabilities(p: F64, domain: int) -> F64:
    p = np.asarray(p, np.float64)
    if p.shape != (domain,):
        raise ConfigError(f"p must have one entry for each of the {domain} symbols, not shape {p.shape}")
    return p


def visits(first: int, count: int, groups: int) -> I64:
    """How many of the players first .. first + count are in each group i mod groups."""
    sizes = np.full(groups, count // groups, np.int64)
    extra = count % groups
    sizes[(first + np.arange(extra)) % groups] += 1
    return sizes


class Protocol(ABC):
    """How a distribution over 0..domain - 1 is learned from messages.

    `estimate` is before any projection onto the simplex, so that it can be unbiased.
    """

    domain: int
    additive: ClassVar[bool] = False
    model: ClassVar[str] = "simultaneous"
    private_coins: ClassVar[bool] = False

    @property
    @abstractmethod
    def bits_per_message(self) -> int:
        """What one message costs."""

    @abstractmethod
    def variance(self, p: F64, n: int) -> F64:
        """The expected squared error of each entry of the estimate from n messages."""

    @abstractmethod
    def predicted_l2(self, n: int) -> float:
        """The expected squared l2 error for the uniform distribution, without a look at the domain's size."""

    @property
    def smallest(self) -> int:
        """With fewer messages there is no estimate."""
        return 1

    def expected_l2(self, p: F64, n: int) -> float:
        """The expected squared l2 error of the estimate from n messages."""
        return float(self.variance(p, n).sum())

    def expected_l1(self, p: F64, n: int) -> float:
        """The expected l1 error where the entries' errors are Gaussian, as they are for many messages."""
        return MEAN_MAGNITUDE * float(np.sqrt(self.variance(p, n)).sum())

    def check_count(self, n: int) -> None:
        if n < self.smallest:
            raise ConfigError(
                f"{self} needs {self.smallest:,} messages or more, not {n:,}: the domain of {self.domain:,} "
                "is too large for this budget. Use more bits a message, or more samples"
            )


class Coded(Protocol):
    """A protocol whose messages are codes of a fixed number of bits."""

    def encode(self, samples: Any, rng: np.random.Generator | None = None, first: int = 0) -> Messages:
        """The messages of players first, first + 1, ...; `rng` tosses their private coins, if they have any.

        Without `rng` private coins come from the operating system.
        """
        x = check_samples(samples, self.domain)
        key = np.uint64(0)
        if self.private_coins:
            rng = np.random.default_rng() if rng is None else rng
            key = np.uint64(rng.integers(2**63))
        bits, n = self.bits_per_message, len(x)
        payload = np.empty((bits * n + 7) // 8, np.uint8)
        codes = np.empty(min(CHUNK, n), np.int64)
        for low in range(0, n, CHUNK):
            piece = x[low : low + CHUNK].astype(np.int64, copy=False)
            mine = codes[: len(piece)]
            self.codes(piece, first + low, key, mine)
            kernels.pack(mine, bits, payload[low * bits // 8 : ((low + len(piece)) * bits + 7) // 8])
        return Messages(payload, n, first)

    def estimate(self, messages: Messages | Sequence[Messages]) -> F64:
        """p, before projection. Bytes that no encoder makes are a PayloadError."""
        parts = [messages] if isinstance(messages, Messages) else list(messages)
        parts.sort(key=lambda part: part.first)
        self.check_count(sum(part.count for part in parts))
        tally = self.begin(parts)
        codes = np.empty(CHUNK, np.int64)
        for part in parts:
            self._read(part, codes, tally)
        return self.finish(tally, parts)

    def _read(self, part: Messages, codes: I64, tally: Any) -> None:
        bits = self.bits_per_message
        needed = (bits * part.count + 7) // 8
        if part.count < 0 or part.first < 0 or part.payload.shape != (needed,):
            raise PayloadError(f"{part.count} messages of {bits} bits do not fit {part.payload.size} bytes")
        for low in range(0, part.count, CHUNK):
            high = min(low + CHUNK, part.count)
            mine = codes[: high - low]
            largest = kernels.unpack(part.payload[low * bits // 8 : (high * bits + 7) // 8], bits, mine)
            if largest >= self.code_limit:
                raise PayloadError(f"code {largest} where {self} has only {self.code_limit}")
            self.tally(mine, part.first + low, tally)

    @property
    def code_limit(self) -> int:
        return 1 << self.bits_per_message

    @abstractmethod
    def codes(self, x: I64, first: int, key: np.uint64, out: I64) -> None:
        """Codes of the samples of players first, first + 1, ..."""

    @abstractmethod
    def begin(self, parts: Sequence[Messages]) -> Any:
        """What `tally` adds codes to."""

    @abstractmethod
    def tally(self, codes: I64, first: int, into: Any) -> None: ...

    @abstractmethod
    def finish(self, tally: Any, parts: Sequence[Messages]) -> F64: ...


def group_sizes(parts: Sequence[Messages], groups: int) -> I64:
    """How many players of each group i mod groups have sent something; every group must have one."""
    sizes = np.zeros(groups, np.int64)
    for part in parts:
        sizes += visits(part.first, part.count, groups)
    if not sizes.all():
        missing = int(np.flatnonzero(sizes == 0)[0])
        raise ConfigError(f"no message from group {missing} of {groups}: number players without gaps from 0")
    return sizes


class Additive(Protocol):
    """A protocol whose messages are tables that add up: one all-reduce, whatever the number of samples."""

    additive: ClassVar[bool] = True

    @abstractmethod
    def encode(self, samples: Any, rng: np.random.Generator | None = None, first: int = 0) -> Sums:
        """One table for all samples of a server."""

    @abstractmethod
    def estimate(self, messages: Sums | Sequence[Sums]) -> F64: ...

    def added(self, messages: Sums | Sequence[Sums]) -> Sums:
        parts = [messages] if isinstance(messages, Sums) else list(messages)
        empty = self.empty()
        for part in parts:
            if part.table.shape != empty.shape or part.table.dtype != empty.dtype:
                what = f"{part.table.dtype} {part.table.shape}"
                raise PayloadError(f"a table of {what} where {self} has {empty.dtype} {empty.shape}")
            empty += part.table
        total = sum(part.count for part in parts)
        self.check_count(total)
        return Sums(empty, total)

    @abstractmethod
    def empty(self) -> NDArray[Any]:
        """A table of zeros."""

    @property
    def bits_per_message(self) -> int:
        table = self.empty()
        return 8 * table.nbytes


AnyProtocol = Coded | Additive


def encode(
    protocol: AnyProtocol, samples: Any, rng: np.random.Generator | None, first: int
) -> Messages | Sums:
    return protocol.encode(samples, rng, first)


def estimate(protocol: AnyProtocol, messages: Sequence[Messages | Sums]) -> F64:
    if isinstance(protocol, Additive):
        return protocol.estimate(cast("Sequence[Sums]", messages))
    return protocol.estimate(cast("Sequence[Messages]", messages))
