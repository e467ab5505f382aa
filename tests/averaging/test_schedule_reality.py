"""Schedules in real processes: bare and DDP models, slow and dead workers, scalers, checkpoints."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import thinwire
from tests.averaging import workers
from tests.averaging.cohort import CONFIGURATIONS
from thinwire.net.launch import Outcome, run_local, start_local
from thinwire.net.roll_call import GRACE_SECONDS

SLACK = 12.0


@pytest.mark.parametrize("size", [2, 4])
def test_processes_agree_with_lock_step_and_with_each_other(size: int) -> None:
    chosen = list(CONFIGURATIONS) if size == 2 else list(workers.ON_DDP)
    ranks = run_local(workers.reality, size, chosen, timeout=400)
    # Two ranks add up alike. Of more, gloo adds in another order, and each of the nine steps rounds anew.
    bound = 1e-6 if size == 2 else 9 * size * torch.finfo(torch.float32).eps
    for method in chosen:
        for rank, results in enumerate(ranks):
            found = results[method]
            for host in ("bare", "ddp", "no_sync") if method in workers.ON_DDP else ("bare",):
                where = f"{method}, {host}, rank {rank}"
                assert torch.equal(found[f"{host} common"], ranks[0][method]["bare common"]), where
                assert torch.equal(found[f"{host} buffers"], ranks[0][method]["bare buffers"]), where
                assert torch.equal(found[f"{host} own"], found["bare own"]), where
                assert torch.equal(found[f"{host} payload"], found["lock-step payload"]), where
            for what in ("own", "common"):
                difference = float((found[f"bare {what}"] - found[f"lock-step {what}"]).abs().max())
                assert difference < bound, f"{method}, rank {rank}: {difference} from lock-step"


@pytest.mark.parametrize("method", ["pqasgd(every=4, fragments=2, overlap=1)", "diloco(every=3)"])
def test_a_resumed_run_goes_on_bit_for_bit(method: str) -> None:
    for straight, resumed in run_local(workers.resumed, 2, method, timeout=400):
        assert torch.equal(straight, resumed)


def test_a_slow_worker_delays_the_others_at_the_meeting_only() -> None:
    nap = 4.0  # long beside what a busy machine takes for the steps
    other, slow = run_local(workers.slow_worker, 2, nap, timeout=400)
    assert slow[9] >= nap
    assert sum(other[8:15]) < 0.5 * nap, "it should not have waited before the sync_round"
    assert 0.5 * nap < other[15] < 1.5 * nap, "the sync round waits for the slow one, and no longer"
    assert sum(other[:8]) + sum(other[8:15]) + other[15] < sum(slow) + 0.5 * nap


def test_with_overlap_a_late_worker_delays_nobody_until_the_result_is_due() -> None:
    nap = 4.0
    (other, first), (slow, second) = run_local(workers.overlapping, 2, nap, timeout=400)
    assert slow[15] >= nap
    assert max(other[15:18]) < 0.5 * nap, "the sync round was to go on beside the steps"
    assert other[18] > 0.4 * nap, "the result is due after step 19"
    assert torch.equal(first, second)


DEATHS = (("localsgd(every=8)", 1), ("pqasgd(every=8, fragments=2, overlap=1)", 2))


@pytest.fixture(scope="module")
def failures() -> dict[object, list[Outcome]]:
    """All that wait for a timeout, side by side."""

    def run(case: tuple) -> tuple[object, list[Outcome]]:
        if case in DEATHS:
            function, size, arguments = workers.one_dies, 3, case
        else:
            function, size, arguments = workers.unequal_steps, 2, case
        return case, start_local(function, size, *arguments, timeout=400, group_timeout=workers.TIMEOUT)

    with ThreadPoolExecutor(4) as pool:
        return dict(pool.map(run, [*DEATHS, ("finish",), ("silence",)]))


@pytest.mark.parametrize(("method", "culprit"), DEATHS)
def test_a_dead_worker_raises_on_all_others_in_time(method: str, culprit: int, failures: dict) -> None:
    for outcome in failures[method, culprit]:
        if outcome.rank == culprit:
            assert outcome.exit_code == 7
            continue
        assert outcome.value is not None, outcome
        kind, text, seconds = outcome.value
        assert kind == "PeerError", text
        assert f"of the sync round after step 8 failed on rank {outcome.rank}" in text
        assert f"no word from rank {culprit}" in text
        assert seconds < workers.TIMEOUT + GRACE_SECONDS + SLACK
        assert outcome.exit_code == 0


def test_ranks_with_unequal_steps_are_told_so(failures: dict) -> None:
    for outcome in failures["finish",]:
        kind, text = outcome.value
        assert kind == "DisagreementError"
        assert "different numbers of optimizer steps (rank 0: 8, rank 1: 6)" in text


def test_a_rank_that_stops_early_without_a_word_does_not_hang_the_other(failures: dict) -> None:
    kind, text = failures["silence",][0].value
    assert kind == "PeerError"
    assert "the sync round after step 8" in text
    assert "no word from rank 1" in text


def test_steps_that_a_scaler_skips_count_on_every_rank() -> None:
    (first, steps, taken), (second, other_steps, other_taken) = run_local(
        workers.scaled, 2, True, timeout=400
    )
    assert torch.equal(first, second)
    assert (steps, other_steps) == (8, 8)
    assert (taken, other_taken) == (8, 6)


def test_ranks_that_were_set_up_differently_hear_of_it() -> None:
    for texts in run_local(workers.disagreeing, 2, timeout=400, group_timeout=60):
        assert "LocalSGD(every=4" in texts["every"]
        assert "LocalSGD(every=5" in texts["every"]
        assert "method: rank 0: qsgd(bits=4); rank 1: qsgd(bits=8)" in texts["exchange"]
        assert "kind" in texts


def test_after_detach_ddp_reduces_gradients_again() -> None:
    first, second = run_local(workers.back_to_ddp, 2, timeout=400)
    assert not torch.equal(first["apart"], second["apart"])
    assert torch.equal(first["plain"], second["plain"])
    assert torch.equal(first["topk"], second["topk"])


def test_a_subgroup_meets_by_itself() -> None:
    ranks = run_local(workers.within_a_subgroup, 4, timeout=400)
    assert torch.equal(ranks[0], ranks[1])
    assert torch.equal(ranks[2], ranks[3])
    assert not torch.equal(ranks[0], ranks[2])


def test_attach_says_what_a_schedule_and_an_exchange_need() -> None:
    model = torch.nn.Linear(3, 3)
    with pytest.raises(thinwire.ConfigError, match=r"localsgd counts the optimizer's steps: give it"):
        thinwire.attach(model, "localsgd")
    with pytest.raises(
        thinwire.ConfigError, match=r"topk.*it averages gradients.*A bare model takes a schedule"
    ):
        thinwire.attach(model, "topk")
    with pytest.raises(thinwire.ConfigError, match=r"takes a torch\.nn\.Module, not int"):
        thinwire.attach(3, "topk")
