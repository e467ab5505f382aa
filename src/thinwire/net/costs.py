"""The cost of a collective: bytes through each rank's network interface, and time on a given link.

The formulas follow the algorithms that gloo uses (ring all-reduce, ring all-gather, binomial-tree
broadcast, pairwise all-to-all). The meter, the simulated network and the choice of a transport for ragged
gathers all use them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Link:
    """A rank's connection: seconds per message, and bytes per second in each direction.

    Args:
        latency: seconds from a message's end to its arrival.
        bandwidth: the rate in each direction, in bytes per second; with `down`, the sending rate only.
        down: the receiving rate, in bytes per second.
        jitter: the largest deviation of a message's latency, earlier or later, in seconds.
        operation: seconds of an operation besides its messages: calls, threads, waiting for a core. Only the
            choice between fewer operations and fewer bytes depends on it.
    """

    latency: float = 50e-6
    bandwidth: float = 125e6
    down: float | None = None
    jitter: float = 0.0
    operation: float = 0.0

    @property
    def up_bandwidth(self) -> float:
        """The sending rate, in bytes per second."""
        return self.bandwidth

    @property
    def down_bandwidth(self) -> float:
        """The receiving rate, in bytes per second."""
        return self.bandwidth if self.down is None else self.down

    def slower(self, factor: float) -> Link:
        """A link on which bytes take `factor` times as long."""
        down = None if self.down is None else self.down / factor
        return replace(self, bandwidth=self.bandwidth / factor, down=down)

    def seconds(self, messages: int, data_bytes: float) -> float:
        """The time for this many bytes in both directions at once."""
        return messages * self.latency + data_bytes / min(self.up_bandwidth, self.down_bandwidth)

    def transfer_seconds(self, cost: Cost) -> float:
        """How long this share of a collective keeps the link busy, without latency."""
        return max(cost.sent / self.up_bandwidth, cost.received / self.down_bandwidth)

    def seconds_for(self, cost: Cost) -> float:
        """How long this share of a collective takes, alone on the link."""
        return cost.hops * self.latency + self.transfer_seconds(cost)


@dataclass(frozen=True)
class Cost:
    """One rank's share of a collective. `hops` is the number of messages that wait for each other."""

    sent: int
    received: int
    hops: int

    @property
    def busiest(self) -> int:
        return max(self.sent, self.received)


# What gloo's TCP transport adds to a message, by the kernel's counters (tests/net/test_kernel_bytes.py): an
# announcement by the sender, a request by the receiver, and a preamble before the data; 48 bytes each.
GLOO_CONTROL = 48
GLOO_SEGMENT = 2**20
# On a slow link a gather or an all-to-all with both directions full takes up to 1.9 times as long as its
# bytes: acknowledgements wait behind the data of the other direction. In pieces of this size it takes as long
# as its bytes, if a piece takes so much longer than the latency that each one adds.
SLICE_BYTES = 2**15
SLICE_LATENCIES = 6.0
# Bytes on an Ethernet with frames of 1,500 bytes for each byte that TCP carries.
TCP_FRAMING = 1514 / 1448


def with_gloo_control(cost: Cost, sent: int, received: int) -> Cost:
    """The cost plus the control traffic of this many messages sent and received."""
    out, back = GLOO_CONTROL * (2 * sent + received), GLOO_CONTROL * (2 * received + sent)
    return Cost(cost.sent + out, cost.received + back, cost.hops)


def gloo_all_reduce_messages(size: int, data_bytes: int) -> int:
    """At least two segments per rank, so that one is summed while the next is sent; at most 1 MiB each."""
    segments = max(2, math.ceil(math.ceil(data_bytes / GLOO_SEGMENT) / size))
    return 2 * (size - 1) * segments


def gloo_all_gather_messages(size: int) -> int:
    """Every block is sent in two halves."""
    return 2 * (size - 1)


def all_reduce(size: int, data_bytes: int) -> Cost:
    """Ring: reduce-scatter, then all-gather."""
    moved = -(-2 * (size - 1) * data_bytes // size)
    return Cost(moved, moved, 2 * (size - 1))


def all_gather(size: int, data_bytes: int) -> Cost:
    """Ring: every rank forwards every other rank's block."""
    moved = (size - 1) * data_bytes
    return Cost(moved, moved, size - 1)


def tree_children(position: int, size: int) -> int:
    """The number of children of `position` in a binomial tree (the root is 0)."""
    first = position.bit_length()
    return sum(1 for bit in range(first, size.bit_length() + 1) if position + (1 << bit) < size)


def broadcast(size: int, data_bytes: int, rank: int, src: int) -> Cost:
    position = (rank - src) % size
    received = 0 if position == 0 else data_bytes
    return Cost(tree_children(position, size) * data_bytes, received, tree_depth(size))


def tree_depth(size: int) -> int:
    return (size - 1).bit_length()


def all_to_all(size: int, rank: int, sent: Sequence[int], received: Sequence[int]) -> Cost:
    """Pairwise; a rank's block for itself does not touch the network."""
    return Cost(sum(sent) - sent[rank], sum(received) - received[rank], size - 1)


def slices(data_bytes: int, link: Link) -> int:
    """The number of pieces in which a gather or an all-to-all is fastest; `data_bytes` are those of a hop.

    A pure function of the bytes and the link, so all ranks agree.
    """
    takes_longer = link.seconds(0, SLICE_BYTES) >= SLICE_LATENCIES * link.latency + link.operation
    return max(1, data_bytes // SLICE_BYTES) if takes_longer else 1


def cheapest_ragged_gather(sizes: Sequence[int], link: Link) -> str:
    """The fastest transport that brings every block to every rank: "padded", "direct" or "broadcast".

    A pure function of the sizes, so all ranks agree. Padding all blocks to the longest costs (W-1) x longest
    on every link; sending directly costs the sender (W-1) x its own size; broadcast trees spread the cost of
    one long block over the ranks, but cost a latency for each rank.
    """
    size, longest, total = len(sizes), max(sizes), sum(sizes)
    depth = tree_depth(size)
    seconds = {
        "padded": link.seconds(size - 1, (size - 1) * longest),
        "direct": link.seconds(size - 1, max((size - 1) * longest, total - min(sizes))),
        "broadcast": link.seconds(size * depth, depth * total),
    }
    # On one link padded and direct take equally long, and direct moves fewer bytes overall.
    wasted = size * longest - total
    if seconds["broadcast"] < seconds["padded"]:
        return "broadcast"
    return "direct" if wasted * (size - 1) > 1024 * size else "padded"


def cheapest_upload(uploaders: int, size: int, coded: int, summed: int, dense: int) -> str:
    """The cheapest way to bring the uploads of some ranks to all: "nothing", "broadcast", "star" or "mean".

    A pure function of the number of uploaders, so all ranks agree. It minimises the bytes that the busiest
    rank receives, then the rounds. Broadcast: every upload is broadcast (`coded` bytes each). Star: the first
    uploader receives the other uploads and broadcasts the sum (`summed` bytes). Mean: an all-reduce of
    `dense` bytes.
    """
    if not uploaders:
        return "nothing"
    received = {
        "broadcast": (uploaders * coded, uploaders),
        "star": (max((uploaders - 1) * coded, summed), 2),
        "mean": (all_reduce(size, dense).received, 1),
    }
    return min(received, key=lambda transport: received[transport])
