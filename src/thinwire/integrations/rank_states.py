"""The state of every rank in a framework's own checkpoint, which holds what is equal on all ranks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thinwire import log
from thinwire.core.optimizers import Given, Optimizers
from thinwire.errors import StateError
from thinwire.sessions import checkpoint, checkpoint_file
from thinwire.sessions.base import BaseSession
from thinwire.sessions.checkpoint import OnResize
from thinwire.sessions.periodic import PeriodicSession
from thinwire.sessions.periodic_checkpoint import check_optimizer_states
from thinwire.sessions.replicas import bare

FILE = "thinwire-rank-{rank}-of-{size}.pt"
_PATTERN = re.compile(r"thinwire-rank-(\d+)-of-(\d+)\.pt")


class RankStates:
    """Saves this rank's part of a checkpoint and loads it again, also with another number of ranks.

    Args:
        session: of this rank.
        model: the model, wrapped or not.
        optimizer: the optimizer, or several; None if there is none.
        on_resize: what becomes of residuals if the number of ranks has changed; see `load_state_dict`.
    """

    def __init__(
        self,
        session: BaseSession,
        model: nn.Module,
        optimizer: Given,
        on_resize: OnResize,
    ) -> None:
        self.session = session
        self._model = bare(model)
        self._optimizers = Optimizers(optimizer)
        self._on_resize: OnResize = on_resize

    # -- this rank's part --------------------------------------------------------------------------------

    def own(self) -> dict[str, Any]:
        """The session's state and, if replicas drift apart, this rank's model and optimizer."""
        found: dict[str, Any] = {"session": self.session.sealed()}
        if self.session.reconcile_every is not None and not isinstance(self.session, PeriodicSession):
            found["model"] = checkpoint_file.copied(self._model.state_dict(), "model")
            kept = [each.state_dict() for each in self._optimizers]
            found["optimizers"] = checkpoint_file.copied(kept, "optimizers")
        return found

    def load(self, size: int, read: Callable[[int], Mapping[str, Any]]) -> None:
        """Continue from what `size` ranks have saved; `read` returns the part of an old rank.

        Call it on every rank, after the framework has loaded the model and the optimizer.
        """
        rank_info = self.session.rank_info
        resized = size != rank_info.size
        olds = checkpoint.dealt(self.session.engine, size) if resized else [rank_info.rank]
        found: list[Mapping[str, Any]] = []
        error: str | None = None
        try:
            found = [read(old) for old in olds or [0]]
            if not all(isinstance(part.get("session"), Mapping) for part in found):
                error = "it has no state of a session"
            elif "model" in found[0] and not resized:
                check_optimizer_states(self._optimizers, found[0].get("optimizers"), "optimizers")
        except StateError as problem:
            error = str(problem)
        self._agree(error)
        states = [part["session"] for part in found]
        how: OnResize | None = None
        if resized:
            drifted = any(bool(state.get("replica") or state.get("under_way")) for state in states)
            how = "drop" if drifted or not olds else self._on_resize
            if rank_info.rank == 0:
                log.info("the checkpoint was written by %d ranks, and there are %d now", size, rank_info.size)
            if drifted:
                log.warning("the local steps since the last sync round are dropped, with their residuals")
        self.session.load_state_dict(states if resized else states[0], on_resize=how)
        if "model" in found[0] and not resized:
            self._model.load_state_dict(found[0]["model"])
            for optimizer, saved in zip(self._optimizers, found[0]["optimizers"], strict=True):
                optimizer.load_state_dict(saved)

    def _agree(self, error: str | None) -> None:
        """Raise on every rank if one of them has an error."""
        said = self.session.engine.bulletin("rank states").all("read", json.dumps(error))
        for rank, text in enumerate(map(json.loads, said)):
            if text is not None:
                raise StateError(f"rank {rank} cannot load its part of the checkpoint: {text}")

    # -- one file per rank, in a folder --------------------------------------------------------------------

    def write(self, folder: Path) -> None:
        """Write this rank's file."""
        rank_info = self.session.rank_info
        folder.mkdir(parents=True, exist_ok=True)
        for path, size in _files(folder):
            if size != rank_info.size:  # of an earlier run
                path.unlink(missing_ok=True)
        name = FILE.format(rank=rank_info.rank, size=rank_info.size)
        checkpoint_file.write(folder / name, self.own())

    def read(self, folder: Path) -> None:
        """Load from the files of all ranks; without any, residuals start at zero, with a warning."""
        size = max((size for _, size in _files(folder)), default=0)
        call = self.session.engine.bulletin("rank files")
        sizes = {int(text) for text in call.all("size", str(size))}
        if sizes == {0}:
            self.warn(str(folder))
        else:
            known = max(sizes)

            def read(old: int) -> dict[str, Any]:
                path = folder / FILE.format(rank=old, size=known)
                return checkpoint_file.read(path, str(path))

            self.load(known, read)

    def warn(self, where: str) -> None:
        """The checkpoint was written without thinwire."""
        if self.session.rank_info.rank == 0:
            log.warning("%s has no state of thinwire: residuals start at zero", where)

    # -- all in one file, written by the first rank ----------------------------------------------------------

    def gather(self) -> list[torch.Tensor]:
        """On rank 0 the parts of all ranks, as bytes; on the others nothing."""
        group, rank_info = self.session.engine.executor.group, self.session.rank_info
        device = torch.device("cpu") if group.name() == "gloo" else torch.device("cuda")
        own = torch.frombuffer(bytearray(checkpoint_file.encode(self.own())), dtype=torch.uint8)
        lengths = self.session.engine.bulletin("rank states").all("length", str(own.numel()))
        parts = [own]
        try:
            if rank_info.rank:
                torch.distributed.send(own.to(device), group=group, group_dst=0)
                return []
            for rank in range(1, rank_info.size):
                part = torch.empty(int(lengths[rank]), dtype=torch.uint8, device=device)
                torch.distributed.recv(part, group=group, group_src=rank)
                parts.append(part.cpu())
        except RuntimeError as error:
            raise self.session.engine.executor.diagnose("the checkpoint", error) from error
        return parts

    def scatter(self, parts: list[torch.Tensor]) -> None:
        """Load from what `gather` returned on rank 0."""

        def read(old: int) -> dict[str, Any]:
            return checkpoint_file.read(parts[old].numpy().tobytes(), f"the part of rank {old}")

        self.load(len(parts), read)


def finish(session: BaseSession) -> None:
    """After the last step: make the replicas equal, if they differ."""
    if session.reconcile_every is not None:
        session.reconcile()


def _files(folder: Path) -> list[tuple[Path, int]]:
    """The files in a folder, each with the number of ranks that wrote them."""
    found = [(path, _PATTERN.fullmatch(path.name)) for path in folder.glob("thinwire-rank-*.pt")]
    return [(path, int(match[2])) for path, match in found if match is not None]
