"""The method "auto": measures, decides for all ranks alike, and decides anew when the link changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.nn.parallel import DistributedDataParallel

from thinwire import log
from thinwire.averaging.base import Schedule
from thinwire.core import checks, schema
from thinwire.core.config import Configured
from thinwire.core.engine import Engine
from thinwire.core.exchange import Exchange
from thinwire.core.optimizers import Given, LossScale, Optimizers
from thinwire.errors import ConfigError, ThinwireError
from thinwire.hosts.agreed import from_rank_0, slowest
from thinwire.hosts.ddp import attach_gradients
from thinwire.hosts.hand_over import Carried, go_on, leave
from thinwire.hosts.loop_clock import LoopClock
from thinwire.hosts.model import attach_schedule
from thinwire.hosts.watch import Watch
from thinwire.methods.adam import Adam
from thinwire.methods.registry import parse
from thinwire.net.costs import Link
from thinwire.net.link import Links
from thinwire.predict import probe as probing
from thinwire.predict.families import Family, families, more_often, same_family
from thinwire.predict.timeline import NOTHING, Compute
from thinwire.predict.warmup import warm_up_of
from thinwire.sessions import frozen_adam
from thinwire.sessions.base import BaseSession
from thinwire.sessions.checkpoint import OnResize
from thinwire.sessions.gradient import Session
from thinwire.sessions.optimizer_checks import kind_of
from thinwire.sessions.periodic import PeriodicSession
from thinwire.sessions.replicas import Replicas

# The first step does not count: it compiles, allocates, and DDP cuts its buckets anew after it.
STEPS = 5
# One of each kind that keeps all replicas equal; trying all of them would hold up a large model for minutes.
CANDIDATES = (
    "dense",
    "fp16",
    "qsgd(bits=4)",
    "efsign",
    "topk(ratio=0.01)",
    "scalecom(ratio=0.01)",
    "powersgd(rank=4)",
)
# After so many steps (and whole cycles of a schedule) the ranks compare how long a step takes.
CHECK_EVERY = 100
LEAST_CYCLES = 4
# The link is measured again if a step was that far from what was expected, in so many checks one by one.
BOUND = 0.3
PATIENCE = 2
# And another method is taken if its steps should be this many times faster.
WORTH_A_SWITCH = 1.1


@dataclass(frozen=True)
class _Options:
    """The arguments of `attach`, for the sessions to create."""

    overlap: bool
    seed: int
    dense_below: int
    scaler: LossScale | None
    optimizers: Optimizers
    replicas: str

    def attach(self, model: DistributedDataParallel, method: Configured) -> Session | PeriodicSession:
        if isinstance(method, Schedule):
            return attach_schedule(
                model,
                method,
                list(self.optimizers),
                seed=self.seed,
                dense_below=self.dense_below,
                scaler=self.scaler,
                process_group=None,
                inner_group=None,
                steps=None,
            )
        return attach_gradients(
            model,
            cast(Exchange, method),
            overlap=self.overlap,
            seed=self.seed,
            dense_below=self.dense_below,
            scaler=self.scaler,
            optimizer=list(self.optimizers),
        )

    @property
    def equal(self) -> bool:
        """Whether only methods that keep replicas equal may be chosen."""
        return self.replicas == "equal"


class AutoSession(BaseSession):
    """A session that begins with `dense`, measures, and continues with the method that should be fastest.

    1. `STEPS` dense steps, in which the forward and the backward pass are timed.
    2. A probe of the link.
    3. Rank 0 predicts a step with each of `CANDIDATES` (`thinwire.predict`), with an adaptive optimizer also
       with what our table of a transformer recommends, and broadcasts its choice. Periodic averaging is
       among them unless `replicas` is "equal", with the shortest period that hides the wire behind computing
       (`predict.families`).
    4. All ranks switch to that method before the next training forward pass. Rank 0 logs the choice and why.
    5. From then on every rank times its steps, and every `CHECK_EVERY` steps the ranks compare. If the
       slowest is more than `BOUND` from what was predicted, `PATIENCE` times in a row, they measure the link
       again, and switch if another method should be at least a tenth faster, or if the same schedule can
       synchronise more often. Otherwise what they measured is expected from then on. Steps of a warm-up do
       not count.

    A switch leaves all replicas equal. What the method before has not sent goes into the next gradient of its
    rank; a schedule synchronises first, applies its residual and averages the optimizer's state, exactly.
    From one period of a schedule to another it only synchronises; residuals and the count of steps go on.

    `method` is the present choice. A checkpoint contains it, and a resumed run begins with it.

    The bytes of the dense steps, the probes and the comparisons are part of `meter`. Do not use it with DDP's
    `join()`: ranks that have run out of data take no part in decisions. On a GPU the times are those of the
    host thread (the tests of this project do not run on a GPU).
    """

    def __init__(self, model: DistributedDataParallel, options: _Options) -> None:
        self._model = model
        self._options = options
        self._throttle: tuple[Links | str, int] | None = None
        self._watch = Watch()
        self._clock = LoopClock()
        self._forwards = 0
        self._compute = Compute(0.0, 0.0)
        self._outside = self._usual = 0.0  # seconds: of the loop besides a step, and of a step with it
        self._off = 0  # checks one by one that found an unexpected step
        self._warm_until = 0  # the method at work saves bytes after so many steps
        self._carried: tuple[Carried, int] | None = None
        self.reasons: tuple[str, ...] = ()
        self.link: Link | None = None
        self._overheads = NOTHING
        self.session = options.attach(model, parse("dense"))
        self._parameters = dict(self.session.engine.parameters)
        self.decided = self.session.rank_info.size == 1
        self._stops: list[Callable[[], None]] = []
        if self.decided:
            log.info("auto: one rank alone has nobody to talk to: dense")
            return
        self._watch.start(model, options.optimizers)
        self._stops.append(model.register_forward_pre_hook(self._before_forward).remove)
        for optimizer in options.optimizers:
            self._stops.append(optimizer.register_step_post_hook(self._after_update).remove)
        if not options.equal:  # a schedule that is chosen later would refuse optimizers out of turn
            self._stops.append(options.optimizers.watch(scaler=options.scaler))

    # -- measuring and deciding ------------------------------------------------------------------------

    def _before_forward(self, module: torch.nn.Module, inputs: object) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        self._settle_carried()
        since = self._clock.begins(self._steps)
        if self._model.require_backward_grad_sync:
            self._forwards += 1
        if not self.decided and self.engine.steps_here >= STEPS:
            self._decide()
        elif self.decided and since >= self._check_after:
            if self._steps - since < self._warm_until:
                self._clock.restart(self._steps, self._cycle)
            else:
                self._check()

    def _after_update(self, optimizer: object, args: object, kwargs: object) -> None:
        self._clock.stepped()  # the last of several optimizers counts

    @property
    def _steps(self) -> int:
        """Counted in the training loop's own thread, so that all ranks check before the same step."""
        return self.session.step if isinstance(self.session, PeriodicSession) else self._forwards

    @property
    def _cycle(self) -> int:
        return self.session.method.period if isinstance(self.session, PeriodicSession) else 1

    @property
    def _check_after(self) -> int:
        return math.ceil(max(CHECK_EVERY, LEAST_CYCLES * self._cycle) / self._cycle) * self._cycle

    def _decide(self) -> None:
        self._learn_compute()
        self._probe()
        self._take(self._planned(None))
        if self.rank_info.rank == 0:
            log.info("auto: %s, because %s", self.method, "; ".join(self.reasons))

    def _learn_compute(self) -> None:
        """How long the slowest rank computes, and what its loop does besides."""
        self._watch.stop()
        compute = self._watch.compute()
        # After a step of a schedule its sync round may come first.
        outside = 0.0 if isinstance(self.session, PeriodicSession) else self._clock.outside()
        mine = (compute.forward, compute.backward, compute.rest, outside)
        forward, backward, rest, self._outside = slowest(mine, self._execute, self.rank_info, self._device)
        self._compute = Compute(forward, backward, rest)

    def _check(self) -> None:
        """Compare the steps of all ranks with what was expected; all ranks come to the same result."""
        (typical,) = slowest((self._clock.typical(),), self._execute, self.rank_info, self._device)
        self._clock.restart(self._steps, self._cycle)
        if not self._usual:  # a checkpoint brought the method along, and nothing was measured here
            self._learn_compute()
            self._usual = typical
            return
        far = typical > 0 and not 1 / (1 + BOUND) <= typical / self._usual <= 1 + BOUND
        self._off = self._off + 1 if far else 0
        if self._off < PATIENCE:
            return
        before, expected = str(self.method), self._usual
        self._probe()
        self._take(self._planned(before))
        if str(self.method) == before:
            self._usual = typical
        if self.rank_info.rank == 0:
            log.info(
                "auto: a step of %s takes %.3g s, and %.3g s was expected: %s",
                before,
                typical,
                expected,
                "the link was measured again, and no other method is a tenth faster"
                if str(self.method) == before
                else f"{self.method} from now on, because {'; '.join(self.reasons)}",
            )

    def _probe(self) -> None:
        """Measure the link, once nothing is under way on it."""
        gloo = self.engine.executor.group.name() == "gloo"
        found = probing.calibrate_with(self._execute, self.rank_info, self._device, gloo=gloo)
        self.link, self._overheads = found.link, found.overheads

    @property
    def _execute(self) -> probing.Execute:
        """The executor of the session, which nobody else uses then."""
        self.session.wait()
        if isinstance(self.session, PeriodicSession):
            self.session.replicas()  # waits for the sync rounds under way
        return self.engine.executor.execute

    @property
    def _device(self) -> torch.device:
        device = next(self._model.parameters()).device
        return device if device.type == "cuda" else torch.device("cpu")

    def _planned(self, now: str | None) -> dict[str, Any]:
        """Rank 0's choice, on every rank."""
        told = self._plan(now) if self.rank_info.rank == 0 else {}
        said = from_rank_0(told, self._execute, self._device)
        if "error" in said:
            raise ThinwireError(f"auto: rank 0 could not plan: {said['error']}")
        return said

    def _plan(self, now: str | None) -> dict[str, Any]:
        """Rank 0's choice. A failure is broadcast as well: otherwise the other ranks would wait for ever.

        Instead of the method `now`, if there is one, only a method that is faster by enough is chosen.
        """
        from thinwire.predict import recommend as planning

        try:
            asked = candidates_for(
                self._options.optimizers,
                equal=self._options.equal,
                scaled=self._options.scaler is not None,
            )
            made = planning.make_plan(
                {name: tuple(parameter.shape) for name, parameter in self._parameters.items()},
                self.rank_info.size,
                cast(Link, self.link),
                self._compute,
                list(dict.fromkeys([*asked, *([] if now is None else [now])])),
                optimizer=kind_of(self._options.optimizers),
                replicas="equal" if self._options.equal else "any",
                # On processors compression and computing share the cores that computing was timed on.
                cores=1.0 if self._device.type == "cpu" else math.inf,
                overheads=self._overheads,
                periodic=families_for(
                    self._options.optimizers,
                    equal=self._options.equal,
                    scaled=self._options.scaler is not None,
                ),
            )
            best, reasons = made.row(made.recommended), list(made.reasons)
            current = next((row for row in made.rows if row.method == now), None)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
        slow = current is None or WORTH_A_SWITCH * best.step_seconds <= current.step_seconds
        if current is not None and not slow and not more_often(best.method, current.method):
            best, reasons = current, [f"no method is {WORTH_A_SWITCH:g} times faster"]
        return {"method": best.method, "reasons": reasons, "seconds": best.step_seconds}

    def _take(self, said: Mapping[str, Any]) -> None:
        """Continue as rank 0 said."""
        self.reasons = tuple(said["reasons"])
        self._switch(parse(cast(str, said["method"])))
        self._usual = float(said["seconds"]) + self._outside
        self._off = 0
        first = 0 if isinstance(self.session, PeriodicSession) else self._steps
        self._warm_until = first + warm_up_of(self.method).steps
        self._clock.restart(self._steps, self._cycle)

    def _switch(self, method: Configured, *, loses: bool = False) -> None:
        """Continue with this method, and keep the counts of the meter.

        Nothing of the method before is lost, unless it `loses` its state because another one is loaded.
        """
        self.decided = True
        before = self.session
        if method == before.method:
            return
        owed = {} if loses else leave(before, method, self._options.optimizers, self._options.scaler)
        before.detach()
        self.session = self._options.attach(self._model, method)
        self.session.meter.load(before.meter.save())
        if not loses and same_family(method, before.method):
            go_on(cast(PeriodicSession, before), cast(PeriodicSession, self.session))
        if self._throttle is not None:
            links, seed = self._throttle
            self.session.throttle(links, seed=seed)
        if owed:
            self._carried = Carried(self._parameters, owed), self.meter.skipped_steps

    def _settle_carried(self) -> None:
        """A step has been taken since the switch: is all that was carried part of it?"""
        if self._carried is None:
            return
        carried, skipped = self._carried
        if carried.left:
            return  # gradients of a part of the model, or none yet
        if self.meter.skipped_steps > skipped and self.rank_info.rank == 0:
            log.warning("auto: the step after the switch was aborted, and the residual before it is lost")
        carried.close()
        self._carried = None

    def _stop_watching(self) -> None:
        self._watch.stop()
        for stop in self._stops:
            stop()
        self._stops.clear()

    # -- what every session has, from the one at work --------------------------------------------------

    @property
    def engine(self) -> Engine:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The engine of the session at work."""
        return self.session.engine

    @property
    def method(self) -> Exchange | Schedule:
        """The method at work."""
        return self.session.method

    @property
    def step(self) -> int:
        """Steps of the session at work."""
        return self.session.step

    @property
    def dense_bytes(self) -> int:
        return self.session.dense_bytes

    @property
    def held(self) -> frozenset[str]:
        """As for the session at work."""
        return self.session.held

    def payload_bytes(self) -> float | None:
        """As for the session at work."""
        return self.session.payload_bytes()

    def metrics(self) -> dict[str, float]:
        """As for the session at work."""
        return self.session.metrics()

    def residuals(self) -> dict[str, Any]:
        """As for the session at work."""
        return self.session.residuals()

    def wait(self) -> None:
        """As for the session at work."""
        self.session.wait()

    @property
    def reconcile_every(self) -> int | None:
        """As for the session at work: None while all replicas are equal after every step."""
        return self.session.reconcile_every

    def common_model(self) -> AbstractContextManager[None]:
        """As for the session at work."""
        return self.session.common_model()

    def reconcile(self) -> None:
        """As for the session at work; for a schedule this is `sync`."""
        self.session.reconcile()

    def replicas(self) -> Replicas:
        """This rank's parameters."""
        return self.session.replicas()

    def throttle(self, links: str | Links, *, seed: int = 0) -> None:
        """As for a `Session`; the throttle stays when the method changes."""
        self._throttle = (links, seed)
        self.session.throttle(links, seed=seed)

    def snapshot(self) -> dict[str, Any]:
        """The state of the session at work, and whether the decision has been made."""
        found = self.session.snapshot()
        return found if isinstance(self.session, PeriodicSession) else {**found, "decided": self.decided}

    def load_sealed(self, states: Sequence[Mapping[str, Any]], on_resize: OnResize | None) -> None:
        """Continue with the checkpoint's method, if one had been chosen by then."""
        schema.verify(states[0])
        method = states[0].get("schedule") or (states[0].get("method") if states[0].get("decided") else None)
        if isinstance(method, str):
            self._drop_carried()
            self._switch(parse(method), loses=True)
        self.session.load_sealed(states, on_resize)
        self._options.optimizers.begin_anew()
        # What a step takes here was not predicted: the first check measures it.
        self._clock.restart(self._steps, self._cycle)

    def detach(self) -> None:
        """Stop: remove all hooks and close the private groups. Call it on every rank."""
        self._stop_watching()
        self._drop_carried()
        self.session.detach()

    def _drop_carried(self) -> None:
        if self._carried is not None:
            self._carried[0].close()
            self._carried = None


def candidates_for(optimizers: Optimizers, *, equal: bool = False, scaled: bool = False) -> list[str]:
    """`CANDIDATES`, and with an adaptive optimizer what our table of a transformer recommends.

    `adam` needs an AdamW whose steps it can take; periodic averaging makes replicas differ, and a schedule
    that averages gradients in its warm-up takes no GradScaler.
    """
    from thinwire.predict.recommend import measured_methods

    found: list[str] = list(CANDIDATES)
    for text in measured_methods() if kind_of(optimizers) == "adaptive" else ():
        method = parse(text)
        if isinstance(method, Adam):
            with suppress(ConfigError):  # not AdamW, or one whose steps it cannot take
                for optimizer in optimizers:
                    frozen_adam.check(method, optimizer)
                found.append(text)
        elif not isinstance(method, Schedule) or not (equal or (scaled and warm_up_of(method).steps)):
            found.append(text)
    return list(dict.fromkeys(found))


def families_for(optimizers: Optimizers, *, equal: bool = False, scaled: bool = False) -> list[Family]:
    """Schedules whose period is chosen by the link, under the conditions of `candidates_for`."""
    if equal or kind_of(optimizers) != "adaptive":
        return []
    return [each for each in families() if not (scaled and warm_up_of(each.schedule).steps)]


def attach_auto(
    model: DistributedDataParallel,
    *,
    overlap: bool,
    seed: int,
    dense_below: int,
    scaler: LossScale | None,
    optimizer: Given,
    replicas: str,
) -> AutoSession:
    """Let the first steps decide; see `AutoSession`."""
    checks.one_of("attach", "replicas", replicas, ("any", "equal"))
    return AutoSession(model, _Options(overlap, seed, dense_below, scaler, Optimizers(optimizer), replicas))
