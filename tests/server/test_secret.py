"""A run with a secret: strangers are refused, changed and repeated messages are noticed. Gloo, in threads."""

import logging
import threading

import numpy as np
import pytest
import torch
from torch.distributed import HashStore

import thinwire
from tests.server.common import EASY, SIZE, optimum, problem
from thinwire.net.meter import Meter
from thinwire.net.secret import TAG_BYTES, VARIABLE, Handshake, Secret
from thinwire.net.transport import LocalNetwork
from thinwire.server import AsyLPG, api, quantiser, serve, work
from thinwire.server.messages import HEADER_BYTES, Kind, Message, MessageConnection

TEXT, OTHER = "correct horse battery staple", "a wrong horse battery staple"
SECRET = Secret(TEXT)
OPTIONS = AsyLPG(**{**EASY, "epochs": 3, "epoch_length": 200, "mode": "centered"})


@pytest.fixture(autouse=True)
def no_secret_outside(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)


class Members:
    """Calls in threads, by name: what they returned or raised."""

    def __init__(self) -> None:
        self.store, self.found, self._threads = HashStore(), {}, {}

    def start(self, name, function, *args, **options) -> None:
        def act() -> None:
            try:
                self.found[name] = function(*args, store=self.store, timeout=20.0, **options)
            except Exception as error:
                self.found[name] = error

        self._threads[name] = threading.Thread(target=act, daemon=True)
        self._threads[name].start()

    def wait(self, *names):
        for name in names:
            self._threads[name].join(300)
        return [self.found.get(name) for name in names]


def run_with(server: str | None, stranger: str | None, worker: str | None):
    """A server, a stranger who comes first, then a worker."""
    members = Members()
    members.start("server", serve, problem(), OPTIONS, workers=1, secret=server)
    members.start("stranger", work, problem(), OPTIONS, index=0, workers=1, secret=stranger)
    members.wait("stranger")
    members.start("worker", work, problem(), OPTIONS, index=0, workers=1, secret=worker)
    return members.wait("server", "stranger", "worker")


@pytest.mark.parametrize(
    ("server", "stranger", "says"),
    [
        (TEXT, OTHER, "the secret differs from the server's"),
        (TEXT, None, "the server has a secret"),
        (None, OTHER, "the worker has a secret and the server has none"),
    ],
    ids=["wrong", "none", "needless"],
)
def test_a_stranger_is_told_why_and_the_server_goes_on(server, stranger, says, caplog):
    with caplog.at_level(logging.WARNING, "thinwire"):
        served, refused, worked = run_with(server, stranger, server)
    assert isinstance(refused, thinwire.DisagreementError)
    assert "worker 0 may not join" in str(refused)
    assert says in str(refused)
    assert says in caplog.text
    assert served.objective - optimum() < 1e-2
    assert served.lost == []
    assert np.array_equal(served.parameters, worked.parameters)


def test_the_environment_gives_the_secret_and_every_message_has_a_tag(monkeypatch):
    sent = {}
    for text in (None, TEXT):
        if text is not None:
            monkeypatch.setenv(VARIABLE, text)
        members = Members()
        members.start("server", serve, problem(), OPTIONS, workers=1)
        members.start("worker", work, problem(), OPTIONS, index=0, workers=1)
        (served, worked) = members.wait("server", "worker")
        assert served.updates == worked.updates == 600
        sent[text] = served.meter.by_operation
    for name in ("send parameters", "send snapshot", "send end"):
        plain, tagged = sent[None][name], sent[TEXT][name]
        assert tagged.payload_bytes == plain.payload_bytes
        assert tagged.overhead_bytes - plain.overhead_bytes == TAG_BYTES * tagged.operations > 0
    plain, tagged = (sent[text]["receive update"] for text in (None, TEXT))
    assert tagged.received_bytes - plain.received_bytes == TAG_BYTES * tagged.operations


# --- messages -----------------------------------------------------------------------------------------------


class Wire:
    """Two sealed ends, and what goes from the first to the second."""

    def __init__(self, sealed: bool = True) -> None:
        self.frames: list[torch.Tensor] = []
        first, second = LocalNetwork().pair(("a", "b"), (Meter(), Meter()))
        first._send = lambda frame: self.frames.append(frame.clone())
        self.sender, self.receiver = MessageConnection(first, SIZE), MessageConnection(second, SIZE)
        self._connection = second
        if sealed:
            ends = Handshake(SECRET, 0, "test"), Handshake(SECRET, 1, "test")
            ends[0].meet(ends[1].nonce)
            ends[1].meet(ends[0].nonce)
            self.sender.seal(*ends[0].seals())
            self.receiver.seal(*ends[1].seals())

    def send(self, number: int) -> torch.Tensor:
        self.sender.send(Message(Kind.UPDATE, number, 1, quantiser.raw(np.arange(float(SIZE)))))
        return self.frames[-1]

    def take(self, frame: torch.Tensor) -> Message:
        """What the second end makes of these bytes."""
        program = self.receiver.receive()
        assert program.send(None) is self._connection
        try:
            program.send(frame)
        except StopIteration as stop:
            return stop.value
        raise AssertionError


def test_sealed_messages_arrive():
    wire = Wire()
    for number in range(3):
        assert wire.take(wire.send(number)).epoch == number
    assert wire.frames[0].numel() == HEADER_BYTES + 4 * SIZE + TAG_BYTES


@pytest.mark.parametrize("position", [0, 5, 12, HEADER_BYTES + 7, -1])
def test_one_changed_byte_is_refused_before_anything_is_read(position):
    wire = Wire()
    frame = wire.send(0)
    frame[position] ^= 1
    with pytest.raises(thinwire.errors.PayloadError, match=r"not authentic|more than can come"):
        wire.take(frame)


def test_repeated_reordered_and_unsealed_messages_are_refused():
    wire = Wire()
    first, second = wire.send(0), wire.send(1)
    wire.take(first)
    with pytest.raises(thinwire.errors.PayloadError, match="not authentic"):
        wire.take(first)
    wire = Wire()
    first, second = wire.send(0), wire.send(1)
    with pytest.raises(thinwire.errors.PayloadError, match="not authentic"):
        wire.take(second)
    wire, plain = Wire(), Wire(sealed=False)
    with pytest.raises(thinwire.errors.PayloadError, match="not authentic"):
        wire.take(plain.send(0))


def test_shards_join_only_authentic_parts():
    store, parts = HashStore(), {}

    def join(shard: int, text: str) -> None:
        part = np.full(3, float(shard))
        try:
            parts[shard] = api._join_shards(store, "run", part, shard, 2, 20.0, Secret(text))
        except thinwire.DisagreementError as error:
            parts[shard] = str(error)

    for texts, check in (
        ((TEXT, TEXT), lambda found: found.tolist() == [0, 0, 0, 1, 1, 1]),
        ((TEXT, OTHER), lambda found: "not authentic" in found),
    ):
        threads = [threading.Thread(target=join, args=(shard, text)) for shard, text in enumerate(texts)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(200)
        assert check(parts[0])
        assert check(parts[1])
