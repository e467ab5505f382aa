"""The progress of a comparison on the terminal: one line per method."""

from __future__ import annotations

from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from thinwire.tools import units
from thinwire.tools.compare.observer import Observer
from thinwire.tools.compare.records import Evaluation, Setting, Step, Values

EMPTY: dict[str, Any] = {"loss": "", "score": "", "sent": ""}


class ProgressBars(Observer):
    """Step, loss, test result, bytes, training time and time left of each method."""

    def __init__(self, console: Console, methods: list[str], setting: Setting) -> None:
        self._setting = setting
        widths = {"loss": 10, "score": 10, "sent": 10, "time": 8}
        values = " ".join(f"{{task.fields[{name}]:>{width}}}" for name, width in widths.items())
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=18),
            MofNCompleteColumn(),
            TextColumn(values),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
        )
        script = setting.script is not None
        results = (setting.measure or "its own values") if script else f"loss, {setting.measure}"
        console.print(f"[dim]method, step, {results}, sent per worker, training time, time left[/]")
        # A script without --steps does not say when it will end; the bar then only shows that it runs.
        total = None if script and setting.steps == 1 else setting.steps
        self._tasks = {
            method: self._bars.add_task(method, total=total, start=False, time="waiting", **EMPTY)
            for method in methods
        }

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def begin(self, method: str, seed: int) -> None:
        seeds = self._setting.seeds
        name = method if seeds == 1 else f"{method} (seed {seed + 1} of {seeds})"
        self._bars.reset(self._tasks[method], description=name, time="starting", **EMPTY)

    def step(self, record: Step) -> None:
        self._bars.update(
            self._tasks[record.method],
            completed=record.step,
            sent=units.data(record.sent),
            time=f"{record.seconds:.1f} s",
        )
        if self._setting.script is None:
            loss = "not finite" if record.loss is None else f"{record.loss:.3f}"
            self._bars.update(self._tasks[record.method], loss=loss)

    def values(self, record: Values) -> None:
        for name, value in record.values.items():
            if self._setting.measure in ("", name):
                text = "not finite" if value is None else units.digits(value)
                self._bars.update(self._tasks[record.method], score=text)

    def evaluation(self, record: Evaluation) -> None:
        accuracy = self._setting.measure == "accuracy"
        score = f"{100 * record.accuracy:.1f} %" if accuracy else f"{record.perplexity:.2f}"
        self._bars.update(self._tasks[record.method], score=score)

    def end(self, method: str, failed: str | None) -> None:
        if failed is not None:
            self._bars.update(self._tasks[method], time="failed")
        self._bars.stop_task(self._tasks[method])
