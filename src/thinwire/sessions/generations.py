"""The checkpoints in a folder: which are complete, and which rank reads which file.

A generation is a folder `step-00000100-3f9a` with a file per rank, files for what is equal on all ranks, and
a manifest, which is written when all ranks have written. One without a manifest does not count.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thinwire.net.rank_info import Hosts
from thinwire.sessions import checkpoint_file
from thinwire.sessions.checkpoint_file import START, Mark

FORMAT = 1
MANIFEST = "manifest.json"
_TOKEN = ".thinwire-folder"


def name_of(step: int, run: str, again: int = 0) -> str:
    """`again`: how often this attempt has saved this step before."""
    return f"step-{step:08d}-{run}" + (f"-{again}" if again else "")


def rank_file(rank: int) -> str:
    return f"rank-{rank}.pt"


def common_file(rank: int) -> str:
    return f"common-{rank}.pt"


def token_of(folder: Path) -> str:
    """A random name of the folder: ranks with the same one see the same files."""
    folder.mkdir(parents=True, exist_ok=True)
    token, own = folder / _TOKEN, folder / f"{_TOKEN}.{secrets.token_hex(4)}"
    try:
        own.write_text(secrets.token_hex(8))
        if not token.exists():
            _link(own, token)
    finally:
        own.unlink(missing_ok=True)
    return token.read_text()


def _link(own: Path, token: Path) -> None:
    """The first one stays, whoever else does this at the same time."""
    try:
        os.link(own, token)
    except FileExistsError:
        pass
    except OSError:  # a file system without links
        own.replace(token)


def inventory(folder: Path) -> dict[str, dict[str, Any]]:
    """The generations in a folder, each with its manifest, if it has one, and the files that are there."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("step-*")):
        if path.is_dir():
            files = {each.name: each.stat().st_size - START for each in path.glob("*.pt")}
            found[path.name] = {"manifest": checkpoint_file.read_json(path / MANIFEST), "files": files}
    return found


@dataclass
class Generation:
    """A complete generation, and the ranks that see each of its files."""

    name: str
    step: int
    size: int
    written: float
    files: dict[str, Mark]
    seen_by: dict[str, list[int]] = field(default_factory=dict[str, list[int]])

    @property
    def missing(self) -> str | None:
        """A file that no rank sees, and that nothing can replace."""
        needed = [rank_file(rank) for rank in range(self.size)]
        lost = [name for name in needed if not self.seen_by.get(name)]
        return lost[0] if lost else None if self.common else "common"

    @property
    def common(self) -> list[str]:
        """The files with what is equal on all ranks; any of them will do."""
        return sorted(name for name in self.files if name.startswith("common-") and self.seen_by.get(name))


def complete(inventories: Sequence[Mapping[str, Any]]) -> list[Generation]:
    """The generations with a manifest, newest first, from what each rank has found."""
    found: dict[str, Generation] = {}
    for one in inventories:
        for name, about in one.items():
            if name not in found and (generation := _parsed(name, about["manifest"])) is not None:
                found[name] = generation
    for generation in found.values():
        for name, mark in generation.files.items():
            generation.seen_by[name] = [
                rank
                for rank, one in enumerate(inventories)
                if one.get(generation.name, {"files": {}})["files"].get(name) == mark.length
            ]
    return sorted(found.values(), key=lambda one: (one.step, one.written), reverse=True)


def manifest(step: int, size: int, written: float, files: Mapping[str, Mark]) -> dict[str, Any]:
    return {"format": FORMAT, "step": step, "size": size, "written": written, "files": dict(files)}


def _parsed(name: str, given: Mapping[str, Any] | None) -> Generation | None:
    if given is None or given.get("format") != FORMAT:
        return None
    try:
        files = {str(file): Mark(*map(int, mark)) for file, mark in given["files"].items()}
        return Generation(name, int(given["step"]), int(given["size"]), float(given["written"]), files)
    except (KeyError, TypeError, ValueError):
        return None


def deal(generation: Generation, size: int, hosts: Hosts | None = None) -> list[list[int]]:
    """The old ranks whose states each new rank gets: each exactly once, and if possible where it is seen.

    With two levels the states of a host go to one leader.
    """
    if generation.size == size:
        return [[rank] for rank in range(size)]
    local, keepers = (1, tuple(range(size))) if hosts is None else (hosts.local, hosts.leaders)
    dealt: list[list[int]] = [[] for _ in range(size)]
    for number, first in enumerate(range(0, generation.size, local)):
        usual = keepers[number % len(keepers)]
        seen = [rank for rank in keepers if rank in generation.seen_by[rank_file(first)]] or [usual]
        chosen = min(seen, key=lambda rank: (len(dealt[rank]), rank != usual, rank))
        dealt[chosen] += range(first, min(first + local, generation.size))
    return dealt


def remove_old(folder: Path, current: str, keep: int) -> None:
    """Remove all but the newest complete generations, and what earlier attempts left unfinished."""
    there = inventory(folder)
    found = complete([there])
    kept = {generation.name for generation in found[:keep]} | {current}
    run = current.rpartition("-")[2]
    for name in there:
        begun = name > current and name.endswith(f"-{run}")  # by a rank that is ahead of this one
        if name in kept or begun:
            continue
        # First the manifest: a generation that is half removed must not count.
        (folder / name / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(folder / name, ignore_errors=True)


def remove_torn(generation: Path) -> None:
    """Remove a generation that will never be complete."""
    if not (generation / MANIFEST).exists():
        shutil.rmtree(generation, ignore_errors=True)
