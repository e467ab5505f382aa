"""Records as a comparison would write them: learning curves and times from simple formulas, by seed."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from msgspec.structs import replace

from thinwire.tools.compare.records import Evaluation, Records, Run, Setting, Step, finite

LAYERS = {
    "0.weight": (1024, 784),
    "0.bias": (1024,),
    "2.weight": (1024, 1024),
    "2.bias": (1024,),
    "4.weight": (10, 1024),
    "4.bias": (10,),
}
COMPUTE = 0.035


@dataclass(frozen=True)
class Entrant:
    method: str
    share: float
    """Of dense's payload."""
    work: float
    """Seconds of compression."""
    slower: float = 1.0
    """How many times as many steps it needs."""
    rounds: int = 1
    fails_at: int | None = None
    ceiling: float = 0.985


HANDFUL = (
    Entrant("dense", 1.0, 0.0),
    Entrant("fp16", 0.5, 0.002),
    Entrant("qsgd(bits=4)", 0.2, 0.006, 1.05),
    Entrant("topk(ratio=0.01)", 0.03, 0.009, 1.25),
    Entrant("powersgd(rank=2)", 0.02, 0.011, 1.1, 2),
    Entrant("dgc(ratio=0.01)", 0.03, 0.01, 1.1),
    Entrant("signsgd(scale='rms')", 0.09, 0.004, 3.0, ceiling=0.962),
)


def setting(**changes: object) -> Setting:
    base = Setting(
        command="thinwire compare --model mlp --data mnist:DATA --link lab:100mbit --target-accuracy 0.97",
        thinwire="0.1.0",
        model="mlp 784-1024-1024-10",
        hidden=(),
        data="mnist:DATA",
        parameters=sum(math.prod(shape) for shape in LAYERS.values()),
        layers=LAYERS,
        workers=4,
        link="100mbit",
        bandwidth=12.5e6,
        latency=100e-6,
        batch=32,
        learning_rate=0.1,
        optimizer="sgd",
        steps=240,
        evaluate_every=10,
        seeds=1,
        measure="accuracy",
        target=0.97,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def made(entrants: tuple[Entrant, ...] = HANDFUL, *, interface: bool = False, **changes: object) -> Records:
    """The records of one comparison."""
    common = setting(**changes)
    steps: list[Step] = []
    tests: list[Evaluation] = []
    runs: list[Run] = []
    for entrant in entrants:
        for seed in range(common.seeds):
            _run(entrant, seed, common, steps, tests, runs, interface)
    return Records(common, steps, tests, runs)


def _run(
    one: Entrant,
    seed: int,
    common: Setting,
    steps: list[Step],
    tests: list[Evaluation],
    runs: list[Run],
    interface: bool,
) -> None:
    rng = random.Random(f"{one.method} {seed}")
    dense = 4 * common.parameters
    payload = dense * one.share
    sent_a_step = 1.5 * payload if one.share >= 0.5 else 3 * payload
    bandwidth = common.bandwidth or math.inf
    wire = sent_a_step / bandwidth + 6 * one.rounds * common.latency
    clock, done, failed = 0.0, 0, None
    reached: tuple[int, float, int] | None = None
    taken: list[float] = []
    value = 0.1
    loss = 2.3
    for step in range(1, common.steps + 1):
        done = step
        taken.append((COMPUTE + one.work + wire) * rng.uniform(0.97, 1.06))
        clock += taken[-1]
        sent = int(sent_a_step * step)
        progress = step / one.slower
        loss = 2.2 * math.exp(-((progress / 18) ** 0.6)) + 0.02
        value = one.ceiling - 0.88 * math.exp(-((progress / 9) ** 0.55))
        if one.fails_at is not None and step >= one.fails_at:
            loss, failed = math.nan, f"diverged: the loss is not a finite number at step {step}"
        steps.append(Step(one.method, seed, step, finite(loss * rng.uniform(0.75, 1.3)), clock, sent, sent))
        if step % 10 == 0 or step == common.steps or failed:
            value += rng.gauss(0, 0.002)
            perplexity = 1e300 if failed else math.exp(loss * 1.05)
            tests.append(
                Evaluation(one.method, seed, step, clock, sent, finite(loss * 1.05), value, perplexity)
            )
            if common.target is not None and common.measure == "accuracy" and value >= common.target:
                reached = (step, clock, sent)
                break
        if failed:
            break
    total = int(sent_a_step * done)
    names = ("target_step", "target_seconds", "target_sent")
    runs.append(
        Run(
            method=one.method,
            seed=seed,
            steps=done,
            loss=finite(loss),
            accuracy=value,
            perplexity=1e300 if failed else math.exp(loss),
            seconds=clock,
            step_seconds=sorted(taken)[len(taken) // 2],
            compute_seconds=COMPUTE,
            compress_seconds=one.work,
            wait_seconds=wire,
            sent=total,
            received=total,
            rounds=float(one.rounds),
            payload=payload,
            layers={
                name: 4 * math.prod(shape) * (one.share if len(shape) > 1 else 1.0)
                for name, shape in LAYERS.items()
            },
            interface_sent=int(total * rng.uniform(1.02, 1.05)) if interface else None,
            failed=failed,
            **dict(zip(names, reached or (None,) * 3, strict=True)),
        )
    )
