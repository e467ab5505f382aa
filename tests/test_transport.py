"""Connections: what is sent arrives, every byte is counted, and a peer that is gone is noticed on its own."""

import threading
import time

import pytest
import torch
import torch.distributed as dist

from thinwire.errors import PayloadError, PeerError
from thinwire.net.meter import Meter
from thinwire.net.transport import SERVER, WORKER, GlooConnection, Listener, LocalNetwork, connect, run

FRAMES = [torch.arange(count, dtype=torch.uint8) for count in (0, 1, 100)]


async def send_all(connection) -> None:
    for frame in FRAMES:
        connection.send(frame, frame.numel() // 2, "send part")


async def receive_all(connection, got: list) -> None:
    for frame in FRAMES:
        received = await connection.receive(200)
        connection.count_received(frame.numel(), "receive part")
        got.append(received[: frame.numel()].clone())


def counted(meter: Meter) -> dict:
    return dict(meter.by_operation)


def over_gloo(store, got: list) -> tuple[Meter, Meter]:
    meters = Meter(), Meter()

    def serve() -> None:
        run(send_all(GlooConnection(store, "pair", SERVER, 10.0, peer="the worker", meter=meters[0])))

    thread = threading.Thread(target=serve)
    thread.start()
    run(receive_all(GlooConnection(store, "pair", WORKER, 10.0, peer="the server", meter=meters[1]), got))
    thread.join()
    return meters


def in_one_process(got: list) -> tuple[Meter, Meter]:
    network, meters = LocalNetwork(), (Meter(), Meter())
    server, worker = network.pair(("the server", "the worker"), meters)
    network.start(receive_all(worker, got))
    network.start(send_all(server))
    network.run()
    return meters


def test_both_ways_carry_and_count_the_same() -> None:
    there, here = [], []
    gloo, local = over_gloo(dist.HashStore(), there), in_one_process(here)
    for got in (there, here):
        assert all(torch.equal(a, b) for a, b in zip(got, FRAMES, strict=True))
    assert [counted(meter) for meter in gloo] == [counted(meter) for meter in local]
    sent = local[0].by_operation["send part"]
    assert (sent.operations, sent.payload_bytes, sent.overhead_bytes) == (3, 50, 51)
    assert sent.sent_bytes == 101 + 3 * 96
    assert local[1].by_operation["receive part"].received_bytes == sent.sent_bytes


def test_a_death_is_noticed_on_that_connection_alone() -> None:
    """Workers join one after the other; the first leaves, the second goes on."""
    store, timeout = dist.HashStore(), 60.0
    listener, joined = Listener(store, "place"), {}
    listener.open()

    def join(number: int) -> None:
        joined[number] = connect(store, "place", timeout, peer="the server", meter=Meter())

    accepted = []
    for number in (1, 2):
        thread = threading.Thread(target=join, args=(number,))
        thread.start()
        while listener.joined() < number:
            time.sleep(0.01)
        accepted.append(listener.accept(number, timeout, Meter()))
        thread.join()
    del joined[1]
    with pytest.raises(PeerError, match=r"lost worker connection 1 \(dead, or silent for 60 s\)"):
        run(accepted[0].receive(8))
    frame = torch.arange(8, dtype=torch.uint8)
    thread = threading.Thread(target=joined[2].send, args=(frame, 8))
    thread.start()
    assert torch.equal(run(accepted[1].receive(8)), frame)
    thread.join()
    listener.close()
    with pytest.raises(PeerError, match=r"no answer from the server within 0\.2 s"):
        connect(store, "place", 0.2, peer="the server", meter=Meter())


def test_a_server_that_was_started_again_keeps_its_place() -> None:
    store = dist.HashStore()
    old, new = Listener(store, "place"), Listener(store, "place")
    old.open()
    new.open()
    old.close()
    assert store.check(["place/open"]), "the old one must not close the new one's place"
    assert (old.joined(), new.joined()) == (0, 0)
    new.close()
    assert not store.check(["place/open"])


def test_messages_take_their_time_and_the_end_of_a_program_closes_its_connections() -> None:
    network = LocalNetwork(latency=0.5)
    ours, theirs = network.pair(("a", "b"), (Meter(), Meter()))
    seen = []

    async def first() -> None:
        ours.busy_until = 2.0
        ours.send(FRAMES[1], 1)

    async def second() -> None:
        await theirs.receive(1)
        seen.append(network.now)
        with pytest.raises(PeerError, match="lost a"):
            await theirs.receive(1)

    network.start(first(), [ours], at=1.0)
    network.start(second())
    network.run()
    assert seen == [2.5]


def test_a_deadlock_is_an_assertion() -> None:
    network = LocalNetwork()
    ends = network.pair(("a", "b"), (Meter(), Meter()))
    for end in ends:
        network.start(receive_all(end, []))
    with pytest.raises(AssertionError, match="deadlock: nothing is under way, and programs wait for b, a"):
        network.run()


def test_a_frame_that_is_too_long_is_refused() -> None:
    network = LocalNetwork()
    ours, theirs = network.pair(("a", "b"), (Meter(), Meter()))

    async def receive() -> None:
        await theirs.receive(99)

    ours.send(FRAMES[2], 0)
    network.start(receive())
    with pytest.raises(PayloadError, match="a frame of 100 bytes from a, where 99 have room"):
        network.run()
