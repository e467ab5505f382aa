"""Lower bounds, up to constants and logarithms: what no protocol can beat by more than these."""

from __future__ import annotations

import math

from thinwire.distributions.protocol import I64
from thinwire.distributions.spec import LearningSpec


def minimax_l2(domain: int, bits: float, n: int) -> float:
    """The squared l2 error with n players of one sample and `bits` bits: domain / (n 2^bits), or 1 / n."""
    return max(domain / (n * 2.0**bits), 1.0 / n)


def minimax_l1(domain: int, bits: float, n: int) -> float:
    """The l1 error: domain / sqrt(n 2^bits), or sqrt(domain / n)."""
    return max(domain / math.sqrt(n * 2.0**bits), math.sqrt(domain / n))


def bit_factor(bits: int) -> float:
    """By what one bit more divides the squared l2 error of grouping, until the floor of 1 / n."""
    return (2.0 ** (bits + 1) - 1.0) / (2.0**bits - 1.0)


def blackboard_bits(domain: int, epsilon: float) -> float:
    """The bits that all servers together must write for an l1 error of epsilon, if each has one sample.

    (domain / epsilon^2) log2(domain), even if everybody reads everything: all samples that are needed,
    written out (Diakonikolas et al. 2017).
    """
    return domain / epsilon**2 * math.log2(domain)


def blackboard_l1(domain: int, total_bits: float) -> float:
    """The same the other way round: the l1 error with so many bits."""
    return math.sqrt(domain * math.log2(domain) / total_bits)


def servers_l2(domain: int, servers: int, samples: float, bits: float) -> float:
    """The squared l2 error with `samples` samples and `bits` bits at each server (Yuan, Guo, Huang).

    Many samples, few bits: domain / (servers samples bits). Fewer samples than symbols: 1 / (servers bits).
    Very few: domain / (servers samples 2^bits), as with one sample. Never below 1 / n.
    """
    floor = 1.0 / (servers * samples)
    if servers * bits < domain:
        return max(floor, 1.0 / (servers * bits))
    if samples >= domain:
        return max(floor, domain / (servers * samples * bits))
    if bits >= math.log2(domain / samples):
        return max(floor, 1.0 / (servers * bits))
    return max(floor, domain / (servers * samples * 2.0**bits))


def servers_l1(domain: int, servers: int, samples: float, bits: float) -> float:
    """The l1 error: sqrt(domain) times the l2 error; that of a guess if there are fewer bits than symbols."""
    if servers * bits < domain:
        return 2.0
    return min(2.0, math.sqrt(domain * servers_l2(domain, servers, samples, bits)))


def monotone_l1(domain: int, n: int) -> float:
    """The l1 error with n samples, if p is known to be monotone: (log2(domain) / n)^(1/3) (Birge 1987)."""
    return min((math.log2(domain) / n) ** (1.0 / 3.0), math.sqrt(domain / n))


def histogram_l1(pieces: int, servers: int, samples: float, bits: float) -> float:
    """The l1 error, if p is a histogram: as hard as so many symbols, even if the cuts are known."""
    return servers_l1(max(2, pieces), servers, samples, bits)


def bound(spec: LearningSpec, sizes: I64) -> float:
    """The error in the norm asked for (l2: its root) that no protocol can beat by more than a constant."""
    servers, n = len(sizes), int(sizes.sum())
    samples = n / servers
    bits = spec.bits * samples
    if spec.structure == "monotone":
        return monotone_l1(spec.domain, n) if spec.norm == "l1" else math.sqrt(1.0 / n)
    if spec.norm == "l2":
        return math.sqrt(servers_l2(max(2, spec.pieces or spec.domain), servers, samples, bits))
    if spec.pieces is not None:
        return histogram_l1(spec.pieces, servers, samples, bits)
    least = servers_l1(spec.domain, servers, samples, bits)
    return max(least, min(2.0, blackboard_l1(spec.domain, n * spec.bits))) if n == servers else least
