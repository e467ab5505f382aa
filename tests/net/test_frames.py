"""Frames: what was packed comes out, and whatever else arrives is an error, never a crash."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire import PayloadError
from thinwire.net import frames

DTYPES = [torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64]


@st.composite
def parts(draw: st.DrawFn) -> list[torch.Tensor]:
    count = draw(st.integers(0, 6))
    made = []
    for _ in range(count):
        dtype = draw(st.sampled_from(DTYPES))
        made.append(torch.arange(draw(st.integers(0, 40))).to(dtype))
    return made


def unpack(frame: torch.Tensor, templates: list[torch.Tensor], ragged: bool) -> list[torch.Tensor]:
    longest = [40] * len(templates) if ragged else None
    return frames.unpack(frame, templates, step=3, mark=77, longest=longest, source=1)


@given(parts(), st.booleans())
def test_round_trip(given_parts: list[torch.Tensor], ragged: bool) -> None:
    frame = frames.pack(given_parts, step=3, mark=77, ragged=ragged)
    assert frame.numel() == frames.frame_bytes(given_parts, ragged)
    templates = [p.new_empty(0) if ragged else p for p in given_parts]
    for before, after in zip(given_parts, unpack(frame, templates, ragged), strict=True):
        assert before.dtype == after.dtype
        assert torch.equal(before, after)


@given(st.binary(max_size=300), parts(), st.booleans())
def test_noise_is_refused(noise: bytes, templates: list[torch.Tensor], ragged: bool) -> None:
    frame = (
        torch.frombuffer(bytearray(noise), dtype=torch.uint8) if noise else torch.empty(0, dtype=torch.uint8)
    )
    with pytest.raises(PayloadError):
        unpack(frame, templates, ragged)


def damaged(frame: torch.Tensor, data: st.DataObject) -> torch.Tensor:
    """Cut, extended, with one byte altered or two words exchanged."""
    how = data.draw(st.sampled_from(["cut", "extend", "alter", "exchange"]))
    if how == "cut":
        return frame[: data.draw(st.integers(0, frame.numel() - 1))]
    if how == "extend":
        return torch.cat([frame, frame.new_zeros(data.draw(st.integers(1, 64)))])
    if how == "alter":
        place = data.draw(st.integers(0, frame.numel() - 1))
        frame[place] ^= data.draw(st.integers(1, 255))
        return frame
    words = frame.view(torch.int64)
    order = data.draw(st.permutations(range(words.numel())))
    return words[list(order)].view(torch.uint8)


@given(parts(), st.booleans(), st.data())
def test_every_damage_is_noticed(given_parts: list[torch.Tensor], ragged: bool, data: st.DataObject) -> None:
    frame = frames.pack(given_parts, step=3, mark=77, ragged=ragged)
    received = damaged(frame.clone(), data)
    if received.equal(frame):
        return
    with pytest.raises(PayloadError):
        unpack(received, given_parts, ragged)


@given(parts(), st.booleans(), st.data())
def test_sealed_forgeries_stay_inside_their_bytes(
    given_parts: list[torch.Tensor], ragged: bool, data: st.DataObject
) -> None:
    """A hostile rank computes the checksum as well: an error, or parts that lie inside the frame."""
    frame = damaged(frames.pack(given_parts, step=3, mark=77, ragged=ragged), data)
    if frame.numel() >= frames.HEADER_BYTES:
        frames.seal(frame)
    try:
        result = unpack(frame, given_parts, ragged)
    except PayloadError:
        return
    assert sum(p.numel() * p.element_size() for p in result) <= frame.numel() - frames.HEADER_BYTES
    assert all(p.numel() <= 40 for p in result)


@pytest.mark.parametrize("place", [*range(24), 32, 1000, 100_000])
def test_a_damaged_byte_is_called_so(place: int) -> None:
    """Also in the header: a damaged step number is not another step."""
    part = torch.zeros(100_001, dtype=torch.uint8)
    frame = frames.pack([part], step=3, mark=77, ragged=False)
    frame[place] ^= 16
    text = {0: "does not begin with", 1: "format version 18"}.get(place, "payload from rank 1 is damaged")
    with pytest.raises(PayloadError, match=text):
        unpack(frame, [part], False)


def test_a_part_that_is_too_long_is_refused() -> None:
    frame = frames.pack([torch.ones(41)], step=3, mark=77, ragged=True)
    with pytest.raises(PayloadError, match="from rank 1 has 41 entries in part 0, which holds at most 40"):
        unpack(frame, [torch.ones(2)], True)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"step": 4}, "belongs to step 3, this rank is at step 4"),
        ({"mark": 78}, "other tensors, another method or another state"),
        ({"longest": [3]}, "is not ragged, which was not expected"),
    ],
)
def test_frames_of_another_step_or_tensor_are_refused(change: dict, text: str) -> None:
    part = torch.ones(3)
    frame = frames.pack([part], step=3, mark=77, ragged=False)
    options = {"step": 3, "mark": 77, "longest": None, "source": 1} | change
    with pytest.raises(PayloadError, match=text):
        frames.unpack(frame, [part], **options)


def test_another_version_is_named() -> None:
    frame = frames.pack([torch.ones(3)], step=3, mark=77, ragged=False)
    frame[1] = 9
    with pytest.raises(PayloadError, match="format version 9, this rank speaks 2"):
        unpack(frame, [torch.ones(3)], False)


def test_golden_bytes() -> None:
    """The format does not change unnoticed: peers of one version must understand each other."""
    frame = frames.pack(
        [torch.tensor([1, 2], dtype=torch.uint8), torch.tensor([1.0])],
        step=5,
        mark=0x0102,
        ragged=True,
    )
    header = "77" + "82" + "0201" + "05000000"
    checksum = "dd1623268e37a5a7"
    lengths = "02000000" + "01000000"
    widest_first = "0000803f" + "0102" + "0000"
    assert frames.to_bytes(frame).hex() == header + checksum + lengths + widest_first


def test_a_long_frame_is_summed_by_blocks_like_a_short_one() -> None:
    long = [
        torch.arange(200_003, dtype=torch.float32),
        torch.arange(7),
        torch.ones(300_001, dtype=torch.uint8),
    ]
    frame = frames.pack(long, step=3, mark=77, ragged=False)
    again = frame.clone()
    frames.seal(again)
    assert frame.equal(again)
    assert all(map(torch.equal, unpack(frame, long, False), long))
    for place in (frames.HEADER_BYTES, 600_000, frame.numel() - 1):
        damaged = frame.clone()
        damaged[place] ^= 4
        with pytest.raises(PayloadError, match="damaged"):
            unpack(damaged, long, False)
