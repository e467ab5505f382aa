"""The throttle against the real thing: the same steps on interfaces that a token bucket makes slow."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist

from thinwire import ConfigError, Session
from thinwire.net.launch import Worker, run_local
from thinwire.net.link import throttle
from thinwire.tools.compare.settings import Comparison, prepare
from thinwire.tools.compare.training import prepare_method
from thinwire.tools.lab import namespaces
from thinwire.tools.lab.hosts import hosts_for
from thinwire.tools.lab.inside import counters
from thinwire.tools.workloads import build, load
from thinwire.tools.workloads.models import loss

PYTORCH = ("pytorch", "pytorch-fp16", "pytorch-powersgd")
METHODS = ("dense", "topk(ratio=0.2)", "qsgd(bits=4)", "powersgd(rank=64)")
SHAPE = (700, 1000)
STEPS = 6
BUSY = 4  # processes a core


@pytest.fixture(autouse=True)
def _needs_namespaces() -> None:
    reason = namespaces.unavailable()
    if reason:
        pytest.skip(reason)


def step_seconds(worker: Worker, link: str) -> dict[str, float]:
    """The shortest step of each method."""
    seconds: dict[str, float] = {}
    tensor = torch.randn(SHAPE, generator=torch.Generator().manual_seed(worker.rank))
    for method in METHODS:
        session = Session([("w", tensor)], method)
        throttle(session, link)
        session.average({"w": tensor})
        times = []
        for _ in range(STEPS):
            dist.barrier()
            begin = time.perf_counter()
            session.average({"w": tensor})
            times.append(time.perf_counter() - begin)
        seconds[method] = min(times)
        session.detach()
    return seconds


def pytorch_step_seconds(worker: Worker, link: str) -> dict[str, float]:
    """The shortest step of each of PyTorch's own methods, as a comparison trains with them."""
    seconds: dict[str, float] = {}
    # Long and narrow matrices: of these PowerSGD sends enough for the link to matter more than processors.
    setting = prepare(Comparison(methods=PYTORCH, link=link, hidden=(20_000,), batch=4))
    data = load(setting.data)
    inputs, targets = data.batch(4 * worker.rank + torch.arange(4))
    for method in PYTORCH:
        trainer = prepare_method(build(setting.model, data, 0, setting.hidden), method, setting)
        times = []
        for _ in range(STEPS + 3):  # PowerSGD begins with two steps that are not compressed
            trainer.optimizer.zero_grad()
            dist.barrier()
            begin = time.perf_counter()
            loss(data, trainer.model(inputs), targets).backward()
            times.append(time.perf_counter() - begin)
            trainer.optimizer.step()
        seconds[method] = min(times[3:])
        trainer.close()
    return seconds


Measured = Callable[[Worker, str], dict[str, float]]


def measure(link: str, steps: Measured) -> dict[str, float]:
    """The slowest rank's best step of each method."""
    with hosts_for(link, 4) as hosts:
        ranks = run_local(steps, 4, link, hosts=hosts)
    return {method: max(rank[method] for rank in ranks) for method in ranks[0]}


@pytest.mark.parametrize(
    ("methods", "steps", "rate", "within"),
    [
        pytest.param(METHODS, step_seconds, "100mbit", 1.15, marks=pytest.mark.slow),
        pytest.param(PYTORCH, pytorch_step_seconds, "50mbit", 1.2, marks=pytest.mark.slow),
    ],
    ids=["thinwire", "pytorch"],
)
def test_steps_under_the_throttle_take_as_long_as_in_the_lab(
    methods: Sequence[str], steps: Measured, rate: str, within: float
) -> None:
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > BUSY * cores:
        pytest.skip(
            f"a load of {load:.0f} on {cores} cores: steps would take as long as other work lets them"
        )
    throttled, real = dict.fromkeys(methods, 1e9), dict.fromkeys(methods, 1e9)
    ratios: dict[str, float] = {}
    # Other work on this machine makes steps longer, never shorter: what is compared are the shortest.
    for _ in range(3):
        for best, link in ((throttled, rate), (real, f"lab:{rate}")):
            best.update({method: min(best[method], found) for method, found in measure(link, steps).items()})
        ratios = {method: throttled[method] / real[method] for method in methods}
        print({method: f"{real[method]:.3f} s in the lab, x {ratios[method]:.3f}" for method in methods})
        if all(1 / within <= ratio <= within for ratio in ratios.values()):
            return
    pytest.fail(f"step times under the throttle, as multiples of those in the lab: {ratios}")


# A frame of 1,514 bytes carries 1,448, and at most one acknowledgement of 66 bytes goes the same way for each
# that comes back: how many are saved depends on how busy the machine is.
MOST_HEADERS = (1514 + 66) / 1448


def carried(worker: Worker) -> tuple[int, int, int]:
    """Bytes of some steps: sent by the meter, sent and received by the kernel."""
    del worker
    session = Session([("w", torch.zeros(SHAPE))], "dense")
    before = counters()
    for _ in range(3):
        session.average({"w": torch.zeros(SHAPE)})
    # What is still in a socket has not been counted: the peer must have it all before the counters are read.
    dist.barrier()
    after, metered = counters(), session.meter.sent_bytes
    session.detach()
    assert before is not None
    assert after is not None
    return metered, after.sent - before.sent, after.received - before.received


def test_a_worker_reads_what_its_interface_has_carried() -> None:
    assert counters() is None
    with hosts_for("lab:none", 2) as hosts:
        for metered, sent, received in run_local(carried, 2, hosts=hosts):
            assert 1.0 <= sent / metered <= MOST_HEADERS
            assert (
                0.9 <= received / metered <= MOST_HEADERS
            )  # the peer's last bytes may still be on their way


def test_as_many_hosts_as_workers() -> None:
    with hosts_for("lab:none", 1) as hosts, pytest.raises(ConfigError, match="3 workers need as many hosts"):
        run_local(carried, 3, hosts=hosts)
