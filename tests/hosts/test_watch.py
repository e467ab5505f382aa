"""The times of a training loop: those of all its optimizers, which may step as they like."""

import time

import torch

from tests.hosts.common import mlp, square_loss
from thinwire.core.optimizers import Optimizers
from thinwire.hosts.watch import Watch

NAP = 0.01


class Slow(torch.optim.SGD):
    def step(self) -> None:
        time.sleep(NAP)


def test_the_steps_of_all_optimizers_are_added_up() -> None:
    model = mlp()
    first, second, *rest = model.parameters()
    optimizers = [Slow([p], lr=0.1) for p in (first, second)] + [torch.optim.SGD(rest, lr=0.1)]
    watch = Watch()
    watch.start(model, Optimizers(optimizers))
    for step in range(5):
        square_loss(model, 0, step).backward()
        time.sleep(10 * NAP)  # not a part of any
        for optimizer in optimizers:
            optimizer.step()
        optimizers[0].step()  # a second time
    found = watch.compute()
    assert len(watch.rest) == 5
    assert 3 * NAP <= found.rest < 10 * NAP
    assert found.forward > 0
    assert found.backward > 0
    watch.stop()
    optimizers[0].step()
    assert len(watch.rest) == 5
    assert not watch.stops
