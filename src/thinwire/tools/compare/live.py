"""What is shown while a comparison runs: a line for each method."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from thinwire.tools.compare.records import Evaluation, Step
from thinwire.tools.report import numbers


class Live:
    """Step, loss, accuracy, bytes, time of training, and time left, for each method."""

    def __init__(self, console: Console, methods: list[str], steps: int, measure: str) -> None:
        self._measure = measure
        self._steps = steps
        figures = (
            "{task.fields[loss]:>8} {task.fields[score]:>10} {task.fields[sent]:>10} {task.fields[time]:>8}"
        )
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=18),
            MofNCompleteColumn(),
            TextColumn(figures),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
        )
        self._bar.console.print(
            f"[dim]method, step, loss, {measure}, sent per worker, training time, time left[/]"
        )
        self._tasks: dict[str, TaskID] = {
            method: self._bar.add_task(
                method, total=steps, start=False, loss="", score="", sent="", time="waiting"
            )
            for method in methods
        }

    def __enter__(self) -> Live:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def begin(self, method: str, seed: int, seeds: int) -> None:
        task = self._tasks[method]
        name = method if seeds == 1 else f"{method} (seed {seed + 1} of {seeds})"
        self._bar.reset(task, description=name, loss="", score="", sent="", time="starting")

    def step(self, record: Step) -> None:
        self._bar.update(
            self._tasks[record.method],
            completed=record.step,
            loss=f"{record.loss:.3f}",
            sent=numbers.data(record.sent),
            time=f"{record.seconds:.1f} s",
        )

    def evaluation(self, record: Evaluation) -> None:
        score = (
            f"{100 * record.accuracy:.1f} %" if self._measure == "accuracy" else f"{record.perplexity:.2f}"
        )
        self._bar.update(self._tasks[record.method], score=score)

    def end(self, method: str, failed: str | None) -> None:
        task = self._tasks[method]
        if failed is not None:
            self._bar.update(task, time="failed")
        self._bar.stop_task(task)
