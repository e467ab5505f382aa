"""The conditions under which periodic and quantised averaging keep the rate of full communication.

M workers take K steps, with a step size proportional to sqrt(M / K). Full communication then has the rate
O(1 / sqrt(M K)). It is kept if

    p = O(K^(1/4) M^(-3/4))    p: the most steps that a coordinate waits for its next average
    q = O(1)                   q: E ||Q(v) - v||^2 <= q ||v||^2, the leading term grows to 1 + q times

Reference: Jiang and Agrawal, "A linear speedup analysis of distributed deep learning with sparse and
quantized communication", NeurIPS 2018. The constants are not known; see `conditions`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from thinwire.averaging.base import Outer, Schedule
from thinwire.core import Channel, Exchange, Layout, checks
from thinwire.core.channel import together
from thinwire.drivers.lockstep import Lockstep
from thinwire.errors import ConfigError
from thinwire.methods.registry import parse
from thinwire.net.costs import Link

LARGEST_Q = 1.0
"""What O(1) is taken for: at most twice the leading term."""


@dataclass(frozen=True)
class Condition:
    """One condition: `bound` and `met` are None if they depend on the number of steps, which is not known."""

    name: Literal["p", "q"]
    value: float
    bound: float | None
    met: bool | None
    sentence: str


@dataclass(frozen=True)
class Conditions:
    """What the analysis says about a method with so many workers and steps."""

    method: str
    workers: int
    steps: int | None
    p: Condition
    q: Condition
    covered_from: int
    """The number of steps from which on p is within its bound."""

    @property
    def met(self) -> bool | None:
        """Both conditions; None if only the number of steps is missing to tell."""
        if self.q.met is False or self.p.met is False:
            return False
        return self.p.met

    def __str__(self) -> str:
        steps = "" if self.steps is None else f" and {self.steps:,} steps"
        place = "outside" if self.met is False else "within"
        since = f" from {self.covered_from:,} steps on" if self.met is None else ""
        told = [one for one in (self.p, self.q) if self.met is not False or one.met is False]
        return (
            f"{self.method} with {self.workers} workers{steps} is {place} the conditions for the rate of "
            f"full communication{since} (up to constants): {'; '.join(one.sentence for one in told)}"
        )


def conditions(
    method: str | Mapping[str, Any] | Exchange | Schedule,
    workers: int,
    steps: int | None = None,
    *,
    constant: float = 1.0,
) -> Conditions:
    """Whether p and q are configured properly for M workers and K steps.

        >>> from thinwire.averaging import conditions
        >>> found = conditions("pqasgd(every=4, bits=8)", workers=4, steps=1000)
        >>> found.p.met, found.q.met, found.covered_from
        (False, True, 16384)

    p = 1 is full communication and always within its bound. q is measured on Gaussian numbers. The second
    rounding of a mean in two shots is not in it.

    Args:
        method: `localsgd`, `spasgd`, `pqasgd`, or `periodic` with an unbiased exchange and plain averaging;
            an unbiased exchange alone, such as `qsgd`, is quantised SGD, with p = 1.
        workers: M.
        steps: K; None if it is not known.
        constant: the factor of both bounds that the analysis leaves open.
    """
    chosen = parse(method)
    if not is_analysed(chosen):
        raise ConfigError(
            f"the analysis is about plain averaging of unbiased exchanges, which {chosen} is not: take "
            "localsgd, spasgd, pqasgd or qsgd"
        )
    checks.whole("conditions", "workers", workers, 1)
    checks.positive("conditions", "constant", constant)
    if steps is not None:
        checks.whole("conditions", "steps", steps, 1)
    p, exchange = (chosen.staleness, chosen.inner) if isinstance(chosen, Schedule) else (1, chosen)
    assert isinstance(exchange, Exchange)
    covered_from = 1 if p == 1 else math.ceil((p / constant) ** 4 * workers**3)
    of_p, of_q = _p(p, workers, steps, constant, covered_from), _q(relative_variance(exchange), constant)
    return Conditions(str(chosen), workers, steps, of_p, of_q, covered_from)


def _p(p: int, workers: int, steps: int | None, constant: float, covered_from: int) -> Condition:
    if p == 1:
        return Condition("p", 1, 1.0, True, "p = 1, every step is averaged")
    allowed = f"{'' if constant == 1 else f'{constant:g} '}K^(1/4) M^(-3/4)"
    if steps is None:
        return Condition("p", p, None, None, f"p = {p} <= {allowed}")
    bound = max(1.0, constant * steps**0.25 * workers**-0.75)
    if steps >= covered_from:
        return Condition("p", p, bound, True, f"p = {p} <= {allowed} = {bound:.3g}")
    told = f"p = {p} > {allowed} = {bound:.3g}, which takes {covered_from:,} steps"
    return Condition("p", p, bound, False, told)


def _q(q: float, constant: float) -> Condition:
    bound = constant * LARGEST_Q
    if q <= bound:
        return Condition("q", q, bound, True, f"q = {q:.2g} <= {bound:g}")
    told = f"q = {q:.3g} > {bound:g}, the leading term is {1 + q:.3g} times as large"
    return Condition("q", q, bound, False, told)


def is_analysed(method: object) -> bool:
    """Whether the analysis is about this method: unbiased, on one level, and averages without outer steps."""
    if isinstance(method, Schedule):
        return is_analysed(method.inner) and method.outer == Outer() and method.delay == 0
    return isinstance(method, Exchange) and method.traits.unbiased and not method.traits.two_levels


def relative_variance(exchange: Exchange, entries: int = 2**18) -> float:
    """q = E ||Q(v) - v||^2 / ||v||^2 of an unbiased exchange, for Gaussian v on one rank."""
    if exchange.traits.single_mean:
        return 0.0
    v = torch.randn(entries, generator=torch.Generator().manual_seed(7))
    made, network = torch.empty_like(v), Lockstep(1)
    ch = Channel(network.rank_infos[0], step=0, seed=11, key="v", device=v.device, link=Link())
    task = exchange.run(v.clone(), made, exchange.init(Layout.of([("v", (entries,))])), ch)
    network.run([together([task], network.rank_infos[0], step=0, mark=0, link=Link())])
    return float((made - v).square().sum() / v.square().sum())
