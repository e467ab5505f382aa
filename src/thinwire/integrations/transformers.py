"""The Hugging Face Trainer: a callback that attaches a session, logs what it costs, and saves it.

    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.add_callback(ThinwireCallback(trainer, "adam(warmup=400)"))  # AdamW is the default
    trainer.train()

Needs `pip install 'thinwire[transformers]'`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from torch.nn.parallel import DistributedDataParallel

from thinwire.averaging.analysis import is_analysed
from thinwire.averaging.base import Schedule
from thinwire.core.exchange import Exchange
from thinwire.errors import ConfigError
from thinwire.hosts.attach import attach
from thinwire.integrations.rank_states import RankStates, finish
from thinwire.methods.registry import parse
from thinwire.sessions.base import BaseSession
from thinwire.sessions.checkpoint import OnResize

try:
    from transformers import trainer_utils
    from transformers.trainer_callback import TrainerCallback
except ImportError as error:
    raise ImportError(
        "thinwire.integrations.transformers needs: pip install 'thinwire[transformers]'"
    ) from error


class ThinwireCallback(TrainerCallback):
    """Trains with a method under the Trainer's DDP.

    The session begins with `trainer.train()` and is at `callback.session`, also afterwards. Its metrics are
    logged with the loss, as "thinwire/bytes_sent" and so on, of rank 0.

    Every rank writes a file of its own into the Trainer's checkpoints, and
    `trainer.train(resume_from_checkpoint=...)` continues from there. With a schedule the model in a
    checkpoint is rank 0's; after the last step all ranks have the same.

    Args:
        trainer: the one that gets this callback; callbacks are given the model without its wrapper.
        method: as for `thinwire.attach`.
        on_resize: what becomes of residuals if a checkpoint is continued with another number of ranks.
        options: other arguments of `thinwire.attach`, such as `dense_below`.
    """

    def __init__(
        self,
        trainer: Any,
        method: str | Mapping[str, Any] | Exchange | Schedule,
        *,
        on_resize: OnResize = "sum",
        **options: Any,
    ) -> None:
        if not hasattr(trainer, "model_wrapped"):
            raise ConfigError(
                f"ThinwireCallback takes the trainer first, not a {type(trainer).__name__}: "
                "trainer.add_callback(ThinwireCallback(trainer, method))"
            )
        self.session: BaseSession | None = None
        self._trainer = trainer
        self._method = method
        self._on_resize: OnResize = on_resize
        self._options = options
        self._states: RankStates | None = None
        self._resume: Any = None
        self._note_resume()

    def _note_resume(self) -> None:
        """Callbacks are not told which checkpoint is continued: note the argument of `trainer.train`."""
        train = self._trainer.train

        @functools.wraps(train)
        def noted(resume_from_checkpoint: Any = None, *args: Any, **named: Any) -> Any:
            self._resume = resume_from_checkpoint
            try:
                return train(resume_from_checkpoint, *args, **named)
            finally:
                self._detach()

        self._trainer.train = noted

    # -- the session ---------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attach to the wrapped model; the Trainer has loaded the model and the optimizer by now."""
        trainer = self._trainer
        model = trainer.model_wrapped
        if not isinstance(model, DistributedDataParallel):
            raise ConfigError(
                f"the Trainer has not wrapped the model in DistributedDataParallel, but in "
                f"{type(model).__name__}: start the script with torchrun, without FSDP and DeepSpeed"
            )
        if state.is_hyper_param_search:
            raise ConfigError("ThinwireCallback does not serve a hyperparameter search")
        optimizer = trainer.optimizer.optimizer
        session = attach(
            model,
            cast(str, self._method),
            optimizer=optimizer,
            scaler=trainer.accelerator.scaler,
            **self._known(state.max_steps),
            **self._options,
        )
        self.session = session
        self._states = RankStates(session, model, optimizer, self._on_resize)
        if self._resume:
            newest = cast(Any, trainer_utils).get_last_checkpoint
            self._states.read(Path(newest(args.output_dir) if self._resume is True else self._resume))

    def _known(self, steps: int) -> dict[str, int]:
        """The number of steps, for a method that asks for it."""
        return {"steps": steps} if self._method != "auto" and is_analysed(parse(self._method)) else {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After the last step make the replicas equal, before the last evaluation and checkpoint."""
        if self.session is not None and state.global_step >= state.max_steps:
            finish(self.session)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write this rank's file beside the others."""
        if self._states is not None and not args.save_only_model:
            self._states.write(Path(args.output_dir) / f"checkpoint-{state.global_step}")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Log the metrics after every loss."""
        if self.session is not None and "loss" in (logs or {}):
            found = self.session.metrics()
            self._trainer.log({f"thinwire/{name}": value for name, value in found.items()})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make the replicas equal if the training was stopped early, unless the best model was loaded."""
        best = args.load_best_model_at_end and state.best_model_checkpoint is not None
        if self.session is not None and state.global_step < state.max_steps and not best:
            finish(self.session)
        self._detach()

    def _detach(self) -> None:
        self._states = None
        if self.session is not None:
            self.session.detach()
