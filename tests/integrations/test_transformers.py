"""ThinwireCallback in a real Hugging Face Trainer on two processes."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tests.integrations.common import (
    ADAM,
    METHODS,
    SAVED,
    STEPS,
    batch,
    environment,
    exact_steps,
    flat,
    network,
    same_ends,
    seen_by_auto,
)
from thinwire.errors import ConfigError
from thinwire.net.launch import Worker, run_local


class Model(nn.Module):
    """Returns the loss first, as the models of the library do."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": cross_entropy(self.network(inputs), labels)}


class Points(torch.utils.data.Dataset):
    """Every item is a batch's row; shuffled by the Trainer."""

    def __init__(self) -> None:
        batches = [batch(step, 0) for step in range(40)]
        self.inputs, self.labels = (torch.cat(parts) for parts in zip(*batches, strict=True))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"inputs": self.inputs[index], "labels": self.labels[index]}


def trainer_in(folder: Path, method: str, steps: int = STEPS) -> tuple:
    from transformers import Trainer, TrainingArguments

    from thinwire.integrations.transformers import ThinwireCallback

    sgd = {} if method == ADAM else {"optim": "sgd", "learning_rate": 0.1}  # else the Trainer's defaults
    arguments = TrainingArguments(
        **sgd,
        output_dir=str(folder),
        max_steps=steps,
        save_steps=SAVED,
        logging_steps=2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        use_cpu=True,
        ddp_backend="gloo",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(Model(), arguments, train_dataset=Points())
    callback = ThinwireCallback(trainer, method, dense_below=0)
    trainer.add_callback(callback)
    return trainer, callback


def train(worker: Worker, folder: str) -> dict[str, dict]:
    environment(worker)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    from thinwire.integrations.transformers import ThinwireCallback

    found = {}
    for method in METHODS:
        path = Path(folder) / method.partition("(")[0]
        trainer, callback = trainer_in(path, method)
        trainer.train()
        logged = [
            entry["thinwire/bytes_sent"] for entry in trainer.state.log_history if "thinwire/steps" in entry
        ]
        straight = flat(trainer.model), callback.session.metrics()
        exact = exact_steps(trainer.optimizer.optimizer)
        trainer, callback = trainer_in(path, method)
        trainer.train(resume_from_checkpoint=str(path / f"checkpoint-{SAVED}"))
        resumed = flat(trainer.model), callback.session.metrics()
        found[method] = {"straight": straight, "resumed": resumed, "logged": logged, "exact": exact}
    trainer, callback = trainer_in(Path(folder) / "auto", "auto", steps=2)  # before it measures and chooses
    trainer.train()
    assert seen_by_auto(callback.session) == [trainer.optimizer.optimizer]
    with pytest.raises(ConfigError, match="takes the trainer first, not a str"):
        ThinwireCallback("topk", "topk")
    trainer, callback = trainer_in(path, "topk")
    trainer._wrap_model = lambda model, **options: trainer.model_wrapped  # as if there were one process
    trainer.accelerator.prepare = lambda *given: given
    with pytest.raises(ConfigError, match="has not wrapped the model in DistributedDataParallel"):
        trainer.train()
    return found


def test_a_resumed_training_ends_with_the_same_bits(tmp_path: Path) -> None:
    first, second = run_local(train, 2, str(tmp_path), timeout=400)
    same_ends(first, second)
    for method in METHODS:
        for found in (first[method], second[method]):
            assert len(found["logged"]) == STEPS // 2
            assert found["logged"] == sorted(found["logged"])
