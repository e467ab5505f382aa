"""`attach(model, "auto")`: a few dense steps that measure, one decision for all ranks, then that method."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from thinwire import log
from thinwire.core import schema
from thinwire.core.engine import Engine, LossScale
from thinwire.core.exchange import Exchange
from thinwire.errors import ConfigError, ThinwireError
from thinwire.hosts.ddp import attach_gradients
from thinwire.hosts.watch import Watch
from thinwire.methods.adam import Adam
from thinwire.methods.registry import parse_exchange
from thinwire.net import frames
from thinwire.net.costs import Link
from thinwire.net.link import Links
from thinwire.net.rank_info import RankInfo
from thinwire.predict import probe as probing
from thinwire.predict.timeline import NOTHING, Compute
from thinwire.sessions import frozen_adam
from thinwire.sessions.base import BaseSession
from thinwire.sessions.checkpoint import OnResize
from thinwire.sessions.gradient import Session
from thinwire.sessions.optimizer_checks import kind_of
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
DECISION_BYTES = 4096


@dataclass(frozen=True)
class _Options:
    """The arguments of `attach`, for the sessions to create."""

    overlap: bool
    seed: int
    dense_below: int
    scaler: LossScale | None
    optimizer: torch.optim.Optimizer | None

    def attach(self, model: DistributedDataParallel, method: Exchange) -> Session:
        return attach_gradients(
            model,
            method,
            overlap=self.overlap,
            seed=self.seed,
            dense_below=self.dense_below,
            scaler=self.scaler,
            optimizer=self.optimizer,
        )


class AutoSession(BaseSession):
    """A session that begins with `dense`, measures, and continues with the method that should be fastest.

    1. `STEPS` dense steps, in which the forward and the backward pass are timed.
    2. A probe of the link.
    3. Rank 0 predicts a step with each of `CANDIDATES` (`thinwire.predict`), with AdamW also with `adam` if
       our table recommends it, and broadcasts its choice.
    4. All ranks switch to that method before the next training forward pass. Rank 0 logs the choice and why.

    From then on `method` is the chosen one and does not change. A checkpoint contains the choice, and a
    resumed run does not repeat it.

    The bytes of the dense steps and of the probe are part of `meter`. Do not use it with DDP's `join()`:
    ranks that have run out of data take no part in the decision. On a GPU the times are those of the host
    thread (the tests of this project do not run on a GPU).
    """

    def __init__(self, model: DistributedDataParallel, options: _Options) -> None:
        self._model = model
        self._options = options
        self._throttle: tuple[Links | str, int] | None = None
        self._watch = Watch()
        self.reasons: tuple[str, ...] = ()
        self.link: Link | None = None
        self._overheads = NOTHING
        self.session = options.attach(model, parse_exchange("dense"))
        self.decided = self.session.rank_info.size == 1
        self._handle: RemovableHandle | None = None
        if self.decided:
            log.info("auto: one rank alone has nobody to talk to: dense")
            return
        self._watch.start(model, options.optimizer)
        self._handle = model.register_forward_pre_hook(self._before_forward)

    # -- measuring and deciding ------------------------------------------------------------------------

    def _before_forward(self, module: torch.nn.Module, inputs: object) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        if self.engine.steps_here >= STEPS:
            self._decide()

    def _decide(self) -> None:
        self._stop_watching()
        execute, rank_info = self.engine.executor.execute, self.rank_info
        device = next(self._model.parameters()).device
        if device.type != "cuda":
            device = torch.device("cpu")
        gloo = self.engine.executor.group.name() == "gloo"
        found = probing.calibrate_with(execute, rank_info, device, gloo=gloo)
        self.link, self._overheads = found.link, found.overheads
        compute = _slowest(self._watch.compute(), execute, rank_info, device)
        told = self._plan(compute) if rank_info.rank == 0 else {}
        said = _from_rank_0(told, execute, device)
        if "error" in said:
            raise ThinwireError(f"auto: rank 0 could not plan: {said['error']}")
        self.reasons = tuple(said["reasons"])
        self._switch(parse_exchange(cast(str, said["method"])))
        if rank_info.rank == 0:
            log.info("auto: %s, because %s", self.method, "; ".join(self.reasons))

    def _plan(self, compute: Compute) -> dict[str, Any]:
        """Rank 0's choice. A failure is broadcast as well: otherwise the other ranks would wait for ever."""
        from thinwire.predict import recommend as planning

        try:
            shapes = {name: tuple(tensor.shape) for name, tensor in self.engine.parameters.items()}
            made = planning.make_plan(
                shapes,
                self.rank_info.size,
                cast(Link, self.link),
                compute,
                candidates_for(self._options.optimizer),
                optimizer=kind_of(self._options.optimizer),
                replicas="equal",
                # On processors compression and computing share the cores that computing was timed on.
                cores=math.inf if self._on_gpu else 1.0,
                overheads=self._overheads,
            )
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return {"method": made.recommended, "reasons": made.reasons}

    @property
    def _on_gpu(self) -> bool:
        return next(self._model.parameters()).device.type == "cuda"

    def _switch(self, method: Exchange) -> None:
        """Continue with this method, and keep the counts of the meter."""
        self.decided = True
        before = self.session
        if method == before.method:
            return
        before.detach()
        self.session = self._options.attach(self._model, method)
        self.session.meter.load(before.meter.save())
        if self._throttle is not None:
            links, seed = self._throttle
            self.session.throttle(links, seed=seed)

    def _stop_watching(self) -> None:
        self._watch.stop()
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    # -- what every session has, from the one at work --------------------------------------------------

    @property
    def engine(self) -> Engine:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The engine of the session at work."""
        return self.session.engine

    @property
    def reconcile_every(self) -> int | None:
        """As for a `Session`."""
        return self.session.reconcile_every

    def reconcile(self) -> None:
        """As for a `Session`."""
        self.session.reconcile()

    def replicas(self) -> Replicas:
        """This rank's parameters."""
        return self.session.replicas()

    def throttle(self, links: str | Links, *, seed: int = 0) -> None:
        """As for a `Session`; the throttle stays when the method changes."""
        self._throttle = (links, seed)
        self.session.throttle(links, seed=seed)

    def snapshot(self) -> dict[str, Any]:
        """The state of the session, and whether the decision has been made."""
        return {**self.session.snapshot(), "decided": self.decided}

    def load_sealed(self, states: Sequence[Mapping[str, Any]], on_resize: OnResize | None) -> None:
        """Continue with the checkpoint's method, without another decision, if it had been chosen by then."""
        schema.verify(states[0])
        method = states[0].get("method") if states[0].get("decided") else None
        if not self.decided and isinstance(method, str):
            self._stop_watching()
            self._switch(parse_exchange(method))
        self.session.load_sealed(states, on_resize)

    def detach(self) -> None:
        """Stop: remove all hooks and close the private groups. Call it on every rank."""
        self._stop_watching()
        self.session.detach()


def candidates_for(optimizer: torch.optim.Optimizer | None) -> list[str]:
    """`CANDIDATES`, and for AdamW the methods with its momentum that our table recommends."""
    from thinwire.predict.recommend import measured_exchanges

    found: list[str] = list(CANDIDATES)
    for text in measured_exchanges() if kind_of(optimizer) == "adaptive" else ():
        method = parse_exchange(text)
        if optimizer is not None and isinstance(method, Adam):
            with suppress(ConfigError):  # not AdamW, or one whose steps it cannot take
                frozen_adam.check(method, optimizer)
                found.append(text)
    return found


def attach_auto(
    model: torch.nn.Module,
    *,
    overlap: bool,
    seed: int,
    dense_below: int,
    scaler: LossScale | None,
    optimizer: torch.optim.Optimizer | None,
) -> AutoSession:
    """Let the first steps decide; see `AutoSession`."""
    if not isinstance(model, DistributedDataParallel):
        raise ConfigError(
            f'attach(model, "auto") takes a DistributedDataParallel model, not {type(model).__name__}'
        )
    return AutoSession(model, _Options(overlap, seed, dense_below, scaler, optimizer))


def _slowest(
    compute: Compute, execute: probing.Execute, rank_info: RankInfo, device: torch.device
) -> Compute:
    """The slowest rank's times: the others wait for it."""
    table = torch.zeros(rank_info.size, 3, dtype=torch.float64, device=device)
    table[rank_info.rank] = torch.tensor([compute.forward, compute.backward, compute.rest])
    flat = table.view(-1)
    execute(frames.AllReduce(flat, flat.numel() * 8))
    forward, backward, rest = cast("list[float]", table[table.sum(1).argmax()].tolist())
    return Compute(forward, backward, rest)


def _from_rank_0(told: Mapping[str, Any], execute: probing.Execute, device: torch.device) -> dict[str, Any]:
    """Rank 0's decision on every rank, checked."""
    block = torch.zeros(DECISION_BYTES, dtype=torch.uint8)
    text = json.dumps(told).encode()[:DECISION_BYTES]
    block[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    block = block.to(device)
    execute(frames.Broadcast(block, 0, DECISION_BYTES if told else 0))
    try:
        said = json.loads(frames.to_bytes(block.cpu()).rstrip(b"\0"))
    except ValueError:
        raise ThinwireError("auto: what rank 0 said is not a decision") from None
    if not isinstance(said, dict) or not ("error" in said or {"method", "reasons"} <= set(cast(Any, said))):
        raise ThinwireError("auto: what rank 0 said is not a decision")
    return cast("dict[str, Any]", said)
