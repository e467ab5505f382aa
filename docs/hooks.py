"""Lists the generated pages of docs/methods in the navigation, so that a new method needs no line there."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def on_config(config: Any) -> Any:
    folder = Path(config.docs_dir) / "methods"
    pages = ["methods/README.md", *(f"methods/{p.name}" for p in sorted(folder.glob("[!R]*.md")))]
    config.nav = [{"Methods": pages} if entry == {"Methods": "methods/"} else entry for entry in config.nav]
    return config
