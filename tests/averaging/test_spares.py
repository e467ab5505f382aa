"""Memory of sync rounds that is used again, and changes whose pieces lie in another order."""

import torch
from torch import nn

from tests.averaging.cohort import Cohort, normed
from thinwire.averaging.base import Outer
from thinwire.averaging.fragments import cut
from thinwire.averaging.spares import Spares
from thinwire.core.layout import Layout


def layout(numel: int, dtype: torch.dtype = torch.float32) -> Layout:
    return Layout.of([("x", (numel,))], dtype)


def test_memory_is_lent_to_one_at_a_time_and_used_again() -> None:
    spares = Spares()
    first, second = spares.lend(layout(100)), spares.lend(layout(100))
    assert first.data_ptr() != second.data_ptr()
    begin = first.data_ptr()
    spares.give_back(first)
    assert first.isnan().all()  # poisoned, as in all tests of schedules
    other = spares.lend(layout(100, torch.float64))
    assert other.dtype == torch.float64
    shorter = spares.lend(layout(60))
    assert shorter.data_ptr() == begin
    assert spares.lend(layout(60)).data_ptr() not in (begin, second.data_ptr())
    spares.give_back(shorter)
    assert spares.lend(layout(100)).data_ptr() == begin  # all of it


def test_a_longer_tensor_takes_the_place_of_a_shorter_one() -> None:
    spares = Spares()
    for numel in (10, 20, 30, 20, 10):
        spares.give_back(spares.lend(layout(numel)))
    both = [spares.lend(layout(10)), spares.lend(layout(10))]
    assert sorted(flat.untyped_storage().nbytes() for flat in both) == [40, 120]


def test_an_arranged_block_does_the_same() -> None:
    plain, arranged = (
        cut(dict(normed().named_parameters()), 1, whole_tensors=True, anchor_device=None, velocity=True)[0]
        for _ in range(2)
    )
    spares = Spares()
    blocks = (*plain.blocks, *arranged.blocks)
    blocks[1].arrange(lambda slot: len(slot.shape))
    assert blocks[1].exchanged != blocks[1].layout
    assert blocks[1].exchanged.key == blocks[1].layout.key
    kept: list[list[torch.Tensor]] = []
    for block in blocks:
        torch.manual_seed(1)
        with torch.no_grad():
            for piece in block.pieces:
                piece.parameter.add_(torch.randn(piece.shape))
        change, own = block.change(spares, keep=True)
        assert own is not None
        assert torch.equal(own, block.read())
        assert torch.equal(block.in_order(change), block.anchor - own)
        again = torch.empty_like(change)
        block.set_change(again, block.in_order(change))
        assert torch.equal(again, change)
        with torch.no_grad():
            block.apply_late(change, Outer(0.7, 0.9), own)
            block.apply(change, Outer(0.3, 0.9))
        assert block.velocity is not None
        kept.append([block.read(), block.anchor, block.velocity])
    assert all(torch.equal(a, b) for a, b in zip(*kept, strict=True))


def test_small_tensors_do_not_scatter_the_others() -> None:
    both = Cohort("postlocal(every=2, warmup=0)", 2, make=_three)
    (block,) = both.sessions[0].blocks
    assert [slot.offset for slot in block.exchanged.slots] == [
        0,
        3 * 4096,
        4096,
        3 * 4096 + 64,
        8192,
        3 * 4096 + 128,
    ]
    engine = both.sessions[0].engine
    assert all(len(group.pieces) == 1 for group in engine._plan([block.exchanged])[0])


def _three() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
