"""The invariants: what must be true after every fault."""

from __future__ import annotations

import re
from collections.abc import Mapping

import thinwire
from tests.chaos.scenarios import FATAL, RESIZES, STEPS, Scenario
from tests.chaos.worker import SAVE_EVERY, TIMEOUT, Report
from thinwire.core.exchange import Exchange
from thinwire.net.roll_call import GRACE_SECONDS

SLACK = 10.0


def violations(scenario: Scenario, reports: Mapping[int, Report], workers: int) -> list[str]:
    """What is wrong with this outcome; empty if all is well."""
    gone = {scenario.culprit} if scenario.fault == "kill" else set[int]()
    silent = sorted(set(range(workers)) - gone - reports.keys())
    if silent:
        return [f"rank {', '.join(map(str, silent))} hangs or has crashed"]
    found = [f"rank {rank}: {what}" for rank, report in reports.items() for what in _own(scenario, report)]
    if scenario.fault == "mismatch":
        return found
    innocent = [report for rank, report in reports.items() if rank != scenario.culprit]
    everybody = [*reports.values()] if _harmless(scenario, reports) else innocent
    return found + _together(scenario, everybody)


def _harmless(scenario: Scenario, reports: Mapping[int, Report]) -> bool:
    """All ranks are expected to train to the end."""
    fired = scenario.culprit not in reports or reports[scenario.culprit].fired
    return scenario.fault not in (*FATAL, "shrinkage") or not fired


def _own(scenario: Scenario, report: Report) -> list[str]:
    found: list[str] = []
    if report.threads:
        found.append(f"threads are left: {report.threads}")
    if scenario.fault == "mismatch":
        if report.kind != "DisagreementError" or f"rank {scenario.culprit}" not in report.error:
            found.append(f"the mismatch went unnoticed: {report.kind} {report.error}")
        return found
    if not report.residuals_kept:
        found.append("residuals changed in a step that was not committed")
    if report.readable:
        found.append(f"no clean state: {report.readable}")
    return found


def _together(scenario: Scenario, reports: list[Report]) -> list[str]:
    found: list[str] = []
    fatal = scenario.fault in FATAL and all(report.rank != scenario.culprit for report in reports)
    for report in reports:
        found += [
            f"rank {report.rank}: {what}" for what in (_error if fatal else _no_error)(scenario, report)
        ]
    expected = _intact(scenario)
    for report in reports:
        if not report.kind and report.resumed != expected:
            found.append(f"rank {report.rank} resumed from step {report.resumed}, not {expected}")
    steps = {report.step for report in reports}
    # A rank that dies in the middle of a step may have completed it for some of the others.
    apart = 1 if scenario.fault == "kill" and scenario.seconds else 0
    if max(steps) - min(steps) > apart:
        found.append(f"ranks have committed different steps: {sorted(steps)}")
    method = thinwire.parse(scenario.method)
    if isinstance(method, Exchange) and not method.traits.consensus:
        return found
    for step in steps:
        if len({report.model for report in reports if report.step == step}) > 1:
            found.append(f"replicas differ after step {step}")
    return found


def _intact(scenario: Scenario) -> int | None:
    """The newest checkpoint that the fault has left whole."""
    if scenario.fault == "torn file":
        return STEPS - SAVE_EVERY
    if scenario.fault in RESIZES:
        return scenario.step
    return scenario.step // SAVE_EVERY * SAVE_EVERY if scenario.fault == "full disk" else None


def _error(scenario: Scenario, report: Report) -> list[str]:
    if not report.kind:
        return [f"did not notice the {scenario.fault}"]
    found: list[str] = []
    limit = TIMEOUT + GRACE_SECONDS + SLACK
    if report.seconds > limit:
        found.append(f"took {report.seconds:.1f} s to notice, more than {limit:g} s")
    if report.kind not in ("PeerError", "PayloadError"):
        found.append(f"raised {report.kind}: {report.error}")
    elif accused(report.error) != {scenario.culprit}:
        found.append(f"blames rank {sorted(accused(report.error))}: {report.error}")
    return found


def accused(error: str) -> set[int]:
    """The ranks that an error holds responsible."""
    told = re.search(r"(?:no word from|payload from|frame from) rank ([\d, ]+)", error)
    told = told or re.search(r"rank ([\d, ]+) (?:ended its training|left before)", error)
    return {int(rank) for rank in re.findall(r"\d+", told[1])} if told else set()


def _no_error(scenario: Scenario, report: Report) -> list[str]:
    return [f"a {scenario.fault} ended the run: {report.kind}: {report.error}"] if report.kind else []
