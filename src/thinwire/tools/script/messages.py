"""What a script's workers are told, and what they report: one JSON object per line, in a file per worker."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Annotated, Literal

import msgspec

from thinwire.errors import ThinwireError

Count = Annotated[int, msgspec.Meta(ge=0)]
Amount = Annotated[float, msgspec.Meta(ge=0)]


class Job(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One run of a script."""

    script: str
    """A file, or with `module` the name of a module."""
    module: bool = False
    arguments: tuple[str, ...] = ()
    method: str
    link: str = "none"
    steps: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Stop after this many optimizer steps."""
    patterns: dict[str, str] = {}
    """Of values in the output, by name: regular expressions with one group."""
    follow: bool = False
    """Report every step and value, and time the computing."""
    folder: str | None = None
    """Where workers report; None if nobody launched them."""
    launcher: int | None = None
    """Its process; workers end with it."""
    to_log: bool = False
    """The output goes to files, and tracebacks with it; otherwise the launcher shows the one that counts."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag=str.lower):
    """Base of what a worker reports; the class's name is the line's "kind"."""


class Failure(Message, frozen=True):
    """The script did not end well on this worker."""

    at: float
    """By `time.monotonic()`, which all processes of a machine share: the first failure causes the others."""
    code: int
    text: str
    """The traceback, or what the script said as it left."""


class Stepped(Message, frozen=True):
    """An optimizer step of rank 0. Bytes and seconds count from the start of the run."""

    step: Count
    seconds: Amount
    sent: Count
    received: Count


class Valued(Message, frozen=True):
    """Values that the script recorded, or that a pattern found in its output; None if not finite."""

    step: Count
    seconds: Amount
    sent: Count
    values: dict[str, float | None]


class ModelReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the meter counted for one model, on rank 0; bytes are totals. All zero for `alone`."""

    model: str
    method: str
    parameters: Count
    steps: Count
    rounds: Count
    payload_bytes: Count
    sent_bytes: Count
    received_bytes: Count
    sent_inside_bytes: Count = 0
    """To other workers of the same host, with `hierarchical`."""
    ratio_to_dense: Amount
    """Payload as a part of that of uncompressed steps."""
    wait_seconds_per_step: Amount
    compress_seconds_per_step: Amount
    overhead_bytes: int = 0
    """Frame headers and length tables."""
    layers: dict[str, Amount] = {}
    """Payload bytes per step by parameter, as far as they can be told apart."""
    shapes: dict[str, tuple[Count, ...]] = {}
    """Of the parameters by name."""
    optimizer: str = ""
    learning_rate: float = 0.0
    kind: Literal["plain SGD", "adaptive", "other", "unknown"] = "unknown"
    """Of the optimizer; see `sessions/optimizer_checks.py`."""
    bucket_bytes: Count | None = None
    """The limit of DDP's buckets; None for the default one."""


class Ended(Message, frozen=True, kw_only=True):
    """The script ended well."""

    workers: Count
    steps: Count
    """Of the optimizer."""
    seconds: Amount
    """From the first training forward pass to the last optimizer step."""
    step_seconds: Amount
    """The median."""
    models: list[ModelReport]
    values: dict[str, float | None] = {}
    """The last recorded ones; None if not finite."""
    compute: tuple[Amount, Amount, Amount] = (0.0, 0.0, 0.0)
    """Forward pass, backward pass and optimizer of a step, see `thinwire.hosts.watch`; 0 if not timed."""
    interface_sent: Count | None = None
    """What the kernel counted on rank 0's interface; None outside of a lab."""


Reported = Failure | Stepped | Valued | Ended
_decoder = msgspec.json.Decoder(Reported)
_encoder = msgspec.json.Encoder()


class Sender:
    """Writes messages to this worker's file; without a folder they go nowhere."""

    def __init__(self, folder: str | None, rank: int) -> None:
        self._file: IO[bytes] | None = None
        if folder is not None:
            self._file = path_of(Path(folder), rank).open("ab", buffering=0)

    def send(self, message: Message) -> None:
        if self._file is not None:
            self._file.write(_encoder.encode(message) + b"\n")


class Receiver:
    """Reads what a worker has written so far."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = path_of(folder, rank).open("w+b")
        self._rest = b""

    def receive(self) -> list[Reported]:
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        try:
            return [_decoder.decode(line) for line in lines]
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ThinwireError(f"a worker's report cannot be read: {error}") from None

    def close(self) -> None:
        self._file.close()


def path_of(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.jsonl"
