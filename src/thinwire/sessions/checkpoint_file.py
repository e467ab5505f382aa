"""A file with tensors and plain values that is whole or not there, and is checked before it is parsed.

    "thinwire checkpoint 1\\n", the length and the CRC-32 of what follows, then `torch.save` of a mapping

It is read with `torch.load(..., weights_only=True)`, so it cannot run code.
"""

from __future__ import annotations

import io
import json
import os
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import torch

from thinwire.errors import StateError

MAGIC = b"thinwire checkpoint 1\n"
HEADER = struct.Struct("<QI")
START = len(MAGIC) + HEADER.size
CHUNK = 2**24


class Mark(NamedTuple):
    """What a file is known by: the length of its content and its CRC-32."""

    length: int
    checksum: int


def copied(value: Any, what: str) -> Any:
    """A copy in main memory; StateError names what cannot be read again without running code."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return {copied(key, f"a key of {what}"): copied(each, f"{what} / {key}") for key, each in items}
    if isinstance(value, list | tuple):
        each = [
            copied(item, f"{what} / {number}") for number, item in enumerate(cast("Sequence[Any]", value))
        ]
        return each if isinstance(value, list) else tuple(each)
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise StateError(
        f"{what} is a {type(value).__name__}: a checkpoint holds tensors, numbers, strings, and mappings "
        "and lists of them"
    )


def write(path: Path, content: Mapping[str, Any]) -> Mark:
    """Write under another name, flush to the disk, and rename."""

    return _atomically(path, lambda stream: _fill(stream, content))


def encode(content: Mapping[str, Any]) -> bytes:
    """The bytes of such a file."""
    stream = io.BytesIO()
    _fill(stream, content)
    return stream.getvalue()


def _fill(stream: BinaryIO, content: Mapping[str, Any]) -> Mark:
    stream.write(bytes(START))
    summing = _Summing(stream)
    torch.save(dict(content), cast(Any, summing))
    stream.seek(0)
    stream.write(MAGIC + HEADER.pack(summing.length, summing.checksum))
    return Mark(summing.length, summing.checksum)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """The same for a small text; `read_json` checks it."""
    text = json.dumps(content, sort_keys=True)
    sealed = json.dumps({"content": text, "checksum": zlib.crc32(text.encode())}).encode()

    def fill(stream: BinaryIO) -> None:
        stream.write(sealed)

    _atomically(path, fill)


def read_json(path: Path) -> dict[str, Any] | None:
    """The content, or None if there is none or it is damaged."""
    try:
        sealed = json.loads(path.read_bytes())
        whole = zlib.crc32(sealed["content"].encode()) == sealed["checksum"]
        found = json.loads(sealed["content"]) if whole else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return cast("dict[str, Any]", found) if isinstance(found, dict) else None


def read(source: Path | bytes, what: str, mark: Mark | None = None) -> dict[str, Any]:
    """The content of a file or of its bytes, if all of it is as it was written."""
    try:
        with io.BytesIO(source) if isinstance(source, bytes) else source.open("rb") as stream:
            _check(stream, what, mark)
            stream.seek(START)
            found = torch.load(stream, weights_only=True, map_location="cpu")
    except OSError as error:
        raise StateError(f"{what} cannot be read: {error}") from None
    except StateError:
        raise
    except Exception as error:  # torch raises many kinds; the checksum fits, so another program wrote this
        raise StateError(f"{what} is not a checkpoint: {error}") from None
    if not isinstance(found, dict):
        raise StateError(f"{what} is not a checkpoint")
    return cast("dict[str, Any]", found)


def _check(stream: BinaryIO, what: str, mark: Mark | None) -> None:
    start = stream.read(START)
    if len(start) < START or start[: len(MAGIC)] != MAGIC:
        raise StateError(f"{what} is not a checkpoint of this version, or its beginning is damaged")
    stated = Mark(*HEADER.unpack(start[len(MAGIC) :]))
    if mark is not None and stated != mark:
        raise StateError(f"{what} is not the file that was written, or its beginning is damaged")
    length = checksum = 0
    while chunk := stream.read(CHUNK):
        length += len(chunk)
        checksum = zlib.crc32(chunk, checksum)
    if length != stated.length:
        raise StateError(f"{what} is damaged: it has {length} bytes of {stated.length}")
    if checksum != stated.checksum:
        raise StateError(f"{what} is damaged: its checksum does not fit")


class _Summing:
    """Passes bytes on, and counts and sums them."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.length = self.checksum = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.length += len(view)
        self.checksum = zlib.crc32(view, self.checksum)
        return self._stream.write(view)

    def flush(self) -> None:
        self._stream.flush()


def _atomically(path: Path, fill: Callable[[BinaryIO], Any]) -> Any:
    temporary = path.with_name(f".{path.name}.new")
    try:
        with temporary.open("wb") as stream:
            result = fill(stream)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    flush_folder(path.parent)
    return result


def flush_folder(folder: Path) -> None:
    """Flush the names in a folder, where the system can."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)
