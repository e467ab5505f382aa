"""Checkpoints for runs that are restarted: written in the background, complete on all ranks or not there."""

from __future__ import annotations

import atexit
import json
import os
import secrets
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import nn

from thinwire import log
from thinwire.core import schema
from thinwire.core.optimizers import SESSION, Given, Optimizers
from thinwire.errors import ConfigError, StateError, ThinwireError
from thinwire.net import frames
from thinwire.net.executor import ProcessGroupExecutor
from thinwire.net.meter import Meter
from thinwire.sessions import checkpoint_file, generations
from thinwire.sessions.base import BaseSession
from thinwire.sessions.checkpoint import OnResize
from thinwire.sessions.checkpoint_file import CHUNK, Mark
from thinwire.sessions.generations import Generation, common_file, rank_file
from thinwire.sessions.periodic import PeriodicSession
from thinwire.sessions.periodic_checkpoint import check_optimizer_states
from thinwire.sessions.replicas import bare

EXIT_TIMEOUT = 10.0
"""How long the end of a program waits for the other ranks to write, in seconds."""


class Stateful(Protocol):
    """Something with a state, such as a learning-rate scheduler or a GradScaler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object: ...


class Checkpointer:
    """Saves a run every few steps, and continues the newest checkpoint that is complete on all ranks.

        checkpointer = thinwire.Checkpointer(folder, session, model, optimizer, every=100)
        for step in range(checkpointer.load_latest(), steps):
            ...
            optimizer.step()
            checkpointer.step()

    Call everything on every rank. `step` only copies; a thread writes. Every rank writes its file under a
    temporary name, flushes it and renames it. When all ranks have written, a manifest makes the generation
    count. So a crash at any moment leaves the one before. If a write is still running when the next is due,
    `step` waits for it, on all ranks alike.

    The folder may be shared by all ranks or local to each machine. What is equal on all ranks (the model, the
    optimizer) is written once per folder. A rank whose machine lacks a file gets it from one that has it.

    A generation that cannot be written, because a disk is full, is logged; the training goes on and the older
    ones stay. With `strict` the next save raises instead, on every rank.

    Args:
        folder: where the checkpoints are; of one run only.
        session: what `thinwire.attach` returned.
        model: the model, wrapped in DistributedDataParallel or not.
        optimizer: the optimizer, or several, such as [muon, adamw]; None if there is none.
        every: `step` saves after so many steps; None leaves it to `save`.
        keep: the number of complete generations that are kept.
        also: other objects with a state that is equal on all ranks, by name: a learning-rate scheduler, a
            GradScaler.
        on_resize: what becomes of residuals if the number of ranks has changed; see `load_latest`.
        strict: raise at the next save if a generation could not be written.
    """

    def __init__(
        self,
        folder: str | Path,
        session: BaseSession,
        model: nn.Module,
        optimizer: Given,
        *,
        every: int | None = None,
        keep: int = 2,
        also: Mapping[str, Stateful] | None = None,
        on_resize: OnResize = "sum",
        strict: bool = False,
    ) -> None:
        for name, value in (("every", every), ("keep", keep)):
            if value is not None and (isinstance(value, bool) or value < 1):
                raise ConfigError(f"Checkpointer: {name} must be a whole number from 1 up, not {value!r}")
        if on_resize not in ("sum", "drop"):
            raise ConfigError(f'Checkpointer: on_resize must be "sum" or "drop", not {on_resize!r}')
        self.folder = Path(folder)
        self.steps = 0
        """Calls of `step` so far, with those of the run that was continued."""
        self._session = session
        self._model = bare(model)
        self._optimizers = Optimizers(optimizer)
        self._optimizers.check_all_held(dict(self._model.named_parameters()))
        self._every = every
        self._keep = keep
        self._also = dict(also or {})
        self._on_resize: OnResize = on_resize
        self._strict = strict
        self._rank, self._size = session.rank_info.rank, session.rank_info.size
        self._call = session.engine.bulletin("checkpointer")
        self._subjects = 0
        self._writing: threading.Thread | None = None
        self._failure: str | None = None
        self._saved = Counter[int]()
        self._leave_at = float("inf")
        self._join_folder()
        _check_launcher(self._rank)
        _open.add(self)

    def _join_folder(self) -> None:
        """Find out who shares the folder, and agree on a name for this attempt."""
        try:
            mine = {"folder": generations.token_of(self.folder), "run": secrets.token_hex(2)}
        except OSError as error:
            mine = {"error": f"{self.folder}: {error.strerror or error}"}
        said = self._agree("folder", mine, lambda text: ConfigError(f"Checkpointer cannot write to {text}"))
        self._run = str(said[0]["run"])
        self._leader = [one["folder"] for one in said].index(mine["folder"]) == self._rank

    def _agree(
        self, subject: str, mine: Mapping[str, Any], failure: Callable[[str], Exception]
    ) -> list[dict[str, Any]]:
        """What all ranks say; an error of one is raised on all."""
        self._subjects += 1
        said = [json.loads(one) for one in self._call.all(f"{self._subjects} {subject}", json.dumps(mine))]
        for rank, one in enumerate(said):
            if "error" in one:
                raise failure(one["error"] if rank == self._rank else f"{one['error']} (on rank {rank})")
        return said

    # -- saving ----------------------------------------------------------------------------------------

    def step(self) -> None:
        """Count a step, after the optimizer's; saves if one is due."""
        self.steps += 1
        if self._every is not None and self.steps % self._every == 0:
            self.save()

    def save(self) -> None:
        """Copy everything now, and write it in the background. Call it between two steps, on every rank."""
        self.wait()
        own: dict[str, Any] = {"session": self._session.snapshot(), "rng": torch.get_rng_state()}
        common: dict[str, Any] = {}
        if self._replicas_differ:
            own |= self._model_and_optimizer()
        if self._leader:
            if not self._replicas_differ:
                common |= self._model_and_optimizer()
            also = {name: each.state_dict() for name, each in self._also.items()}
            common["also"] = checkpoint_file.copied(also, "also")
        # A step that is saved again gets a folder of its own: the first one stays, whatever comes of this.
        name = generations.name_of(self.steps, self._run, self._saved[self.steps])
        self._saved[self.steps] += 1
        self._writing = threading.Thread(
            target=self._write, args=(self.steps, name, own, common), name="thinwire-checkpoint", daemon=True
        )
        self._writing.start()

    def wait(self) -> None:
        """Wait until the last `save` is over; with `strict`, raises if it failed."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        failure, self._failure = self._failure, None
        if failure is not None and self._strict:
            raise ThinwireError(failure)

    @property
    def _replicas_differ(self) -> bool:
        """Whether a method lets the models drift apart. A periodic session holds its model itself."""
        return not isinstance(self._session, PeriodicSession) and any(
            not exchange.traits.consensus for exchange in self._session.engine.exchanges
        )

    def _model_and_optimizer(self) -> dict[str, Any]:
        state = {name: each for name, each in self._model.state_dict().items() if name not in self._held}
        found = {"model": checkpoint_file.copied(state, "model")}
        if not isinstance(self._session, PeriodicSession):
            # The session's state is saved for every rank, also if the optimizer owns the session.
            kept = [
                {name: part for name, part in each.state_dict().items() if name != SESSION}
                for each in self._optimizers
            ]
            found["optimizers"] = checkpoint_file.copied(kept, "optimizers")
        return found

    @property
    def _held(self) -> set[str]:
        """The parts of the model that the session's state holds."""
        return set(self._session.held) if isinstance(self._session, PeriodicSession) else set()

    def _write(self, step: int, name: str, own: dict[str, Any], common: dict[str, Any]) -> None:
        """In the background: write, tell the others, and commit when all have written."""
        path = self.folder / name
        try:
            report: dict[str, Any] = {"files": self._write_files(path, own, common)}
        except Exception as error:
            report = {"error": f"{type(error).__name__}: {error}"}
        del own, common
        try:
            self._call.say(f"written {name}", json.dumps(report))
            said = self._hear(f"written {name}")
            if self._rank == 0 and self._leave_at < float("inf"):
                self._call.until_heard(f"written {name}", stop=self._late)
            failed = {rank: one["error"] for rank, one in enumerate(said) if "error" in one}
            if failed:
                listing = "; ".join(f"rank {rank}: {error}" for rank, error in failed.items())
                raise ThinwireError(listing)
            if self._leader:
                files = {file: Mark(*mark) for one in said for file, mark in one["files"].items()}
                about = generations.manifest(step, self._size, time.time(), files)
                checkpoint_file.write_json(path / generations.MANIFEST, about)
                generations.remove_old(self.folder, name, self._keep)
        except Exception as error:
            self._failure = (
                f"the checkpoint of step {step} could not be written: {error}. The one before it is kept"
            )
            if self._leader:
                log.warning("%s, and the training goes on", self._failure)
                generations.remove_torn(path)

    def _write_files(self, path: Path, own: dict[str, Any], common: dict[str, Any]) -> dict[str, Mark]:
        path.mkdir(parents=True, exist_ok=True)
        own["session"] = schema.seal(own["session"])
        files = {rank_file(self._rank): checkpoint_file.write(path / rank_file(self._rank), own)}
        if self._leader:
            files[common_file(self._rank)] = checkpoint_file.write(path / common_file(self._rank), common)
        return files

    def _hear(self, subject: str) -> list[dict[str, Any]]:
        return [json.loads(one) for one in self._call.hear(subject, stop=self._late)]

    def _late(self) -> bool:
        return time.monotonic() > self._leave_at

    def close_at_exit(self) -> None:
        """Finish what is being written; do not wait for ranks that are gone."""
        self._leave_at = time.monotonic() + EXIT_TIMEOUT
        if self._writing is not None:
            self._writing.join()

    # -- loading ---------------------------------------------------------------------------------------

    def load_latest(self) -> int:
        """Continue the newest generation that is complete on all ranks; returns its step, or 0.

        With another number of ranks, each old rank's state goes to exactly one new rank. With
        `on_resize="sum"` nothing of the residuals is lost; with "drop" they start at zero. The local
        steps of a schedule since its last sync round belong to ranks that no longer exist: if there are any,
        the run continues from the last common model. Rank 0 logs what was done.

        A generation with a damaged file is skipped, with a warning. If there are generations and none of them
        can be read, this raises a StateError instead of starting again from step 0.
        """
        self.wait()
        try:
            mine: dict[str, Any] = {"found": generations.inventory(self.folder)}
        except OSError as error:
            mine = {"error": f"{self.folder}: {error.strerror or error}"}
        said = self._agree("inventory", mine, lambda text: StateError(f"no checkpoint can be read in {text}"))
        known = generations.complete([one["found"] for one in said])
        for generation in known:
            found = self._read(generation)
            if found is not None:
                self._apply(generation, *found)
                return self.steps
        if known:
            raise StateError(
                f"none of the {len(known)} checkpoints in {self.folder} can be read (see the warnings). To "
                "start again from step 0, use another folder"
            )
        if self._rank == 0:
            log.info("no complete checkpoint in %s: a new run", self.folder)
        return 0

    def _read(self, generation: Generation) -> tuple[list[list[int]], dict[str, dict[str, Any]], bool] | None:
        """Who gets which old states, the files for this rank, and whether replicas had drifted apart."""
        if generation.missing is not None:
            self._skip(generation, f"no rank sees its file {generation.missing!r}")
            return None
        dealt = generations.deal(generation, self._size, self._session.engine.hosts)
        needs = [self._needs(generation, olds, rank) for rank, olds in enumerate(dealt)]
        files: dict[str, dict[str, Any]] = {}
        mine: dict[str, Any] = {}
        try:
            for name in needs[self._rank]:
                if self._rank in generation.seen_by[name]:
                    path = self.folder / generation.name / name
                    files[name] = checkpoint_file.read(path, str(path), generation.files[name])
        except StateError as error:
            mine["error"] = str(error)
        states = [
            each["session"] for name, each in files.items() if name.startswith("rank-") and "session" in each
        ]
        mine["drifted"] = any(bool(one.get("replica") or one.get("under_way")) for one in states)
        try:
            said = self._agree("files", mine, StateError)
        except StateError as error:
            self._skip(generation, str(error))
            return None
        for name in sorted({name for names in needs for name in names}):
            seen = generation.seen_by[name]
            lacking = [rank for rank, names in enumerate(needs) if name in names and rank not in seen]
            if lacking:
                content = self._send(generation, name, seen[0])
                if self._rank in lacking:
                    files[name] = checkpoint_file.read(
                        content, f"{name} from rank {seen[0]}", generation.files[name]
                    )
        return dealt, files, any(one["drifted"] for one in said)

    def _needs(self, generation: Generation, olds: Sequence[int], rank: int) -> list[str]:
        names = [rank_file(old) for old in olds] or [rank_file(0)]
        if self._replicas_differ and generation.size != self._size and rank_file(0) not in names:
            names.append(rank_file(0))
        common = generation.common
        return [*names, next((name for name in common if rank in generation.seen_by[name]), common[0])]

    def _skip(self, generation: Generation, why: str) -> None:
        if self._rank == 0:
            log.warning("the checkpoint %s is skipped: %s", generation.name, why)

    def _send(self, generation: Generation, name: str, source: int) -> bytes:
        """The bytes of a file, on every rank, from one that has it."""
        length = generation.files[name].length + checkpoint_file.START
        executor = ProcessGroupExecutor(self._session.engine.executor.group, Meter())
        executor.label = f"sending {name}"
        parts: list[bytes] = []
        path = self.folder / generation.name / name
        with path.open("rb") if self._rank == source else open(os.devnull, "rb") as stream:
            for begin in range(0, length, CHUNK):
                block = torch.zeros(min(CHUNK, length - begin), dtype=torch.uint8)
                if self._rank == source:
                    block = torch.frombuffer(bytearray(stream.read(block.numel())), dtype=torch.uint8)
                executor.execute(frames.Broadcast(block, source, block.numel()))
                parts.append(frames.to_bytes(block))
        return b"".join(parts)

    def _apply(
        self, generation: Generation, dealt: list[list[int]], files: dict[str, dict[str, Any]], drifted: bool
    ) -> None:
        resized = generation.size != self._size
        olds = dealt[self._rank]
        how: OnResize | None = None
        if resized:
            how = "drop" if drifted or not olds else self._on_resize
        (common,) = (each for name, each in files.items() if name.startswith("common-"))
        first = files[rank_file(0 if resized and self._replicas_differ else (olds or [0])[0])]
        shared = first if self._replicas_differ else common
        states = [files[rank_file(old)].get("session") for old in olds or [0]]

        def load() -> None:
            self._session.load_state_dict(cast(Any, states if resized else states[0]), on_resize=how)
            self._load(shared, common)
            if not resized:
                torch.set_rng_state(_part(first, "rng"))

        for what, action in (("check", lambda: self._check(shared, common)), ("load", load)):
            mine: dict[str, Any] = {}
            try:
                action()
            except (ValueError, RuntimeError, TypeError, KeyError, IndexError) as error:
                mine["error"] = str(error)
            self._agree(
                what, mine, lambda text: StateError(f"{generation.name} does not fit this run: {text}")
            )
        self.steps = generation.step
        if self._rank == 0:
            self._tell(generation, dealt, drifted)

    def _check(self, shared: Mapping[str, Any], common: Mapping[str, Any]) -> None:
        """Find what does not fit before anything is changed."""
        own = {name: each for name, each in self._model.state_dict().items() if name not in self._held}
        tensors = {name: each for name, each in own.items() if isinstance(each, torch.Tensor)}
        theirs = _part(shared, "model")
        schema.tensors(tensors)(
            {name: theirs[name] for name in theirs if name not in own or name in tensors}, "model"
        )
        if not isinstance(self._session, PeriodicSession):
            check_optimizer_states(self._optimizers, _part(shared, "optimizers"), "optimizers")
        saved = _part(common, "also")
        if saved.keys() != self._also.keys():
            raise StateError(
                f"it has the states of {sorted(saved)} besides, and this run has {sorted(self._also)}"
            )

    def _load(self, shared: Mapping[str, Any], common: Mapping[str, Any]) -> None:
        held = self._session.held  # after its state has been loaded: an automatic session may be periodic now
        theirs = {name: each for name, each in _part(shared, "model").items() if name not in held}
        self._model.load_state_dict(theirs, strict=not held)
        if not held:
            for optimizer, saved in zip(self._optimizers, _part(shared, "optimizers"), strict=True):
                optimizer.load_state_dict(saved)
        for name, each in self._also.items():
            each.load_state_dict(_part(common, "also")[name])

    def _tell(self, generation: Generation, dealt: list[list[int]], drifted: bool) -> None:
        log.info("continues at step %d from %s", generation.step, self.folder / generation.name)
        if generation.size == self._size:
            return
        listing = ", ".join(
            f"rank {rank}: {' and '.join(map(str, olds)) or 'none'}" for rank, olds in enumerate(dealt)
        )
        log.info(
            "it was written by %d ranks and there are %d now; old states by rank: %s",
            generation.size,
            self._size,
            listing,
        )
        if drifted:
            log.warning(
                "the local steps and residuals since the last sync round are dropped: they belong to ranks "
                "that no longer exist. Call session.sync() before save() if the number of ranks may change"
            )
        elif self._replicas_differ:
            log.warning("replicas had drifted apart: all ranks continue with the model of old rank 0")


def _part(content: Mapping[str, Any], name: str) -> Any:
    if name not in content:
        raise StateError(f"it has no {name!r}")
    return content[name]


def _check_launcher(rank: int) -> None:
    """torchrun's store outlives a restart: new workers may find the addresses of the dead ones."""
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if rank == 0 and restarts != "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        log.warning(
            "restarted workers may find the addresses of dead ones in torchrun's store, and fail in "
            "init_process_group: start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
        )


_open: weakref.WeakSet[Checkpointer] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for checkpointer in list(_open):
        checkpointer.close_at_exit()
