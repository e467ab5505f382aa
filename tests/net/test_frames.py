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
    return frames.unpack(frame, templates, step=3, mark=77, ragged=ragged, source=1)


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


@given(parts(), st.booleans(), st.data())
def test_damaged_frames_stay_inside_their_bytes(
    given_parts: list[torch.Tensor], ragged: bool, data: st.DataObject
) -> None:
    """Cut, extended or altered: an error, or parts that lie inside the frame (altered values)."""
    frame = frames.pack(given_parts, step=3, mark=77, ragged=ragged)
    how = data.draw(st.sampled_from(["cut", "extend", "alter"]))
    if how == "cut":
        frame = frame[: data.draw(st.integers(0, frame.numel() - 1))]
    elif how == "extend":
        frame = torch.cat([frame, frame.new_zeros(data.draw(st.integers(1, 64)))])
    else:
        place = data.draw(st.integers(0, frame.numel() - 1))
        frame[place] ^= data.draw(st.integers(1, 255))
    try:
        result = unpack(frame, given_parts, ragged)
    except PayloadError:
        return
    assert how == "alter"
    assert sum(p.numel() * p.element_size() for p in result) <= frame.numel() - frames.HEADER_BYTES


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"step": 4}, "belongs to step 3, this rank is at step 4"),
        ({"mark": 78}, "other tensors or another method"),
        ({"ragged": True}, "is not ragged, which was not expected"),
    ],
)
def test_frames_of_another_step_or_tensor_are_refused(change: dict, text: str) -> None:
    part = torch.ones(3)
    frame = frames.pack([part], step=3, mark=77, ragged=False)
    options = {"step": 3, "mark": 77, "ragged": False, "source": 1} | change
    with pytest.raises(PayloadError, match=text):
        frames.unpack(frame, [part], **options)


def test_another_version_is_named() -> None:
    frame = frames.pack([torch.ones(3)], step=3, mark=77, ragged=False)
    frame[1] = 9
    with pytest.raises(PayloadError, match="format version 9, this rank speaks 1"):
        unpack(frame, [torch.ones(3)], False)


def test_golden_bytes() -> None:
    """The format does not change unnoticed: peers of one version must understand each other."""
    frame = frames.pack(
        [torch.tensor([1, 2], dtype=torch.uint8), torch.tensor([1.0])],
        step=5,
        mark=0x0102,
        ragged=True,
    )
    header = "77" + "81" + "0201" + "05000000"
    lengths = "02000000" + "01000000"
    widest_first = "0000803f" + "0102" + "0000"
    assert frames.to_bytes(frame).hex() == header + lengths + widest_first
