"""`thinwire.Checkpointer`: what is loaded is what was saved, on as many ranks as there are."""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Generator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import thinwire
from tests.hosts.common import flat, mlp, square_loss
from thinwire.core import schema
from thinwire.net.launch import Worker, run_local
from thinwire.net.rank_info import Hosts, RankInfo
from thinwire.sessions import checkpoint_file, checkpointer, generations

METHOD = "topk(ratio=0.1)"


def _without_seconds(state: dict) -> dict[str, int]:
    """The checksums of a state, except for the times in its counters."""
    inside = state.get("engine", state)
    counters = inside.pop("counters")
    counted = {name: {**one, "seconds": 0} for name, one in counters["by_operation"].items()}
    state["counted"] = [counters["steps"], counters["skipped_steps"], counted]
    return schema.checksums(state)


class Run:
    """A model, its optimizer, its session and its checkpoints, on some of the ranks."""

    def __init__(
        self, folder: Path, group: dist.ProcessGroup, method: str = METHOD, **options: object
    ) -> None:
        self.model = mlp()
        self.rank = group.rank()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.5)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.periodic = "every" in method
        if self.periodic:
            self.session = thinwire.attach(
                self.model, method, optimizer=self.optimizer, process_group=group, dense_below=0
            )
        else:
            self.session = thinwire.Session(self.model.named_parameters(), method, group, dense_below=0)
        self.checkpointer = thinwire.Checkpointer(
            folder, self.session, self.model, self.optimizer, also={"scheduler": self.scheduler}, **options
        )

    def train(self, steps: int, *, save: bool = True) -> Run:
        for _ in range(steps):
            self.optimizer.zero_grad()
            noise = torch.rand(1)  # as dropout would: the state of the generator is part of a checkpoint
            (square_loss(self.model, self.rank, self.checkpointer.steps) * (1 + noise)).backward()
            if not self.periodic:
                gradients = {name: p.grad for name, p in self.model.named_parameters()}
                self.session.average(gradients, in_place=True)
            self.optimizer.step()
            self.scheduler.step()
            if save:
                self.checkpointer.step()
            else:
                self.checkpointer.steps += 1
        self.checkpointer.wait()
        return self

    def owed(self) -> torch.Tensor:
        """The mean of all ranks' residuals."""
        own = flat(self.session.residuals().values())
        dist.all_reduce(own, group=self.session.engine.executor.group)
        return own / self.session.rank_info.size

    def same_as(self, other: Run) -> None:
        assert torch.equal(flat(self.model), flat(other.model))
        assert _without_seconds(self.session.snapshot()) == _without_seconds(other.session.snapshot())
        assert self.scheduler.state_dict() == other.scheduler.state_dict()
        assert self.checkpointer.steps == other.checkpointer.steps

    def end(self) -> None:
        self.session.detach()


@contextlib.contextmanager
def logged() -> Generator[list[str]]:
    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler, logger = Handler(), logging.getLogger("thinwire")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def newest(folder: Path) -> Path:
    return max(folder.glob("step-*"))


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)


def resumed_bit_for_bit(folder: Path, everyone: dist.ProcessGroup, few: dist.ProcessGroup | None) -> None:
    torch.manual_seed(everyone.rank())
    straight = Run(folder / "unused", everyone).train(5, save=False)
    torch.manual_seed(everyone.rank())
    before = Run(folder, everyone, every=1, keep=2).train(3)
    dist.barrier()
    assert len(list(folder.glob("step-*"))) == 2
    assert newest(folder).name.startswith("step-00000003-")
    torch.manual_seed(99)
    after = Run(folder, everyone)
    assert after.checkpointer.load_latest() == 3
    after.same_as(before)
    after.train(2, save=False).same_as(straight)
    for run in (straight, before, after):
        run.end()


def resized(folder: Path, everyone: dist.ProcessGroup, few: dist.ProcessGroup | None) -> None:
    """4 to 2 to 4: each old state to exactly one rank, and nothing of the residuals is lost."""
    four = Run(folder, everyone, every=3).train(3)
    owed, parameters = four.owed(), flat(four.model)
    assert float(owed.abs().max()) > 0
    four.end()
    dist.barrier()
    with logged() as lines:
        if few is not None:
            two = Run(folder, few, every=1)
            assert two.checkpointer.load_latest() == 3
            assert torch.equal(flat(two.model), parameters)
            torch.testing.assert_close(two.owed(), owed)
            two.train(1)
            owed, parameters = two.owed(), flat(two.model)
            two.end()
            if dist.get_rank() == 0:
                assert any("written by 4 ranks and there are 2 now" in line for line in lines)
                assert any("rank 0: 0 and 2, rank 1: 1 and 3" in line for line in lines), lines
    dist.broadcast(owed, 0)
    dist.broadcast(parameters, 0)
    four = Run(folder, everyone)
    assert four.checkpointer.load_latest() == 4
    assert torch.equal(flat(four.model), parameters)
    torch.testing.assert_close(four.owed(), owed)
    four.end()


def damaged(folder: Path, everyone: dist.ProcessGroup, few: dist.ProcessGroup | None) -> None:
    first = Run(folder, everyone, every=1).train(2)
    dist.barrier()
    if dist.get_rank() == 0:
        damage(newest(folder) / "rank-2.pt")
        torn = folder / "step-00000009-ffff"
        torn.mkdir()
        (torn / "rank-0.pt").write_bytes(b"half a file")
    dist.barrier()
    with logged() as lines:
        second = Run(folder, everyone)
        assert second.checkpointer.load_latest() == 1
    if dist.get_rank() == 0:
        assert any("is skipped: " in line and "rank-2.pt is damaged" in line for line in lines), lines
    dist.barrier()
    if dist.get_rank() == 0:
        damage(min(folder.glob("step-*")) / "common-0.pt")
    dist.barrier()
    third = Run(folder, everyone)
    with pytest.raises(thinwire.StateError, match=r"none of the 2 checkpoints .* can be read"):
        third.checkpointer.load_latest()
    for run in (first, second, third):
        run.end()


def local_folders(folder: Path, everyone: dist.ProcessGroup, few: dist.ProcessGroup | None) -> None:
    """Every rank sees only its own files; new ranks get what they lack from those that have it."""
    own = folder / str(dist.get_rank())
    owed, parameters = flat(mlp()), flat(mlp())
    if few is not None:
        two = Run(own, few, every=2).train(2)
        assert {path.name for path in newest(own).glob("*.pt")} == {
            f"rank-{dist.get_rank()}.pt",
            f"common-{dist.get_rank()}.pt",
        }
        owed, parameters = two.owed(), flat(two.model)
        two.end()
    dist.broadcast(owed, 0)
    dist.broadcast(parameters, 0)
    four = Run(own, everyone, every=1)
    assert four.checkpointer.load_latest() == 2
    assert torch.equal(flat(four.model), parameters)
    torch.testing.assert_close(four.owed(), owed)
    four.train(1)
    four.end()
    dist.barrier()
    if few is not None:  # the states of ranks 2 and 3 are on disks that are gone: an older generation must do
        two = Run(own, few)
        assert two.checkpointer.load_latest() == 2
        two.end()


def failed_writes(folder: Path, everyone: dist.ProcessGroup, few: dist.ProcessGroup | None) -> None:
    blocked = folder / "file"
    if dist.get_rank() == 0:
        folder.mkdir(exist_ok=True)
        blocked.write_text("not a folder")
    dist.barrier()
    mine = blocked / "inside" if dist.get_rank() == 1 else folder / "good"
    with pytest.raises(thinwire.ConfigError, match=r"cannot write to .*inside.*directory"):
        Run(mine, everyone)
    good = Run(folder / "good", everyone, every=1).train(1)
    strict = Run(folder / "strict", everyone, every=1, strict=True).train(1)
    original = checkpoint_file.write
    if dist.get_rank() == 1:

        def full(path: Path, content: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        checkpoint_file.write = full
    with logged() as lines:
        good.train(1)
        strict.checkpointer.save()
        with pytest.raises(thinwire.ThinwireError, match=r"rank 1: .*No space left on device"):
            strict.checkpointer.wait()
    if dist.get_rank() == 0:
        assert any("step 2 could not be written: rank 1: " in line and "goes on" in line for line in lines), (
            lines
        )
    checkpoint_file.write = original
    dist.barrier()
    assert newest(folder / "good").name.startswith("step-00000001-")
    # The same step was written before: that generation is still whole.
    assert newest(folder / "strict").name.startswith("step-00000001-")
    good.train(1)
    dist.barrier()
    assert newest(folder / "good").name.startswith("step-00000003-")
    good.end()
    strict.end()


def schedules(folder: Path, everyone: dist.ProcessGroup, few: dist.ProcessGroup | None) -> None:
    """Between two sync rounds, with one under way; and on other ranks, from the last common model."""
    method = "localsgd(every=3, overlap=2)"
    straight = Run(folder / "unused", everyone, method)
    before = Run(folder, everyone, method, every=4)
    torch.manual_seed(everyone.rank())
    straight.train(7, save=False)
    torch.manual_seed(everyone.rank())
    before.train(4)
    common = torch.cat([p.flatten() for p in before.session.common_parameters().values()]).double()
    after = Run(folder, everyone, method)
    assert after.checkpointer.load_latest() == 4
    after.train(3, save=False).same_as(straight)
    for run in (straight, before, after):
        run.end()
    if few is not None:
        with logged() as lines:
            two = Run(folder, few, method)
            assert two.checkpointer.load_latest() == 4
        assert torch.equal(flat(two.model), common)
        assert dist.get_rank() != 0 or any("local steps" in line and "dropped" in line for line in lines)
        two.end()


def two_ranks_with_one_state(
    folder: Path, everyone: dist.ProcessGroup, few: dist.ProcessGroup | None
) -> None:
    """Without a Checkpointer: what two ranks were given is compared, and an error of one is heard by all."""
    four = Run(folder, everyone).train(2, save=False)
    saved = [None] * 4
    dist.all_gather_object(saved, four.session.sealed())
    four.end()
    if few is not None:
        session = thinwire.Session(mlp().named_parameters(), METHOD, few, dense_below=0)
        with pytest.raises(thinwire.StateError, match="old rank 0 was given to rank 0 and to rank 1"):
            session.load_state_dict([saved[0], saved[few.rank() + 1]], on_resize="sum")
        given = saved[:2] if few.rank() == 0 else {**saved[2], "step": 1}
        with pytest.raises(thinwire.StateError, match="checksum of 'step' does not fit"):
            session.load_state_dict(given, on_resize="sum")
        with pytest.raises(thinwire.StateError, match="residuals of old rank 3 would be lost"):
            session.load_state_dict(saved[:2] if few.rank() == 0 else saved[2], on_resize="sum")
        assert session.step == 0, "nothing is loaded anywhere"
        session.load_state_dict(saved[:2] if few.rank() == 0 else saved[2:], on_resize="sum")
        assert session.residuals().keys() == dict(mlp().named_parameters()).keys()
        session.detach()


def grown(folder: Path, everyone: dist.ProcessGroup, few: dist.ProcessGroup | None) -> None:
    """2 to 4: the new ranks need what the old ones know of the second moments."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)

    def run(group: dist.ProcessGroup, steps: int, every: int | None) -> torch.Tensor:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        session = thinwire.Session(
            model.named_parameters(), "adam(warmup=5)", group, dense_below=0, optimizer=optimizer
        )
        checkpointer = thinwire.Checkpointer(folder, session, model, optimizer, every=every)
        begin = checkpointer.load_latest()
        for step in range(begin, begin + steps):
            optimizer.zero_grad()
            square_loss(model, group.rank(), step).backward()
            session.average({name: p.grad for name, p in model.named_parameters()}, in_place=True)
            optimizer.step()
            checkpointer.step()
        checkpointer.wait()
        session.detach()
        return flat(model.parameters())

    if few is not None:
        run(few, steps=8, every=8)
    dist.barrier()
    before = run(everyone, steps=0, every=None).clone()
    after = run(everyone, steps=30, every=None)
    total = after.clone()
    dist.all_reduce(total)
    assert torch.equal(total, 4 * after), "replicas drift apart"
    assert float((after != before).float().mean()) > 0.99


CASES = (
    resumed_bit_for_bit,
    resized,
    grown,
    damaged,
    local_folders,
    failed_writes,
    schedules,
    two_ranks_with_one_state,
)


def all_cases(worker: Worker, folder: str) -> dict[str, str]:
    import traceback

    everyone = dist.new_group([0, 1, 2, 3])
    few = dist.new_group([0, 1])
    outcomes = {}
    for case in CASES:
        try:
            case(Path(folder) / case.__name__, everyone, few if worker.rank < 2 else None)
            outcomes[case.__name__] = ""
            worker.report(case.__name__)
        except BaseException:
            outcomes[case.__name__] = traceback.format_exc()
            break  # the ranks are no longer together
        dist.barrier()
    return outcomes


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return run_local(all_cases, 4, str(tmp_path_factory.mktemp("checkpoints")), timeout=400, group_timeout=90)


@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_with_real_processes(case: str, outcomes: list[dict[str, str]]) -> None:
    for rank, outcome in enumerate(outcomes):
        assert outcome.get(case, "an earlier case failed") == "", f"rank {rank}:\n{outcome.get(case)}"


# -- the parts -----------------------------------------------------------------------------------------------


def test_old_states_are_dealt_exactly_once_and_where_they_are_seen() -> None:
    for old in range(1, 9):
        for new in range(1, 9):
            files = {generations.rank_file(rank): checkpoint_file.Mark(1, 1) for rank in range(old)}
            shared = generations.Generation(
                "g", 1, old, 0.0, files, {name: list(range(new)) for name in files}
            )
            dealt = generations.deal(shared, new)
            assert sorted(state for states in dealt for state in states) == list(range(old))
            assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
            seen = {generations.rank_file(rank): [rank % new] for rank in range(old)}
            local = generations.Generation("g", 1, old, 0.0, files, seen)
            for rank, states in enumerate(generations.deal(local, new)):
                assert all(state % new == rank for state in states)
            hosts = Hosts.of(RankInfo(0, new), 2)
            by_host = generations.deal(shared, new, hosts)
            assert sorted(state for states in by_host for state in states) == list(range(old))
            for rank, states in enumerate(by_host) if old != new else ():
                assert rank in hosts.leaders or not states
                assert all(state % 2 == 0 or state - 1 in states for state in states), "of one host"


def test_what_cannot_be_read_again_is_refused_when_it_is_saved() -> None:
    with pytest.raises(thinwire.StateError, match="also / scheduler / 0 is a function"):
        checkpoint_file.copied({"scheduler": [lambda step: step]}, "also")


def test_torchrun_without_its_setting_is_pointed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with logged() as lines:
        checkpointer._check_launcher(0)
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in lines[0]
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    with logged() as lines:
        checkpointer._check_launcher(0)
    assert not lines
