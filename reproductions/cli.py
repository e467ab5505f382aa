"""`python -m reproductions`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from reproductions import NAMES, find
from reproductions.base import Context, Outcome, Reproduction, folder
from thinwire.errors import ConfigError
from thinwire.tools.cli.show import console, errors, progress, table

PAGE = Path("docs/reproductions.md")
OUTCOME, PLOTS, PICTURE = "outcome.json", "plots.html", "picture.svg"
Outcomes = dict[str, tuple[Reproduction, Outcome]]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def reproduce(
    name: Annotated[str, typer.Argument(help="Which one, or `all`; without a name they are listed.")] = "",
    data: Annotated[Path | None, typer.Option(help="The folder with the datasets.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A smoke run: minutes become seconds.")] = False,
    out: Annotated[Path, typer.Option(help="Where records and plots go.")] = Path("out/reproduce"),
    finished: Annotated[
        bool, typer.Option("--finished", help="Run nothing: show what earlier runs have found.")
    ] = False,
    page: Annotated[
        Path | None,
        typer.Option(
            help="Write all outcomes to this Markdown file, pictures beside it; for a full run of `all` "
            f"{PAGE}, if nothing else is said."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Run a paper's central claim again: the paper's figure, ours, and the verdict, side by side."""
    if not name:
        rows = [(each, find(each).title, find(each).paper) for each in NAMES]
        table("reproductions", ("name", "about", "paper"), rows, numbers=False)
        return
    outcomes: Outcomes = {}
    with errors():
        if data is not None and not data.is_dir():
            raise ConfigError(f"--data: there is no folder {data}")
        chosen = {each: find(each) for each in (NAMES if name == "all" else (name,))}
        for each, reproduction in chosen.items():
            place = folder(each, quick, out)
            if finished and not (place / OUTCOME).is_file():
                continue
            outcome = _read(place) if finished else _run(each, reproduction, data, quick, out)
            outcomes[each] = (reproduction, outcome)
            if not as_json:
                _show(reproduction, outcome)
                console().print(f"{each}: {place}", markup=False)
        if not outcomes:
            raise ConfigError(f"--finished: no run of {name} has ended in {out}")
    if as_json:
        record = {each: outcome.findings() for each, (_, outcome) in outcomes.items()}
        console().print_json(msgspec.json.encode(record).decode())
    if page is None and name == "all" and not quick:
        page = PAGE
    if page is not None:
        flags = " --quick" * quick + " --finished" * finished
        flags += "" if page == PAGE and name == "all" else f" --page {page}"
        pictures = {each: folder(each, quick, out) / PICTURE for each in outcomes}
        _write_page(page, f"python -m reproductions {name} --data DATA{flags}", outcomes, pictures)


def _run(name: str, reproduction: Reproduction, data: Path | None, quick: bool, out: Path) -> Outcome:
    from reproductions.page import write_plots
    from thinwire.tools.report.figure_picture import svg

    done = 0
    with progress(None) as advance:

        def show(what: str, number: int, total: int) -> None:
            nonlocal done
            advance(f"{name}: {what}", number - done, total)
            done = number

        context = Context(name, data=data, quick=quick, out=out, progress=show)
        outcome = reproduction.run(context)
    found = msgspec.json.format(msgspec.json.encode(outcome.findings()), indent=2)
    (context.folder / OUTCOME).write_bytes(found + b"\n")
    if outcome.figures:
        write_plots(context.folder / PLOTS, reproduction.title, outcome.figures, outcome)
        drawn = svg(*next(iter(outcome.figures.items())))
        if drawn is not None:
            (context.folder / PICTURE).write_text(drawn)
    return outcome


def _read(place: Path) -> Outcome:
    """Without the figures: they are in the HTML file beside it."""
    path = place / OUTCOME
    try:
        return msgspec.json.decode(path.read_bytes(), type=Outcome)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path} is not the outcome of a reproduction: {error}") from None


def _show(reproduction: Reproduction, outcome: Outcome) -> None:
    if outcome.claims:
        claims = [(c.what, c.paper, c.ours, c.verdict, c.note) for c in outcome.claims]
        table(reproduction.title, ("claim", "paper", "ours", "verdict", "why"), claims, numbers=False)
    for each in outcome.tables:
        table(each.title, each.header, each.rows)
    for note in outcome.notes:
        console().print(note, markup=False)


def _write_page(page: Path, command: str, outcomes: Outcomes, pictures: dict[str, Path]) -> None:
    """The page, and a folder of the same name with a picture of each reproduction."""
    from reproductions.page import markdown

    beside = page.with_suffix("")
    beside.mkdir(parents=True, exist_ok=True)
    shown: dict[str, str] = {}
    for each, drawn in pictures.items():
        if drawn.is_file():
            (beside / f"{each}.svg").write_text(drawn.read_text())
            shown[each] = f"{beside.name}/{each}.svg"
    page.write_text(markdown(outcomes, command, shown))
