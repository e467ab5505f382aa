"""Whether all ranks are at the same step, with the same replicated state.

In the first step, and in the first after a checkpoint was loaded, all ranks tell each other where they are,
in a round of its own. Later frames carry the step and are refused if it is another one. A mean carries
nothing: ranks at different steps would train on, each with another model. So now and then a mean carries a
note as well, 64 numbers that are +1 or -1, the bits of a digest. Their means are +1 or -1 too only if all
ranks have the same bits. The means are equal on all ranks, so all notice a difference and tell each other
where they are.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
import xxhash

from thinwire.errors import DisagreementError
from thinwire.net import frames
from thinwire.net.handshake import by_value
from thinwire.net.rank_info import RankInfo

EVERY = 64
"""Steps between two notes."""
_RECORD = struct.Struct("<QQ")


class Note(NamedTuple):
    """Where a rank is."""

    step: int
    digest: int
    """Of the state that is equal on all ranks."""

    def bits(self, device: torch.device) -> torch.Tensor:
        """+1 or -1 for each bit of a hash of the note."""
        raw = xxhash.xxh3_64_digest(_RECORD.pack(*self))
        bits = np.unpackbits(np.frombuffer(raw, np.uint8)).astype(np.float32)
        return torch.from_numpy(2 * bits - 1).to(device)

    def block(self, device: torch.device) -> torch.Tensor:
        """The note for an all-gather."""
        return torch.frombuffer(bytearray(_RECORD.pack(*self)), dtype=torch.uint8).to(device)


def digest_of(tensors: Iterable[torch.Tensor]) -> int:
    """A hash of the tensors' bytes, one after the other."""
    total = xxhash.xxh3_64()
    for tensor in tensors:
        total.update(frames.memory_of(frames.as_bytes(tensor)))
    return total.intdigest()


def same_bits(mean: torch.Tensor, rank_info: RankInfo) -> bool:
    """Whether all ranks have sent the same bits: another one changes a mean by 2 / W."""
    return bool((mean.abs() > 1 - 1 / rank_info.size).all())


def check(rows: torch.Tensor) -> None:
    """Raise `DisagreementError` if the notes of the ranks differ; says who is where."""
    notes = [Note(*_RECORD.unpack(frames.to_bytes(row))) for row in rows]
    if any(note.step != notes[0].step for note in notes):
        where = by_value([f"step {note.step}" for note in notes], range(len(notes)))
        raise DisagreementError(
            f"the ranks are at different steps ({where}): load the same generation of the checkpoint on all "
            "ranks, or on none"
        )
    if any(note.digest != notes[0].digest for note in notes):
        where = by_value([f"digest {note.digest:016x}" for note in notes], range(len(notes)))
        raise DisagreementError(
            f"the ranks are all at step {notes[0].step}, but state that is equal on all ranks differs "
            f"({where}): load checkpoints of one run on all ranks"
        )


def signed(digest: int) -> int:
    """The digest as a number that int64 holds."""
    return digest - 2**64 if digest >= 2**63 else digest
