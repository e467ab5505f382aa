"""The primitive operations a driver must carry out, and the frame around every payload.

Channel, exchanges and engine are coroutines that yield these primitives. A driver (on a process group, in
lock-step, or on a simulated network) only has to perform them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import xxhash

from thinwire.errors import PayloadError
from thinwire.net.device_sums import Head, device_sum, heads

MAGIC = 0x77
VERSION = 2
RAGGED = 0x80
ON_DEVICE = 0x40
"""In the version of a frame that was sealed on another device than a CPU (`device_sums.py`)."""
_FLAGS = RAGGED | ON_DEVICE
_WHOSE = struct.Struct("<BBHI")  # magic, version, mark, step
_CHECKSUM = struct.Struct("<Q")
HEADER_BYTES = _WHOSE.size + _CHECKSUM.size
_LIMIT = 2**32
_BLOCK_BYTES = 2**18
"""So much of a frame is copied at a time, and added to its checksum while it is in the cache."""


@dataclass(frozen=True)
class AllReduce:
    """Sum the tensor over all ranks, in place. Returns the tensor."""

    tensor: torch.Tensor
    payload_bytes: int
    name: str = "all_reduce"


@dataclass(frozen=True)
class AllGather:
    """Gather the blocks of all ranks, of equal length. Returns a (size, length) uint8 tensor."""

    block: torch.Tensor
    payload_bytes: int
    name: str = "all_gather"
    setup: bool = False
    """Part of the beginning of a session, like the handshake: the meter does not count it."""


@dataclass(frozen=True)
class Broadcast:
    """Send the block of rank `src` to all ranks, in place. Returns the block."""

    block: torch.Tensor
    src: int
    payload_bytes: int
    name: str = "broadcast"


@dataclass(frozen=True)
class AllToAll:
    """Send blocks[r] to rank r; `receive` has the lengths of the blocks for this rank. Returns them."""

    blocks: tuple[torch.Tensor, ...]
    receive: tuple[int, ...]
    payload_bytes: int
    name: str = "all_to_all"


@dataclass(frozen=True)
class Commit:
    """No network operation: wait until the whole step is known. Returns whether it is committed."""

    finite: bool


@dataclass(frozen=True)
class Deliver:
    """Not for a driver: the program waits for memory to write its results to (`core/begun.py`)."""


Operation = AllReduce | AllGather | Broadcast | AllToAll


@dataclass(frozen=True)
class Within:
    """An operation of some ranks only: of those of one host (`inside`), or of one of each host."""

    op: Operation
    ranks: tuple[int, ...]
    inside: bool


def is_counted(op: Operation | Commit) -> bool:
    """Whether the meter counts this operation."""
    return not isinstance(op, Commit) and not (isinstance(op, AllGather) and op.setup)


Primitive = Operation | Commit | Within


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as flat uint8 (a view where it is contiguous)."""
    # What is so already is not asked again: frames have many parts, and most are short.
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.dim() != 1 or not tensor.is_contiguous():
        tensor = tensor.contiguous().view(-1)
    return tensor if tensor.dtype == torch.uint8 else tensor.view(torch.uint8)


def to_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(cast("list[int]", tensor.tolist()))


def _order(parts: Sequence[torch.Tensor]) -> list[int]:
    """Wide elements first, so that every part starts at a multiple of its element size, without padding."""
    sizes = [-part.element_size() for part in parts]
    return sorted(range(len(parts)), key=sizes.__getitem__)


def frame_bytes(parts: Sequence[torch.Tensor], ragged: bool) -> int:
    """Length of the frame around these parts."""
    return HEADER_BYTES + _aligned(_table_bytes(len(parts), ragged) + parts_bytes(parts))


def longest_frame(parts: Sequence[torch.Tensor], longest: Sequence[int]) -> int:
    """Length of the frame if every part is as long as it may be."""
    content = sum(most * part.element_size() for part, most in zip(parts, longest, strict=True))
    return HEADER_BYTES + _aligned(_table_bytes(len(parts), True) + content)


def parts_bytes(parts: Sequence[torch.Tensor]) -> int:
    return sum(part.numel() * part.element_size() for part in parts)


def _aligned(count: int) -> int:
    """Frames are multiples of 8 bytes, so that the next frame in the same buffer is aligned too."""
    return -(-count // 8) * 8


def _table_bytes(count: int, ragged: bool) -> int:
    return 8 * -(-count // 2) if ragged else 0


def memory_of(buffer: torch.Tensor) -> memoryview:
    """The bytes of a uint8 tensor: its own memory on the CPU, a copy otherwise."""
    return cast(Any, buffer.cpu().numpy()).data


class Checksum:
    """XXH3 of everything behind a frame's header; the first word of the header is its seed."""

    def __init__(self, frame: memoryview) -> None:
        self._frame = frame
        self._sum = xxhash.xxh3_64(seed=_CHECKSUM.unpack_from(frame)[0])
        self._until = HEADER_BYTES

    def add_until(self, end: int) -> None:
        """Add the bytes of the frame up to this one."""
        self._sum.update(self._frame[self._until : end])
        self._until = end

    def write(self) -> None:
        """Write it into the header of the frame."""
        _CHECKSUM.pack_into(self._frame, _WHOSE.size, self._sum.intdigest())

    def is_right(self) -> bool:
        """Whether the header of the frame has it."""
        return _CHECKSUM.unpack_from(self._frame, _WHOSE.size)[0] == self._sum.intdigest()


def _checksum_of(frame: memoryview) -> Checksum:
    checksum = Checksum(frame)
    checksum.add_until(len(frame))
    return checksum


def seal(frame: torch.Tensor) -> None:
    """Write the checksum of a frame into its header."""
    if frame.device.type != "cpu":
        frame[_WHOSE.size : HEADER_BYTES] = device_sum(frame, HEADER_BYTES).view(1).view(torch.uint8)
        return
    _checksum_of(memory_of(frame)).write()


def read_heads(frames: Sequence[torch.Tensor], parts: int, ragged: bool) -> list[Head | None]:
    """What `unpack` needs of received frames: read in one go if they are not in the host's memory."""
    length = HEADER_BYTES + _table_bytes(parts, ragged)
    away = [frame.device.type != "cpu" and frame.numel() >= length for frame in frames]
    chosen = [frame for frame, is_away in zip(frames, away, strict=True) if is_away]
    found = iter(heads(chosen, length, HEADER_BYTES) if chosen else ())
    return [next(found) if is_away else None for is_away in away]


def pack(
    parts: Sequence[torch.Tensor], *, step: int, mark: int, ragged: bool, length: int | None = None
) -> torch.Tensor:
    """One uint8 buffer that holds all parts behind a header (and a table of lengths if they may vary).

    With `length` it is padded with zeros to that many bytes.
    """
    total = frame_bytes(parts, ragged) if length is None else length
    if total >= _LIMIT or any(part.numel() >= _LIMIT for part in parts):
        raise PayloadError(f"a payload of {total} bytes exceeds the frame's limit of {_LIMIT - 1}")
    device = parts[0].device if parts else torch.device("cpu")
    buffer = torch.empty(total, dtype=torch.uint8, device=device)
    version = VERSION | (RAGGED if ragged else 0) | (0 if device.type == "cpu" else ON_DEVICE)
    head = bytearray(HEADER_BYTES + _table_bytes(len(parts), ragged))
    _WHOSE.pack_into(head, 0, MAGIC, version, mark, step % _LIMIT)
    if ragged:
        struct.pack_into(f"<{len(parts)}I", head, HEADER_BYTES, *(part.numel() for part in parts))
    contents = [as_bytes(parts[index]) for index in _order(parts)]
    if device.type == "cpu":
        if total <= _BLOCK_BYTES and len(contents) > 1:  # it stays in the cache as a whole
            contents = [torch.cat(contents)]
        _fill(memory_of(buffer), head, [memory_of(content) for content in contents])
        return buffer
    buffer[: len(head)] = torch.frombuffer(head, dtype=torch.uint8)
    position = len(head)
    for content in contents:
        buffer[position : position + content.numel()] = content
        position += content.numel()
    buffer[position:] = 0
    seal(buffer)
    return buffer


def _fill(frame: memoryview, head: bytearray, contents: Sequence[memoryview]) -> None:
    """Header and contents, with the checksum; the rest is zero."""
    position = len(head)
    frame[:position] = head
    checksum = Checksum(frame)
    for content in contents:
        for begin in range(0, len(content), _BLOCK_BYTES):
            piece = content[begin : begin + _BLOCK_BYTES]
            frame[position : position + len(piece)] = piece
            position += len(piece)
            checksum.add_until(position)
    frame[position:] = bytes(len(frame) - position)
    checksum.add_until(len(frame))
    checksum.write()


def _check_header(
    memory: memoryview, step: int, mark: int, ragged: bool, is_right: Callable[[], bool], where: str
) -> None:
    if len(memory) < HEADER_BYTES:
        raise PayloadError(f"{where} has {len(memory)} bytes, less than a header of {HEADER_BYTES}")
    magic, version, its_mark, its_step = _WHOSE.unpack_from(memory)
    if magic != MAGIC:
        raise PayloadError(f"{where} does not begin with thinwire's mark: another program on this group?")
    if version & ~_FLAGS != VERSION:
        raise PayloadError(f"{where} has format version {version & ~_FLAGS}, this rank speaks {VERSION}")
    if not is_right():
        raise PayloadError(f"{where} is damaged: its checksum is wrong. Check the network and the memory")
    if bool(version & RAGGED) != ragged:
        raise PayloadError(f"{where} is {'' if version & RAGGED else 'not '}ragged, which was not expected")
    if its_step != step % _LIMIT:
        raise PayloadError(
            f"{where} belongs to step {its_step}, this rank is at step {step}: "
            "load the same checkpoint on every rank"
        )
    if its_mark != mark:
        raise PayloadError(
            f"{where} belongs to other tensors, another method or another state than this rank's: "
            "load the same checkpoint on every rank, or on none"
        )


def _is_right(frame: torch.Tensor, memory: memoryview, head: Head | None) -> bool:
    """Whether the header has the checksum of the rest, of the kind that it names."""
    if not memory[1] & ON_DEVICE:
        return _checksum_of(memory if head is None else memory_of(frame)).is_right()
    if frame.numel() % 8:
        return False
    found = head.sum if head is not None else int(device_sum(frame, HEADER_BYTES)) % 2**64
    return _CHECKSUM.unpack_from(memory, _WHOSE.size)[0] == found


def unpack(
    frame: torch.Tensor,
    templates: Sequence[torch.Tensor],
    *,
    step: int,
    mark: int,
    longest: Sequence[int] | None,
    source: int,
    own: bool = False,
    head: Head | None = None,
    padded: bool = False,
) -> list[torch.Tensor]:
    """The parts in a frame, as flat views into it. `templates` give the dtypes.

    They give the lengths as well, unless `longest` has the largest length that each part may have. The
    checksum of this rank's `own` frame is not computed again: it has not been on the wire. `head` has what
    was read of a frame on another device. A `padded` frame may be longer than its parts.

    Nothing in the frame is used before it is checked: whatever the bytes are, the result is either parts
    that lie inside the frame or a `PayloadError`.
    """
    memory = memory_of(frame) if head is None else head.memory
    where = f"payload from rank {source}"
    _check_header(
        memory, step, mark, longest is not None, lambda: own or _is_right(frame, memory, head), where
    )
    table = _table_bytes(len(templates), longest is not None)
    body = frame.numel() - HEADER_BYTES
    if longest is None:
        lengths = [template.numel() for template in templates]
    else:
        if body < table:
            raise PayloadError(f"{where} is too short for its table of {len(templates)} lengths")
        lengths = list(struct.unpack_from(f"<{len(templates)}I", memory, HEADER_BYTES))
        for number, (length, most) in enumerate(zip(lengths, longest, strict=True)):
            if length > most:
                raise PayloadError(
                    f"{where} has {length} entries in part {number}, which holds at most {most}"
                )
    needed = table + sum(n * t.element_size() for n, t in zip(lengths, templates, strict=True))
    if _aligned(needed) != body and not (padded and _aligned(needed) < body):
        raise PayloadError(f"{where} has {body} bytes for parts that need {needed}: truncated or too long")
    order, begin = _order(templates), HEADER_BYTES + table
    widths = [lengths[index] * templates[index].element_size() for index in order]
    pieces = cast("Sequence[torch.Tensor]", frame[begin : begin + sum(widths)].split(widths))
    parts = dict(zip(order, pieces, strict=True))
    types = [template.dtype for template in templates]
    return [parts[i] if kind == torch.uint8 else parts[i].view(kind) for i, kind in enumerate(types)]
