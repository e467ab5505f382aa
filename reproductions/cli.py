"""`python -m reproductions`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thinwire.errors import ConfigError
from thinwire.tools.cli.show import console, errors, progress, table
from thinwire.tools.cli.usage_errors import OneLineErrors

if TYPE_CHECKING:
    from reproductions import Outcome, Reproduction


PAGE = Path("docs/reproductions.md")
PICTURE = "picture.svg"


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
    """Run a paper's central claim again: its figure, ours, and the verdict side by side."""
    import reproductions as module

    if not name:
        rows = [(each, module.find(each).title) for each in module.names()]
        table("reproductions", ("name", ""), rows, numbers=False)
        return
    with errors():
        if data is not None and not data.is_dir():
            raise ConfigError(f"--data: there is no folder {data}")
        chosen = module.names() if name == "all" else (name,)
        found = {each: module.find(each) for each in chosen}
        outcomes: dict[str, tuple[Reproduction, Outcome]] = {}
        if finished:
            found = {each: one for each, one in found.items() if _outcome_file(each, quick, out).is_file()}
            if not found:
                raise ConfigError(f"--finished: no run of {name} has ended in {out}")
        for each, reproduction in found.items():
            outcome = _read(each, quick, out) if finished else _run(each, reproduction, data, quick, out)
            outcomes[each] = (reproduction, outcome)
            if not as_json:
                _show(reproduction, outcomes[each][1])
    if as_json:
        record = {each: outcome.to_json() for each, (_, outcome) in outcomes.items()}
        console().print_json(json.dumps(record))
    if page is None and name == "all" and not quick:
        page = PAGE
    if page is not None:
        _write_page(page, name, outcomes, quick, finished, out)


def _write_page(
    page: Path,
    name: str,
    outcomes: dict[str, tuple[Reproduction, Outcome]],
    quick: bool,
    finished: bool,
    out: Path,
) -> None:
    """The page, and a folder of the same name with a picture of each reproduction."""
    from reproductions.page import markdown

    folder = page.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    pictures: dict[str, str] = {}
    for each in outcomes:
        drawn = _folder(each, quick, out) / PICTURE
        if drawn.is_file():
            (folder / f"{each}.svg").write_text(drawn.read_text())
            pictures[each] = f"{folder.name}/{each}.svg"
    flags = " --quick" * quick + " --finished" * finished
    command = f"python -m reproductions {name} --data DATA{flags}"
    command += "" if page == PAGE and name == "all" else f" --page {page}"
    page.write_text(markdown(outcomes, command, pictures))


def _run(name: str, reproduction: Reproduction, data: Path | None, quick: bool, out: Path) -> Outcome:
    from reproductions import Context
    from reproductions.page import write_plots
    from reproductions.picture import svg

    done = 0
    with progress(None) as advance:

        def show(what: str, number: int, total: int) -> None:
            nonlocal done
            advance(f"{name}: {what}", number - done, total)
            done = number

        context = Context(name, data=data, quick=quick, out=out, progress=show)
        outcome = reproduction.run(context)
    (context.folder / "outcome.json").write_text(json.dumps(outcome.to_json(), indent=2) + "\n")
    if outcome.figures:
        write_plots(context.folder / "plots.html", reproduction.title, outcome.figures, outcome)
        drawn = svg(*next(iter(outcome.figures.items())))
        if drawn is not None:
            (context.folder / PICTURE).write_text(drawn)
    return outcome


def _folder(name: str, quick: bool, out: Path) -> Path:
    return out / (f"{name}-quick" if quick else name)


def _outcome_file(name: str, quick: bool, out: Path) -> Path:
    return _folder(name, quick, out) / "outcome.json"


def _read(name: str, quick: bool, out: Path) -> Outcome:
    from reproductions import Outcome

    path = _outcome_file(name, quick, out)
    try:
        return Outcome.from_json(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not the outcome of a reproduction: {error}") from None


def _show(reproduction: Reproduction, outcome: Outcome) -> None:
    if outcome.claims:
        claims: Sequence[Sequence[str]] = [
            (c.what, c.paper, c.ours, c.verdict, c.note) for c in outcome.claims
        ]
        table(reproduction.title, ("claim", "paper", "ours", "verdict", "why"), claims, numbers=False)
    for each in outcome.tables:
        table(each.title, each.header, each.rows)
    for note in outcome.notes:
        console().print(note, markup=False)


app = typer.Typer(
    cls=OneLineErrors, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)
app.command()(reproduce)
