"""A session on what Accelerate has prepared, on two processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

import thinwire
from tests.hosts.common import muon_and_adamw
from tests.integrations.common import (
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
    same_ends,
    seen_by_auto,
)
from thinwire.errors import ConfigError
from thinwire.net.launch import Worker, run_local


def train(worker: Worker, folder: str) -> dict[str, dict]:
    environment(worker)
    from accelerate import Accelerator

    from thinwire.integrations.accelerate import attach

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)

    def run(method: str, path: Path, *, resume: bool = False) -> tuple:
        model = network()
        model, optimizer = accelerator.prepare(model, optimizer_for(method, model.parameters()))
        session = attach(accelerator, model, method, optimizer, dense_below=0)
        if resume:
            accelerator.load_state(path)
        for step in range(SAVED if resume else 0, STEPS):
            for micro in range(2):
                with accelerator.accumulate(model):
                    inputs, labels = batch(2 * step + micro, worker.rank)
                    accelerator.backward(cross_entropy(model(inputs), labels))
                    optimizer.step()
                    optimizer.zero_grad()
            if step + 1 == SAVED and not resume:
                accelerator.save_state(path)
        if session.reconcile_every is not None:
            session.reconcile()
        counted = session.metrics()
        session.detach()
        accelerator.free_memory()
        return flat(model), counted, exact_steps(optimizer.optimizer)

    found = {}
    for method in METHODS:
        path = Path(folder) / method.partition("(")[0]
        *straight, exact = run(method, path)
        *resumed, again = run(method, path, resume=True)
        found[method] = {"straight": straight, "resumed": resumed, "exact": exact}
        assert exact == again

    # A prepared optimizer is also good for thinwire.attach itself, and for a schedule.
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    session = thinwire.attach(model, "localsgd(every=2)", optimizer=optimizer)
    assert list(session.optimizers) == [optimizer.optimizer]
    session.detach()
    session = attach(accelerator, model, "auto", optimizer)
    assert seen_by_auto(session) == [optimizer.optimizer]
    session.detach()
    with pytest.raises(ConfigError, match="auto chooses by the optimizer"):
        attach(accelerator, model, "auto")
    with pytest.raises(ConfigError, match=r"not wrapped in DistributedDataParallel, but a Sequential"):
        attach(accelerator, network(), "topk", optimizer)
    with pytest.raises(ConfigError, match="the optimizer is not prepared"):
        attach(accelerator, model, "topk", optimizer.optimizer)
    return found


def several(worker: Worker, folder: str) -> dict[str, bool]:
    """Muon and AdamW, both prepared: six steps and two from the saved state, or eight at once."""
    environment(worker)
    from accelerate import Accelerator

    from thinwire.integrations.accelerate import attach

    accelerator, found = Accelerator(cpu=True, gradient_accumulation_steps=2), {}
    for method in SEVERAL:
        path, ends = Path(folder) / method.partition("(")[0], []
        for resume in (False, True):
            model = network()
            model, *optimizers = accelerator.prepare(model, *muon_and_adamw(model))
            session = attach(accelerator, model, method, optimizers, dense_below=0)
            if resume:
                accelerator.load_state(path)
            for step in range(SAVED if resume else 0, STEPS):
                for micro in range(2):
                    with accelerator.accumulate(model):
                        inputs, labels = batch(2 * step + micro, worker.rank)
                        accelerator.backward(cross_entropy(model(inputs), labels))
                        for optimizer in optimizers:
                            optimizer.step()
                        for optimizer in optimizers:
                            optimizer.zero_grad()
                if step + 1 == SAVED and not resume:
                    accelerator.save_state(path)
            found[f"{method} counts"] = session.metrics()["steps"] == STEPS
            if session.reconcile_every is not None:
                session.reconcile()
            session.detach()
            accelerator.free_memory()
            ends.append(flat(model))
        found[method] = torch.equal(*ends)
    model = network()
    model, muon, adamw = accelerator.prepare(model, *muon_and_adamw(model))
    with pytest.raises(ConfigError, match="the optimizer is not prepared"):
        attach(accelerator, model, "topk", [muon, adamw.optimizer])
    with pytest.raises(
        ConfigError, match=r"no optimizer holds 'module\.0\.weight'|no optimizer holds '0\.weight'"
    ):
        attach(accelerator, model, "topk", adamw)
    with pytest.raises(ConfigError, match="the optimizer is not prepared"):
        attach(accelerator, model, "topk", 3)
    return found


def test_prepared_optimizers_side_by_side(tmp_path: Path) -> None:
    for found in run_local(several, 2, str(tmp_path), timeout=400):
        assert all(found.values()), found


def test_a_loaded_state_ends_with_the_same_bits(tmp_path: Path) -> None:
    first, second = run_local(train, 2, str(tmp_path), timeout=400)
    same_ends(first, second)
