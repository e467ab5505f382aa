"""`thinwire reproduce`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thinwire.cli.show import console, errors, progress, table
from thinwire.errors import ConfigError

if TYPE_CHECKING:
    from thinwire.reproduce import Outcome, Reproduction


def reproduce(
    name: Annotated[str, typer.Argument(help="Which one, or `all`; without a name they are listed.")] = "",
    data: Annotated[Path | None, typer.Option(help="The folder with the datasets.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A smoke run: minutes become seconds.")] = False,
    out: Annotated[Path, typer.Option(help="Where records and plots go.")] = Path("out/reproduce"),
    finished: Annotated[
        bool, typer.Option("--finished", help="Run nothing: show what earlier runs have found.")
    ] = False,
    page: Annotated[Path | None, typer.Option(help="Write all outcomes to this Markdown file, too.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Run a paper's central claim again: its figure, ours, and the verdict side by side."""
    from thinwire import reproduce as module

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
    if page is not None:
        from thinwire.reproduce.page import markdown

        page.parent.mkdir(parents=True, exist_ok=True)
        flags = " --quick" * quick + " --finished" * finished
        page.write_text(markdown(outcomes, f"thinwire reproduce {name} --data DATA{flags} --page {page}"))


def _run(name: str, reproduction: Reproduction, data: Path | None, quick: bool, out: Path) -> Outcome:
    from thinwire.reproduce import Context
    from thinwire.reproduce.page import write_plots

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
    return outcome


def _outcome_file(name: str, quick: bool, out: Path) -> Path:
    return out / (f"{name}-quick" if quick else name) / "outcome.json"


def _read(name: str, quick: bool, out: Path) -> Outcome:
    from thinwire.reproduce import Outcome

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
