"""How often the host waits for the device in a frozen step of `adam`: once for all tensors."""

from types import SimpleNamespace

import pytest
import torch

from tests.devices.shadow import Device, device
from thinwire.methods import Adam
from thinwire.sessions.frozen_adam import _FrozenSteps

SHAPES = ((4, 5), (5,), (3, 2), (7,))


def frozen_step(there: Device, *, fused: bool, scaled: bool = False, rate: float | torch.Tensor = 0.1) -> int:
    """The waits of one step after the warm-up, by an optimizer with two groups."""
    parameters = [there.put(torch.randn(shape)).requires_grad_() for shape in SHAPES]
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate, fused=fused)
    for parameter, shape in zip(parameters, SHAPES, strict=True):
        count = torch.tensor(3.0)
        moments = {name: there.put(torch.rand(shape)) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": there.put(count) if fused else count, **moments}
        parameter.grad = there.put(torch.randn(shape))
    if scaled:  # as a GradScaler does
        optimizer.grad_scale, optimizer.found_inf = (there.put(torch.tensor(x)) for x in (8.0, 0.0))
    named = {str(number): parameter for number, parameter in enumerate(parameters)}
    before = [parameter.value.clone() for parameter in parameters]
    there.waits.clear()
    steps = _FrozenSteps(Adam(warmup=3), optimizer, SimpleNamespace(given_step=10, parameters=named))
    steps.before(optimizer, (optimizer,), {})
    waits = there.by("sessions")
    assert sum(there.waits.values()) == waits, there.waits
    pairs = zip(before, parameters, strict=True)
    assert not any(torch.equal(old, parameter.value) for old, parameter in pairs), "it was a step"
    return waits


@pytest.mark.parametrize("fused", [False, True])
def test_the_host_waits_once_for_the_counts_that_are_on_the_device(fused: bool) -> None:
    with device() as there:
        assert frozen_step(there, fused=fused) == fused
        rate = there.put(torch.tensor(0.1))
        assert frozen_step(there, fused=fused, rate=rate) == fused + 2, "and for the rate of each group"
        if fused:
            assert frozen_step(there, fused=True, scaled=True) == 3, "and for what a GradScaler tells"
