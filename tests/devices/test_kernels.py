"""Every reference kernel keeps to the device of its tensors, and none makes the host wait without need."""

import pytest
import torch
from torch.utils import _pytree as pytree

from tests.devices import kernel_calls
from tests.devices.kernel_calls import CALLS, DATA_DEPENDENT
from tests.devices.shadow import Shadow, device
from thinwire import kernels

# No tensors among their arguments or results, or not a kernel.
NO_KERNELS = {"SIGN_TILE", "Chunks", "PayloadError", "PerChunk", "block_of", "prepare", "use_reference"}
each = pytest.mark.parametrize("name", CALLS)


def test_every_kernel_is_called() -> None:
    assert set(kernels.__all__) - NO_KERNELS <= set(CALLS)


@each
@pytest.mark.quick
def test_on_meta_tensors(name: str) -> None:
    """Without data: a constant on the CPU in the middle of a kernel shows at once."""
    if name in DATA_DEPENDENT:
        pytest.skip("its result depends on the data, which meta tensors have not: see the shadow device")
    results = CALLS[name](lambda tensor: tensor.to("meta"))
    for tensor in pytree.tree_leaves(results):
        assert not isinstance(tensor, torch.Tensor) or tensor.device.type == "meta"


@each
def test_on_the_shadow_device(name: str) -> None:
    """The results of the reference on the CPU, bit for bit, with tensors that stay on the device."""
    with kernels.use_reference():
        expected = pytree.tree_leaves(CALLS[name](torch.clone))
        with device() as cuda:
            found = pytree.tree_leaves(CALLS[name](cuda.put))
    assert cuda.by("kernels") <= DATA_DEPENDENT.get(name, 0), cuda.waits
    assert (cuda.by("kernels") > 0) == (name in DATA_DEPENDENT)
    for mine, other in zip(found, expected, strict=True):
        if isinstance(other, torch.Tensor):
            assert isinstance(mine, Shadow)
            assert torch.equal(mine.value, other)
        elif isinstance(mine, Shadow):  # a flag
            assert bool(mine.value) == other
        else:
            assert mine == other


def test_damaged_index_codes_are_noticed_on_the_device() -> None:
    """Nothing is checked when they are decoded there: the flag tells."""
    codes, n, k, low = kernel_calls.codes, kernel_calls.N, 40, kernel_calls.LOW
    rng = torch.Generator().manual_seed(1)
    honest = {
        "bitmap": (codes.bitmap(kernel_calls.INDICES, n), lambda code: codes.from_bitmap(code, n, k)),
        "elias-fano": (
            codes.elias_fano(kernel_calls.INDICES, n, low),
            lambda code: codes.from_elias_fano(code, n, k, low),
        ),
        "rice": (codes.rice(kernel_calls.INDICES, n, low), lambda code: codes.from_rice(code, n, k, low)),
    }
    with device() as cuda:
        for name, (code, decode) in honest.items():
            refused = 0
            for _ in range(40):
                damaged = code.clone()
                damaged[torch.randint(code.numel(), (1,), generator=rng)] ^= 1 << int(
                    torch.randint(8, (1,), generator=rng)
                )
                there = decode(cuda.put(damaged))
                valid = bool(kernel_calls.ascending_flag(there, n).value)
                try:
                    here = decode(damaged)
                except kernels.PayloadError:
                    refused += 1
                    assert not valid or name == "bitmap", name
                else:
                    assert valid, name
                    assert torch.equal(there.value, here), name
            assert refused, name
