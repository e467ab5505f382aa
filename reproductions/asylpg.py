"""AsyLPG: bits to a given gap with its algorithms, a three-layer network, and throughput on a slow link."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from reproductions import asylpg_link as link
from reproductions.asylpg_runs import (
    ALGORITHMS,
    FULL,
    LINEAR,
    NETWORK,
    STRENGTH,
    WORKERS,
    Runs,
    Study,
    measure,
)
from reproductions.base import Claim, Context, Outcome, Reproduction
from thinwire.tools.report.figures import lines

SETS = ("mushrooms", "a9a", "ijcnn1", "w8a", "reuters")
# Of the sets here the one most like real-sim: news, 8,315 words; real-sim has 20,958.
NEAREST = "reuters"
GAPS = (1e-4, 1e-8)
REACHED = 1e-10
SHOWN = 6
MAX_STALENESS, QUICK_STALENESS = 16, 4
SMOKE = (
    FULL,
    "AsyLPG, paper mode",
    "Sparse-AsyLPG, centered, 2 bits",
    "accelerated AsyLPG, centered, 3 bits",
)
_PUBLISHED = {"AsyLPG": (6.48, 7.28), "Sparse-AsyLPG": (19.19, 19.13), "accelerated AsyLPG": (7.33, 8.87)}


def published(label: str) -> tuple[float, float]:
    """Bits saved by this algorithm, on real-sim and on MNIST."""
    return _PUBLISHED[label.split(",", maxsplit=1)[0]]


def ratio(full: int | None, own: int | None) -> float | None:
    return full / own if full and own else None


def savings(one: Runs, label: str, level: float) -> tuple[float | None, float | None]:
    """Bits, and bytes on the wire, that full precision spends until the objective is at most `level`, over
    what this algorithm spends."""
    full, own = one.histories[FULL], one.histories[label]
    return ratio(full.bits_to(level), own.bits_to(level)), ratio(full.bytes_to(level), own.bytes_to(level))


def run(context: Context) -> Outcome:
    outcome = Outcome(judged=not context.quick)
    quick = context.quick
    data = context.data if context.has_data or not quick else None
    labels = SMOKE if quick else tuple(ALGORITHMS)
    sets = SETS if not quick else ("mushrooms" if data else "digits",)
    # A smoke run may share its cores with anything: it must not diverge because a worker had to wait.
    stale = QUICK_STALENESS if quick else MAX_STALENESS
    studies = {name: Study(name, 5 if quick else 14, labels, 0, stale, data) for name in sets}
    rows, epochs = (1000, 2) if quick else (10_000, 12)
    studies["network"] = Study("mnist" if data else "digits", epochs, labels, rows, stale, data)
    reports = {
        name: replace(study, report=partial(context.progress, done=done, total=len(studies)))
        for done, (name, study) in enumerate(studies.items())
    }
    found = context.each({name: partial(measure, study) for name, study in reports.items()})
    network = found.pop("network")
    _linear(outcome, found)
    _network(outcome, network)
    _throughput(context, outcome)
    outcome.notes += [
        f"All runs of the first tables are {WORKERS} worker processes and a server over gloo on one machine. "
        f"Logistic regression: rows of length 1, l2 of {STRENGTH:g} as the proximal term, the step size 1/L "
        "(half of it for the sparse variant), batches of 16, epochs of 1,000 updates. Bits are codes, scales "
        "and float32 vectors of all workers, both ways, until the first snapshot with such a gap; on the "
        "wire headers and gloo's control messages count, too.",
        "Where no number of bits is given, the way down has as many as the rule for mu = 0.5 asks for, the "
        f"way up 4. The other numbers, and the floor of theta, were chosen on mushrooms, w8a and {NEAREST}.",
        "6.48x means 9.9 bits an entry, both ways together. The paper's grid must resolve x - x~ out of x, "
        "and needs more bits the closer they are: so few suffice only while the gap is large. Centered, the "
        "bits stay the same, and fewer than the rule asks for still converge.",
    ]
    return outcome


def _linear(outcome: Outcome, found: dict[str, Runs]) -> None:
    figures: dict[str, Any] = {}
    for name, one in found.items():
        rows: list[Sequence[str]] = []
        for label, own in one.histories.items():
            cells = [label, f"{max(own.objective[-1] - one.least, 0.0):.0e}"]
            for gap in GAPS:
                saved, on_wire = savings(one, label, one.least + gap)
                cells += [_mega(own.bits_to(one.least + gap)), _times(saved), _times(on_wire)]
            highest = max(number for number, count in enumerate(own.staleness) if count)
            rows.append((*cells, f"{_mean(own.staleness):.1f} / {highest}"))
        outcome.table(
            f"{name}: {one.rows:,} x {one.size:,}, {WORKERS} workers",
            (
                "algorithm",
                "last gap",
                *(text for gap in GAPS for text in (f"Mbit to {gap:.0e}", "saves", "on the wire")),
                "staleness, mean / max",
            ),
            rows,
        )
        curves = {
            label: (
                [(d + u) / 1e6 for d, u in zip(own.bits_down, own.bits_up, strict=True)],
                [max(value - one.least, 1e-16) for value in own.objective],
            )
            for label, own in one.histories.items()
        }
        figures[f"Gap over bits, {name}"] = lines(
            curves, "Mbit, both ways", "gap", log_x=True, log_y=True, markers=True
        )
    outcome.figures |= dict(reversed(figures.items()))
    worst = max(own.objective[-1] - one.least for one in found.values() for own in one.histories.values())
    outcome.claim(
        "every algorithm converges linearly, to a gap of 1e-10 and below",
        "linear rate (theorem)",
        f"largest last gap {worst:.0e}",
        worst <= REACHED,
        "" if outcome.judged else "a smoke run of few epochs",
    )
    name, one = next(reversed(found.items()))
    for label in (each for each in one.histories if each != FULL):
        saved = {name: savings(each, label, each.least + GAPS[1])[0] for name, each in found.items()}
        nearest, paper = saved.get(NEAREST), published(label)[0]
        outcome.claims.append(
            Claim(
                f"{label}: bits saved over full precision, to a gap of {GAPS[1]:.0e}",
                f"{paper:g}x (real-sim, 20,958 features; from a summary)",
                ", ".join(f"{name} {_times(value)}" for name, value in saved.items()),
                None if nearest is None else _reached(nearest, paper),
                ""
                if nearest is None
                else f"judged on {NEAREST}, the set most like real-sim; "
                + _why(found[NEAREST], label, found[NEAREST].least + GAPS[1], LINEAR["epoch_length"]),
            )
        )
    spent = {
        label: own.bits_per_entry(one.size, LINEAR["epoch_length"])[:SHOWN]
        for label, own in one.histories.items()
    }
    outcome.table(
        f"{name}: bits an entry and update, down + up, in epoch ...",
        ("algorithm", *(str(number + 1) for number in range(len(spent[FULL])))),
        [(label, *(f"{down:.1f} + {up:.1f}" for down, up in each)) for label, each in spent.items()],
    )


def _why(one: Runs, label: str, level: float, updates: int) -> str:
    """What the bits are spent on until the objective is at most `level`, in numbers."""
    ours, theirs = (one.histories[each].epochs_to(level) for each in (label, FULL))
    if not ours or not theirs:
        return "not reached"
    spent = one.histories[label].bits_per_entry(one.size, updates)[:ours]
    (first, up), (last, _) = spent[0], spent[-1]
    way_down = f"{first:.1f}" if last < first + 1 else f"{first:.1f} in the first, {last:.1f} in the last"
    return f"{ours} epochs (full precision: {theirs}); bits an entry: down {way_down}, up {up:.1f}"


def _reached(saved: float, paper: float) -> bool:
    """At the precision that both are printed with."""
    return round(saved, 1) >= round(paper, 1)


def _network(outcome: Outcome, one: Runs) -> None:
    """How many bits until the objective that all algorithms reach."""
    level = max(own.objective[-1] for own in one.histories.values())
    rows: list[Sequence[object]] = []
    for label, own in one.histories.items():
        saved, on_wire = savings(one, label, level)
        bits = _mega(own.bits_to(level))
        rows.append((label, own.objective[-1], own.accuracy, bits, _times(saved), _times(on_wire)))
        if label != FULL:
            paper = published(label)[1]
            outcome.claims.append(
                Claim(
                    f"{label}: bits saved with a three-layer network",
                    f"{paper:g}x (MNIST; from a summary)",
                    f"{_times(saved)} ({one.name})",
                    None if not outcome.judged or saved is None else _reached(saved, paper),
                    _why(one, label, level, NETWORK["epoch_length"]),
                )
            )
    outcome.table(
        f"{one.name}: {one.rows:,} rows, a network of {one.size:,} parameters, {WORKERS} workers",
        {"algorithm": "", "last objective": ".4f", "test": ".1%", f"Mbit to {level:.4f}": ""}
        | {"saves": "", "on the wire": ""},
        rows,
    )


def _throughput(context: Context, outcome: Outcome) -> None:
    from thinwire.tools.lab import namespaces

    reason = namespaces.unavailable()
    if reason:
        outcome.notes.append(f"Throughput at {link.RATE} was not measured: {reason}.")
        return
    updates, epochs = (16, 2) if context.quick else (96, 4)
    counts = (2,) if context.quick else (1, 2, 4)
    found = context.each(
        {workers: partial(link.measure, workers, updates, epochs) for workers in counts},
        f"throughput at {link.RATE}, workers:",
    )
    fewest, most = found[min(counts)], found[max(counts)]
    outcome.table(
        f"gradients applied a second at {link.RATE} a host, {'-'.join(map(str, link.WIDTHS))} network",
        {"algorithm": ""} | {f"{workers} workers": ".1f" for workers in counts} | {"most over 1": ""},
        [
            (label, *(one[label] for one in found.values()), _times(most[label] / fewest[label]))
            for label in (*link.ASYNCHRONOUS, link.SYNCHRONOUS)
        ],
    )
    best, rival = most["AsyLPG, centered"], most[link.SYNCHRONOUS]
    outcome.claim(
        f"asynchronous double quantisation applies more gradients a second at {link.RATE}",
        "faster than full precision (no figure at hand)",
        f"{best:.1f} against {rival:.1f} of {link.SYNCHRONOUS}, {max(counts)} workers",
        best > rival,
        "synchronous steps count one gradient for every worker",
    )


def _mean(counts: Sequence[int]) -> float:
    return sum(number * count for number, count in enumerate(counts)) / max(sum(counts), 1)


def _mega(bits: int | None) -> str:
    return "not reached" if bits is None else f"{bits / 1e6:,.2f}"


def _times(value: float | None) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.1f}x"


REPRODUCTION = Reproduction(
    "AsyLPG: asynchronous training with parameters and gradients quantised",
    "Yu, Wu, Huang: Double Quantization for Communication-Efficient Distributed Optimization, NeurIPS 2019",
    run,
)
