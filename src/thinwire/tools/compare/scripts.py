"""One run of a training script in a comparison: what its workers report becomes records."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from thinwire.tools.compare.observer import Observer
from thinwire.tools.compare.records import HIGHER, Records, Run, Setting, Step, Values
from thinwire.tools.compare.settings import Comparison, Script
from thinwire.tools.lab.namespaces import Host
from thinwire.tools.script.launch import Failed, launch
from thinwire.tools.script.messages import Ended, Job, Reported, Stepped, Valued

LOGS = "logs"
NO_MODEL = "the script trained no DistributedDataParallel model"
_TESTED = re.compile(r"val|test|eval|dev")


class ScriptRun:
    """Trains with one method and one seed. The output of rank R is in `out/logs/METHOD/rankR.log`."""

    def __init__(
        self, asked: Comparison, script: Script, method: str, seed: int, out: Path, observer: Observer
    ) -> None:
        self._asked = asked
        self._method = method
        self._seed = seed
        self._observer = observer
        name = re.sub(r"[^\w.=-]+", "_", method).strip("_")
        self._logs = out / LOGS / (name if asked.seeds == 1 else f"{name}-seed{seed}")
        self._job = Job(
            script=script.path,
            module=script.module,
            arguments=tuple(each.replace("{seed}", str(seed)) for each in script.arguments),
            method=method,
            link=asked.link,
            steps=asked.steps,
            patterns=dict(script.patterns),
            follow=True,
        )
        self._steps: list[Step] = []
        self._values: list[Values] = []
        self._ended: Ended | None = None

    def run(self, records: Records, hosts: Sequence[Host] | None) -> Records:
        """The records with those of this run. Its steps and values are kept even if it fails."""
        self._logs.mkdir(parents=True, exist_ok=True)
        try:
            failed = launch(self._job, self._asked.workers, self._note, hosts=hosts, logs=self._logs)
        finally:
            records.steps.extend(self._steps)
            records.values.extend(self._values)
        run = self._record(failed)
        records.runs.append(run)
        return replace(records, setting=self._filled(records.setting, run))

    def _note(self, rank: int, message: Reported) -> None:
        if rank != 0:
            return
        if isinstance(message, Stepped):
            step = Step(
                self._method, self._seed, message.step, None, message.seconds, message.sent, message.received
            )
            self._steps.append(step)
            self._observer.step(step)
        elif isinstance(message, Valued):
            values = Values(
                self._method, self._seed, message.step, message.seconds, message.sent, message.values
            )
            self._values.append(values)
            self._observer.values(values)
        elif isinstance(message, Ended):
            self._ended = message

    def _record(self, failed: Failed | None) -> Run:
        last = self._steps[-1] if self._steps else Step(self._method, self._seed, 0, None, 0.0, 0, 0)
        values: dict[str, float | None] = {}
        for row in self._values:
            values.update(row.values)
        ended = self._ended if failed is None else None
        why = self._why(failed) if failed is not None else None
        if ended is not None and not ended.models:
            why = NO_MODEL
        return Run(
            method=self._method,
            seed=self._seed,
            steps=last.step,
            values=values,
            seconds=last.seconds,
            step_seconds=last.seconds / max(last.step, 1) if ended is None else ended.step_seconds,
            sent=last.sent,
            received=last.received,
            failed=why,
            **({} if ended is None else _costs(ended)),
        )

    def _why(self, failed: Failed) -> str:
        """The last line of a traceback says what was wrong."""
        lines = [line for line in failed.text.splitlines() if line.strip()]
        said = lines[-1].strip() if lines else f"it left with exit code {failed.code}"
        return f"worker {failed.rank}: {said} (see {self._logs / f'rank{failed.rank}.log'})"

    def _filled(self, setting: Setting, run: Run) -> Setting:
        """What the script trains, and for how many steps, is known when it has."""
        models = [] if self._ended is None else self._ended.models
        if models and not setting.layers:
            layers = {name: shape for one in models for name, shape in one.shapes.items()}
            setting = replace(
                setting,
                parameters=sum(map(math.prod, layers.values())),
                layers=layers,
                optimizer=models[0].optimizer,
                learning_rate=models[0].learning_rate,
            )
        if not setting.measure:
            setting = replace(setting, measure=most_telling(list(run.values)))
        if self._asked.steps is None and run.failed is None:
            setting = replace(setting, steps=max(setting.steps, run.steps))
        return setting


def most_telling(names: Sequence[str]) -> str:
    """The value that methods are compared by: a test's before a batch's, an accuracy before a loss."""

    def rank(name: str) -> tuple[bool, bool]:
        return not _TESTED.search(name.lower()), not HIGHER.search(name.lower())

    return min(names, key=rank, default="")


def _costs(ended: Ended) -> dict[str, Any]:
    """Of all models together, per step of the script."""
    steps, models = max(ended.steps, 1), ended.models
    chosen = [one.method.removeprefix("auto: ") for one in models if one.method.startswith("auto: ")]
    layers: dict[str, float] = {}
    for one in models:
        layers |= one.layers
    waited = sum(one.wait_seconds_per_step * one.steps for one in models) / steps
    if ended.interface_sent is not None and not any(one.rounds for one in models):  # no meter in a lab
        waited = max(0.0, ended.step_seconds - sum(ended.compute))
    return {
        "compute_seconds": sum(ended.compute),
        "compress_seconds": sum(one.compress_seconds_per_step * one.steps for one in models) / steps,
        "wait_seconds": waited,
        "rounds": sum(one.rounds for one in models) / steps,
        "sent_inside": sum(one.sent_inside_bytes for one in models),
        "payload": sum(one.payload_bytes + one.overhead_bytes for one in models) / steps,
        "layers": layers,
        "chosen": " and ".join(dict.fromkeys(chosen)) or None,
        "interface_sent": ended.interface_sent,
    }
