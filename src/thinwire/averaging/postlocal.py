"""Post-local SGD and Adam: data-parallel steps first, then local ones with few bits between them."""

from __future__ import annotations

from dataclasses import dataclass, field

from thinwire.averaging.base import Outer, PeriodOptions
from thinwire.averaging.localsgd import EveryOption
from thinwire.averaging.periodic import check_outer
from thinwire.core import Exchange, checks
from thinwire.methods.dense import Dense
from thinwire.methods.efsign import EFSign
from thinwire.methods.qsgd import QSGD


@dataclass(frozen=True)
class _PostLocalOptions(EveryOption):
    every: int = 4
    bits: int | None = 1
    outer_lr: float = 1.0
    outer_momentum: float = 0.0


@dataclass(frozen=True)
class PostLocal(PeriodOptions, _PostLocalOptions):
    """Data-parallel steps until AdamW's moments have formed; then local steps, and few bits between them.

        warm-up: g = (1/W) sum_i g_i before each step, so that all ranks take the same one
        then: local steps with v_i = beta2 v_i + (1 - beta2) g_i^2 / r, and after every `every` of them:
            u_i = e_i + z - x_i;  c_i = code of u_i;  e_i = u_i - c_i
            z <- z - (1/W) sum_l c_l;  x_i <- z

    The squared gradient of one rank is noisier than that of the mean. The warm-up measures how many times
    larger it is, r = (1/W) sum_i ||g_i||^2 / ||g||^2 for each tensor, and local steps divide by it. So they
    are as long as the data-parallel ones, with the same learning rate. With fewer than 50 steps of warm-up,
    or none, r = sqrt(W). With other optimizers than AdamW and Adam nothing is divided.

    Args:
        bits: signs with error feedback and a magnitude per 4,096 entries, once or several times (see
            `efsign`). None sends changes as they are.
        outer_lr: the step of the common model along the mean.
        outer_momentum: the Nesterov momentum of that step (see `diloco`).
        warmup: the number of data-parallel steps, at least as many as the learning rate rises. They send all
            bytes of `dense`, in `optimizer.step()` and so after any clipping.
        warmup_bits: quantise gradients in these steps, in two shots (see `qsgd`): 8, or 4 for an eighth of
            the bytes where a dense step takes seconds.

    Example:
        >>> from thinwire.averaging import PostLocal
        >>> str(PostLocal(every=4, bits=1).inner)
        "efsign(bucket=4096, scope='bucket')"

    Differences from the paper: it has SGD and sends changes as they are. The code, the division of the second
    moment and the outer momentum are added.
    """

    name = "postlocal"
    use_when = """You train a transformer with AdamW over a slow link: less than 1 % of the bytes, and closer
    to `dense` than `diloco` and sparse methods in short runs."""
    avoid_when = """You need equal replicas in every step, or the run is hardly longer than the warm-up."""
    formula = "(itemsize * n if bits is None else bits * (ceil(n / 8) + 4 * ceil(n / 4096))) / every"
    formula_note = "on average, after the warm-up"
    rounds_per_step = """1 in the warm-up; then 2 in a sync round (one to compare the ranks), or 3 with two
    shots, and none in between"""
    reference = """Lin, Stich, Patel and Jaggi, "Don't use large mini-batches, use local SGD", 2020; signs
    with error feedback between local steps: Lu et al., "0/1 Adam", 2022"""
    warmup: int = field(default=100, metadata={"main": False})
    warmup_bits: int | None = field(default=None, metadata={"main": False})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_outer(self.name, self.outer_lr, self.outer_momentum)
        checks.one_of(self.name, "warmup_bits", self.warmup_bits, (None, 1, 2, 4, 8))

    @property
    def gradient_warmup(self) -> bool:
        return True

    @property
    def warmup_exchange(self) -> Exchange | None:
        return None if self.warmup_bits is None else QSGD(bits=self.warmup_bits, reduce="twoshot")

    @property
    def inner(self) -> Exchange:
        return Dense() if self.bits is None else EFSign(bucket=4096, bits=self.bits, scope="bucket")

    @property
    def outer(self) -> Outer:
        return Outer(self.outer_lr, self.outer_momentum)
