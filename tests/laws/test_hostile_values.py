"""A rank sends one non-finite number: no rank that receives it commits the step or gets a mean.

An honest rank with a non-finite gradient says so in all that it sends. Here a single number is non-finite, in
every place in turn where a float travels: an entry of a mean, a value or a scale in a frame, also where a
float is hidden among bytes.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch

from tests.fuzz_payloads import Group
from tests.laws.cohort import CONFIGURATIONS, DEFAULTS, Cohort, every, is_late, memory, same_state
from thinwire import PayloadError, kernels
from thinwire.core.channel import Program
from thinwire.kernels.natural import NOT_FINITE
from thinwire.methods.families import sampled
from thinwire.net import frames

Shapes = dict[str, tuple[int, ...]]
SHAPES: Shapes = {"wide": (24, 37), "vector": (301,)}
# The last rank's stretch has fewer buckets than the others, whose codes are padded.
UNEVEN: Shapes = {"uneven": (3 * 4096 + 8,)}
SIZE = 3
VALUES = (math.nan, math.inf, -math.inf)

_pack, _sample, _natural = frames.pack, sampled.encode, kernels.natural_quantise


class Saboteur:
    """One rank, which sends one such number: at place `target`, counted in the order of sending."""

    def __init__(self, rank: int, target: int, value: float, fill: int | None = None) -> None:
        self.rank = rank
        self.target = target
        self.value = value
        self.fill = fill
        """What all bytes of the part before it become: codes that may have no use for the number."""
        self.sending = -1
        """The rank that runs now."""
        self.places = 0
        self.frame: torch.Tensor | None = None
        """The frame with the number."""
        self.heard: set[int] = set()
        """The ranks that have received the number itself; others hear of it, if at all, from these."""
        self._naturals: dict[int, torch.Tensor] = {}  # kept, so that no other tensor gets their identity
        self._sample: torch.Tensor | None = None  # the code of sampled entries with the number in it

    def _here(self) -> bool:
        if self.sending != self.rank:
            return False
        self.places += 1
        return self.places - 1 == self.target

    def _spoiled(self, x: torch.Tensor) -> torch.Tensor:
        """x, or a copy with the number as its first or last entry."""
        for place in (0, -1) if x.numel() else ():
            if self._here():
                x = x.detach().clone()
                x.view(-1)[place] = self.value
        return x

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Inside, programs that are `Watched` send what it makes of them."""
        with (
            mock.patch.object(frames, "pack", self.pack),
            mock.patch.object(sampled, "encode", self.sample),
            mock.patch.object(kernels, "natural_quantise", self.natural),
        ):
            yield

    # -- in place of what sends ----------------------------------------------------------------------------

    def natural(self, x: torch.Tensor, seed: int) -> torch.Tensor:
        code = _natural(x, seed)
        self._naturals[id(code)] = code
        return code

    def sample(self, n: int, sample: sampled.Sample) -> torch.Tensor:
        values, magnitude = self._spoiled(sample.values), sample.magnitude
        if sample.drawn.numel() and self._here():
            magnitude = self.value
        code = _sample(n, sample._replace(values=values, magnitude=magnitude))
        if values is not sample.values or magnitude is not sample.magnitude:
            self._sample = code
        return code

    def pack(self, parts, **options) -> torch.Tensor:
        sent, bad = list[torch.Tensor](), any(part is self._sample for part in parts)
        for part in parts:
            found = self._spoiled(part) if part.is_floating_point() else part
            if id(part) in self._naturals and self._here():
                found = part.clone()
                found[-1] = NOT_FINITE
            if found is not part:
                bad = True
                if self.fill is not None and sent and sent[-1].dtype == torch.uint8:
                    sent[-1] = torch.full_like(sent[-1], self.fill)
            sent.append(found)
        frame = _pack(sent, **options)
        if bad:
            self.frame = frame
        return frame

    def ask(self, request: frames.Primitive) -> None:
        """Look at what the running rank asks for."""
        ranks, op = range(SIZE), request
        if isinstance(request, frames.Within):
            ranks, op = request.ranks, request.op
        if isinstance(op, frames.Commit) or self.sending != self.rank:
            return
        if isinstance(op, frames.AllReduce) and op.payload_bytes:
            self._spoil(op.tensor, ranks)
        elif isinstance(op, frames.Broadcast) and isinstance(request, frames.Within) and op.payload_bytes:
            self._spoil(op.block.view(torch.float32), ranks)  # a leader's result
        elif self.frame is not None and isinstance(op, frames.AllToAll):
            self.heard |= {rank for rank, block in zip(ranks, op.blocks, strict=True) if block is self.frame}
        elif self.frame is not None and op.block.numel() >= self.frame.numel():  # not the lengths before it
            self.heard |= set(ranks)
        if self.heard:
            self.frame = None

    def _spoil(self, x: torch.Tensor, ranks: Sequence[int]) -> None:
        """The same in place, for an operation with these ranks."""
        flat = x.view(-1)
        found = self._spoiled(flat)
        if found is not flat:
            flat.copy_(found)
            self.heard |= set(ranks)


class Watched:
    """A program whose rank and commit are known."""

    def __init__(self, program: Program, rank: int, saboteur: Saboteur) -> None:
        self.program, self.rank, self.saboteur = program, rank, saboteur
        self.committed: bool | None = None
        self.close = program.close

    def send(self, answer: object) -> frames.Primitive:
        self.saboteur.sending = self.rank
        try:
            request = self.program.send(answer)
            self.saboteur.ask(request)
        finally:
            self.saboteur.sending = -1
        if isinstance(request, frames.Commit):
            self.committed = request.finite
        return request


def warm(method: str, steps: int, shapes: Shapes) -> Cohort:
    """After so many steps there are residuals and last uploads."""
    cohort = Cohort(method, SIZE, shapes, driver=Group(SIZE))
    for step in range(steps):
        cohort.average(cohort.inputs(step))
    return cohort


def places_of(method: str, rank: int, shapes: Shapes) -> tuple[int, int]:
    """A step in which this rank sends floats, and how many places it has: lazy methods skip some steps."""
    for steps in (2, 3, 4, 0):  # in the first all upload
        scout = Saboteur(rank, -1, 0.0)
        step_of(warm(method, steps, shapes), scout)
        if scout.places:
            return steps, scout.places
    raise AssertionError(f"{method} sends no float")


def step_of(cohort: Cohort, saboteur: Saboteur) -> tuple[list[dict[str, torch.Tensor]], list[bool | None]]:
    """The outputs and commits of the ranks."""
    results, programs = [], []
    for rank, (session, tensors) in enumerate(
        zip(cohort.sessions, cohort.inputs(5, scale=30.0), strict=True)
    ):
        session.engine.begin_step()
        result, views = session.engine.views(tensors)
        results.append(result)
        programs.append(Watched(session.engine.program(views), rank, saboteur))
    with saboteur.at_work():
        cohort.driver.run(programs)
    return results, [program.committed for program in programs]


def assert_nobody_keeps_it(method: str, rank: int, fill: int | None, shapes: Shapes) -> None:
    (steps, places), heard = places_of(method, rank, shapes), 0
    for target in range(places):
        cohort = warm(method, steps, shapes)
        saboteur = Saboteur(rank, target, VALUES[target % len(VALUES)], fill)
        before = copy.deepcopy([memory(session) for session in cohort.sessions])
        label = f"{saboteur.value} at place {target} of {places}"
        try:
            outputs, commits = step_of(cohort, saboteur)
        except PayloadError:
            heard += 1
            continue
        for peer in saboteur.heard - {rank}:
            heard += 1
            if not cohort.sessions[peer].engine.remembers:
                assert not all(output.isfinite().all() for output in outputs[peer].values()), label
                continue
            assert commits[peer] is False, f"{label}: rank {peer} has committed the step"
            if not is_late(method):
                assert all(output.isnan().all() for output in outputs[peer].values()), label
                assert same_state(before[peer], memory(cohort.sessions[peer])), (
                    f"{label}: rank {peer} keeps it"
                )
    assert heard >= places // 2, "a rank sends some pieces to itself alone, but not most of them"


@every(quick=DEFAULTS, rank=(0, 1), fill=(None, 0, 255))
def test_a_non_finite_number_from_a_peer_is_neither_kept_nor_handed_out_as_a_mean(
    method: str, rank: int, fill: int | None
) -> None:
    assert_nobody_keeps_it(method, rank, fill, SHAPES)


@every([method for method in CONFIGURATIONS if "twoshot" in method], quick=(), rank=(0, 2), fill=(None, 0))
def test_nor_is_one_in_the_padding_of_a_code(method: str, rank: int, fill: int | None) -> None:
    assert_nobody_keeps_it(method, rank, fill, UNEVEN)
