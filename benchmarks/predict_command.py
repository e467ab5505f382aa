"""`python -m benchmarks predict`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from thinwire.errors import ConfigError
from thinwire.tools.cli.show import JsonFile, Methods, errors, progress, save, table


def predict(
    link: Annotated[
        list[str] | None, typer.Option(help="Such as lab:100mbit; may be given several times.")
    ] = None,
    workers: Annotated[int, typer.Option(min=2, help="Hosts.")] = 4,
    method: Methods = None,
    json_file: JsonFile = None,
) -> None:
    """Predicted step times against measured ones, on slow links of the lab (needs root)."""
    with errors():
        from benchmarks import predictions as module
        from thinwire.tools.lab import namespaces

        links, methods = link or list(module.LINKS), method or list(module.METHODS)
        for text in links:
            if not text.startswith("lab:"):
                raise ConfigError(f"--link: only the lab's links are measured here: lab:{text}, not {text}")
        reason = namespaces.unavailable()
        if reason is not None:
            raise ConfigError(f"the lab is not available here: {reason}")
        with progress(len(links) * len(methods)) as advance:
            results = module.run(links, methods, workers, lambda what: advance(what, 1))
    rows = [
        (
            r.link,
            r.method,
            f"{1e3 * r.predicted:.1f} ms",
            f"{1e3 * r.measured:.1f} ms",
            f"{100 * r.error:+.0f} %",
            f"{1e3 * r.compute:.1f} ms",
            f"{1e3 * r.compression:.1f} ms",
            f"{1e3 * r.wire:.1f} ms",
        )
        for r in results
    ]
    title = f"a step of the 784-1024-1024-10 network on {workers} hosts; target: within 25 %"
    header = ("link", "method", "predicted", "measured", "error", "compute", "compression", "on the link")
    table(title, header, rows)
    save(json_file, [{**asdict(r), "error": r.error, "passed": r.passed} for r in results])
