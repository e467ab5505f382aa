"""Lightning: a callback that attaches a session, logs what it costs, and saves it with the checkpoint.

    # the module trains with AdamW
    trainer = Trainer(strategy="ddp", callbacks=[ThinwireCallback("adam(warmup=400)")])

Needs `pip install 'thinwire[lightning]'`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch.nn.parallel import DistributedDataParallel

from thinwire.averaging.base import Schedule
from thinwire.core.exchange import Exchange
from thinwire.errors import ConfigError, StateError
from thinwire.hosts.attach import attach
from thinwire.hosts.model import is_scheduled
from thinwire.integrations.rank_states import RankStates, finish
from thinwire.sessions.base import BaseSession
from thinwire.sessions.checkpoint import OnResize

try:
    from lightning.pytorch import Callback
except ImportError as error:
    raise ImportError("thinwire.integrations.lightning needs: pip install 'thinwire[lightning]'") from error


class ThinwireCallback(Callback):
    """Trains with a method under Lightning's DDP strategy.

    The session begins in `on_fit_start` and is at `callback.session`, also after the fit. Its metrics go to
    the trainer's loggers every `log_every_n_steps` steps, as "thinwire/bytes_sent" and so on, of rank 0.

    Lightning's checkpoints contain the state of every rank, which rank 0 gathers. `fit(ckpt_path=...)`
    continues from there. With a schedule the model in a checkpoint is rank 0's; after the last step all ranks
    have the same.

    Args:
        method: as for `thinwire.attach`.
        on_resize: what becomes of residuals if a checkpoint is continued with another number of ranks.
        options: other arguments of `thinwire.attach`, such as `dense_below`.
    """

    def __init__(
        self,
        method: str | Mapping[str, Any] | Exchange | Schedule,
        *,
        on_resize: OnResize = "sum",
        **options: Any,
    ) -> None:
        super().__init__()
        self.session: BaseSession | None = None
        self._method = method
        self._on_resize: OnResize = on_resize
        self._options = options
        self._states: RankStates | None = None
        self._loaded: list[torch.Tensor] | None = None

    # -- the session ---------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach to the wrapped model."""
        model = trainer.strategy.model
        if not isinstance(model, DistributedDataParallel):
            raise ConfigError(
                'ThinwireCallback needs DistributedDataParallel: Trainer(strategy="ddp"), not '
                f"{type(trainer.strategy).__name__}"
            )
        optimizers = cast("list[torch.optim.Optimizer]", trainer.optimizers)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        method = cast(str, self._method)
        session = attach(model, method, optimizer=optimizers or None, scaler=scaler, **self._options)
        self.session = session
        self._states = RankStates(session, model, optimizers, self._on_resize)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Lightning has restored the model and the optimizer: now this rank's own state."""
        states, loaded = self._attached(), self._loaded
        self._loaded = None
        if loaded is not None:
            states.scatter(loaded)
        elif trainer.ckpt_path:
            states.warn(str(trainer.ckpt_path))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Keep DDP silent for a schedule.

        In manual optimisation Lightning tells it after every forward pass to reduce gradients from now on.
        """
        model = trainer.strategy.model
        if is_scheduled(model):
            model.require_backward_grad_sync = False

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the metrics, as often as the trainer logs."""
        step = trainer.global_step
        if trainer.is_global_zero and trainer.loggers and step % trainer.log_every_n_steps == 0:
            found = self._attached().session.metrics()
            for logger in trainer.loggers:
                logger.log_metrics({f"thinwire/{name}": value for name, value in found.items()}, step=step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Make the replicas equal."""
        finish(self._attached().session)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Detach."""
        self._detach()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Detach."""
        self._detach()

    def _attached(self) -> RankStates:
        if self._states is None:
            raise ConfigError("ThinwireCallback has no session: it begins with trainer.fit()")
        return self._states

    def _detach(self) -> None:
        self._states = None
        if self.session is not None:
            self.session.detach()

    # -- checkpoints ---------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The states of all ranks, on rank 0, which writes the checkpoint; called on every rank."""
        return {} if self._states is None else {"ranks": self._states.gather()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the states for `on_train_start`: the session does not exist yet."""
        ranks = state_dict.get("ranks")
        if not isinstance(ranks, list) or not all(
            isinstance(part, torch.Tensor) for part in cast(Any, ranks)
        ):
            raise StateError(
                "the checkpoint's state of ThinwireCallback is not a list with one part per rank"
            )
        self._loaded = cast("list[torch.Tensor]", ranks)
