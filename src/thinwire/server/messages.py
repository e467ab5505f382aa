"""Messages between server and workers: a header of 28 bytes with everything to check the payload by."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import torch

from thinwire.errors import PayloadError
from thinwire.net.secret import TAG_BYTES, Seal
from thinwire.net.transport import Connection
from thinwire.server.quantiser import Bytes, Coded, raw

MAGIC = 0x79
FORMAT = 1
# magic, format, kind, form, epoch, version, entries, bytes of payload, checksum, scale
_HEADER = struct.Struct("<BBBBIIIIIf")
_CHECKSUM = struct.Struct("<I")
_CHECKSUM_AT = 20
HEADER_BYTES = _HEADER.size
ONE_WAY = 0x80
"""On top of a kind: no answer is expected."""


class Kind(IntEnum):
    """From a worker: HELLO to FINISHED, and FAULT. From a server: SNAPSHOT to FAULT. From both: the rest."""

    HELLO = 1  # a worker joins: its index as version, its agreement as payload
    ASK = 2  # for parameters
    UPDATE = 3  # a gradient difference, computed with the parameters of `version`
    PARTIAL = 4  # the sum of gradients (and losses) of chunk `version` at the snapshot
    FINISHED = 5  # nothing more will come for this epoch
    SNAPSHOT = 6  # x~ in float32, and the chunk to sum up (version; 0: none, c + 1: chunk c)
    CHUNK = 7  # another chunk to sum up, left by a worker that is gone
    PARAMETERS = 8  # Q(x) of `version`
    PAUSE = 9  # the epoch's updates are all given out
    END = 10  # the final x~
    WAIT = 11  # the server lives, the answer takes longer
    REFUSED = 12  # to HELLO, with the reason
    FAULT = 13  # the run cannot go on, with the reason
    NONCE = 14  # before HELLO, where there is a secret: see net/secret.py
    PROOF = 15


FINAL = (Kind.END, Kind.REFUSED, Kind.FAULT)
_KINDS = frozenset(int(kind) for kind in Kind)


@dataclass(slots=True)
class Message:
    """The vector's form, entries, scale and bytes are in `coded`."""

    kind: Kind
    epoch: int = 0
    version: int = 0
    coded: Coded = field(default_factory=lambda: Coded(0, 0))
    one_way: bool = False

    @property
    def length(self) -> int:
        """Bytes on the wire."""
        return HEADER_BYTES + len(self.coded.payload)

    @property
    def text(self) -> str:
        return self.coded.payload.tobytes().decode(errors="replace")


class MessageConnection:
    """Messages over a connection, for vectors of up to `size` entries. Once sealed, each ends with a tag."""

    def __init__(self, connection: Connection, size: int) -> None:
        self.connection = connection
        self._room = capacity(size) + TAG_BYTES
        self._out = np.zeros(self._room, np.uint8)
        self._out_tensor = torch.from_numpy(self._out)
        self._sending: Seal | None = None
        self._receiving: Seal | None = None

    def seal(self, sending: Seal, receiving: Seal) -> None:
        """From now on every message is authenticated."""
        self._sending, self._receiving = sending, receiving

    def send(self, message: Message) -> None:
        end = pack_into(message, self._out[:-TAG_BYTES])
        if self._sending is not None:
            tag = self._sending.tag(self._out[:end].data)
            self._out[end : end + TAG_BYTES] = np.frombuffer(tag, np.uint8)
            end += TAG_BYTES
        name = f"send {message.kind.name.lower()}"
        self.connection.send(self._out_tensor[:end], len(message.coded.payload), name)

    async def receive(self) -> Message:
        buffer, length = (await self.connection.receive(self._room)).numpy(), 0
        if self._receiving is not None:
            end = length_of(buffer, self.connection.peer)
            tag = buffer[end : end + TAG_BYTES]
            self._receiving.check(buffer[:end].data, tag.data, self.connection.peer)
            length = TAG_BYTES
        message = unpack(buffer, self.connection.peer)
        length += message.length
        self.connection.count_received(length, f"receive {message.kind.name.lower()}")
        return message


def capacity(size: int) -> int:
    """The longest message there can be for `size` parameters: 48 bits each, or a text."""
    return HEADER_BYTES + max(8192, 6 * size + 16)


def with_text(kind: Kind, text: str, *, epoch: int = 0, version: int = 0) -> Message:
    return Message(kind, epoch, version, Coded(0, 0, 0.0, np.frombuffer(text.encode()[:8000], np.uint8)))


def with_bytes(kind: Kind, data: bytes) -> Message:
    return Message(kind, coded=Coded(0, 0, 0.0, np.frombuffer(data, np.uint8)))


def partial(epoch: int, chunk: int, loss: float, gradient: Any, *, one_way: bool) -> Message:
    """A chunk's sum of losses as float64, then its sum of gradients as float32."""
    coded = raw(gradient)
    coded.payload = np.concatenate((np.array([loss]).view(np.uint8), coded.payload))
    return Message(Kind.PARTIAL, epoch, chunk, coded, one_way)


def open_partial(message: Message, size: int) -> tuple[float, Any]:
    payload = message.coded.payload
    if len(payload) != 8 + 4 * size:
        raise PayloadError(f"a partial gradient has {len(payload)} bytes, expected {8 + 4 * size}")
    loss = float(payload[:8].copy().view(np.float64)[0])
    gradient = payload[8:].copy().view(np.float32)
    if not np.isfinite(loss) or not bool(np.isfinite(gradient).all()):
        raise PayloadError("a partial gradient is not finite")
    return loss, gradient


def pack_into(message: Message, buffer: Bytes) -> int:
    """Write the message into `buffer`; returns its length."""
    coded, payload, end = message.coded, message.coded.payload, message.length
    if end > len(buffer):
        raise PayloadError(f"a message of {end} bytes exceeds the {len(buffer)} that were agreed")
    kind = message.kind | ONE_WAY if message.one_way else int(message.kind)
    head = (MAGIC, FORMAT, kind, coded.form, message.epoch, message.version, coded.entries, len(payload), 0)
    _HEADER.pack_into(buffer.data, 0, *head, coded.scale)
    buffer[HEADER_BYTES:end] = payload
    _CHECKSUM.pack_into(buffer.data, _CHECKSUM_AT, zlib.crc32(buffer[:end].data))
    return end


def length_of(buffer: Bytes, source: str) -> int:
    """Bytes of the message at the beginning of `buffer`, by its header; no more than there are."""
    if len(buffer) < HEADER_BYTES:
        raise PayloadError(f"a message from {source} has {len(buffer)} bytes, less than a header")
    end = HEADER_BYTES + int(_HEADER.unpack_from(buffer.data, 0)[7])
    if end > len(buffer):
        raise PayloadError(f"a message from {source} claims {end - HEADER_BYTES} bytes, more than can come")
    return end


def unpack(buffer: Bytes, source: str) -> Message:
    """The message at the beginning of `buffer`, with a payload of its own. PayloadError if it is none."""
    what, end = f"a message from {source}", length_of(buffer, source)
    found = _HEADER.unpack_from(buffer.data, 0)
    magic, version_of_format, kind, form, epoch, version, entries, _, checksum, scale = found
    if magic != MAGIC:
        raise PayloadError(f"{what} does not begin with thinwire's mark")
    if version_of_format != FORMAT:
        raise PayloadError(f"{what} has format {version_of_format}, this side speaks {FORMAT}")
    if kind & ~ONE_WAY not in _KINDS:
        raise PayloadError(f"{what} is of the unknown kind {kind & ~ONE_WAY}")
    copy = buffer[:end].copy()
    copy[_CHECKSUM_AT : _CHECKSUM_AT + 4] = 0
    if zlib.crc32(copy.data) != checksum:
        raise PayloadError(f"{what} is damaged: its checksum does not fit")
    coded = Coded(form, entries, scale, copy[HEADER_BYTES:])
    return Message(Kind(kind & ~ONE_WAY), epoch, version, coded, bool(kind & ONE_WAY))
