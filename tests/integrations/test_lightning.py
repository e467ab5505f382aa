"""ThinwireCallback in a real Lightning Trainer on two processes."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.hosts.common import muon_and_adamw
from tests.integrations.common import (
    ADAM,
    METHODS,
    SAVED,
    SEVERAL,
    STEPS,
    batch,
    environment,
    exact_steps,
    flat,
    network,
    optimizer_for,
    seen_by_auto,
)
from thinwire.errors import ConfigError
from thinwire.net.launch import Worker, run_local


def fit(folder: Path, method: str, *, resume: Path | None = None, **options: object) -> tuple:
    """Train to the last step; returns the module, the callback and the count of exact steps of AdamW."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    from thinwire.integrations.lightning import ThinwireCallback

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def training_step(self, given: torch.Tensor, index: int) -> torch.Tensor:
            inputs, labels = batch(self.global_step, self.global_rank)
            return cross_entropy(self.network(inputs), labels)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_for(method, self.parameters())

    callback = ThinwireCallback(method, dense_below=0)
    saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=SAVED, save_top_k=-1)
    settings = {"accelerator": "cpu", "devices": 2, "strategy": "ddp", "max_steps": STEPS} | options
    trainer = Trainer(
        **settings,
        callbacks=[callback, saving],
        logger=CSVLogger(folder),
        log_every_n_steps=2,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader(torch.arange(100)), ckpt_path=resume)
    return module, callback, exact_steps(trainer.optimizers[0])


def fit_several(folder: Path, method: str, *, resume: Path | None = None, often: bool = False) -> tuple:
    """Muon and AdamW in manual optimisation; Lightning counts each of their steps."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    from thinwire.integrations.lightning import ThinwireCallback

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.network = network()

        def training_step(self, given: torch.Tensor, index: int) -> None:
            optimizers = self.optimizers()
            inputs, labels = batch(self.global_step // 2, self.global_rank)
            for optimizer in optimizers:
                optimizer.zero_grad()
            self.manual_backward(cross_entropy(self.network(inputs), labels))
            for optimizer in optimizers:
                optimizer.step()
            if often:
                optimizers[0].step()
                optimizers[0].step()

        def configure_optimizers(self) -> list[torch.optim.Optimizer]:
            return muon_and_adamw(self)

    callback = ThinwireCallback(method, dense_below=0)
    saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2 * SAVED, save_top_k=-1)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=2 * STEPS,
        callbacks=[callback, saving],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader(torch.arange(100)), ckpt_path=resume)
    return flat(module), callback.session.metrics()["steps"]


def train_several(worker: Worker, folder: str) -> dict[str, tuple[torch.Tensor, bool, float]]:
    environment(worker)
    warnings.simplefilter("ignore")
    found = {}
    for method in SEVERAL:
        path = Path(folder) / method.partition("(")[0]
        straight, steps = fit_several(path, method)
        resumed, _ = fit_several(path / "again", method, resume=path / f"step={2 * SAVED}.ckpt")
        found[method] = straight, torch.equal(straight, resumed), steps
    with pytest.raises(ConfigError, match=r"Muon \(optimizer\[0\]\) steps a second time before AdamW"):
        fit_several(Path(folder), "localsgd(every=2)", often=True)
    return found


def test_several_optimizers_in_manual_optimisation(tmp_path: Path) -> None:
    first, second = run_local(train_several, 2, str(tmp_path), timeout=400)
    for method in SEVERAL:
        straight, same, steps = first[method]
        assert same, f"{method}: a resumed fit ends elsewhere"
        assert second[method][1]
        assert steps == STEPS
        assert torch.equal(straight, second[method][0]), f"{method}: replicas differ at the end"


def train(worker: Worker, folder: str) -> dict[str, dict]:
    environment(worker)
    warnings.simplefilter("ignore")
    found = {}
    for method in METHODS:
        path = Path(folder) / method.partition("(")[0]
        module, callback, exact = fit(path, method)
        straight = flat(module), callback.session.metrics()
        module, callback, again = fit(path / "again", method, resume=path / f"step={SAVED}.ckpt")
        resumed = flat(module), callback.session.metrics()
        found[method] = {"straight": straight, "resumed": resumed, "exact": exact}
        assert exact == again
    _, callback, _ = fit(Path(folder) / "auto", "auto", max_steps=2)  # before it measures and chooses
    assert [type(each) for each in seen_by_auto(callback.session)] == [torch.optim.SGD]
    with pytest.raises(ConfigError, match=r'Trainer\(strategy="ddp"\), not SingleDeviceStrategy'):
        fit(Path(folder), "topk", devices=1, strategy="auto")
    return found


def test_a_resumed_fit_ends_with_the_same_bits(tmp_path: Path) -> None:
    first, second = run_local(train, 2, str(tmp_path), timeout=400)
    for method in METHODS:
        for found in (first[method], second[method]):
            (straight, counted), (resumed, counted_on) = found["straight"], found["resumed"]
            assert torch.equal(straight, resumed), method
            assert found["exact"] == ({3.0} if method == ADAM else set()), method
            for name in ("steps", "bytes_sent", "rounds", "residual_norm", "ratio_to_dense"):
                assert counted[name] == counted_on[name], f"{method}: {name}"
            assert counted["steps"] == STEPS
            assert torch.equal(straight, first[method]["straight"][0]), (
                f"{method}: replicas differ at the end"
            )
        (log,) = (tmp_path / method.partition("(")[0] / "lightning_logs").rglob("metrics.csv")
        lines = log.read_text().splitlines()
        column = lines[0].split(",").index("thinwire/bytes_sent")
        sent = [float(line.split(",")[column]) for line in lines[1:]]
        assert len(sent) == STEPS // 2
        assert sent == sorted(sent)
