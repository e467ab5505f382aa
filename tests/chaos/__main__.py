"""`python -m tests.chaos [--count 1000] [--seed 0] [--workers 4 8]`: exit code 1 if an invariant was broken.

Every number of workers gets an equal share of the scenarios.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

from tests.chaos.judge import violations
from tests.chaos.scenarios import FAULTS, Scenario, batches, draw
from tests.chaos.worker import TIMEOUT, Report, soak
from thinwire.net.launch import start_local

SECONDS_PER_SCENARIO = 60.0


def outcomes(
    scenarios: Sequence[Scenario], workers: int, *, length: int = 10, at_once: int = 2
) -> Iterator[tuple[Scenario, bool, list[str]]]:
    """Each scenario, whether its fault really happened, and what it broke."""

    def run(batch: list[Scenario]) -> list[tuple[Scenario, bool, list[str]]]:
        reports: dict[int, dict[int, Report]] = {scenario.number: {} for scenario in batch}

        def note(rank: int, told: tuple[int, Report]) -> None:
            reports[told[0]][rank] = told[1]

        limit = SECONDS_PER_SCENARIO * (1 + len(batch))
        with tempfile.TemporaryDirectory(prefix="thinwire-chaos-") as folder:
            ended = start_local(
                soak, workers, batch, folder, timeout=limit, group_timeout=TIMEOUT, on_report=note
            )
        judged: list[tuple[Scenario, bool, list[str]]] = []
        for scenario in batch:
            found = reports[scenario.number]
            broken = violations(scenario, found, workers)
            fired = scenario.fault == "kill" or any(
                found[rank].fired for rank in found if rank == scenario.culprit
            )
            judged.append((scenario, fired, broken))
        last = batch[-1]
        for rank, outcome in enumerate(ended):
            killed = last.fault == "kill" and rank == last.culprit
            if not killed and outcome.exit_code != 0:
                judged[-1][2].append(f"rank {rank} ended with exit code {outcome.exit_code}: {outcome.error}")
        return judged

    with ThreadPoolExecutor(at_once) as pool:
        for judged in pool.map(run, batches(scenarios, length)):
            yield from judged


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 8])
    asked = parser.parse_args()
    begin = time.monotonic()
    injected, idle, broken = Counter[str](), Counter[str](), Counter[str]()
    share = -(-asked.count // len(asked.workers))
    judged = chain.from_iterable(
        outcomes(draw(share, asked.seed + workers, workers), workers) for workers in asked.workers
    )
    for done, (scenario, fired, wrong) in enumerate(judged, 1):
        (injected if fired else idle)[scenario.fault] += 1
        broken[scenario.fault] += bool(wrong)
        for what in wrong:
            print(f"{scenario.label}: {what}", flush=True)
        if done % 50 == 0:
            print(f"{done} of {asked.count}, {time.monotonic() - begin:.0f} s", flush=True)
    print(f"\n{'fault':<18}{'injected':>10}{'no effect':>12}{'broken':>9}")
    for fault in FAULTS:
        print(f"{fault:<18}{injected[fault]:>10}{idle[fault]:>12}{broken[fault]:>9}")
    seconds = time.monotonic() - begin
    print(f"{'all':<18}{injected.total():>10}{idle.total():>12}{broken.total():>9}   in {seconds:.0f} s")
    return int(broken.total() > 0)


if __name__ == "__main__":
    raise SystemExit(main())
