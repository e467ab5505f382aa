"""`python -m tests.mutants [NAME ...]`: break the source in one place at a time and show which test notices.

Each mutant gets a copy of the package in a temporary folder. A mutant that survives, or that does not fit the
source any more, is an error.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutants.mutants import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
AT_ONCE = 2


def main(names: list[str]) -> int:
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    unknown = set(names) - {mutant.name for mutant in chosen}
    if unknown:
        print(f"there is no mutant {', '.join(sorted(unknown))}")
        return 2
    with ThreadPoolExecutor(AT_ONCE) as pool:
        survivors = sum(pool.map(survives, chosen))
    print(f"{len(chosen) - survivors} of {len(chosen)} mutants caught")
    return int(survivors > 0)


def survives(mutant: Mutant) -> bool:
    begin = time.monotonic()
    caught = catcher(mutant)
    seconds = time.monotonic() - begin
    print(f"{mutant.name:<40} {caught or 'SURVIVED'}  ({seconds:.0f} s)", flush=True)
    return caught is None


def catcher(mutant: Mutant) -> str | None:
    """The first test that fails on the mutant; None if all pass."""
    with tempfile.TemporaryDirectory(prefix="thinwire-mutant-") as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        apply(mutant, source / "thinwire" / mutant.file)
        environment = os.environ | {"PYTHONPATH": f"{source}{os.pathsep}{ROOT}"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *mutant.tests]
        run = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=900
        )
    if run.returncode == 0:
        return None
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", run.stdout, re.MULTILINE)
    if run.returncode != 1 or found is None:
        raise SystemExit(f"{mutant.name}: pytest could not run:\n{run.stdout}{run.stderr}")
    return found[1]


def apply(mutant: Mutant, path: Path) -> None:
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise SystemExit(
            f"{mutant.name}: {mutant.file} has {text.count(mutant.old)} places with {mutant.old!r}, not one: "
            "adapt the mutant"
        )
    path.write_text(text.replace(mutant.old, mutant.new))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
