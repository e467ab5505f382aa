"""The time of a step with a large LSTM: A2SGD against top-k, QSGD and dense, on an emulated link.

All methods average the same gradients in turn, in an order that rotates: what disturbs the machine disturbs
all of them. Nothing overlaps, so that the parts of a step add up.
"""

from __future__ import annotations

import statistics
import time
from typing import cast

import msgspec
import torch

from thinwire import log
from thinwire.net.launch import Worker, run_local
from thinwire.net.link import throttle
from thinwire.sessions.gradient import Session
from thinwire.tools.workloads import build, load
from thinwire.tools.workloads.models import loss

WORKERS = 2
BATCH = 1
# A V100 computes about a hundred times as fast as two cores, so 100 Gbit/s there is 1 Gbit/s here.
LINK = "1gbit,latency=50us"
HOURS = 4 * 3600.0


class Step(msgspec.Struct):
    """Median seconds of the parts of a step, and bytes sent per worker.

    compute: forward and backward pass and optimizer, the same for all methods. work: selecting, coding,
    decoding. network: inside operations on the link.
    """

    compute: float
    exchange: float
    work: float
    network: float
    sent: float

    @property
    def total(self) -> float:
        return self.compute + self.exchange


def times(methods: tuple[str, ...], hidden: tuple[int, ...], rounds: int, link: str) -> dict[str, Step]:
    """Steps of `rounds` rounds, after one that prepares everything; on two local workers."""
    return run_local(_times, WORKERS, methods, hidden, rounds, link, timeout=HOURS, group_timeout=900.0)[0]


def _times(
    worker: Worker, methods: tuple[str, ...], hidden: tuple[int, ...], rounds: int, link: str
) -> dict[str, Step]:
    log.quiet()
    data = load("words")
    model = build("lstm", data, 0, hidden)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # Every tensor goes through the method, as in the papers.
    sessions = {m: Session(model.named_parameters(), m, dense_below=0) for m in methods}
    for session in sessions.values():
        throttle(session, link)
    averaged = {name: torch.empty_like(p) for name, p in model.named_parameters()}
    order = torch.Generator().manual_seed(1 + worker.rank)
    computed: list[float] = []
    found: dict[str, list[Step]] = {method: [] for method in methods}
    for number in range(rounds + 1):
        inputs, targets = data.batch(torch.randint(len(data.inputs), (BATCH,), generator=order))
        began = time.perf_counter()
        optimizer.zero_grad()
        loss(data, model(inputs), targets).backward()
        backward = time.perf_counter() - began
        for method in methods[number % len(methods) :] + methods[: number % len(methods)]:
            for name, parameter in model.named_parameters():
                averaged[name].copy_(cast(torch.Tensor, parameter.grad))
            found[method].append(_exchange(sessions[method], averaged))
        began = time.perf_counter()
        optimizer.step()
        computed.append(backward + time.perf_counter() - began)
    for session in sessions.values():
        session.detach()
    return {method: _median(computed[1:], steps[1:]) for method, steps in found.items()}


def _exchange(session: Session, gradients: dict[str, torch.Tensor]) -> Step:
    torch.distributed.barrier()  # who waits for the other's computation does not communicate yet
    meter = session.meter
    before = (meter.work_seconds, meter.network_seconds, meter.sent_bytes)
    began = time.perf_counter()
    session.average(gradients, in_place=True)
    took = time.perf_counter() - began
    work, network, sent = meter.work_seconds, meter.network_seconds, meter.sent_bytes
    return Step(0.0, took, work - before[0], network - before[1], sent - before[2])


def _median(computed: list[float], steps: list[Step]) -> Step:
    parts = (statistics.median(getattr(one, part) for one in steps) for part in Step.__struct_fields__[1:])
    return Step(statistics.median(computed), *parts)
