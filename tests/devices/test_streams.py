"""The order of work on streams: who waits for whom, and which memory is used again when."""

import pytest
import torch

from tests.devices.recording import RecordingStreams
from thinwire.core.channel import ask
from thinwire.drivers.lanes import Job, Lanes, Step
from thinwire.errors import ThinwireError
from thinwire.net import frames
from thinwire.net.executor import ProcessGroupExecutor
from thinwire.net.launch import Worker, run_local
from thinwire.net.meter import Meter
from thinwire.net.staging import Staging
from thinwire.net.streams import CUDA, refuse_capture

CPU = torch.device("cpu")


class Wire:
    """In place of an executor."""

    def __init__(self, streams: RecordingStreams, fails: bool = False) -> None:
        self.streams = streams
        self.fails = fails

    def execute(self, op: frames.Primitive) -> object:
        self.streams.note("operation")
        if self.fails:
            raise RuntimeError("the wire is broken")
        return op.tensor if isinstance(op, frames.AllReduce) else None


def submitted(
    *, wires: int = 1, jobs: int = 1, fails: bool = False, commits: bool = True
) -> RecordingStreams:
    """What lanes ask of the streams for so many buckets of one step, without threads."""
    streams = RecordingStreams()
    lanes = Lanes([Wire(streams, fails) for _ in range(wires)], overlap=False, streams=streams)  # type: ignore[list-item]
    step = Step(lambda committed: None)

    async def program() -> None:
        streams.note("first kernel")
        await ask(frames.AllReduce(torch.ones(3), 12))
        if commits:
            await ask(frames.Commit(True))
        streams.note("last kernel")

    for number in range(jobs):
        streams.log.append(("bucket is ready", "main"))
        lanes.submit(number, Job(program(), step, lambda error: streams.note("future"), CPU))
    step.close()
    lanes.close()
    return streams


@pytest.mark.parametrize("commits", [True, False])
def test_a_lane_waits_for_the_bucket_before_its_first_kernel(commits: bool) -> None:
    log = submitted(commits=commits).log
    assert log[:5] == [
        ("bucket is ready", "main"),
        ("record", "main", 0),  # the event behind the gradients
        ("wait", "stream 0", 0),
        ("first kernel", "stream 0"),
        ("operation", "stream 0"),
    ]


@pytest.mark.parametrize("commits", [True, False])
def test_the_future_is_completed_on_the_stream_of_the_lane(commits: bool) -> None:
    """A future of torch for a device records an event on the current stream when it is completed.

    Whoever waits for the future lets its own stream wait for that event. So DDP reads the bucket behind the
    lane's last kernel.
    """
    log = submitted(commits=commits).log
    assert log.index(("last kernel", "stream 0")) < log.index(("future", "stream 0"))
    assert not [entry for entry in log if entry[0] in ("last kernel", "future") and entry[1] != "stream 0"]


def test_every_lane_has_one_stream_and_every_bucket_an_event() -> None:
    log = submitted(wires=2, jobs=4).log
    events = [entry[2] for entry in log if entry[0] == "record"]
    assert events == [0, 1, 2, 3]
    for bucket, event in enumerate(events):
        waiting = {entry[1] for entry in log if entry[0] == "wait" and entry[2] == event}
        assert waiting == {f"stream {bucket % 2}"}


def test_a_failed_bucket_is_filled_on_the_stream_of_its_lane() -> None:
    """The host writes NaN into it: not beside work that is still queued there."""
    log = submitted(fails=True).log
    assert ("future", "stream 0") in log
    assert ("future", "main") not in log


def test_nobody_blocks_the_host_in_a_lane() -> None:
    assert not [entry for entry in submitted(wires=2, jobs=4).log if entry[0] == "host waits"]


# -- staging -----------------------------------------------------------------------------------------------


def through(staging: Staging, streams: RecordingStreams, tensor: torch.Tensor) -> None:
    """One operation that gloo performs on the host."""
    (room,) = staging.begin(4 * tensor.numel())
    host = room.view(torch.float32)
    staging.take([(host, tensor)])
    streams.note("gloo")
    staging.give([(host, tensor)])


def test_gloo_reads_after_the_copy_to_the_host_has_ended() -> None:
    streams = RecordingStreams()
    through(Staging(streams), streams, torch.ones(3))
    assert streams.log == [
        ("pinned", 64),
        ("record", "main", 0),  # behind the copy to the host
        ("host waits", 0),
        ("gloo", "main"),
        ("record", "main", 1),  # behind the copy to the device
    ]


def test_a_buffer_is_used_again_only_after_the_copy_out_of_it() -> None:
    streams = RecordingStreams()
    staging = Staging(streams)
    for _ in range(4):
        through(staging, streams, torch.ones(3))
    copies_back = [1, 3, 5]  # the events of the second copies; those of the first ones are waited for at once
    waited = [entry[1] for entry in streams.log if entry[0] == "host waits"]
    assert [event for event in waited if event in copies_back] == [1, 3], (
        "by the third and the fourth operation"
    )
    begins = [position for position, entry in enumerate(streams.log) if entry == ("gloo", "main")]
    assert streams.log.index(("host waits", 1)) < begins[2]
    assert streams.log.index(("host waits", 3)) < begins[3]
    assert streams.log.index(("host waits", 1)) > begins[1], "the second operation has the other buffer"


def test_memory_is_allocated_once() -> None:
    streams = RecordingStreams()
    staging = Staging(streams)
    for length in (1000, 900, 10, 1000):
        through(staging, streams, torch.ones(length))
    assert [entry for entry in streams.log if entry[0] == "pinned"] == [
        ("pinned", 4032),
        ("pinned", 3648),
        ("pinned", 7296),
    ]


def staged(worker: Worker) -> tuple[list[object], int]:
    """Every operation, on gloo, with tensors that seem to be on a GPU."""
    import torch.distributed as dist

    streams = RecordingStreams()
    group = dist.group.WORLD
    assert group is not None
    here = ProcessGroupExecutor(group, Meter(), streams=streams)
    plain = ProcessGroupExecutor(group, Meter())
    results: list[object] = []
    for executor in (here, plain, here, here):
        rank = worker.rank
        sum_of = executor.execute(frames.AllReduce(torch.arange(5.0) + rank, 20))
        block = torch.arange(8, dtype=torch.uint8) + rank
        rows = executor.execute(frames.AllGather(block, 8))
        sent = executor.execute(frames.Broadcast(block.clone(), 1, 8))
        pieces = (block[: 2 + rank].clone(), block[:3].clone())
        got = executor.execute(frames.AllToAll(pieces, (2, 3) if rank == 0 else (3, 3), 5))
        results.append([each.tolist() for each in (sum_of, rows, sent, *got)])
    here.close()
    return results, sum(entry[0] == "pinned" for entry in streams.log)


def test_staged_operations_have_the_results_of_plain_ones() -> None:
    for results, allocations in run_local(staged, 2):
        assert all(one == results[1] for one in results)
        assert allocations == 2, "both buffers are large enough from the first operation on"


# -- what is refused ---------------------------------------------------------------------------------------


def test_a_captured_graph_is_refused() -> None:
    streams = RecordingStreams()
    refuse_capture(streams)
    streams.capturing = True
    with pytest.raises(ThinwireError, match="CUDA graph is being captured"):
        refuse_capture(streams)
    lanes = Lanes([Wire(streams)], overlap=False, streams=streams)  # type: ignore[list-item]

    async def program() -> None:
        raise AssertionError("nothing may run")

    waiting = program()
    with pytest.raises(ThinwireError, match="average"):
        lanes.submit(0, Job(waiting, Step(lambda committed: None), lambda error: None, CPU))
    waiting.close()


def test_nothing_is_captured_on_a_machine_without_a_gpu() -> None:
    assert CUDA.is_capturing() is False
