"""What is minimised, how, and what a run reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

import torch

from thinwire.core import checks
from thinwire.errors import ConfigError
from thinwire.methods.families.lazy import EXACT, UNCODED, WIDTHS, Coder
from thinwire.net.meter import Meter

Algorithm = Literal["gd", "qgd", "lag-wk", "lag-ps", "laq", "iag-cyclic", "iag-random"]
ALGORITHMS: tuple[Algorithm, ...] = ("gd", "qgd", "lag-wk", "lag-ps", "laq", "iag-cyclic", "iag-random")
BY_SERVER: tuple[Algorithm, ...] = ("lag-ps", "iag-cyclic", "iag-random")
"""A server chooses the workers of an iteration; the others compute nothing."""
_XI: dict[str, float] = {"lag-wk": 0.1, "lag-ps": 1.0}


@dataclass(frozen=True)
class Objective:
    """One worker's share of the loss, a function of the flat float64 parameters.

    Args:
        loss: its value.
        gradient: its gradient, flat; None computes it from `loss` by autograd (which must then return a
            tensor).
        both: loss and gradient at once, if that is cheaper than one after the other.
    """

    loss: Callable[[torch.Tensor], torch.Tensor | float]
    gradient: Callable[[torch.Tensor], torch.Tensor] | None = None
    both: Callable[[torch.Tensor], tuple[torch.Tensor | float, torch.Tensor]] | None = None

    def value(self, theta: torch.Tensor) -> float:
        """The loss at these parameters."""
        return float(self.loss(theta))

    def slope(self, theta: torch.Tensor) -> torch.Tensor:
        """The gradient at these parameters, flat and in float64."""
        return self.value_and_slope(theta)[1]

    def value_and_slope(self, theta: torch.Tensor) -> tuple[float | None, torch.Tensor]:
        """Loss and gradient. The loss is None where it is not computed on the way to the gradient."""
        value: torch.Tensor | float | None = None
        if self.both is not None:
            value, found = self.both(theta)
        elif self.gradient is not None:
            found = self.gradient(theta)
        else:
            point = theta.detach().clone().requires_grad_()
            value = self.loss(point)
            (found,) = torch.autograd.grad(cast(torch.Tensor, value), point)
            value = cast(torch.Tensor, value).detach()
        found = found.detach().double()
        if found.shape != theta.shape:
            raise ConfigError(
                f"a gradient of shape {tuple(found.shape)} for parameters of {tuple(theta.shape)}"
            )
        return None if value is None else float(value), found


@dataclass(frozen=True)
class Descent:
    """theta_{k+1} = theta_k - step * sum_m (worker m's last uploaded gradient).

    R_k = xi / (step M)^2 * sum_{d=1..window} |theta_{k+1-d} - theta_{k-d}|^2 (see
    `thinwire.methods.families.lazy_rules`). The last upload of a worker stands for it until the next one.

    Args:
        algorithm: "gd": all workers upload at every iteration; "qgd": the same, quantised; "lag-wk": worker m
            uploads if its gradient has changed by more than sqrt(R_k); "lag-ps": a server asks worker m
            for its gradient if smoothness[m] * |theta - theta(last upload of m)| exceeds sqrt(R_k);
            "laq": "lag-wk" with quantised differences and the rule of `thinwire.methods.LAQ`;
            "iag-cyclic": a server asks one worker after the other, one in each iteration; "iag-random": one
            at random, with a probability proportional to its smoothness. The papers give both a step of
            1 / (M L), where the others have 1 / L.
        step: the step size for the sum of the gradients.
        window: the number of past steps in R_k.
        xi: the weight of each; None takes the papers' values: 0.1, for "lag-ps" 1, for "laq" 0.8 / window.
        bits: per entry of a quantised difference.
        float_bits: per entry of a difference that is not quantised, 32 or 64.
        max_skip: the longest silence under "laq", in iterations.
        smoothness: L_m of every worker's gradient, for "lag-ps" and "iag-random".
        seed: of the random choices of "iag-random".
    """

    algorithm: Algorithm
    step: float
    window: int = 10
    xi: float | None = None
    bits: int = 4
    max_skip: int = 100
    float_bits: int = UNCODED
    smoothness: tuple[float, ...] | None = field(default=None)
    seed: int = 0

    def __post_init__(self) -> None:
        name = "lazy_gd"
        checks.one_of(name, "algorithm", self.algorithm, ALGORITHMS)
        checks.positive(name, "step", self.step)
        checks.whole(name, "window", self.window, 1)
        if self.xi is not None:
            checks.not_negative(name, "xi", self.xi)
        checks.one_of(name, "bits", self.bits, WIDTHS)
        checks.whole(name, "max_skip", self.max_skip, 0)
        checks.one_of(name, "float_bits", self.float_bits, (UNCODED, EXACT))
        if self.smoothness is not None:
            for value in self.smoothness:
                checks.positive(name, "smoothness", value)

    @property
    def by_server(self) -> bool:
        """Whether a server chooses the workers of an iteration."""
        return self.algorithm in BY_SERVER

    @property
    def coder(self) -> Coder:
        """How uploads are coded."""
        return Coder(self.bits if self.algorithm in ("qgd", "laq") else self.float_bits)

    @property
    def weight(self) -> float:
        """xi, or the papers' value if it is None."""
        default = 0.8 / self.window if self.algorithm == "laq" else _XI.get(self.algorithm, 0.0)
        return default if self.xi is None else self.xi

    def check_workers(self, workers: int) -> None:
        """Raise `ConfigError` unless there is a smoothness for each worker, where it is needed."""
        if self.algorithm not in ("lag-ps", "iag-random"):
            return
        given = None if self.smoothness is None else len(self.smoothness)
        if given != workers:
            raise ConfigError(
                f"lazy_gd: {self.algorithm} needs smoothness=(...), one number for each of {workers} "
                f"workers, not {'none' if given is None else given}"
            )


@dataclass(frozen=True)
class Known:
    """What is known before the first iteration, to continue an earlier run; without it all workers upload.

    Args:
        last: every worker's last upload.
        anchors: the parameters at each worker's last upload, for "lag-ps".
        steps: squared lengths of past steps, newest first.
    """

    last: Sequence[torch.Tensor]
    anchors: Sequence[torch.Tensor] = ()
    steps: Sequence[float] = ()


@dataclass(frozen=True)
class Iteration:
    """An iteration once its uploads have arrived; counts run from the beginning.

    Args:
        number: from 1.
        uploads: uploads so far, of all workers together.
        bits: of those uploads, as the papers count: payloads only, no headers, flags or downloads.
        gradients: gradients computed so far.
        loss: at the parameters of this iteration, the sum over the workers.
        gap: its distance from `optimum`, if that was given.
        uploaders: the workers that uploaded in this iteration.
        silence: for how many iterations each worker has not uploaded.
    """

    number: int
    uploads: int
    bits: int
    gradients: int
    loss: float
    gap: float | None
    uploaders: tuple[int, ...]
    silence: tuple[int, ...]


@dataclass
class Trace:
    """All iterations and the last parameters. `meters` has one per rank, unless it ran in a loop."""

    iterations: list[Iteration]
    theta: torch.Tensor
    meters: list[Meter] = field(default_factory=list[Meter])

    @property
    def last(self) -> Iteration:
        """The last iteration."""
        return self.iterations[-1]

    def reached(self, gap: float) -> Iteration | None:
        """The first iteration whose loss is closer to the optimum than `gap`."""
        return next((one for one in self.iterations if one.gap is not None and one.gap < gap), None)
