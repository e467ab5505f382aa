"""The options of an asynchronous run, and what server and workers must have in common."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from thinwire.core import checks
from thinwire.errors import ConfigError

VARIANTS = ("asylpg", "sparse", "accelerated")
MODES = ("paper", "centered")
PROXIMAL = ("none", "l1", "l2")
RAW_BITS = 32
"""So many bits mean: send float32 as it is."""

Schedule = Callable[[int], float]
SCHEDULES: dict[str, Schedule] = {
    "constant": lambda epoch: 1.0,
    "sqrt": lambda epoch: 1.0 / math.sqrt(epoch + 1.0),
    "inverse": lambda epoch: 1.0 / (epoch + 1.0),
}


@dataclass(frozen=True)
class AsyLPG:
    """Asynchronous variance-reduced proximal gradients, quantised on the way down and up.

    In epoch s all sides know the parameters x~ exactly, and the server knows the full gradient g~ at x~. Then
    each worker, without waiting for the others, gets Q(x), takes some rows a, and sends
    Q(grad f_a(Q(x)) - grad f_a(x~)). The server does x = prox(x - lr (received difference + g~)). After
    `epoch_length` such updates x~ = x.

    Args:
        variant: "asylpg"; "sparse" (the way up keeps few coordinates, drawn at random without bias);
            "accelerated" (x = x~ + theta_s (y - x~), steps on y, and x~ becomes the mean of all x).
        bits_down: bits per parameter; None: as few as the rule E|Q(x) - x|^2 <= mu |x - x~|^2 needs; 32:
            float32, so that only gradients are quantised.
        bits_up: bits per coordinate of the gradient difference, 2 to 16; 32: float32, so that only the model
            is quantised. Unused by "sparse".
        mode: "paper" quantises x; "centered" quantises x - x~, which needs no more bits as x nears x~.
        mu: the precision rule's constant.
        max_staleness: no update is applied more than so many updates after its parameters were sent.
        epochs, epoch_length: the number of epochs, and of updates in each.
        batch: rows per update.
        prox, strength: h(x), added to the loss: "none", "l1" (strength |x|) or "l2" (strength / 2 |x|^2).
        lr: step size.
        lr_schedule: "constant", "sqrt" (lr / sqrt(s+1)), "inverse" (lr / (s+1)), or a function of the epoch
            that gives the factor.
        keep: of the sparse variant: the expected number of kept coordinates, as a part of |a|_1 / |a|_inf.
        theta_floor: of the accelerated variant: theta_s = max(2 / (s + 2), theta_floor). The paper's is 0; 1
            is no momentum.
        seed: of the rows drawn and of all rounding.

    Reference
        Yu, Wu, Huang: Double Quantization for Communication-Efficient Distributed Optimization, NeurIPS 2019.

    Differences from the paper
        - "centered" is not in the paper: it is the bit centring of HALP (De Sa et al., 2018).
        - The sparse variant sends a sign and an index for a survivor: they all have one magnitude, so bits
          would add nothing. Indices are coded as a bitmap or by Elias-Fano.
        - `theta_floor` is not in the paper: with theta going to zero a strongly convex problem slows down.
        - The paper lets the delay be what it is and assumes a bound; here the server keeps to it.
    """

    variant: str = "asylpg"
    bits_down: int | None = None
    bits_up: int = 4
    mode: str = "paper"
    mu: float = 0.5
    max_staleness: int = 16
    epochs: int = 10
    epoch_length: int = 1000
    batch: int = 16
    prox: str = "none"
    strength: float = 0.0
    lr: float = 0.1
    lr_schedule: str | Schedule = "constant"
    keep: float = 1.0
    theta_floor: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        name, widths = "asylpg", (*range(2, 17), RAW_BITS)
        checks.one_of(name, "variant", self.variant, VARIANTS)
        checks.one_of(name, "mode", self.mode, MODES)
        checks.one_of(name, "prox", self.prox, PROXIMAL)
        if self.bits_down is not None and self.bits_down not in widths:
            raise ConfigError(
                f"asylpg: bits_down must be from 2 to 16, 32 (float32) or None (the precision rule), "
                f"not {self.bits_down!r}"
            )
        if self.bits_up not in widths:
            raise ConfigError(f"asylpg: bits_up must be from 2 to 16, or 32 (float32), not {self.bits_up!r}")
        checks.positive(name, "mu", self.mu)
        checks.positive(name, "lr", self.lr)
        checks.whole(name, "max_staleness", self.max_staleness, 0)
        checks.whole(name, "seed", self.seed, 0)
        for option in ("epochs", "epoch_length", "batch"):
            checks.whole(name, option, getattr(self, option), 1)
        if not 0 <= self.strength < math.inf or (self.strength > 0) != (self.prox != "none"):
            raise ConfigError(
                f"asylpg: strength goes with prox='l1' or 'l2' and is a finite number above 0, "
                f"not {self.strength!r} with prox={self.prox!r}"
            )
        if not 0 < self.keep <= 1:
            raise ConfigError(f"asylpg: keep must be above 0 and up to 1, not {self.keep!r}")
        if not 0 <= self.theta_floor <= 1:
            raise ConfigError(f"asylpg: theta_floor must be from 0 to 1, not {self.theta_floor!r}")
        if isinstance(self.lr_schedule, str):
            checks.one_of(name, "lr_schedule", self.lr_schedule, tuple(SCHEDULES))
        if self.variant == "sparse" and self.bits_up == RAW_BITS:
            raise ConfigError("asylpg: the sparse variant sends signs and indices, never bits_up=32")

    @property
    def l1(self) -> float:
        """The strength of the l1 term, or 0."""
        return self.strength if self.prox == "l1" else 0.0

    @property
    def l2(self) -> float:
        """The strength of the l2 term, or 0."""
        return self.strength if self.prox == "l2" else 0.0

    def theta(self, epoch: int) -> float:
        """The weight of y in x; 1 unless accelerated."""
        if self.variant != "accelerated":
            return 1.0
        return max(2.0 / (epoch + 2.0), self.theta_floor)

    def rate(self, epoch: int) -> float:
        """The step size of an epoch: the schedule's, divided by theta."""
        schedule = SCHEDULES[self.lr_schedule] if isinstance(self.lr_schedule, str) else self.lr_schedule
        return self.lr * schedule(epoch) / self.theta(epoch)

    def penalty(self, x: NDArray[Any]) -> float:
        """h(x)."""
        return self.l1 * float(np.abs(x).sum()) + 0.5 * self.l2 * float(np.dot(x, x))


@dataclass(frozen=True)
class Agreement:
    """Options, sizes, and how parameters are cut into shards and rows into chunks: equal on all sides."""

    options: AsyLPG
    parameters: int
    rows: int
    shards: int
    chunks: int

    def __post_init__(self) -> None:
        checks.whole("asylpg", "shards", self.shards, 1)
        checks.whole("asylpg", "workers", self.chunks, 1)
        if self.shards > self.parameters:
            raise ConfigError(f"asylpg: {self.shards} shards for {self.parameters} parameters are too many")

    def part(self, shard: int) -> tuple[int, int]:
        """The range of parameters that a shard keeps."""
        return self.parameters * shard // self.shards, self.parameters * (shard + 1) // self.shards

    def chunk(self, number: int) -> tuple[int, int]:
        """The range of rows of a chunk."""
        return self.rows * number // self.chunks, self.rows * (number + 1) // self.chunks

    def to_json(self) -> str:
        told = asdict(self)
        options = told.pop("options")
        if not isinstance(self.options.lr_schedule, str):
            options["lr_schedule"] = "a function"
        return json.dumps(options | told)

    def difference(self, theirs: str, whose: str = "the worker", apart_from: Collection[str] = ()) -> str:
        """The first difference to another side's agreement, in words; empty if there is none."""
        try:
            found = json.loads(theirs)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            return f"what {whose} says of its options cannot be read"
        told, own = cast("dict[str, Any]", found), json.loads(self.to_json())
        for name in sorted((set(told) | set(own)).difference(apart_from)):
            if told.get(name) != own.get(name):
                return f"{whose} has {name}={told.get(name)!r}, the server {own.get(name)!r}: set them alike"
        return ""
