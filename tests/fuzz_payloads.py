"""Hostile payloads for every method: `python -m tests.fuzz_payloads --count 1000000`.

A forged frame has a valid checksum and hostile content: a rank that is broken or malicious. A damaged frame
has a wrong checksum: a broken network. Whatever is in them, the step ends with a `PayloadError` or with some
result; damage must always be noticed.

There are two kinds of groups. In most turns one rank is *besieged*: all that it receives is forged, and no
other rank has to be run. In the other turns all ranks run in lock-step and forge some of what they send, so
that announced lengths are hostile too, and all ranks must take or refuse together.
"""

import argparse
import collections
import logging
import os
import random
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from unittest import mock

import torch

from tests.laws.cohort import CONFIGURATIONS, Cohort
from thinwire import PayloadError, Session, parse
from thinwire.drivers import Lockstep
from thinwire.net import frames
from thinwire.net.rank_info import RankInfo

STEPS = 12
SHAPES: dict[str, tuple[int, ...]] = {"wide": (12, 17), "vector": (61,), "one": (1,), "scalar": ()}
SIZES = (2, 3, 5)
FORGED = 0.4
"""The share of frames that are forged where all ranks run."""
BESIEGED = (2, 3, 6)
"""Numbers of ranks of a group in which only one runs."""
GROUPS = 8
"""In one of so many turns all ranks run."""

_pack, _unpack = frames.pack, frames.unpack


class Forger:
    """Stands between a rank and the wire, in place of `frames.pack`."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.forged = 0
        self.damaged = 0

    def pack(self, parts, *, step: int, mark: int, ragged: bool) -> torch.Tensor:
        if self.rng.random() >= FORGED:
            return _pack(parts, step=step, mark=mark, ragged=ragged)
        self.forged += 1
        kind = self.rng.randrange(8)
        if kind > 1:  # hostile content in a frame of the right form
            parts = [self._hostile(part, ragged) if self.rng.random() < 0.6 else part for part in parts]
            return _pack(parts, step=step, mark=mark, ragged=ragged)
        frame = _pack(parts, step=step, mark=mark, ragged=ragged)
        self.damaged += self.spoil(frame, sealed=kind == 0)
        return frame

    def spoil(self, frame: torch.Tensor, *, sealed: bool) -> bool:
        """Change some bytes; whether the checksum must notice it."""
        before = frame.clone()
        self._flip(frame, self.rng.choice((1, 1, 2, 8)))
        if sealed:
            frames.seal(frame)
        return not sealed and not frame.equal(before)

    def _hostile(self, part: torch.Tensor, ragged: bool) -> torch.Tensor:
        part = part.detach().clone().view(-1)
        if ragged and self.rng.random() < 0.5:
            length = self.rng.choice((0, 1, part.numel() - 1, part.numel() + 1, self.rng.randrange(400)))
            longer = part.new_zeros(max(length, part.numel()))
            longer[: part.numel()] = part
            part = longer[: max(0, length)].clone()
        if not part.numel():
            return part
        raw = part.view(torch.uint8)
        how = self.rng.randrange(6)
        if how == 0:
            self._flip(raw, self.rng.choice((1, 3, 30)))
        elif how == 1:
            raw.fill_(self.rng.choice((0, 255, 127, 128)))
        elif how == 2:
            noise = self.rng.randbytes(raw.numel())
            raw.copy_(torch.frombuffer(bytearray(noise), dtype=torch.uint8))
        elif how == 3 and part.is_floating_point():
            part[self.rng.randrange(part.numel())] = self.rng.choice(
                (float("nan"), float("inf"), -float("inf"), -1.0, 6e4, 1e-45)
            )
        elif how == 3:
            limits = torch.iinfo(part.dtype)
            part[self.rng.randrange(part.numel())] = self.rng.choice((limits.min, limits.max, 0, 1, 100))
        elif how == 4:
            part.copy_(part.flip(0))
        else:
            part.copy_(part[:1].expand(part.numel()).clone())
        return part

    def _flip(self, raw: torch.Tensor, count: int) -> None:
        for _ in range(count):
            raw[self.rng.randrange(raw.numel())] ^= self.rng.randrange(1, 256)


class Siege(Forger):
    """Stands between the wire and the only rank that runs, in place of `frames.unpack`.

    What unpacking refuses ends here, and an honest frame goes on; hostile content that it takes goes on to
    the method's decoder.
    """

    def __init__(self, rng: random.Random, rank: int) -> None:
        super().__init__(rng)
        self.rank = rank
        self.delivered = 0
        """Hostile payloads on their way to a decoder."""

    def unpack(
        self, frame, templates, *, step: int, mark: int, longest, source: int, own: bool, head, padded
    ) -> list[torch.Tensor]:
        assert head is None, "only frames on another device have one"
        assert not padded, "only frames on NCCL are"
        if own:
            return _unpack(frame, templates, step=step, mark=mark, longest=longest, source=source, own=True)
        try:
            parts = _unpack(frame, templates, step=step, mark=mark, longest=longest, source=source)
        except PayloadError:  # this rank has sent nothing like it, or not yet
            parts = [torch.zeros_like(template).view(-1) for template in templates]
        ragged = longest is not None
        honest = _pack(parts, step=step, mark=mark, ragged=ragged)
        spoiled = honest.clone()
        damaged = self.spoil(spoiled, sealed=self.rng.random() < 0.5)
        self.forged += 1
        self.damaged += damaged
        try:
            parts = _unpack(spoiled, templates, step=step, mark=mark, longest=longest, source=source)
        except PayloadError:
            pass
        else:
            assert not damaged, f"damage in a frame of {frame.numel()} bytes was not noticed"
        hostile = [self._hostile(part, ragged) if self.rng.random() < 0.6 else part for part in parts]
        forged = _pack(hostile, step=step, mark=mark, ragged=ragged)
        try:
            parts = _unpack(forged, templates, step=step, mark=mark, longest=longest, source=source)
            self.delivered += 1
        except PayloadError:
            self.forged += 1
        return parts

    def answer(self, request: frames.Primitive, size: int) -> object:
        """As if every other rank had sent what this one sends."""
        if isinstance(request, frames.Within):
            request, size = request.op, len(request.ranks)
        match request:
            case frames.Commit(finite=finite):
                return finite
            case frames.AllReduce(tensor=tensor):
                return tensor.mul_(size)
            case frames.AllGather(block=block):
                return torch.stack([block] * size)
            case frames.Broadcast(block=block):
                return block
            case frames.AllToAll(blocks=blocks, receive=receive):
                # Those that this rank has for others may have another length than those for itself.
                fitting = {block.numel(): block for block in blocks}
                return [fitting.get(length, torch.zeros(length, dtype=torch.uint8)) for length in receive]


def _besiege(method: str, size: int, siege: Siege) -> collections.Counter:
    """Some steps of one rank among forgers; a new session after every refusal."""
    outcomes: collections.Counter = collections.Counter()
    parameters = [(name, torch.zeros(shape)) for name, shape in SHAPES.items()]
    session = None
    for _ in range(STEPS):
        session = session or Session(
            parameters, method, rank_info=RankInfo(siege.rank, size), dense_below=0, seed=0
        )
        tensors = {name: torch.randn(shape) ** 3 for name, shape in SHAPES.items()}
        session.engine.begin_step()
        program = session.engine.program(session.engine.views(tensors, in_place=False)[1])
        siege.delivered = 0
        committed, answer = True, None
        try:
            while True:
                request = program.send(answer)
                answer = siege.answer(request, size)
                committed = answer if isinstance(request, frames.Commit) else committed
        except StopIteration:
            session.engine.end_step(committed)
            outcomes["taken"] += 1
            siege.forged += siege.delivered
        except PayloadError:
            outcomes["refused"] += 1
            siege.forged += siege.delivered > 0  # one was refused; the others may not have been looked at
            session = None
        finally:
            program.close()
    return outcomes


class Group(Lockstep):
    """A hostile rank may send other numbers to every rank, which then disagree on whether they are finite."""

    def _check_symmetry(self, requests) -> None:
        if not all(isinstance(request, frames.Commit) for request in requests):
            super()._check_symmetry(requests)


def _run(method: str, size: int, forger: Forger) -> collections.Counter:
    """Some steps of one group; a new one after every refusal."""
    outcomes: collections.Counter = collections.Counter()
    cohort = None
    for step in range(STEPS):
        cohort = cohort or Cohort(method, size, SHAPES, driver=Group(size))
        damaged = forger.damaged
        try:
            cohort.average(cohort.inputs(forger.rng.randrange(1000)))
        except PayloadError:
            outcomes["refused"] += 1
            cohort = None
        else:
            assert forger.damaged == damaged, f"{method} on {size} ranks, step {step}: damage was not noticed"
            outcomes["taken"] += 1
    return outcomes


def _suspicious(*args, own: bool, **options) -> list[torch.Tensor]:
    """Damage is looked for in a rank's own frames as well, which are forged here like all others."""
    del own
    return _unpack(*args, **options)


def _turn(method: str, turn: int, rng: random.Random) -> tuple[Forger, collections.Counter]:
    if turn % GROUPS == 0:
        forger = Forger(rng)
        with mock.patch.multiple(frames, pack=forger.pack, unpack=_suspicious):
            return forger, _run(method, rng.choice(SIZES), forger)
    size = rng.choice(BESIEGED)
    siege = Siege(rng, rng.randrange(size))
    with mock.patch.object(frames, "unpack", siege.unpack):
        return siege, _besiege(method, size, siege)


def fuzz(count: int, seed: int, methods: list[str] | None = None) -> collections.Counter:
    """Forge at least `count` payloads, of all methods in turn; raises what is not a `PayloadError`."""
    found = list(methods or CONFIGURATIONS)
    outcomes: collections.Counter = collections.Counter()
    begin, turn, made = time.monotonic(), 0, 0
    while made < count and found:
        for method in list(found):
            place = f"{seed}/{turn}/{method}"
            rng = random.Random(place)
            torch.manual_seed(rng.randrange(2**31))
            try:
                forger, ended = _turn(method, turn, rng)
            except Exception as error:
                raise AssertionError(f"{place}: {type(error).__name__}: {error}") from error
            if turn == 0 and not forger.forged:  # a method that only takes means sends no frames
                found.remove(method)
            outcomes += ended
            made += forger.forged
            outcomes["damaged"] += forger.damaged
            if made >= count:
                break
        turn += 1
        if turn % 20 == 0:
            print(f"{made:,} payloads, {time.monotonic() - begin:.0f} s", flush=True)
    outcomes |= {"forged": made, "methods": len(found)}
    return outcomes


def _prepared() -> None:
    torch.set_num_threads(1)
    logging.getLogger("thinwire").addFilter(lambda record: False)
    os.environ.setdefault("LOCAL_WORLD_SIZE", "2")  # for `hierarchical` with its default options


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000, help="payloads to forge")
    parser.add_argument("--seed", type=int, default=0, help="of the first process; the next one has the next")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--method", action="append", help="only this method; may be repeated")
    given = parser.parse_args()
    methods = given.method and [str(parse(text)) for text in given.method]
    outcomes: collections.Counter = collections.Counter()
    with ProcessPoolExecutor(given.processes, get_context("spawn"), initializer=_prepared) as pool:
        each = -(-given.count // given.processes)
        begun = [pool.submit(fuzz, each, given.seed + number, methods) for number in range(given.processes)]
        for future in begun:
            outcomes += future.result()
    outcomes["methods"] //= given.processes
    print(", ".join(f"{name}: {amount:,}" for name, amount in outcomes.items()))


if __name__ == "__main__":
    main()
