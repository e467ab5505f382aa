"""Every schedule on a GPU, as far as a machine without one can tell."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.devices.shadow import Device, Shadow, device
from tests.devices.test_methods import Watched
from tests.hosts.common import mlp
from thinwire import kernels, list_schedules, parse
from thinwire.net.rank_info import RankInfo
from thinwire.sessions import periodic
from thinwire.sessions.periodic import PeriodicSession

SIZE, EVERY = 2, 2
SCHEDULES = [
    *(f"{name}({'groups' if name == 'spasgd' else 'every'}={EVERY})" for name in list_schedules()),
    "localsgd(every=2, fragments=2)",
    "periodic(every=2, exchange=topk(ratio=0.2))",
]


def replicas(method: str, cuda: Device | None) -> tuple[list[nn.Module], list[PeriodicSession]]:
    models = [mlp(depth=2) for _ in range(SIZE)]
    for model in models:
        for layer in model if cuda is not None else ():
            for name, parameter in list(layer.named_parameters()):
                setattr(layer, name, nn.Parameter(cuda.put(parameter), requires_grad=False))
    for model in models:
        for parameter in model.parameters():
            parameter.requires_grad_(True)
    sessions = [
        PeriodicSession(
            model,
            replace(parse(method), warmup=0),
            torch.optim.SGD(model.parameters(), lr=0.1),
            rank_info=RankInfo(rank, SIZE),
            dense_below=64,
        )
        for rank, model in enumerate(models)
    ]
    return models, sessions


def advance(models: list[nn.Module], sessions: list[PeriodicSession], driver: Watched, step: int) -> None:
    """A step that adds noise in place of a gradient, and a sync round if one is due."""
    for rank, model in enumerate(models):
        rng = torch.Generator().manual_seed(100 * step + rank)
        for parameter in model.parameters():
            noise = 0.1 * torch.randn(parameter.shape, generator=rng)
            with torch.no_grad():
                parameter.add_(noise.to(parameter.device))
    programs = [session.advance() for session in sessions]
    if programs[0] is not None:
        driver.run(programs)


@pytest.mark.parametrize("method", SCHEDULES)
def test_the_whole_sync_round(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # It refuses tensors of other classes, which those of the shadow device are.
    monkeypatch.setattr(periodic, "check_parameters", lambda *arguments: None)
    here, hosts = replicas(method, None)
    plain, driver = Watched(SIZE), Watched(SIZE)
    with kernels.use_reference():
        for step in range(2 * EVERY):
            advance(here, hosts, plain, step)
        with device() as cuda:
            there, sessions = replicas(method, cuda)
            for step in range(2 * EVERY):
                cuda.waits, driver.framed = Counter(), 0
                advance(there, sessions, driver, step)
    for model, other in zip(there, here, strict=True):
        for mine, truth in zip(model.parameters(), other.parameters(), strict=True):
            assert isinstance(mine, Shadow)
            assert torch.equal(mine.value, truth)
    tensors = len(list(here[0].parameters()))
    assert driver.framed, "the last step has a sync round"
    bound = parse(method).host_waits.most(tensors, SIZE) + driver.framed
    assert sum(cuda.waits.values()) <= SIZE * bound, cuda.waits
