"""Frames on a device: checked where they are, with one wait of the host; and padded ones."""

import pytest
import torch

from tests.devices.shadow import device
from thinwire.core import Channel
from thinwire.core.channel import LONGEST_PADDED, together
from thinwire.drivers import Lockstep
from thinwire.errors import PayloadError
from thinwire.net import frames
from thinwire.net.costs import Link

PARTS = [torch.arange(37.0), torch.arange(5, dtype=torch.uint8), torch.zeros(0)]


def unpack(frame: torch.Tensor, head=None) -> list[torch.Tensor]:
    return frames.unpack(frame, PARTS, step=3, mark=77, longest=[40] * 3, source=1, head=head)


def test_a_frame_of_a_device_is_understood_everywhere() -> None:
    """By a rank with a device, and by one with a CPU, which computes the same checksum."""
    with device() as cuda:
        frame = frames.pack([cuda.put(part) for part in PARTS], step=3, mark=77, ragged=True)
        assert not cuda.waits
        (head,) = frames.read_heads([frame], len(PARTS), True)
        there = unpack(frame, head)
        assert sum(cuda.waits.values()) == 1
    here = unpack(frame.value)
    for mine, other, part in zip(there, here, PARTS, strict=True):
        assert torch.equal(mine.value, part)
        assert torch.equal(other, part)


def test_a_frame_of_a_cpu_is_understood_on_a_device() -> None:
    frame = frames.pack(PARTS, step=3, mark=77, ragged=True)
    with device() as cuda:
        moved = cuda.put(frame)
        (head,) = frames.read_heads([moved], len(PARTS), True)
        for mine, part in zip(unpack(moved, head), PARTS, strict=True):
            assert torch.equal(mine.value, part)


def test_the_heads_of_all_frames_are_read_together() -> None:
    with device() as cuda:
        there = [frames.pack([cuda.put(torch.ones(9))], step=3, mark=77, ragged=False) for _ in range(5)]
        assert len(frames.read_heads(there, 1, False)) == 5
    assert sum(cuda.waits.values()) == 1


def test_every_damaged_byte_is_noticed() -> None:
    with device() as cuda:
        frame = frames.pack([cuda.put(part) for part in PARTS], step=3, mark=77, ragged=True).value
    for place in range(frame.numel()):
        damaged = frame.clone()
        damaged[place] ^= 1 << place % 8
        with pytest.raises(PayloadError):
            unpack(damaged)
    words = frame.clone().view(torch.int64)
    words[5], words[6] = int(words[6]), int(words[5])
    with pytest.raises(PayloadError, match="damaged"):
        unpack(words.view(torch.uint8))


def test_short_frames_are_refused_not_read() -> None:
    with device() as cuda:
        short = cuda.put(torch.zeros(8, dtype=torch.uint8))
        heads = frames.read_heads([short], 3, True)
        assert heads == [None]
        with pytest.raises(PayloadError, match="less than a header"):
            unpack(short, heads[0])


def gathered(
    pads: bool, longest: int, *, scatters: bool = False
) -> tuple[list[list[list[torch.Tensor]]], Lockstep]:
    """What three ranks receive that send 0, 5 and 10 numbers."""
    driver, results = Lockstep(3), []

    async def task(ch: Channel) -> None:
        mine = torch.full((5 * ch.rank,), float(ch.rank))
        if scatters:
            results.append(await ch.scatter([[mine]] * 3, longest=[longest]))
        else:
            results.append(await ch.gather([mine], longest=[longest]))

    channels = [
        Channel(info, step=0, seed=0, key="x", device=torch.device("cpu"), link=Link())
        for info in driver.rank_infos
    ]
    programs = [
        together([task(ch)], info, step=0, mark=1, link=Link(), pads=pads)
        for ch, info in zip(channels, driver.rank_infos, strict=True)
    ]
    driver.run(programs)
    return results, driver


@pytest.mark.parametrize("scatters", [False, True])
def test_a_short_bound_saves_the_round_of_lengths(scatters: bool) -> None:
    usual, with_lengths = gathered(False, 100, scatters=scatters)
    padded, without = gathered(True, 100, scatters=scatters)
    for mine, other in zip(padded, usual, strict=True):
        for (a,), (b,) in zip(mine, other, strict=True):
            assert torch.equal(a, b)
    assert (without.meters[0].rounds, with_lengths.meters[0].rounds) == (1, 2)
    _, long = gathered(True, LONGEST_PADDED, scatters=scatters)
    assert long.meters[0].rounds == 2


def test_padding_is_refused_where_it_was_not_agreed() -> None:
    padded = frames.pack(PARTS, step=3, mark=77, ragged=True, length=1024)
    with pytest.raises(PayloadError, match="truncated or too long"):
        unpack(padded)
