"""What worker processes do in the tests of schedules."""

import contextlib
import io
import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.averaging.cohort import Cohort, normed, sgd
from tests.hosts.common import batch, flat, loaded_together, mlp
from thinwire.net.launch import Worker
from thinwire.net.roll_call import GRACE_SECONDS

TIMEOUT = 16.0  # torch may look a name up for five seconds, in vain


ON_DDP = ("localsgd(every=1)", "spasgd(groups=3)", "diloco(every=6, fragments=3, overlap=2)")


def local_step(model, optimizer, rank: int, step: int) -> None:
    optimizer.zero_grad()
    model(batch(rank, step)).square().mean().backward()
    optimizer.step()


def session_of(model, method: str, **options):
    """Model, optimizer and session; `dense_below` as in the lock-step cohort."""
    optimizer = sgd(model)
    return optimizer, thinwire.attach(model, method, optimizer=optimizer, dense_below=64, **options)


def reality(worker: Worker, methods: list[str]) -> dict[str, dict[str, torch.Tensor]]:
    """Every schedule on a bare model, some on DDP and under no_sync, beside its lock-step run."""
    results = {}
    for method in methods:
        found = {}
        for host in ("bare", "ddp", "no_sync") if method in ON_DDP else ("bare",):
            model = normed()
            if worker.rank and host == "bare":  # rank 0's model counts
                with torch.no_grad():
                    next(model.parameters()).add_(1.0)
                    model.norm.running_var.fill_(9.0)
            wrapped = model if host == "bare" else DistributedDataParallel(model)
            optimizer, session = session_of(wrapped, method)
            with wrapped.no_sync() if host == "no_sync" else contextlib.nullcontext():
                for step in range(9):
                    local_step(wrapped, optimizer, worker.rank, step)
            found[f"{host} own"] = flat(model)
            session.sync()
            found[f"{host} common"] = flat(model)
            found[f"{host} buffers"] = flat(b for b in model.buffers() if b.is_floating_point())
            found[f"{host} payload"] = torch.tensor(session.meter.payload_bytes)
            assert session.step == session.meter.steps == 9
            session.detach()
        cohort = Cohort(method, worker.size, make=normed)
        cohort.train(range(9))
        found["lock-step own"] = flat(cohort.models[worker.rank])
        cohort.sync()
        found["lock-step common"] = flat(cohort.models[worker.rank])
        found["lock-step payload"] = torch.tensor(cohort.driver.meters[worker.rank].payload_bytes)
        results[method] = found
    return results


def resumed(worker: Worker, method: str) -> list[torch.Tensor]:
    def make():
        model = normed()
        return model, *session_of(model, method)

    straight, before, after = make(), make(), make()
    for step in range(14):
        local_step(straight[0], straight[1], worker.rank, step)
    for step in range(7):
        local_step(before[0], before[1], worker.rank, step)
    file = io.BytesIO()
    torch.save(before[2].state_dict(), file)
    file.seek(0)
    after[2].load_state_dict(torch.load(file, weights_only=True))
    for step in range(7, 14):
        local_step(after[0], after[1], worker.rank, step)
    for _, _, session in (straight, before, after):
        session.detach()
    return [flat(straight[0].state_dict().values()), flat(after[0].state_dict().values())]


def slow_worker(worker: Worker, nap: float) -> list[float]:
    """Rank 1 sleeps in its second step of a cycle of eight. How long each step of each rank took."""
    model = mlp()
    optimizer, session = session_of(model, "localsgd(every=8)")
    seconds = []
    for step in range(16):
        begin = time.monotonic()
        if worker.rank == 1 and step == 9:
            time.sleep(nap)
        local_step(model, optimizer, worker.rank, step)
        seconds.append(time.monotonic() - begin)
    session.detach()
    return seconds


def overlapping(worker: Worker, nap: float) -> tuple[list[float], torch.Tensor]:
    """As before, but a result has three steps' time: nobody waits when it is asked for."""
    model = mlp()
    optimizer, session = session_of(model, "localsgd(every=8, overlap=3)")
    seconds = []
    for step in range(19):
        begin = time.monotonic()
        if worker.rank == 1 and step == 15:
            time.sleep(nap)
        local_step(model, optimizer, worker.rank, step)
        seconds.append(time.monotonic() - begin)
    session.finish()
    return seconds, flat(model)


def one_dies(worker: Worker, method: str, culprit: int) -> tuple[str, str, float] | None:
    loaded_together(worker, str(thinwire.parse(method).inner))
    model = mlp()
    optimizer, session = session_of(model, method)
    for step in range(5):
        local_step(model, optimizer, worker.rank, step)
    if worker.rank == culprit:
        os._exit(7)
    begin = time.monotonic()
    try:
        for step in range(5, 12):
            local_step(model, optimizer, worker.rank, step)
    except RuntimeError as error:
        seconds = time.monotonic() - begin
        session.detach()
        return type(error).__name__, str(error), seconds
    return None


def unequal_steps(worker: Worker, how: str) -> tuple[str, str]:
    """Rank 1 runs out of batches after six steps."""
    loaded_together(worker, "dense")
    model = mlp()
    optimizer, session = session_of(model, "localsgd(every=4)")
    try:
        for step in range(8 if worker.rank == 0 else 6):
            local_step(model, optimizer, worker.rank, step)
        if how == "finish":
            session.finish()
        else:
            time.sleep(TIMEOUT + GRACE_SECONDS)
    except RuntimeError as error:
        session.detach()
        return type(error).__name__, str(error)
    return "", ""


def scaled(worker: Worker, told: bool) -> tuple[torch.Tensor, int, int]:
    """Rank 1's gradients overflow in steps 1 and 2: its GradScaler leaves these steps out."""
    model = mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=1000)
    optimizer, session = session_of(model, "localsgd(every=4)", scaler=scaler if told else None)
    taken = 0
    for step in range(8):
        optimizer.zero_grad()
        loss = model(batch(worker.rank, step)).square().mean()
        scaler.scale(loss).backward()
        if worker.rank == 1 and step in (1, 2):
            next(model.parameters()).grad[0, 0] = torch.inf
        before = flat(model)
        scaler.step(optimizer)
        scaler.update()
        taken += int(not torch.equal(before, flat(model)))
    steps = session.step
    session.detach()
    assert "step" not in scaler.__dict__
    return flat(model), steps, taken


def disagreeing(worker: Worker) -> dict[str, str]:
    texts = {}
    cases = {
        "every": ("localsgd(every=4)", "localsgd(every=5)"),
        "exchange": ("pqasgd(bits=4)", "pqasgd(bits=8)"),
        "kind": ("localsgd", "spasgd"),
    }
    for label, pair in cases.items():
        try:
            session_of(mlp(), pair[worker.rank % 2])
        except thinwire.DisagreementError as error:
            texts[label] = str(error)
    return texts


def back_to_ddp(worker: Worker) -> dict[str, torch.Tensor]:
    """After detach a DDP model reduces gradients again, and another method can be attached."""
    model = DistributedDataParallel(normed())
    optimizer, session = session_of(model, "localsgd(every=3)")
    texts = []
    for method in ("localsgd", "topk"):
        try:
            thinwire.attach(model, method, optimizer=optimizer)
        except thinwire.ConfigError as error:
            texts.append(str(error))
    assert texts == ["this model has a thinwire session already: detach() it first"] * 2
    for step in range(2):
        local_step(model, optimizer, worker.rank, step)
    apart = flat(model)
    session.finish()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2, 4):
        local_step(model, optimizer, worker.rank, step)
    plain = flat(model)
    session = thinwire.attach(model, "topk(ratio=0.2)")
    local_step(model, optimizer, worker.rank, 4)
    session.detach()
    return {"apart": apart, "plain": plain, "topk": flat(model)}


def within_a_subgroup(worker: Worker) -> torch.Tensor:
    """Ranks 0 and 1, and 2 and 3, meet among themselves."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = mlp()
    optimizer, session = session_of(model, "localsgd(every=2)", process_group=groups[worker.rank // 2])
    for step in range(4):
        local_step(model, optimizer, worker.rank, step)
    session.finish()
    return flat(model)
