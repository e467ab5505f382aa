"""At attach, all ranks get the first rank's model; what they have already is not sent."""

import pytest
import torch

from thinwire.drivers import Lockstep
from thinwire.net.costs import Link
from thinwire.sessions import first_rank

SIZE = 3


def replicas(dtype: torch.dtype = torch.float32) -> list[list[torch.Tensor]]:
    return [
        [
            torch.arange(6000.0).to(dtype).view(60, 100),
            torch.tensor(3),
            torch.empty(0),
            torch.ones(700).to(dtype),
        ]
        for _ in range(SIZE)
    ]


def begin(ranks: list[list[torch.Tensor]]) -> int:
    """Returns how many bytes the first rank passed on."""
    driver = Lockstep(SIZE)
    pairs = zip(ranks, driver.rank_infos, strict=True)
    driver.run([first_rank.from_first_rank(tensors, info, Link()) for tensors, info in pairs])
    return driver.meters[0].payload_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_equal_replicas_compare_digests_and_send_nothing(dtype: torch.dtype) -> None:
    ranks = replicas(dtype)
    assert begin(ranks) == first_rank.DIGEST_BYTES
    for mine, fresh in zip(ranks, replicas(dtype), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, fresh, strict=True))


@pytest.mark.parametrize("rank", [0, 2])
def test_one_other_bit_on_one_rank_is_overwritten(rank: int) -> None:
    ranks = replicas()
    ranks[rank][3][699] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    first = [tensor.clone() for tensor in ranks[0]]
    assert begin(ranks) > 4 * 6700
    for tensors in ranks:
        assert all(torch.equal(a, b) for a, b in zip(tensors, first, strict=True))


def test_only_the_portion_that_differs_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_rank, "PORTION_BYTES", 1000)
    ranks = replicas()
    ranks[1][3][5] = 7.0
    assert 2800 <= begin(ranks) < 4 * 6000
    assert torch.equal(ranks[1][3], ranks[0][3])
