"""`thinwire`, `python -m thinwire`, and so `torchrun -m thinwire`."""

import gc
import sys
from importlib.util import find_spec

NEEDED = ("typer", "rich", "jinja2", "msgspec", "plotly")
"""What the extra `cli` installs."""


def main() -> None:
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        sys.exit(f"thinwire: the command line needs {', '.join(missing)}: pip install 'thinwire[cli]'")
    from thinwire.tools.cli import app

    try:
        app()
    finally:
        gc.freeze()  # Python would look through all objects before it ends


if __name__ == "__main__":
    main()
