"""Hostile payloads for every method: `python -m tests.fuzz_payloads --count 1000000`.

In every step of a group in lock-step some frames are forged before they are sent. A forged frame has a valid
checksum and hostile content: a rank that is broken or malicious. A damaged frame has a wrong checksum: a
broken network. Whatever is in them, the step ends with a `PayloadError` or with some result; damage must
always be noticed.
"""

import argparse
import collections
import logging
import random
import time
from unittest import mock

import torch

from tests.laws.cohort import CONFIGURATIONS, Cohort
from thinwire import PayloadError, parse
from thinwire.drivers import Lockstep
from thinwire.net import frames

STEPS = 12
SHAPES: dict[str, tuple[int, ...]] = {"wide": (12, 17), "vector": (61,), "one": (1,), "scalar": ()}
SIZES = (2, 3, 5)
FORGED = 0.4
"""The share of frames that are forged."""

_pack = frames.pack


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
        before = frame.clone()
        self._flip(frame, self.rng.choice((1, 1, 2, 8)))
        if kind == 0:
            frames.seal(frame)
        elif not frame.equal(before):
            self.damaged += 1
        return frame

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


def fuzz(count: int, seed: int, methods: list[str] | None = None) -> collections.Counter:
    """Forge at least `count` payloads, of all methods in turn; raises what is not a `PayloadError`."""
    found = list(methods or CONFIGURATIONS)
    outcomes: collections.Counter = collections.Counter()
    begin, turn, made = time.monotonic(), 0, 0
    while made < count and found:
        for method in list(found):
            place = f"{seed}/{turn}/{method}"
            rng = random.Random(place)
            forger = Forger(rng)
            torch.manual_seed(rng.randrange(2**31))
            with mock.patch.object(frames, "pack", forger.pack):
                try:
                    outcomes += _run(method, rng.choice(SIZES), forger)
                except Exception as error:
                    raise AssertionError(f"{place}: {type(error).__name__}: {error}") from error
            if not forger.forged:  # a method that only takes means sends no frames
                found.remove(method)
            made += forger.forged
            outcomes["damaged"] += forger.damaged
            if made >= count:
                break
        turn += 1
        if turn % 20 == 0:
            print(f"{made:,} payloads, {time.monotonic() - begin:.0f} s", flush=True)
    outcomes |= {"forged": made, "methods": len(found)}
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000, help="payloads to forge")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--method", action="append", help="only this method; may be repeated")
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("thinwire").setLevel(logging.ERROR)
    outcomes = fuzz(given.count, given.seed, given.method and [str(parse(text)) for text in given.method])
    print(", ".join(f"{name}: {amount:,}" for name, amount in outcomes.items()))


if __name__ == "__main__":
    main()
