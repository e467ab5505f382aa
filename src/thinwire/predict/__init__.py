"""How long a training step would take: any method, model, number of workers and link, without training.

    from thinwire.net.costs import Link
    from thinwire import predict

    shapes = {"hidden": (1024, 1024), "head": (10, 1024)}
    link = Link(latency=100e-6, bandwidth=12.5e6)              # 100 Mbit/s
    predict.step_seconds("topk(ratio=0.01)", shapes, 4, link, compute=0.05)
    predict.speed_up("topk(ratio=0.01)", shapes, 4, link, compute=0.05)
    predict.break_even("topk(ratio=0.01)", shapes, 4, compute=0.05)

The operations of a step come from the method's own code, run for one worker that stands for all
(`mirror.py`). Their bytes and messages come from `net/costs.py`. The time of coding and decoding is measured
on this machine. A model of the drivers (`timeline.py`) computes how much of all this overlaps with the
backward pass. A `Profile` holds the result for one method. It has the operations that a session chooses on
one link, can be evaluated for any number of links, and stored as JSON.

`Overheads` say what an operation costs besides the link; `probe.calibrate` measures them. `interval` gives a
range instead of one number. Not modelled: packet loss, other traffic, and machines unlike this one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Literal

from thinwire.averaging.base import Schedule
from thinwire.methods.registry import parse
from thinwire.net.costs import Link
from thinwire.predict.buckets import Shapes, ddp_buckets
from thinwire.predict.mirror import Job, Round
from thinwire.predict.profiles import (
    Host,
    Interval,
    PeriodicProfile,
    Profile,
    any_profile,
    periodic_profile,
    profile,
    profiles,
)
from thinwire.predict.timeline import NOTHING, Compute, Overheads, Sites

__all__ = [
    "BreakEven",
    "Compute",
    "Interval",
    "Job",
    "Overheads",
    "PeriodicProfile",
    "Profile",
    "Round",
    "Sites",
    "break_even",
    "break_even_bandwidth",
    "break_even_of",
    "ddp_buckets",
    "periodic_profile",
    "profile",
    "profile_of",
    "profiles",
    "speed_up",
    "step_seconds",
]

# The range of a break-even in bytes per second: from 80 kbit/s to 8 Tbit/s.
SLOWEST, FASTEST = 1e4, 1e12


@dataclass(frozen=True)
class BreakEven:
    """The bandwidth at which a method and dense take equally long.

    `verdict` is "below" (the method is faster on links slower than `bandwidth`, in bytes per second),
    "always" or "never" (`bandwidth` is then None).
    """

    verdict: Literal["below", "always", "never"]
    bandwidth: float | None = None


def profile_of(
    method: str,
    shapes: Shapes,
    workers: int,
    *,
    link: Link | None = None,
    host: Host = "ddp",
    overlap: bool = True,
    bucket_bytes: int | None = None,
) -> Profile | PeriodicProfile:
    """Like `profile`, or `periodic_profile` for a method that averages parameters; measured once and cached.

    Without overlap only methods for gradients can be predicted.
    """
    key = tuple((name, tuple(shape)) for name, shape in shapes.items())
    schedule = parse(method)
    if not isinstance(schedule, Schedule):
        return _remembered(method, key, workers, link, host, overlap, bucket_bytes)
    # The sync rounds after the warm-up are the same with any warm-up.
    played = str(replace(schedule, warmup=0))
    found = _remembered(played, key, workers, link, host, overlap, bucket_bytes)
    return replace(found, method=str(schedule))


@lru_cache(maxsize=512)
def _remembered(
    method: str,
    shapes: tuple[tuple[str, tuple[int, ...]], ...],
    workers: int,
    link: Link | None,
    host: Host,
    overlap: bool,
    bucket_bytes: int | None,
) -> Profile | PeriodicProfile:
    made = any_profile if overlap else partial(profile, overlap=False)
    return made(method, dict(shapes), workers, link=link, host=host, bucket_bytes=bucket_bytes)


def step_seconds(
    method: str,
    shapes: Shapes,
    workers: int,
    link: Link,
    compute: Compute | float = 0.0,
    *,
    host: Host = "ddp",
    cores: float = math.inf,
) -> float:
    """Seconds of one training step.

    Args:
        method: a method string.
        shapes: of the parameters by name, in the model's order.
        workers: the number of workers.
        link: of every worker; its bandwidth is that of the line, headers included.
        compute: seconds of a step without communication, or a `Compute` with its parts.
        host: "ddp", or "average" for `Session.average` in a loop of your own.
        cores: the number of threads of a worker that run at full speed at the same time.
    """
    return profile_of(method, shapes, workers, link=link, host=host).step_seconds(link, compute, cores=cores)


def speed_up(
    method: str,
    shapes: Shapes,
    workers: int,
    link: Link,
    compute: Compute | float = 0.0,
    *,
    host: Host = "ddp",
    cores: float = math.inf,
) -> float:
    """How many times faster a step is than with `dense`."""
    dense = step_seconds("dense", shapes, workers, link, compute, host=host, cores=cores)
    return dense / step_seconds(method, shapes, workers, link, compute, host=host, cores=cores)


def break_even_of(
    method: Profile | PeriodicProfile,
    dense: Profile | PeriodicProfile,
    compute: Compute | float = 0.0,
    *,
    latency: float = 50e-6,
    cores: float = math.inf,
    dense_compute: Compute | float | None = None,
    overheads: Overheads = NOTHING,
) -> BreakEven:
    """The bandwidth at which two profiles take equally long, at this latency, with the operations they have.

    With `dense_compute`, `compute` is the method's only.
    """
    other = compute if dense_compute is None else dense_compute

    def gain(bandwidth: float) -> float:
        link = Link(latency, bandwidth)
        own = method.step_seconds(link, compute, cores=cores, overheads=overheads)
        return dense.step_seconds(link, other, cores=cores, overheads=overheads) - own

    if method.method == dense.method or gain(SLOWEST) <= 0:
        return BreakEven("never")
    if gain(FASTEST) > 0:
        return BreakEven("always")
    return BreakEven("below", _sign_change(gain))


def _sign_change(gain: Callable[[float], float]) -> float:
    low, high = SLOWEST, FASTEST
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if gain(middle) > 0 else (low, middle)
    return math.sqrt(low * high)


def break_even(
    method: str,
    shapes: Shapes,
    workers: int,
    compute: Compute | float = 0.0,
    *,
    latency: float = 50e-6,
    host: Host = "ddp",
    cores: float = math.inf,
) -> BreakEven:
    """The links on which the method is faster than `dense`, with its operations at 1 Gbit/s."""
    link = Link(latency)
    own, dense = (profile_of(each, shapes, workers, link=link, host=host) for each in (method, "dense"))
    return break_even_of(own, dense, compute, latency=latency, cores=cores)


def break_even_bandwidth(
    method: str,
    shapes: Shapes,
    workers: int,
    compute: Compute | float = 0.0,
    *,
    latency: float = 50e-6,
    host: Host = "ddp",
    cores: float = math.inf,
) -> float | None:
    """The bandwidth in bytes per second below which the method beats `dense`; None if never, or always.

    `break_even` distinguishes the two.
    """
    return break_even(method, shapes, workers, compute, latency=latency, host=host, cores=cores).bandwidth
