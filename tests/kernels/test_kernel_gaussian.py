import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_inputs import choices, counts_for, quick, reference, same, vector, vectors
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from thinwire import kernels
from thinwire.kernels.cpu import gaussian as cpu
from thinwire.kernels.reference import gaussian

KINDS = ("normal", "heavy", "shifted")


@quick
@given(vectors(), choices)
def test_gaussiank_equals_the_reference(x, choice):
    k = counts_for(x.numel(), choice)
    indices, values = kernels.gaussiank(x, k)
    same((indices, values), reference(lambda: kernels.gaussiank(x, k)))
    if k >= 1 and x.numel():
        assert 1 <= indices.numel() <= max(4 * k / 3, 1)
    same(values, x[indices.long()])


@quick
@given(st.integers(0, 20), st.sampled_from([0.001, 0.01, 0.1]), st.sampled_from(KINDS))
def test_about_k_on_well_behaved_input(seed, ratio, kind):
    x = vector(kind, 100_003, seed)
    k = int(ratio * x.numel())
    n = kernels.gaussiank(x, k)[0].numel()
    assert 2 * k / 3 - 1 <= n <= 4 * k / 3 + 1


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_non_finite_entries_are_selected(bad):
    x = vector("normal", 100_003, 1)
    x[777] = bad
    assert 777 in kernels.gaussiank(x, 100)[0].tolist()
    assert kernels.gaussiank(torch.full((100,), bad), 10)[0].numel() == 10


def test_the_edges():
    assert kernels.gaussiank(torch.zeros(0), 3)[0].numel() == 0
    assert kernels.gaussiank(torch.ones(5), 0)[0].numel() == 0
    assert kernels.gaussiank(torch.zeros(100), 10)[0].tolist() == list(range(10))
    assert kernels.gaussiank(torch.ones(100), 10)[0].tolist() == list(range(10))


class HostReads(TorchDispatchMode):
    """Counts the operations that make the host wait for a device."""

    WAITING = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "unique", "equal", "_to_copy")

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        a_copy = name == "_to_copy" and not (kwargs or {}).get("device")  # to another dtype, on the device
        by_mask = name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        if by_mask or (name in self.WAITING and not a_copy):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [*KINDS, "zeros", "infinite"])
@pytest.mark.parametrize("ratio", [0.001, 0.1])
def test_the_host_waits_once_for_the_selection_and_never_in_the_search(kind, ratio):
    x = vector(kind, 50_021, 3) if kind in KINDS else torch.zeros(50_021)
    if kind == "infinite":
        x += torch.inf
    k = int(ratio * x.numel())
    with HostReads() as search:
        gaussian.threshold_bits(x, k)
    assert search.found == []
    with HostReads() as whole:
        gaussian.gaussiank(x, None, k)
    assert whole.found == ["nonzero"]


def test_waiting_is_noticed():
    x = torch.arange(5.0)
    with HostReads() as reads:
        float(x.sum())
        bool((x > 2).any())
        x[x > 2]
    assert len(reads.found) == 3


def test_the_search_runs_without_numbers():
    """On `meta` a tensor has no numbers, so whatever the host wants to know is an error."""
    x = torch.empty(1000, device="meta")
    found = gaussian.threshold_bits(x, 10)
    assert (found.device.type, found.shape, found.dtype) == ("meta", (), torch.int32)
    with FakeTensorMode() as fake:
        assert gaussian.threshold_bits(fake.from_tensor(torch.randn(1000)), 10).shape == ()


@quick
@given(
    st.floats(0, 2.0**100, width=32),
    st.integers(1, 100),
    st.lists(st.floats(0, 2.0**100, width=32), min_size=1, max_size=300),
)
def test_both_searches_end_at_the_same_threshold(first, k, magnitudes):
    data = torch.tensor(magnitudes)
    wanted = cpu.search(first, k, lambda t: int((data > t).sum()))
    found = gaussian.search(torch.tensor(first, dtype=torch.float64), k, lambda t: (data > t.float()).sum())
    assert (None if found.isnan() else float(found)) == wanted
