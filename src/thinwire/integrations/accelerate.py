"""Accelerate: attach after `prepare`, and let `save_state` and `load_state` take every rank's state along.

    model, optimizer = accelerator.prepare(model, optimizer)
    session = attach(accelerator, model, "adam(warmup=400)", optimizer)  # of an AdamW

`thinwire.attach(model, ..., optimizer=optimizer)` takes prepared objects as well, without the checkpoints.
Needs `pip install 'thinwire[accelerate]'`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.averaging.base import Schedule
from thinwire.core.exchange import Exchange
from thinwire.core.optimizers import Given
from thinwire.errors import ConfigError
from thinwire.hosts.attach import attach as attach_prepared
from thinwire.integrations.rank_states import RankStates
from thinwire.sessions.base import BaseSession
from thinwire.sessions.checkpoint import OnResize

try:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
except ImportError as error:
    raise ImportError("thinwire.integrations.accelerate needs: pip install 'thinwire[accelerate]'") from error


def attach(
    accelerator: Accelerator,
    model: nn.Module,
    method: str | Mapping[str, Any] | Exchange | Schedule,
    optimizer: Given = None,
    *,
    on_resize: OnResize = "sum",
    **options: Any,
) -> BaseSession:
    """Train a prepared model with a method; `accelerator.save_state` and `load_state` include the session.

    Every rank writes a file of its own into the folder of `save_state`. With a schedule the model in there is
    rank 0's: call `session.finish()` on every rank after the last step.

    Args:
        accelerator: the one that has prepared model and optimizer.
        model: what `accelerator.prepare` returned.
        method: as for `thinwire.attach`.
        optimizer: what `accelerator.prepare` returned, one or a list; a schedule needs it.
        on_resize: what becomes of residuals if a checkpoint is continued with another number of ranks.
        options: other arguments of `thinwire.attach`, such as `dense_below`.
    """
    if not isinstance(model, DistributedDataParallel):
        raise ConfigError(
            f"the model is not wrapped in DistributedDataParallel, but a {type(model).__name__}: call "
            "accelerator.prepare first, and start the script with torchrun or `accelerate launch`"
        )
    several = optimizer if isinstance(optimizer, list | tuple) else [] if optimizer is None else [optimizer]
    if not all(isinstance(each, AcceleratedOptimizer) for each in several):
        raise ConfigError("the optimizer is not prepared: give what accelerator.prepare returned for it")
    scaler = cast(Any, accelerator).scaler
    session = attach_prepared(model, cast(str, method), optimizer=optimizer, scaler=scaler, **options)
    register(accelerator, RankStates(session, model, optimizer, on_resize))
    return session


def register(accelerator: Accelerator, states: RankStates) -> None:
    """Save and load these states with those of the accelerator."""
    loading = _Loading(states)

    def save(models: object, weights: object, folder: str) -> None:
        states.write(Path(folder))

    def load(models: object, folder: str) -> None:
        loading.folder = Path(folder)

    handles = accelerator.register_save_state_pre_hook(save), accelerator.register_load_state_pre_hook(load)
    # Objects like this one are loaded last, after the model and the optimizer.
    accelerator.register_for_checkpointing(loading)

    def remove() -> None:
        for handle in handles:
            handle.remove()
        cast("list[Any]", cast(Any, accelerator)._custom_objects).remove(loading)

    states.session.on_detach(remove)


class _Loading:
    """Loads the ranks' files when Accelerate has loaded everything else."""

    def __init__(self, states: RankStates) -> None:
        self.folder: Path | None = None
        self._states = states

    def state_dict(self) -> dict[str, Any]:
        """Nothing: every rank has written its own file."""
        return {"files": "thinwire-rank-*"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        folder, self.folder = self.folder, None
        if folder is not None:
            self._states.read(folder)
