"""`python -m tests.golden record FILE`, then, with other code on the same machine, `compare FILE`.

Exit code 1 if a trajectory differs. Bits depend on the processor and on the version of torch, so no file is
part of the repository.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from pathlib import Path

from tests.golden.training import cases, recorded


def all_trajectories(only: str) -> dict[str, dict[str, object]]:
    chosen = [case for case in cases() if only in str(case)]
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        return dict(pool.imap(recorded, chosen, chunksize=8))


def differences(old: dict[str, dict[str, object]], new: dict[str, dict[str, object]]) -> list[str]:
    """A line for every case that is not the same."""
    found = [f"{name}: is gone" for name in old.keys() - new.keys()]
    found += [f"{name}: is new" for name in new.keys() - old.keys()]
    for name in old.keys() & new.keys():
        before, after = old[name], new[name]
        for field in before.keys() | after.keys():
            was, now = before.get(field), after.get(field)
            if was == now:
                continue
            if isinstance(was, list) and isinstance(now, list) and field == "parameters":
                first = next(step for step, (a, b) in enumerate(zip(was, now, strict=True)) if a != b)
                found.append(f"{name}: other parameters from step {first} on")
            else:
                found.append(f"{name}: {field} {was} -> {now}")
    return sorted(found)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="", help="the cases with this text in their names")
    asked = parser.parse_args()
    begin = time.monotonic()
    found = all_trajectories(asked.only)
    seconds = time.monotonic() - begin
    if asked.action == "record":
        asked.file.parent.mkdir(parents=True, exist_ok=True)
        asked.file.write_text(json.dumps(found, indent=1))
        broken = [f"{name}: {one['error']}" for name, one in found.items() if "error" in one]
        print("\n".join([*broken, f"{len(found)} trajectories in {asked.file}, in {seconds:.0f} s"]))
        return 0
    old = json.loads(asked.file.read_text())
    wrong = differences({name: one for name, one in old.items() if asked.only in name}, found)
    print("\n".join([*wrong, f"{len(found)} trajectories, {len(wrong)} differences, in {seconds:.0f} s"]))
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
