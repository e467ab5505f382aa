"""`thinwire report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from thinwire.tools.cli.show import AsJson, check_writable, console, errors, print_json


def report(
    records: Annotated[Path, typer.Argument(help="records.jsonl of `thinwire compare`, or its folder.")],
    out: Annotated[
        Path | None, typer.Option(help="The HTML file; by default report.html beside the records.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Also draw accuracy against time, as an SVG file.")
    ] = None,
    predict: Annotated[
        bool, typer.Option(help="Predict other links and numbers of workers; takes some seconds.")
    ] = True,
    show: Annotated[bool, typer.Option("--open", help="Open the report in the browser.")] = False,
    as_json: AsJson = False,
) -> None:
    """Make the report of a comparison from its records: one HTML file that opens without a network."""
    with errors():
        from thinwire.tools import report as module
        from thinwire.tools.compare.records import read
        from thinwire.tools.report.summary import summarise

        source = records / "records.jsonl" if records.is_dir() else records
        found = read(source)
        path = source.with_name("report.html") if out is None else out
        check_writable(path, "--out")
        if picture is not None:
            check_writable(picture, "--picture")
        module.write(found, path, predict=predict)
        if picture is not None:
            module.picture(found, picture)
    if as_json:
        print_json(summarise(found))
    else:
        for each in (path, picture):
            if each is not None:
                console().print(str(each), markup=False, soft_wrap=True)
    if show:
        import webbrowser

        webbrowser.open(path.resolve().as_uri())
