"""The demo: a small network on scikit-learn's handwritten digits, trained by local worker processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from thinwire.errors import ConfigError
from thinwire.launch import Worker, run_local
from thinwire.registry import methods, parse_method

BATCH = 32
HIDDEN = 256
STEPS = 150

# Only other methods make something of these.
WRAPPERS = ("warmup", "route")


@dataclass(frozen=True)
class Result:
    """One method's run. Bytes and rounds are per step and worker."""

    method: str
    accuracy: float
    payload: float
    rounds: float
    sent: float
    ratio: float
    """Of the bytes sent, to those of `dense`."""
    loss: float


def line_up(chosen: Sequence[str] = ()) -> list[str]:
    """The method strings to run: `dense` first, then those chosen, or all that are registered."""
    wanted = chosen or [name for name in methods() if name not in WRAPPERS]
    strings = [str(parse_method(text)) for text in wanted]
    return ["dense", *(text for text in dict.fromkeys(strings) if text != "dense")]


def run(
    chosen: Sequence[str] = (),
    workers: int = 4,
    steps: int = STEPS,
    seeds: int = 1,
    progress: Callable[[str, int], None] | None = None,
) -> list[Result]:
    """Train with each method from the same weights on the same batches; `dense` comes first."""
    if min(workers, steps, seeds) < 1:
        raise ConfigError(f"workers, steps and seeds must be 1 or more, not {workers}, {steps}, {seeds}")
    load()
    strings = line_up(chosen)

    def on_report(rank: int, message: tuple[str, int]) -> None:
        if rank == 0 and progress is not None:
            progress(*message)

    ranks = run_local(_work, workers, strings, steps, seeds, timeout=7200, on_report=on_report)
    outcomes = cast("list[dict[str, Any]]", ranks[0])
    dense = outcomes[0]["sent"]
    return [Result(**one, ratio=one["sent"] / dense if dense else 1.0) for one in outcomes]


def load() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Training images and labels, then those for the test: every fifth."""
    try:
        from sklearn import datasets
    except ImportError:
        raise ConfigError("the demo needs scikit-learn: pip install 'thinwire[demo]'") from None
    found = cast(Any, datasets).load_digits()
    images = torch.tensor(found.data, dtype=torch.float32) / 16
    labels = torch.tensor(found.target)
    test = torch.arange(len(images)) % 5 == 0
    return images[~test], labels[~test], images[test], labels[test]


def network(seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers: list[nn.Module] = [nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(HIDDEN, 10))


def _work(worker: Worker, strings: Sequence[str], steps: int, seeds: int) -> list[dict[str, Any]]:
    outcomes: list[dict[str, Any]] = []
    for method in strings:
        runs = [_train(worker, method, steps, seed) for seed in range(seeds)]
        figures = {key: sum(run[key] for run in runs) / seeds for key in runs[0]}
        outcomes.append({"method": method, **figures})
    return outcomes


def _train(worker: Worker, method: str, steps: int, seed: int) -> dict[str, float]:
    from thinwire.hosts import attach

    images, labels, test_images, test_labels = load()
    model = DistributedDataParallel(network(seed))
    # Without momentum: what random selections hold back comes in bursts, which momentum makes worse.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    session = attach(model, method, optimizer=optimizer)
    order = torch.Generator().manual_seed(1 + seed)
    loss = torch.zeros(())
    for step in range(steps):
        batch = torch.randint(len(images), (worker.size, BATCH), generator=order)[worker.rank]
        optimizer.zero_grad()
        loss = cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
        if worker.rank == 0:
            worker.report((method, step + 1))
    if session.reconcile_every is not None:
        session.reconcile()
    with torch.no_grad():
        guesses = cast(nn.Module, model.module)(test_images).argmax(1)
    meter = session.meter.total
    session.detach()
    return {
        "accuracy": float((guesses == test_labels).float().mean()),
        "payload": meter.payload_bytes / steps,
        "rounds": meter.operations / steps,
        "sent": meter.sent_bytes / steps,
        "loss": float(loss.detach()),
    }
