"""The session that averages gradients in every step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from thinwire.core.channel import Program
from thinwire.core.engine import Engine
from thinwire.core.exchange import Exchange
from thinwire.core.optimizers import Given, LossScale, Optimizers
from thinwire.drivers.behind import Behind, overlapping
from thinwire.errors import ConfigError
from thinwire.methods.adam import Adam
from thinwire.methods.dense import Dense
from thinwire.methods.registry import parse_exchange
from thinwire.net.costs import Link
from thinwire.net.rank_info import RankInfo
from thinwire.sessions import checkpoint, frozen_adam
from thinwire.sessions.base import BaseSession
from thinwire.sessions.histogram import Histogram, measure
from thinwire.sessions.optimizer_checks import check_optimizers
from thinwire.sessions.replicas import Replicas
from thinwire.sessions.same_batch import stale_gradients


class Session(BaseSession):
    """Averages tensors over a process group with a method.

    In a training loop of your own:

        session = thinwire.Session(model.named_parameters(), "qsgd(bits=4)", optimizer=optimizer)
        loss.backward()
        session.average({n: p.grad for n, p in model.named_parameters()}, in_place=True)
        optimizer.step()

    Under `DistributedDataParallel` use `thinwire.attach`, which makes a session and installs it.

    Args:
        named_parameters: names and tensors; names, shapes and types must be equal on all ranks. If the
            method lets replicas drift (see `reconcile`), these must be the parameters themselves.
        method: a method string, JSON, or an Exchange.
        process_group: the ranks to average over; None is the default group.
        seed: of the random numbers that the ranks share; equal on all ranks.
        dense_below: tensors with fewer entries, and short vectors, are sent dense; 0 compresses all.
        scaler: the GradScaler in use, so that residuals follow its scale.
        optimizer: the optimizer in use, or several, such as [muon, adamw]. One with momentum is refused if
            the method has its own, and `reconcile` averages its state as well. `adam` takes steps of AdamW
            for it.
        lanes: the number of private process groups.
        inner_group: for `hierarchical`: the process group of this rank's host, such as
            `mesh["local"].get_group()`; None takes consecutive ranks.
        rank_info: only for ranks run by the Lockstep or Simulated driver: which rank this is. No process
            group is used then, and the driver runs `engine.program`.
        link: the link by which the cheapest operations are chosen; None takes that of THINWIRE_LINK, or
            measures it.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.Tensor]],
        method: str | Mapping[str, Any] | Exchange,
        process_group: dist.ProcessGroup | None = None,
        *,
        seed: int = 0,
        dense_below: int = 1024,
        scaler: LossScale | None = None,
        optimizer: Given = None,
        lanes: int = 1,
        inner_group: dist.ProcessGroup | None = None,
        rank_info: RankInfo | None = None,
        link: Link | None = None,
    ) -> None:
        optimizers = Optimizers(optimizer)
        self.engine = Engine(
            named_parameters,
            parse_exchange(method),
            dense=Dense(),
            dense_below=dense_below,
            seed=seed,
            scaler=scaler,
            optimizers=optimizers,
            link=link,
        )
        exchanges, parameters = self.engine.exchanges, self.engine.parameters
        periods = [exchange.reconcile_every for exchange in exchanges]
        self._reconcile_every = min((period for period in periods if period is not None), default=None)
        self._reconciled = 0
        self._needs_forward: str | None = None
        self._replicas = Replicas(parameters, optimizers)
        optimizers.check_all_held(parameters)
        warnings = check_optimizers(exchanges, optimizers)
        if self._reconcile_every is not None:
            warnings.append(
                f"replicas drift; their parameters are averaged, dense, every {self._reconcile_every} steps"
            )
        self.start(process_group, rank_info, lanes=lanes, inner_group=inner_group, warnings=warnings)
        if self.engine.delay is not None and rank_info is None:
            adaptive = not self.engine.delay.on
            self.behind = Behind(self.engine, overlapping(self.engine.executors), adaptive=adaptive)
            self.on_detach(self.behind.close)
        adam = next((exchange for exchange in exchanges if isinstance(exchange, Adam)), None)
        if adam is not None:
            for each in optimizers:
                self.on_detach(frozen_adam.install(adam, each, self.engine))

    @property
    def method(self) -> Exchange:
        """The method, with all its options."""
        return self.engine.method

    # -- averaging -------------------------------------------------------------------------------------

    def average(
        self,
        tensors: Mapping[str, torch.Tensor | None],
        *,
        in_place: bool = False,
        stale: Mapping[str, torch.Tensor] | None = None,
    ) -> dict[str, torch.Tensor]:
        """The method's estimate of each tensor's mean over the ranks.

        Pass all parameters of the session on every rank; None counts as zeros. With `in_place` the means are
        written over the inputs, which saves memory and time.

        If replicas drift (`reconcile_every`), their parameters are averaged first when that is due. To do
        this before the gradient is computed, begin the step with `reconcile(when_due=True)`.

        `stale` are second gradients on the same batch, at `stale_parameters()`, for methods that compare
        gradients (`lasg`); `same_batch` computes and passes them, under DDP as well.
        """
        if stale is not None:
            self.engine.use_stale_gradients(stale)
        self.reconcile(when_due=True)
        results, views = self.engine.views(tensors, in_place=in_place)
        if self.behind is not None and self.engine.executors:
            self.behind.average(views)
            return results
        self.engine.begin_step()
        self.engine.end_step(self.run(self.engine.program(views)))
        return results

    @property
    def step(self) -> int:
        """Steps so far; equal on all ranks. With a delay this waits for the exchange under way."""
        if self.behind is not None:
            self.behind.wait(quiet=True)
        return self.engine.step

    def stale_parameters(self) -> dict[str, torch.Tensor]:
        """The parameters at this rank's last upload, or the current ones if the method keeps none.

        They are for the second gradient of `average(..., stale=...)`. Copies, by name.
        """
        return self.engine.stale_parameters()

    def same_batch(self, model: torch.nn.Module, loss: Callable[[torch.nn.Module], torch.Tensor]) -> None:
        """Compute the gradient of the next step's batch at the parameters of this rank's last upload.

        Call it before the forward pass of the step. Nothing else changes: gradients, buffers (batch-norm
        statistics), the model's parameters and the random numbers of the next forward pass stay as they are,
        so that dropout is the same in both. Only `lasg` uses the result.

        Args:
            model: the model, wrapped in DistributedDataParallel or not.
            loss: computes the loss of this step's batch with the module it is given.
        """
        self.engine.use_stale_gradients(stale_gradients(self.stale_parameters(), model, loss))

    # -- steps without a gradient ----------------------------------------------------------------------

    def wants_gradient(self) -> bool:
        """Whether this rank must compute its gradient for the next step; ask before the forward pass.

            if session.wants_gradient():
                loss(model, batch).backward()       # without DDP, then session.average as usual
            else:
                session.skip_gradient()
            optimizer.step()

        False only for methods that know beforehand that a rank will not upload (`lag(rule="ps")`). It saves
        the forward and the backward pass of that rank.
        """
        if self._needs_forward is not None:
            raise ConfigError(f"no rank can skip its forward pass: {self._needs_forward}")
        return self.engine.wants_gradient()

    def skip_gradient(self) -> None:
        """Take part in a step without a gradient of this rank: sets `.grad` of all parameters to the result.

        Call it only where `wants_gradient()` was False. The other ranks average as usual.
        """
        if self.wants_gradient():
            raise ConfigError("skip_gradient: this rank must compute its gradient: wants_gradient() is True")
        self.engine.begin_step()
        views = self.engine.views_without_gradient()
        self.engine.end_step(self.run(self.engine.program(views)))
        for view in views:
            for slot, part in zip(view.layout.slots, view.layout.parts(view.out), strict=True):
                self.engine.parameters[slot.name].grad = part.view(slot.shape)

    def needs_forward(self, why: str) -> None:
        """For hosts: every rank takes part in every forward pass, and this is why."""
        self._needs_forward = why

    # -- replicas --------------------------------------------------------------------------------------

    @property
    def reconcile_every(self) -> int | None:
        """The number of steps after which replicas are made equal; None if they always are."""
        return self._reconcile_every

    def replicas(self) -> Replicas:
        """This rank's parameters."""
        return self._replicas

    def reconcile(self, *, when_due: bool = False) -> None:
        """Make all ranks' parameters equal, to the last bit: each becomes its mean over the ranks.

        The optimizer's state for each parameter (momentum, second moments) is averaged as well, if the
        session knows the optimizer; otherwise it stays each rank's own. Call it on every rank.

        With `when_due` it acts only if the method lets replicas drift and `reconcile_every` steps have
        passed. DDP sessions and `average` do this by themselves. Call it without `when_due` after the last
        step, and before you write a checkpoint of the model.
        """
        every = self._reconcile_every
        due = every is not None and self.step % every == 0 and self.step != self._reconciled
        if due or not when_due:
            self.run(self.reconciliation())

    def reconciliation(self) -> Program:
        """The coroutine that reconciles on one rank, for a driver to run."""
        return self._reconcile(self.step)

    async def _reconcile(self, step: int) -> None:
        await self._replicas.reconcile(self.rank_info, step, self.engine.link)
        self._reconciled = step

    def histogram(
        self, tensors: Mapping[str, torch.Tensor] | None = None, *, ratio: float | None = None
    ) -> Histogram:
        """The distribution of the magnitudes of all ranks' gradients, for 4 KB whatever the model's size.

        Call it on every rank, between `backward()` and `average()` (under DDP gradients are averaged by
        then). With `ratio` it includes the threshold of top-k at this ratio. `tensors` replace the gradients.
        """
        gradients = {name: parameter.grad for name, parameter in self.engine.parameters.items()}
        given = [tensor for tensor in (tensors or gradients).values() if tensor is not None]
        result: list[Histogram] = []
        self.run(measure(given, ratio, self.rank_info, result))
        return result[0]

    # -- checkpoints -----------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """A copy like `sealed()`, without the checksums that take most of its time."""
        if self.behind is not None:
            self.behind.wait(quiet=True)
        return {**checkpoint.save(self.engine), "decided": True}

    def load_sealed(self, states: Sequence[Mapping[str, Any]], on_resize: checkpoint.OnResize | None) -> None:
        """`load_state_dict` with what `sealed()` returned, of one or several ranks."""
        if self.behind is not None:
            self.behind.wait(quiet=True)
            self.behind.forget()
        checkpoint.load(self.engine, states, on_resize)
