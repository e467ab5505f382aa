"""AdamW that averages its momentum over the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist

from thinwire.core.exchange import Exchange
from thinwire.core.optimizers import SESSION, LossScale, with_gradients
from thinwire.core.shards import is_sharded
from thinwire.errors import ConfigError
from thinwire.methods.adam import Adam
from thinwire.methods.registry import parse_exchange
from thinwire.sessions.first_rank import from_first_rank
from thinwire.sessions.gradient import Session

Named = Iterable[tuple[str, torch.Tensor]]


class CompressedAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` for training loops without DDP: `step()` averages over the ranks first.

        optimizer = CompressedAdamW(model.named_parameters(), lr=4e-4, warmup=1000)
        loss(model, batch).backward()  # of this rank
        optimizer.step()
        optimizer.zero_grad()

    The method is `adam` with these options: exact steps in the warm-up, then a momentum that goes through
    `exchange`, with a frozen second moment. With the default exchange this is 1-bit Adam. Make it on every
    rank. All ranks then have the parameters of the first one, but not its buffers.

    To clip gradients, or with a GradScaler, call `average()` yourself. A GradScaler must find a number that
    is not finite on all ranks or on none, so it comes after the average:

        optimizer = CompressedAdamW(model.named_parameters(), lr=4e-4, scaler=scaler)
        scaler.scale(loss(model, batch)).backward()
        optimizer.average()
        scaler.unscale_(optimizer)  # only to clip
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    Args:
        named_parameters: `model.named_parameters()`, or groups, `[{"params": [(name, p), ...], "lr": ...}]`.
        lr: the learning rate, which schedulers may change.
        betas: as in AdamW; the first must stay as it is.
        eps: as in AdamW.
        weight_decay: as in AdamW.
        exchange: the method for the momentum, as a string or an object.
        warmup: the number of exact steps.
        refresh: see `thinwire.methods.Adam`.
        process_group: the ranks to average over; None is the default group.
        seed: of the random numbers that the ranks share.
        dense_below: tensors with fewer entries, and short vectors, send their momentum in 16 bits instead; 0
            compresses all.
        scaler: the GradScaler in use, so that momenta and residuals follow its scale.
        foreach: as in AdamW.
        fused: as in AdamW; for the exact steps.
    """

    _session: Session | None = None  # until it is made

    def __init__(
        self,
        named_parameters: Named | Iterable[Mapping[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        exchange: str | Exchange = "efsign(bucket=4096)",
        warmup: int = 100,
        refresh: int | None = 2,
        process_group: dist.ProcessGroup | None = None,
        seed: int = 0,
        dense_below: int = 1024,
        scaler: LossScale | None = None,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        method = Adam(parse_exchange(exchange), warmup=warmup, refresh=refresh, beta1=float(betas[0]))
        super().__init__(
            cast(Any, named_parameters), lr, betas, eps, weight_decay, foreach=foreach, fused=fused
        )
        self._scaled = scaler is not None
        self._averaged = False
        # Before the session's own hook, which takes the frozen steps: hooks run in this order.
        hook = self.register_step_pre_hook(self._before_step)
        self._session = session = Session(
            _trained(self.param_groups),
            method,
            process_group,
            seed=seed,
            dense_below=dense_below,
            scaler=scaler,
            optimizer=self,
        )
        session.on_detach(hook.remove)
        parameters = list(session.engine.parameters.values())
        try:
            session.run(from_first_rank(parameters, session.rank_info, session.engine.link))
        except BaseException:
            session.detach()
            raise
        session.meter.reset()

    @property
    def session(self) -> Session:
        """The meter, the metrics and the state of this rank; its `detach()` closes the process groups."""
        assert self._session is not None
        return self._session

    def average(self) -> None:
        """Average the gradients now, on every rank; `step()` then leaves them as they are.

        After the warm-up `.grad` holds the averaged momentum. If a number is not finite on one rank, the
        result is not finite on any.
        """
        gradients: dict[str, torch.Tensor] = {}
        for name, parameter in self.session.engine.parameters.items():
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradients[name] = parameter.grad = grad.contiguous()
        self.session.average(gradients, in_place=True)
        self._averaged = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, also those that a GradScaler has skipped."""
        super().zero_grad(set_to_none)
        self._averaged = False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only when the optimizer is made: the ranks compare their parameters then."""
        if self._session is not None:
            raise ConfigError(
                "the ranks have agreed on the parameters: make another CompressedAdamW for new ones"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The state of AdamW, and that of the session, which differs between ranks: every rank saves its own.

        It loads with `torch.load(..., weights_only=True)`. A `thinwire.Checkpointer` takes `session` and the
        optimizer, and saves what differs for every rank.
        """
        return {**super().state_dict(), SESSION: self.session.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on bit for bit from this rank's `state_dict()`.

        The state of a `torch.optim.AdamW` has no session. The warm-up then starts again.
        """
        given = dict(state_dict)
        session = given.pop(SESSION, None)
        if session is not None:
            self.session.load_state_dict(session)
        super().load_state_dict(given)

    def _before_step(self, _: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return with_gradients(self, args, kwargs, self._average_once)

    def _average_once(self) -> None:
        if not self._averaged and self._scaled:
            raise ConfigError(
                "a GradScaler judges the gradients before step(), on each rank by itself: call "
                "optimizer.average() after backward() and before scaler.step(optimizer)"
            )
        if not self._averaged:
            self.average()
        self._averaged = False


def _trained(groups: Iterable[Mapping[str, Any]]) -> Named:
    """The names and the parameters, which torch keeps side by side."""
    for group in groups:
        if "param_names" not in group:
            raise ConfigError(
                "the ranks know parameters by their names: give model.named_parameters(), not "
                "model.parameters()"
            )
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            if is_sharded(parameter):
                raise ConfigError(
                    f"{name!r} is sharded, and this optimizer averages whole replicas: give "
                    'torch.optim.AdamW to thinwire.attach(model, "adam(...)", optimizer=...) instead'
                )
            if parameter.requires_grad:
                yield name, parameter
