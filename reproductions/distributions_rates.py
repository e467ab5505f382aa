"""Errors over grids of domains, players and bits, and the powers that they follow."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import msgspec
import numpy as np

from reproductions.distributions_draw import draw
from thinwire.distributions import Grouping, Monotone, PublicHash, Raw, RecursiveHadamard, learn
from thinwire.distributions.protocol import Coded
from thinwire.distributions.spec import Model

PROTOCOLS = ("grouping", "public hash", "recursive Hadamard")


class Rate(msgspec.Struct):
    """The mean errors at one point of a grid. `bits` are those of one message, or of one server."""

    protocol: str
    domain: int
    n: int
    bits: int
    l2: float
    l1: float


def powers(rows: Sequence[Rate], norm: str, *, bits_doubled: bool) -> tuple[float, float, float]:
    """The exponents of domain, n and 2^bits (or bits) in the error, by least squares."""
    x = [
        [1.0, math.log2(row.domain), math.log2(row.n), row.bits if bits_doubled else math.log2(row.bits)]
        for row in rows
    ]
    y = [math.log2(getattr(row, norm)) for row in rows]
    found = np.linalg.lstsq(np.array(x), np.array(y), rcond=None)[0]
    return float(found[1]), float(found[2]), float(found[3])


def _protocol(name: str, domain: int, bits: int, seed: int) -> Coded:
    if name == "grouping":
        return Grouping(domain, bits)
    return PublicHash(domain, bits, seed) if name == "public hash" else RecursiveHadamard(domain, bits)


def one_sample(
    name: str, domains: tuple[int, ...], sizes: tuple[int, ...], bits: tuple[int, ...], repeats: int
) -> list[Rate]:
    """A player has one sample of the uniform distribution, the hardest one, and sends so many bits."""
    rows: list[Rate] = []
    for domain, n, b in itertools.product(domains, sizes, bits):
        p = np.full(domain, 1.0 / domain)
        l2, l1 = 0.0, 0.0
        for repeat in range(repeats):
            protocol = _protocol(name, domain, b, repeat)
            seed = 7919 * repeat + len(rows)
            off = protocol.estimate(protocol.encode(draw(p, n, seed), np.random.default_rng(seed))) - p
            l2 += float((off**2).sum()) / repeats
            l1 += float(np.abs(off).sum()) / repeats
        rows.append(Rate(name, domain, n, b, l2, l1))
    return rows


def many_samples(
    model: Model, servers: int, grid: tuple[tuple[int, int, int], ...], repeats: int
) -> list[Rate]:
    """Servers with many samples of the uniform distribution; n is the number of all samples.

    The grid has domains, samples of a server and bits of a server.
    """
    rows: list[Rate] = []
    for domain, samples, bits in grid:
        p = np.full(domain, 1.0 / domain)
        l2, l1 = 0.0, 0.0
        for repeat in range(repeats):
            shards = [draw(p, samples, 1000 * repeat + server) for server in range(servers)]
            found = learn(shards, domain, bits=bits / samples, norm="l2", seed=repeat, model=model)
            off = found.p - p
            l2 += float((off**2).sum()) / repeats
            l1 += float(np.abs(off).sum()) / repeats
        rows.append(Rate(model, domain, servers * samples, bits, l2, l1))
    return rows


class Monotony(msgspec.Struct):
    """Of a monotone distribution, with cells as wide as so many samples deserve."""

    domain: int
    n: int
    bits: int
    l1: float


def monotone(domains: tuple[int, ...], sizes: tuple[int, ...], repeats: int) -> list[Monotony]:
    rows: list[Monotony] = []
    for domain, n in itertools.product(domains, sizes):
        ranks = np.arange(1, domain + 1)
        p = (1.0 / ranks**0.7) / (1.0 / ranks**0.7).sum()
        protocol = Monotone(domain, min(0.5, (math.log2(domain) / n) ** (1 / 3)))
        total = 0.0
        for repeat in range(repeats):
            found = protocol.estimate(protocol.encode(draw(p, n, 31 * repeat + n)))
            total += float(np.abs(found - p).sum()) / repeats
        rows.append(Monotony(domain, n, n * protocol.bits_per_message, total))
    return rows


class Whole(msgspec.Struct):
    """Total bits of raw samples, times the squared l1 error, over domain log2(domain)."""

    domain: int
    n: int
    constant: float


def raw_constants(domains: tuple[int, ...], per_symbol: int, repeats: int) -> list[Whole]:
    """The constant of (domain / epsilon^2) log2(domain) bits, with so many samples per symbol."""
    rows: list[Whole] = []
    for domain in domains:
        p, protocol, n = np.full(domain, 1.0 / domain), Raw(domain), per_symbol * domain
        l1 = 0.0
        for repeat in range(repeats):
            off = protocol.estimate(protocol.encode(draw(p, n, 17 * repeat + domain))) - p
            l1 += float(np.abs(off).sum()) / repeats
        bits = n * protocol.bits_per_message
        rows.append(Whole(domain, n, bits * l1**2 / (domain * math.log2(domain))))
    return rows
