"""The replica groups of a torchft job: who takes part, what a change means for the states, and the vote.

torchft decides in a quorum which groups take part, and gives them a new process group if that has changed. A
group that is behind gets the model of a peer. Errors are reported to its manager. After the exchange every
group votes: one that saw an error does not commit, and it gets the model of a group that did in the next
quorum.

If a group has several ranks, all of this holds for each of them and the ranks of the same number in the other
groups, and the vote is one for all ranks of the group.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.distributed as dist

from thinwire import log
from thinwire.core import schema
from thinwire.core.agreement import EVERY
from thinwire.core.channel import Program
from thinwire.core.engine import Engine
from thinwire.core.shards import local
from thinwire.core.state import SavedState, check_entries
from thinwire.drivers.blocking import drive_until_commit, finish
from thinwire.errors import DisagreementError, PeerError, ThinwireError
from thinwire.hosts.group_ranks import MODEL, GroupRanks
from thinwire.net import frames
from thinwire.net.handshake import agree
from thinwire.net.liveness import plain
from thinwire.net.meter import Meter
from thinwire.net.rank_info import RankInfo
from thinwire.net.reconfigurable import ReconfigurableExecutor

KEY = "thinwire"
"""The name of a session's part in the state that torchft's manager sends to a group that is behind."""
NAME_BYTES = 64


class Manager(Protocol):
    """The part of `torchft.Manager` that is used here."""

    def start_quorum(self) -> None: ...
    def should_commit(self, timeout: timedelta | None = None) -> bool: ...
    def report_error(self, e: Exception) -> None: ...
    def errored(self) -> Exception | None: ...
    def current_step(self) -> int: ...
    def register_state_dict_fn(
        self, key: str, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]
    ) -> None: ...


class _Member(NamedTuple):
    """What a group says of itself in a new process group."""

    age: int
    session: str
    settings: str
    name: str

    def pack(self) -> torch.Tensor:
        numbers = self.age.to_bytes(8, "little") + bytes.fromhex(self.session + self.settings)
        name = self.name.encode()[:NAME_BYTES].ljust(NAME_BYTES, b"\0")
        return torch.frombuffer(bytearray(numbers + name), dtype=torch.uint8)

    @staticmethod
    def unpack(row: torch.Tensor) -> _Member:
        data = frames.to_bytes(row)
        name = data[40:].rstrip(b"\0").decode(errors="replace")
        return _Member(int.from_bytes(data[:8], "little"), data[8:24].hex(), data[24:40].hex(), name)


class ReplicaGroups:
    """This group and the others of the quorum, for one session.

    Args:
        manager: torchft's manager of this group.
        engine: its rank and process group follow the quorum.
        describe: the settings that must be equal on all groups.
        common: the tensors that are equal on all groups between two steps.
        sharded: whether the ranks of a group have shards of a replica each, and not all of it.
        keep_late: whether a group that is behind keeps its change; only the log speaks of it.

    `age` counts the steps that this group has committed. `contributed` has the last committed step of each
    group, by its `session`.
    """

    def __init__(
        self,
        manager: Manager,
        engine: Engine,
        describe: Callable[[], dict[str, Any]],
        common: Callable[[], Sequence[torch.Tensor]],
        *,
        sharded: bool = False,
        keep_late: bool = False,
    ) -> None:
        self._manager = manager
        self._engine = engine
        self._describe = describe
        self._common = common
        self._vote = manager.should_commit
        self._group: dist.ProcessGroup | None = None
        self._ranks = GroupRanks(manager)
        self.session = uuid.uuid4().hex
        self._name = str(cast(Any, manager)._replica_id or self.session[:8])
        self._others: dict[str, str] = {}
        self._seen: set[str] = set()
        self._sharded = sharded
        self._keep_late = keep_late
        self._size = 0
        self.age = 0
        self.contributed: dict[str, int] = {}
        # A sum over ranks that come and go is not that of the ranks that are there: such methods start anew.
        self._restarts = any(
            engine.router.exchange_for(layout.slots[0]).init(layout).tensors("own")
            for layout in engine.checkpoint_layouts().values()
        )

    # -- a step ------------------------------------------------------------------------------------------

    def run(
        self,
        program: Program,
        timeout: timedelta | None = None,
        only_finite: Callable[[], bool] | None = None,
    ) -> bool:
        """Run a program on the groups of the quorum and vote; returns whether this group commits.

        With `only_finite`, a program whose numbers are not finite, or whose result this finds not to be, is
        not committed by any group: both are equal on all of them.
        """
        request: frames.Commit | None = None
        failure: str | None = None
        try:
            self._join()
            request = drive_until_commit(program, self._engine.executor.execute)
            if only_finite is not None and not (request.finite if request is not None else only_finite()):
                self._report(ThinwireError("a group's numbers are not finite"))
        except PeerError as error:
            failure = str(error)
        finally:
            if request is None:
                program.close()
        if failure is not None:
            self._abort()
            self._report(PeerError(failure))
        step = self._manager.current_step()
        committed = self._vote(timeout) if timeout is not None else self._vote()
        if request is not None:
            finish(program, committed and request.finite)
        if committed:
            self.age += 1
            self.contributed |= dict.fromkeys((self.session, *self._others), step)
        return committed

    def _report(self, error: Exception) -> None:
        if self._manager.errored() is None:
            self._manager.report_error(error)
        step = self._manager.current_step()
        name = self._name if self._ranks.size == 1 else f"{self._name}, rank {self._ranks.rank}"
        log.warning("%s: step %d is aborted on this group (%s)", name, step, error)

    def _abort(self) -> None:
        """Close the connections, so that no other group waits for this one.

        gloo closes them with the last reference to the process group. So an error that torchft keeps must
        not have a traceback.
        """
        self.leave()
        cast(Any, self._manager)._pg.abort()

    # -- a new process group -----------------------------------------------------------------------------

    def _join(self) -> None:
        """Use the process group of this quorum; if it is new, find out who is there."""
        step = self._manager.current_step()
        moment = f"{cast(Any, self._manager)._quorum_id}/{step}"
        error = self._manager.errored()
        if error is not None:
            self._ranks.say(moment, None)
            raise PeerError(f"torchft reports: {plain(str(error))}")
        group = _process_group(self._manager)
        if group is self._group:
            if step % EVERY == 1:
                self._compare_ranks(moment)
            return
        self._say_to_ranks(moment)
        members = self._introduce(group)
        self._ranks.compare(moment)
        self._group = group
        self._engine.executors = [ReconfigurableExecutor(group, self._engine.meter)]
        self._engine.rank_info = RankInfo(group.rank(), group.size())
        self._note_changes({m.session: m.name for m in members if m.session != self.session})
        if self._restarts:
            self._engine.states.load(SavedState.empty())
        elif self._size:
            # A residual r of W groups stands for r / W in the mean: with W' groups that is r W' / W.
            self._engine.states.reweigh(group.size() / self._size)
        self._size = group.size()

    def _compare_ranks(self, moment: str) -> None:
        """Whole replicas stay equal on all ranks of this group only if their gradients are averaged there."""
        self._say_to_ranks(moment)
        self._ranks.compare(moment)

    def _say_to_ranks(self, moment: str) -> None:
        if self._ranks.size == 1:
            return
        settings = self._describe()
        if self._sharded:
            del settings["parameters"]  # each rank has shards of its own
        else:
            settings[MODEL] = _digest(self._common())
        self._ranks.say(moment, settings)

    def _introduce(self, group: dist.ProcessGroup) -> list[_Member]:
        """Compare the settings of all groups. Whoever differs from the oldest ones must leave."""
        executor = ReconfigurableExecutor(group, Meter())  # not the training's traffic
        settings = self._describe() | {"model": _digest(self._common())}
        text = json.dumps(settings, sort_keys=True).encode()
        me = _Member(self.age, self.session, hashlib.blake2b(text, digest_size=16).hexdigest(), self._name)
        gathered = cast(torch.Tensor, executor.execute(frames.AllGather(me.pack(), 0)))
        members = [_Member.unpack(row) for row in gathered]
        if len({member.settings for member in members}) > 1:
            oldest = max(member.age for member in members)
            agreed = {member.settings for member in members if member.age == oldest}
            try:
                agree(settings, executor.execute, range(group.size()))
            except DisagreementError as error:
                if oldest and agreed == {me.settings}:
                    raise PeerError(f"a group that has joined does not fit: {error}") from error
                raise
        return members

    def _note_changes(self, others: dict[str, str]) -> None:
        """Say who is there no more, and who is there again."""
        gone = [name for session, name in self._others.items() if session not in others]
        new = [name for session, name in others.items() if session not in self._seen]
        back = [name for session, name in others.items() if session in self._seen - self._others.keys()]
        first, self._others = not self._size, others
        self._seen |= others.keys()
        if first or self._engine.rank_info.rank or self._ranks.rank:
            return
        count = len(others) + 1
        fate = (
            "its change comes later if it was only late" if self._keep_late else "its residuals are dropped"
        )
        if gone:
            log.warning("%s left: %s; %d groups go on", ", ".join(gone), fate, count)
        if new:
            log.info("%s joined with empty residuals: %d groups", ", ".join(new), count)
        if back:
            log.info("%s is back: %d groups", ", ".join(back), count)

    # -- the state of a group that is behind -------------------------------------------------------------

    def save(self) -> dict[str, Any]:
        """The state that another group may take for its own; residuals are each group's own."""
        states = self._engine.states.save()
        return {
            "method": str(self._engine.method),
            "parameters": self._engine.described_parameters(),
            "seed": self._engine.seed,
            "state": SavedState({}, states.shared, states.by_layout).entries(),
        }

    def load(self, given: Mapping[str, Any], *, keep_residuals: bool = False) -> None:
        """Start from a peer's state, with empty residuals unless this group's own are still to be sent."""
        engine = self._engine
        found = schema.check(
            {
                "method": schema.equal(str(engine.method)),
                "parameters": schema.parameters(engine.described_parameters()),
                "seed": schema.equal(engine.seed),
                "state": schema.mapping(),
            },
            given,
            "the peer",
        )
        layouts, exchange_for = engine.checkpoint_layouts(), engine.router.exchange_for
        kept = check_entries(found["state"], layouts, exchange_for, complete=False)
        own = engine.states.save().additive if keep_residuals else {}
        engine.states.load(SavedState(own, kept.shared, kept.by_layout))
        if keep_residuals:
            log.warning("%s was late: its change is part of the next sync round", self._name)
        elif self.age or self._manager.current_step():
            log.warning("%s starts from a peer's model, with empty residuals", self._name)

    # -- the end -----------------------------------------------------------------------------------------

    def register(self, load: Callable[[Any], None], save: Callable[[], Any]) -> Callable[[], None]:
        """Let the manager send this session's state to groups that are behind; returns how to stop it."""
        self._manager.register_state_dict_fn(KEY, load, save)

        def remove() -> None:
            private = cast(Any, self._manager)
            private._load_state_dict_fns.pop(KEY, None)
            private._user_state_dicts.pop(KEY, None)

        return remove

    def leave(self) -> None:
        """Use the process group no more; torchft closes it."""
        self._engine.close()
        self._group = None


def has_session(manager: Manager) -> bool:
    """Whether a session is attached to this manager."""
    return KEY in cast(Any, manager)._user_state_dicts


def _process_group(manager: Manager) -> dist.ProcessGroup:
    """The group that was made for this quorum; torchft's own managed group uses the same attribute."""
    group = cast(Any, manager)._pg
    inside = getattr(group, "_pg", group)
    if inside is None:
        raise ThinwireError(
            "there is no process group yet: call manager.start_quorum() before every step (torchft's "
            "OptimizerWrapper does so in zero_grad())"
        )
    return cast(dist.ProcessGroup, inside)


def _digest(tensors: Sequence[torch.Tensor]) -> str:
    found = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        found.update(cast(Any, frames.as_bytes(local(tensor).cpu()).numpy()))
    return found.hexdigest()
