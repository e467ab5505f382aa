"""Averaging of sampled entries: some are sent with values, the others share a magnitude and have a sign.

Positions are Rice codes of the gaps between them. If entries are spread evenly, gaps are geometric, and the
code is within 3 % of their entropy. It is never longer than Elias-Fano with as many plain bits.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple, cast

import torch

from thinwire.core import Channel
from thinwire.errors import PayloadError
from thinwire.kernels.indices import INDEX_BITS, from_rice, rice
from thinwire.methods.families import sparse
from thinwire.methods.families.feedback import Entries
from thinwire.methods.families.indices import rice_bits
from thinwire.methods.families.sparse import SparseMean
from thinwire.net.costs import Link

_LONGEST_HEAD = 3 * 5 + 4


class Sample(NamedTuple):
    """The result of `kernels.gspar_sample`: `drawn` has the sign in its highest bit."""

    sure: torch.Tensor
    values: torch.Tensor
    drawn: torch.Tensor
    magnitude: float

    def cut(self, begins: Sequence[int]) -> list[Sample]:
        """One sample for each range of coordinates; `begins` also has the end of the last one."""
        edges = torch.tensor(begins, device=self.sure.device)
        sure, drawn = (
            cast("list[int]", torch.searchsorted(indices, edges).tolist())
            for indices in (self.sure, self.drawn & INDEX_BITS)
        )
        return [
            Sample(self.sure[a:b] - begin, self.values[a:b], self.drawn[c:d] - begin, self.magnitude)
            for begin, (a, b), (c, d) in zip(begins[:-1], pairwise(sure), pairwise(drawn), strict=True)
        ]


Sampler = Callable[[torch.Tensor, int], Sample]
"""Samples a tensor without bias, by a seed."""


def _mean_of(lists: Sequence[Entries], n: int) -> SparseMean:
    """Two lists of each rank, or of all owners together."""
    # The mean is over lists, and there are two of each rank, so every value counts twice.
    return SparseMean(lists, n=n, weight=2.0)


async def gather(x: torch.Tensor, sample: Sampler, ch: Channel) -> SparseMean:
    """The entries of all ranks."""
    n = x.numel()
    received = await ch.gather([encode(n, sample(x, ch.private_seed()))], longest=[longest(n)])
    pairs = decode_all([code for (code,) in received], [n] * ch.size)
    return _mean_of([entries for pair in pairs for entries in pair], n)


async def split(x: torch.Tensor, sample: Sampler, ch: Channel) -> SparseMean:
    """Every rank owns a range of coordinates: it averages all entries there and samples the mean again."""
    n = x.numel()
    share = -(-n // ch.size)
    begins = [min(n, rank * share) for rank in range(ch.size + 1)]
    widths = [end - begin for begin, end in pairwise(begins)]
    pieces = sample(x, ch.private_seed()).cut(begins)
    coded = [[encode(width, piece)] for width, piece in zip(widths, pieces, strict=True)]
    received = await ch.scatter(coded, longest=[longest(share)])
    own = widths[ch.rank]
    mean = torch.empty(own, device=x.device)
    pairs = decode_all([code for (code,) in received], [own] * ch.size)
    first = _mean_of([entries for pair in pairs for entries in pair], own)
    first.refuse_invalid()  # these are used before the step's commit
    first.write(mean)
    # A non-finite mean is sure to be sent, so every rank learns of it.
    again = encode(own, sample(mean, ch.private_seed() - 1))
    gathered = await ch.gather([again], longest=[longest(share)])
    owners = decode_all([code for (code,) in gathered], widths)
    return _mean_of([_joined(lists, begins) for lists in zip(*owners, strict=True)], n)


def _joined(pieces: Sequence[Entries], begins: Sequence[int]) -> Entries:
    """The entries of all owners as one list."""
    where = torch.cat([piece.indices + begin for piece, begin in zip(pieces, begins[:-1], strict=True)])
    return Entries(where, torch.cat([piece.values for piece in pieces]))


def split_pays(n: int, ratio: float, size: int, link: Link) -> bool:
    """Whether a split reduction takes less time. All ranks know the inputs, so they agree."""
    k = max(1, int(ratio * n))
    # An entry has its plain bits, a sign, and somewhat less than two unary bits.
    return sparse.split_pays(k * (rice_bits(n, k) + 3) / 8, size, link)


def encode(n: int, sample: Sample) -> torch.Tensor:
    """One part for the wire.

    It has both counts, the length of the first code and the magnitude; then positions and values of the sure
    entries; then positions and signs of the drawn ones. An empty list costs its count only.
    """
    sure, values, drawn, magnitude = sample
    counts = [sure.numel(), drawn.numel()]
    coded: list[torch.Tensor] = []
    if 0 < sure.numel() < n:
        coded = [rice(sure, n, rice_bits(n, sure.numel()))]
        counts.append(coded[0].numel())
    if sure.numel():
        coded.append(values.view(torch.uint8))
    head = [torch.frombuffer(bytearray(b"".join(map(_varint, counts))), dtype=torch.uint8).to(sure.device)]
    if drawn.numel():
        head.append(torch.tensor([magnitude], dtype=torch.float32, device=sure.device).view(torch.uint8))
        coded.append(rice(drawn, n, rice_bits(n, drawn.numel()), signed=True))
    return torch.cat([*head, *coded])


def longest(n: int) -> int:
    """The bytes of the longest code: all values, and less than 4 bits per entry for each list."""
    return _LONGEST_HEAD + 4 * n + 2 * (-(-n // 2) + 1)


def decode(code: torch.Tensor, n: int) -> tuple[Entries, Entries]:
    """The sure and the drawn entries. Raises PayloadError if the code is not one of entries of n."""
    return decode_all([code], [n])[0]


def decode_all(codes: Sequence[torch.Tensor], lengths: Sequence[int]) -> list[tuple[Entries, Entries]]:
    """Of several codes, of tensors of these lengths."""
    heads = _heads(codes)
    return [_decode(code, n, head) for code, n, head in zip(codes, lengths, heads, strict=True)]


def _heads(codes: Sequence[torch.Tensor]) -> list[_Head]:
    """The beginnings of all codes, read together."""
    firsts = [code[:_LONGEST_HEAD] for code in codes]
    data, position, heads = bytes(cast("list[int]", torch.cat(firsts).tolist())), 0, list[_Head]()
    for first in firsts:
        heads.append(_Head(data[position : position + first.numel()]))
        position += first.numel()
    return heads


def _decode(code: torch.Tensor, n: int, head: _Head) -> tuple[Entries, Entries]:
    k, drawn_count = head.number(), head.number()
    if k > n or drawn_count > n:
        raise PayloadError(f"a payload claims {k} and {drawn_count} entries of a tensor of {n}")
    width = head.number() if 0 < k < n else 0
    magnitude = head.float() if drawn_count else 0.0
    begin, end = head.at + width, head.at + width + 4 * k
    if code.numel() < end:
        raise PayloadError(f"a payload of {code.numel()} bytes is too short for {k} values")
    sure = _positions(code[head.at : begin], n, k)
    values = code[begin:end].clone().view(torch.float32)
    drawn = from_rice(code[end:], n, drawn_count, rice_bits(n, drawn_count), signed=True)
    signed = torch.full_like(drawn, magnitude, dtype=torch.float32).copysign_(drawn)
    return Entries(sure, values), Entries(drawn & INDEX_BITS, signed)


def _positions(code: torch.Tensor, n: int, k: int) -> torch.Tensor:
    if k == n:
        return torch.arange(n, dtype=torch.int32, device=code.device)
    return from_rice(code, n, k, rice_bits(n, k))


class _Head:
    """Reads the numbers at the beginning of a code."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def number(self) -> int:
        value = shift = 0
        while self.at < len(self.data) and shift < 32:
            byte = self.data[self.at]
            self.at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
        raise PayloadError("a payload of sampled entries ends within its counts")

    def float(self) -> float:
        if self.at + 4 > len(self.data):
            raise PayloadError("a payload of sampled entries ends within its magnitude")
        self.at += 4
        return struct.unpack_from("<f", self.data, self.at - 4)[0]


def _varint(value: int) -> bytes:
    """Seven bits per byte, the lowest first; the highest bit says that more follow."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])
