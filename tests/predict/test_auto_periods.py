"""auto chooses the period of a schedule by the link, and another one when the link changes.

Link, computing time and step times are injected, and a step computes for minutes: nothing depends on how fast
this machine is.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.hosts.common import flat
from thinwire.averaging.base import PeriodOptions
from thinwire.hosts import auto
from thinwire.net.costs import Link
from thinwire.net.launch import Worker, run_local
from thinwire.predict import language
from thinwire.predict import probe as probing
from thinwire.predict.timeline import NOTHING, Compute

WIDTH, LAYERS, COMPUTE, WARMUP = 128, 8, 200.0, 4
# The signs of all layers, with what is sent beside them, take about six steps or next to nothing.
SLOW, FAST = (Link(1e-3, WIDTH**2 * LAYERS / 8 / (steps * COMPUTE)) for steps in (6, 0.01))
SHORT, LONG = (f"postlocal(every={every}, warmup={WARMUP}, fragments={every})" for every in (2, 8))


def changing(worker: Worker) -> list[dict[str, object]]:
    """Train on a slow link, then on a fast one, then on the slow one again."""
    auto.CHECK_EVERY, auto.LEAST_CYCLES, auto.PATIENCE = 4, 1, 1
    auto.CANDIDATES = ("dense",)
    rows = {"dense": 0.0, str(thinwire.parse(SHORT)): 0.0, str(thinwire.parse(LONG)): 0.03}
    language.behind = lambda: rows
    language.recovered = lambda: dict.fromkeys(rows, 0.9)
    present = {"link": SLOW, "step": 0.0}
    probing.calibrate_with = lambda *_, **__: probing.Calibration(present["link"], NOTHING)
    torch.manual_seed(3)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session = thinwire.attach(model, "auto", optimizer=optimizer)
    assert isinstance(session, auto.AutoSession)
    session._watch.compute = lambda: Compute.of(COMPUTE)
    session._clock.typical = lambda: present["step"] or session._usual
    session._clock.outside = lambda: 0.0
    rng = torch.Generator().manual_seed(worker.rank)
    seen: list[dict[str, object]] = []

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(4, WIDTH, generator=rng)).square().mean().backward()
            optimizer.step()

    def train_until_switched(most: int = 30) -> None:
        before = str(session.method)
        while str(session.method) == before and most:
            train(1)
            most -= 1

    def note() -> None:
        seen.append(
            {
                "method": str(session.method),
                "step": session.step,
                "meter": session.meter.steps,
                "reasons": session.reasons,
            }
        )

    train(auto.STEPS + 1)
    note()
    train(3 * WARMUP)  # steps of the warm-up are not compared, and no other step is unexpected
    note()
    present.update(link=FAST, step=COMPUTE / 2)
    train_until_switched()
    present["step"] = 0.0
    note()
    train(10)
    present.update(link=SLOW, step=5 * COMPUTE)
    train_until_switched()
    note()
    session.reconcile()
    seen.append({"parameters": flat(model)})
    session.detach()
    return seen


def test_auto_follows_the_link_with_the_period_of_a_schedule() -> None:
    ranks = run_local(changing, 2, timeout=250)
    *first, last = ranks[0]
    assert torch.equal(ranks[1][-1]["parameters"], last["parameters"])
    assert [each["method"] for each in first] == [each["method"] for each in ranks[1][:-1]]
    slow, later, fast, again = (thinwire.parse(each["method"]) for each in first)
    assert isinstance(slow, PeriodOptions)
    assert 4 <= slow.period <= 8
    assert slow.fragments == slow.period
    assert str(fast) == SHORT, "the wire is hidden with a shorter period as well"
    assert slow == later == again
    assert any("the wire is hidden" in reason for reason in first[0]["reasons"])
    # The count of steps goes on, so the warm-up is not repeated.
    steps = [each["step"] for each in first]
    assert steps[0] == 1
    assert steps == [each["meter"] - auto.STEPS for each in first]
