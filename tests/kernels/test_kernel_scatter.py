import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_inputs import DTYPES, SIZES, quick, reference, same, vector

from thinwire import kernels


def payloads(n, workers, share, seed):
    g = torch.Generator().manual_seed(seed)
    indices, values = [], []
    for w in range(workers):
        where = torch.nonzero(torch.rand(n, generator=g) < share).flatten().to(torch.int32)
        indices.append(where)
        values.append(vector("normal", where.numel(), seed + w))
    return indices, values


@quick
@given(
    st.sampled_from(SIZES),
    st.integers(1, 9),
    st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    st.integers(0, 99),
    st.sampled_from(DTYPES),
)
def test_mean_equals_the_reference(n, workers, share, seed, dtype):
    indices, values = payloads(n, workers, share, seed)
    out, expected = torch.full((n,), 7.0).to(dtype), torch.empty(n).to(dtype)
    kernels.scatter_mean(indices, values, out)
    reference(lambda: kernels.scatter_mean(indices, values, expected))
    same(out, expected)
    if dtype == torch.float32 and workers:
        dense = torch.zeros(n)
        for where, what in zip(indices, values, strict=True):
            dense[where.long()] += what
        same(out, dense / workers)


def test_unaligned_slices_of_one_wire_buffer():
    n = 1000
    indices, values = payloads(n, 3, 0.3, 5)
    expected = torch.empty(n)
    kernels.scatter_mean(indices, values, expected)
    moved = []
    for t in (*indices, *values):
        buffer = torch.zeros(t.numel() + 3, dtype=t.dtype)
        buffer[3:] = t
        moved.append(buffer[3:])
    out = torch.empty(n)
    kernels.scatter_mean(moved[:3], moved[3:], out)
    same(out, expected)


HOSTILE = {
    "beyond the end": [0, 5, 10],
    "negative": [-1, 5],
    "far negative": [-(2**31), 0],
    "largest": [2**31 - 1],
    "unsorted": [5, 4],
    "duplicate": [4, 4],
    "descending through the middle": [1, 9, 3, 9],
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_hostile_indices_are_refused_and_nothing_is_written(name, rank, backend):
    good = torch.tensor([1, 2], dtype=torch.int32)
    bad = torch.tensor(HOSTILE[name], dtype=torch.int32)
    indices = [good, good]
    indices[rank] = bad
    out = torch.full((10,), 3.0)

    def attack():
        kernels.scatter_mean(indices, [torch.ones(i.numel()) for i in indices], out)

    with pytest.raises(kernels.PayloadError):
        attack() if backend == "cpu" else reference(attack)
    assert out.tolist() == [3.0] * 10


def test_hostile_shapes_are_refused():
    out = torch.zeros(10)
    i = torch.tensor([1, 2], dtype=torch.int32)
    for indices, values in (
        ([i], [torch.ones(3)]),
        ([i], [torch.ones(1)]),
        ([i], []),
        ([], []),
        ([i.long()], [torch.ones(2)]),
        ([i], [torch.ones(2, dtype=torch.float64)]),
        ([i.view(1, 2)], [torch.ones(2)]),
        ([torch.zeros(4, dtype=torch.int32)[::2]], [torch.ones(2)]),
    ):
        with pytest.raises(kernels.PayloadError):
            kernels.scatter_mean(indices, values, out)


def test_a_violation_anywhere_in_a_long_list_is_seen():
    for where in (1, 63, 64, 65, 5000, 9999):
        i = torch.arange(10_000, dtype=torch.int32) * 2
        i[where] = i[where - 1]
        with pytest.raises(kernels.PayloadError):
            kernels.scatter_mean([i], [torch.ones(10_000)], torch.zeros(20_000))
