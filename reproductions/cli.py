"""`python -m reproductions`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from reproductions import NAMES, find
from reproductions.base import Left, Outcome, Reproduction
from reproductions.parts import RECORDS, Context, Progress
from thinwire.errors import ConfigError
from thinwire.tools.cli.show import console, errors, table

PAGE = Path("docs/reproductions.md")
OUTCOME, PLOTS, PICTURE = "outcome.json", "plots.html", "picture.svg"
Outcomes = dict[str, tuple[Reproduction, Outcome]]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def reproduce(
    name: Annotated[str, typer.Argument(help="Which one, or `all`; without a name they are listed.")] = "",
    data: Annotated[Path | None, typer.Option(help="The folder with the datasets.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A smoke run: minutes become seconds.")] = False,
    out: Annotated[Path, typer.Option(help="Where parts, outcomes and plots go.")] = Path("out/reproduce"),
    records: Annotated[
        bool,
        typer.Option("--records", help="Continue the records of this repository instead of those in --out."),
    ] = False,
    only: Annotated[str, typer.Option(help="Run only sections with these words in their question.")] = "",
    at_once: Annotated[int, typer.Option(help="Processes that share the work.", min=1)] = 1,
    finished: Annotated[
        bool, typer.Option("--finished", help="Run nothing: judge what is finished, and say what is left.")
    ] = False,
    page: Annotated[
        Path | None,
        typer.Option(
            help="Write all outcomes to this Markdown file, pictures beside it; for a full run of `all` "
            f"{PAGE}, if nothing else is said."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    helper: Annotated[bool, typer.Option("--helper", hidden=True)] = False,
) -> None:
    """Run a paper's central claims again: the paper's figure, ours, and the verdict, side by side.

    A run that was stopped continues where it was.
    """
    if not name:
        rows = [(each, find(each).title, find(each).paper) for each in NAMES]
        table("reproductions", ("name", "about", "paper"), rows, numbers=False)
        return
    outcomes: Outcomes = {}
    with errors():
        if data is not None and not data.is_dir():
            raise ConfigError(f"--data: there is no folder {data}")
        if records and quick:
            raise ConfigError("--records are those of full runs: leave out --quick")
        chosen = list(NAMES if name == "all" else (name,))
        given = {each: find(each) for each in chosen}
        contexts = {
            each: Context(
                each,
                data=data,
                quick=quick,
                out=out,
                records=RECORDS if records else None,
                finished=finished,
                progress=None if helper else _told(each),
            )
            for each in chosen
        }
        _one_thread()
        if helper:  # from the other end, so that it seldom waits for the parts of others
            for each in reversed(chosen):
                given[each].run(contexts[each], only)
            return
        with _helpers(at_once - 1):
            for each, reproduction in given.items():
                outcome, left = reproduction.run(contexts[each], only)
                outcomes[each] = (reproduction, outcome)
                _keep(reproduction, outcome, contexts[each].folder)
                if not as_json:
                    _show(reproduction, outcome, left)
                    console().print(f"{each}: {contexts[each].folder}", markup=False)
    if as_json:
        record = {each: outcome.findings() for each, (_, outcome) in outcomes.items()}
        console().print_json(msgspec.json.encode(record).decode())
    if page is None and name == "all" and not quick:
        page = PAGE
    if page is not None:
        flags = " --quick" * quick + " --records" * records + " --finished" * finished
        flags += "" if page == PAGE and name == "all" else f" --page {page}"
        pictures = {each: contexts[each].folder / PICTURE for each in outcomes}
        _write_page(page, f"python -m reproductions {name} --data DATA{flags}", outcomes, pictures)


def _one_thread() -> None:
    """The models are small; and the same numbers come out whatever the cores."""
    import torch

    torch.set_num_threads(1)


@contextmanager
def _helpers(count: int) -> Generator[None]:
    """Processes with the same arguments, which compute parts as long as there are some."""
    command = [sys.executable, "-m", "reproductions", *sys.argv[1:], "--helper"]
    started = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in started:
            process.terminate()
            process.wait()


def _told(name: str) -> Progress:
    """Tells of every part that was computed, and how many of its kind are left."""

    def tell(what: str, done: int, total: int, seconds: float) -> None:
        left = f", {total - done} left" if total > 1 else ""
        console(stderr=True).print(f"{name}: {what} ({seconds:.0f} s){left}", markup=False, highlight=False)

    return tell


def _keep(reproduction: Reproduction, outcome: Outcome, place: Path) -> None:
    from reproductions.page import write_plots
    from thinwire.tools.report.figure_picture import svg

    found = msgspec.json.format(msgspec.json.encode(outcome.findings()), indent=2)
    (place / OUTCOME).write_bytes(found + b"\n")
    (place / PICTURE).unlink(missing_ok=True)
    if outcome.figures:
        write_plots(place / PLOTS, reproduction.title, outcome.figures, outcome)
        drawn = svg(*next(iter(outcome.figures.items())))
        if drawn is not None:
            (place / PICTURE).write_text(drawn)


def _show(reproduction: Reproduction, outcome: Outcome, left: list[Left]) -> None:
    if outcome.claims:
        claims = [(c.what, c.paper, c.ours, c.verdict, c.note) for c in outcome.claims]
        table(reproduction.title, ("claim", "paper", "ours", "verdict", "why"), claims, numbers=False)
    for each in outcome.tables:
        table(each.title, each.header, each.rows)
    for note in outcome.notes:
        console().print(note, markup=False)
    for one in left:
        console().print(f"left: {one.what}: {one.total - one.done} of {one.total} parts", markup=False)


def _write_page(page: Path, command: str, outcomes: Outcomes, pictures: dict[str, Path]) -> None:
    """The page, and a folder of the same name with a picture of each reproduction."""
    from reproductions.page import markdown

    beside = page.with_suffix("")
    beside.mkdir(parents=True, exist_ok=True)
    shown: dict[str, str] = {}
    for each, drawn in pictures.items():
        kept = beside / f"{each}.svg"
        kept.unlink(missing_ok=True)
        if drawn.is_file():
            kept.write_text(drawn.read_text())
            shown[each] = f"{beside.name}/{each}.svg"
    page.write_text(markdown(outcomes, command, shown))
