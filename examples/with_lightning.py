"""Lightning with thinwire: a callback is all. Metrics and checkpoints are in out/lightning.

torchrun --standalone --nproc-per-node 2 examples/with_lightning.py
"""

import argparse

import torch
from ddp_before import data
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from thinwire.integrations.lightning import ThinwireCallback

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--folder", default="out/lightning")
arguments = parser.parse_args()


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        return cross_entropy(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


callback = ThinwireCallback("adam(warmup=20)")
settings = {"accelerator": "cpu", "devices": 2, "max_steps": arguments.steps}
trainer = Trainer(**settings, strategy="ddp", callbacks=[callback], logger=CSVLogger(arguments.folder))
trainer.fit(Classifier(), DataLoader(TensorDataset(*data()), batch_size=32, shuffle=True))
trainer.print(f"{callback.session.metrics()['bytes_sent'] / arguments.steps:,.0f} bytes sent per step")
