"""torchft's replica groups as threads of this process: states, votes, refusals. No process is killed here."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
from torch import nn
from torch.distributed import TCPStore

import thinwire
from tests.hosts.common import muon_and_adamw
from tests.laws.cohort import Cohort
from thinwire.hosts import replica_groups

torchft = pytest.importorskip("torchft", reason="needs thinwire[torchft]")
coordination = pytest.importorskip("torchft.coordination")

# torchft's manager warns in ways that Python has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore")

SERVED = sorted(
    name
    for name, cls in thinwire.list_methods().items()
    if cls().traits.consensus and name not in ("route", "hierarchical", "delayed")
)
WAIT = timedelta(seconds=60)


def light(wait: int) -> Iterator[str]:
    """A lighthouse that waits so many milliseconds for a group that is alive."""
    server = coordination.LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=wait, heartbeat_timeout_ms=1000
    )
    yield server.address()
    server.shutdown()


@pytest.fixture(scope="module")
def lighthouse() -> Iterator[str]:
    yield from light(300)


@pytest.fixture(scope="module")
def patient() -> Iterator[str]:
    """For tests in which no group but one may be late, on a busy machine as well."""
    yield from light(1500)


class Group:
    """A replica group with a small model, driven by the thread of a test."""

    def __init__(self, lighthouse: str, number: int, groups: int = 2, **options: object) -> None:
        torch.manual_seed(number)
        self.number = number
        self.model = nn.Linear(40, 40)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        given = {
            "pg": torchft.ProcessGroupGloo(timeout=WAIT),
            "load_state_dict": self._load,
            "state_dict": lambda: {"model": self.model.state_dict(), "lr": self.optimizer.state_dict()},
            "min_replica_size": groups,
            "use_async_quorum": False,
            "timeout": WAIT,
            "quorum_timeout": WAIT,
            "replica_id": f"group{number}",
        }
        place = {"store_addr": "localhost", "store_port": self.store.port, "rank": 0, "world_size": 1}
        self.manager = torchft.Manager(**(given | options), **place, lighthouse_addr=lighthouse)
        self.session: thinwire.Session | None = None

    def _load(self, state: dict) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["lr"])

    def attach(self, method: str, **options: object) -> thinwire.Session:
        self.session = thinwire.attach(
            self.model, method, manager=self.manager, optimizer=self.optimizer, **options
        )
        return self.session

    def gradient(self, step: int) -> None:
        rng = torch.Generator().manual_seed(100 * step + self.number)
        for parameter in self.model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=rng)

    def step(self) -> bool:
        self.manager.start_quorum()
        self.gradient(self.manager.current_step())
        committed = self.manager.should_commit()
        if committed:
            self.optimizer.step()
        return committed

    def flat(self) -> torch.Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])

    def leave(self) -> None:
        if self.session is not None:
            self.session.detach()
        self.manager.shutdown()
        self.manager._pg.abort()
        self.manager._checkpoint_transport._server.server_close()


@contextmanager
def assembled(lighthouse: str, method: str, count: int = 2) -> Iterator[list[Group]]:
    groups = [Group(lighthouse, number, count) for number in range(count)]
    try:
        for group in groups:
            group.attach(method, dense_below=0)
        yield groups
    finally:
        for group in groups:
            group.leave()


def at_once(*functions: Callable[[], object]) -> list[object]:
    """The results of these functions, each in a thread; an exception counts as a result."""
    results: list[object] = [None] * len(functions)

    def call(place: int) -> None:
        try:
            results[place] = functions[place]()
        except Exception as error:
            results[place] = error

    threads = [threading.Thread(target=call, args=(place,), daemon=True) for place in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
        assert not thread.is_alive(), "a group hangs"
    return results


def steps(groups: list[Group], count: int = 1) -> None:
    for _ in range(count):
        assert at_once(*(group.step for group in groups)) == [True] * len(groups)


def test_the_result_is_that_of_the_same_ranks_in_lockstep(lighthouse: str) -> None:
    method = "topk(ratio=0.1)"
    shapes = {"weight": (40, 40), "bias": (40,)}
    cohort = Cohort(method, 2, shapes)
    with assembled(lighthouse, method) as groups:
        for step in range(4):
            steps(groups)
            # the quorum, not this test, decides which group is rank 0
            in_order = sorted(groups, key=lambda group: group.session.rank_info.rank)
            gradients = []
            for group in in_order:
                rng = torch.Generator().manual_seed(100 * step + group.number)
                gradients.append({name: torch.randn(shape, generator=rng) for name, shape in shapes.items()})
            expected = cohort.average(gradients)[0]
            for group in groups:
                for name, parameter in group.model.named_parameters():
                    assert torch.equal(parameter.grad, expected[name]), (step, name)


def test_an_aborted_step_leaves_residuals_and_gradients_as_before(lighthouse: str) -> None:
    with assembled(lighthouse, "topk(ratio=0.1)") as groups:
        steps(groups, 2)
        before = [{k: v.clone() for k, v in group.session.residuals().items()} for group in groups]
        assert all(bool(kept["weight"].any()) for kept in before)

        def refuse(group: Group) -> bool:
            group.manager.start_quorum()
            group.gradient(9)
            group.manager._client = _VotesNo(group.manager._client)
            try:
                return group.manager.should_commit()
            finally:
                group.manager._client = group.manager._client.client

        models = [group.flat() for group in groups]
        assert at_once(*(lambda g=g: refuse(g) for g in groups)) == [False, False]
        for group, kept, model in zip(groups, before, models, strict=True):
            now = group.session.residuals()
            assert all(torch.equal(now[name], kept[name]) for name in kept)
            rng = torch.Generator().manual_seed(900 + group.number)
            own = torch.randn(40, 40, generator=rng)
            assert torch.equal(group.model.weight.grad, own)
            assert torch.equal(group.flat(), model)
        steps(groups, 2)
        assert torch.equal(groups[0].flat(), groups[1].flat())


class _VotesNo:
    """The manager's client, with a rank of the group that saw an error."""

    def __init__(self, client: object) -> None:
        self.client = client

    def should_commit(self, *args: object, **kwargs: object) -> bool:
        self.client.should_commit(args[0], args[1], False, **kwargs)
        return False


@pytest.mark.parametrize("method", ["dense", "topk(ratio=0.1)"])
def test_no_group_commits_numbers_that_are_not_finite(method: str, lighthouse: str) -> None:
    with assembled(lighthouse, method) as groups:
        steps(groups)
        groups[1].gradient = lambda step: setattr(
            groups[1].model.weight, "grad", torch.full((40, 40), torch.nan)
        )
        before = groups[0].flat()
        assert at_once(*(group.step for group in groups)) == [False, False]
        assert torch.equal(groups[0].flat(), before)
        del groups[1].gradient
        steps(groups)
        assert torch.equal(groups[0].flat(), groups[1].flat())
        assert groups[0].flat().isfinite().all()


def test_a_failed_operation_is_reported_and_nobody_hangs(lighthouse: str) -> None:
    """One group sees an error between the quorum and the exchange: the others do not wait for it."""
    with assembled(lighthouse, "topk(ratio=0.1)", 3) as groups:
        steps(groups, 2)
        kept = {k: v.clone() for k, v in groups[0].session.residuals().items()}

        def broken() -> bool:
            groups[2].manager.start_quorum()
            groups[2].manager.report_error(RuntimeError("a test"))
            groups[2].gradient(2)
            return groups[2].manager.should_commit()

        begin = time.monotonic()
        assert at_once(groups[0].step, groups[1].step, broken) == [False] * 3
        assert time.monotonic() - begin < WAIT.total_seconds() - 1, "it ended by the timeout"
        assert all(torch.equal(groups[0].session.residuals()[name], kept[name]) for name in kept)
        steps(groups, 2)
        assert all(torch.equal(group.flat(), groups[0].flat()) for group in groups)


# Quorums take seconds to form: one method of each kind here, all of them with the slow tests.
EACH_KIND = ("dense", "topk", "qsgd", "powersgd", "lag")


@pytest.mark.parametrize(
    "method",
    [each if each in EACH_KIND else pytest.param(each, marks=pytest.mark.slow) for each in SERVED],
)
def test_replicas_stay_equal_when_groups_join_and_leave(method: str, lighthouse: str) -> None:
    """Every method: its replicated state reaches the group that joins, or starts anew on all of them."""
    groups = [Group(lighthouse, number) for number in range(3)]
    joined: list[int] = []  # the step after which the third group is there

    def trained(group: Group) -> torch.Tensor:
        while not joined or group.manager.current_step() < joined[0] + 12:
            if joined and group is groups[0] and group.manager.current_step() >= joined[0] + 6:
                group.leave()
                break
            if group.step() and group is groups[2] and not joined:
                joined.append(group.manager.current_step())
        return group.flat()

    def late() -> torch.Tensor:
        while groups[0].manager.current_step() < 4:
            time.sleep(0.01)
        return trained(groups[2])

    try:
        for group in groups:
            group.attach(method, dense_below=0)
        found = at_once(lambda: trained(groups[0]), lambda: trained(groups[1]), late)
        assert all(isinstance(one, torch.Tensor) for one in found), found
        assert torch.equal(found[1], found[2])
        assert found[1].isfinite().all()
        assert not torch.equal(found[0], found[1])
    finally:
        for group in groups[1:]:
            group.leave()


def test_residuals_of_a_group_that_left_are_dropped_and_the_others_keep_their_weight(
    lighthouse: str, caplog: pytest.LogCaptureFixture
) -> None:
    with assembled(lighthouse, "topk(ratio=0.1)", 2) as groups, caplog.at_level("INFO", "thinwire"):
        third = Group(lighthouse, 2)
        third.attach("topk(ratio=0.1)", dense_below=0)
        everyone = [*groups, third]
        for _ in range(20):  # until all three are in one quorum
            at_once(*(group.step for group in everyone))
            if third.session.rank_info.size == 3 and groups[0].session.rank_info.size == 3:
                break
        third.leave()
        time.sleep(1.5)  # the lighthouse misses its heartbeats
        old = [{k: v.clone() for k, v in group.session.residuals().items()} for group in groups]
        joins: list[dict[str, torch.Tensor]] = [{}, {}]

        def watched(place: int) -> bool:
            group = groups[place]
            group.manager.start_quorum()
            group.session._groups._join()
            joins[place] = {k: v.clone() for k, v in group.session.residuals().items()}
            group.gradient(0)
            committed = group.manager.should_commit()
            if committed:
                group.optimizer.step()
            return committed

        assert at_once(lambda: watched(0), lambda: watched(1)) == [True, True]
        for before, after in zip(old, joins, strict=True):
            for name, kept in before.items():
                torch.testing.assert_close(after[name], kept * (2 / 3))
    assert "group2 left: its residuals are dropped; 2 groups go on" in caplog.text


def test_a_group_that_does_not_fit_leaves_and_the_others_go_on(lighthouse: str) -> None:
    with assembled(lighthouse, "topk(ratio=0.1)", 2) as groups:
        steps(groups, 2)
        stranger = Group(lighthouse, 7)
        stranger.attach("topk(ratio=0.2)", dense_below=0)
        outcome: list[object] = []

        def try_in() -> None:
            try:
                stranger.step()
            except Exception as error:
                outcome.append(error)
            stranger.leave()

        thread = threading.Thread(target=try_in, daemon=True)
        thread.start()
        while not outcome:
            at_once(*(group.step for group in groups))
        thread.join(100)
        assert isinstance(outcome[0], thinwire.StateError)
        assert "topk(ratio=0.1)" in str(outcome[0])
        while not all(at_once(*(group.step for group in groups))):
            pass
        assert torch.equal(groups[0].flat(), groups[1].flat())


def test_a_group_without_its_peers_model_is_found(lighthouse: str) -> None:
    """The manager's callbacks forget the model: the replicas would differ for ever, unnoticed."""
    with assembled(lighthouse, "qsgd", 2) as groups:
        steps(groups, 2)
        forgetful = Group(lighthouse, 3, load_state_dict=lambda state: None)
        forgetful.attach("qsgd", dense_below=0)
        outcome: list[object] = []

        def try_in() -> None:
            try:
                forgetful.step()
            except Exception as error:
                outcome.append(error)
            forgetful.leave()

        thread = threading.Thread(target=try_in, daemon=True)
        thread.start()
        while not outcome:
            at_once(*(group.step for group in groups))
        thread.join(100)
        assert isinstance(outcome[0], thinwire.DisagreementError)
        assert "model" in str(outcome[0])
        while not all(at_once(*(group.step for group in groups))):
            pass
        assert torch.equal(groups[0].flat(), groups[1].flat())


# -- schedules ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method", ["pqasgd(every=2)", "localsgd(every=2)", "diloco(every=2)", "periodic(every=2, exchange=topk)"]
)
def test_a_schedule_synchronises_groups_that_join_and_leave(method: str, lighthouse: str) -> None:
    groups = [Group(lighthouse, number) for number in range(3)]
    joined: list[int] = []

    def trained(group: Group) -> torch.Tensor:
        session = group.attach(method, dense_below=0)
        if group is groups[2]:
            assert session.step >= 4, "it did not continue where the others are"
            joined.append(session.step)
        while not joined or session.step < joined[0] + 12:
            if joined and group is groups[0] and session.step >= joined[0] + 6:
                group.leave()
                return group.flat()
            group.gradient(session.step)
            group.optimizer.step()
        session.finish()
        return group.flat()

    def late() -> torch.Tensor:
        while groups[0].session is None or groups[0].session.step < 4:
            time.sleep(0.01)
        return trained(groups[2])

    try:
        found = at_once(lambda: trained(groups[0]), lambda: trained(groups[1]), late)
        assert all(isinstance(one, torch.Tensor) for one in found), found
        assert torch.equal(found[1], found[2])
        assert found[1].isfinite().all()
    finally:
        for group in groups[1:]:
            group.leave()


class Several(Group):
    """With Muon and AdamW, which step in this order or in the other."""

    def __init__(self, lighthouse: str, number: int) -> None:
        super().__init__(lighthouse, number)
        self.both = muon_and_adamw(self.model)
        self.order = (0, 1) if number else (1, 0)

    def attach(self, method: str, **options: object) -> thinwire.Session:
        given = {"optimizer": self.both, "manager": self.manager} | options
        self.session = thinwire.attach(self.model, method, **given)
        return self.session

    def update(self) -> None:
        for which in self.order:
            self.both[which].step()

    def step(self) -> bool:
        self.manager.start_quorum()
        self.gradient(self.manager.current_step())
        committed = self.manager.should_commit()
        if committed:
            self.update()
        return committed


def test_groups_step_muon_and_adamw(lighthouse: str) -> None:
    """A step has one vote and a sync round one quorum, whatever the order of the steps."""
    groups = [Several(lighthouse, number) for number in range(2)]

    def trained(group: Several) -> torch.Tensor:
        session = group.attach("localsgd(every=2)", dense_below=0)
        for step in range(6):
            group.gradient(step)
            group.update()
        assert (session.step, group.manager.current_step()) == (6, 4), "three sync rounds, and that of attach"
        found = group.flat()
        session.detach()
        return found

    try:
        one, other = at_once(*(lambda group=group: trained(group) for group in groups))
        assert torch.equal(one, other)
        for group in groups:  # whose momenta are their own after local steps
            group.both = muon_and_adamw(group.model)
            group.attach("topk(ratio=0.2)", dense_below=0)
        steps(groups, 3)
        assert torch.equal(groups[0].flat(), groups[1].flat())
    finally:
        for group in groups:
            group.leave()


def test_several_optimizers_that_vote_in_each_step_are_refused(lighthouse: str) -> None:
    group = Several(lighthouse, 0)
    muon, adamw = (torchft.Optimizer(group.manager, each) for each in group.both)
    for given in ([muon, adamw], [group.both[0], adamw]):
        with pytest.raises(thinwire.ConfigError, match="votes in its step, and a training step has one vote"):
            group.attach("topk", optimizer=given)
        with pytest.raises(thinwire.ConfigError, match="the optimizer inside it"):
            group.attach("localsgd", optimizer=given)
    for given in (adamw, group.both[1]):
        with pytest.raises(thinwire.ConfigError, match=r"no optimizer holds 'weight' \(given: AdamW\)"):
            group.attach("topk", optimizer=given)
    group.leave()


def test_options_of_groups_have_an_effect(lighthouse: str) -> None:
    """Those that all groups must give alike are compared when a group joins."""
    group = Group(lighthouse, 0, 1)
    for method in ("qsgd(bits=4)", "pqasgd(every=2)"):
        session = group.attach(method, seed=3, dense_below=7)
        settings = session.engine.describe()
        assert (settings["seed"], settings["dense_below"]) == (3, 7)
        assert "Managed" in type(session).__name__
        session.detach()
    group.leave()


def test_an_aborted_sync_round_keeps_the_change_for_the_next(lighthouse: str) -> None:
    """Nothing is lost: after the next round the common model has moved by both changes."""
    groups = [Group(lighthouse, number) for number in range(2)]
    try:
        at_once(*(lambda g=g: g.attach("localsgd(every=1)", dense_below=0) for g in groups))
        start = groups[0].flat().clone()
        assert torch.equal(start, groups[1].flat())

        def failing(group: Group) -> None:
            group.manager.report_error = group.manager.report_error
            original = group.manager.start_quorum

            def quorum() -> None:
                original()
                group.manager.report_error(RuntimeError("a test"))

            group.manager.start_quorum = quorum
            group.gradient(0)
            group.optimizer.step()
            del group.manager.start_quorum

        assert at_once(*(lambda g=g: failing(g) for g in groups)) == [None, None]
        assert not torch.equal(groups[0].flat(), groups[1].flat())
        assert not any(g.session.clock.all_synced for g in groups)

        def again(group: Group) -> None:
            group.gradient(1)
            group.optimizer.step()

        assert at_once(*(lambda g=g: again(g) for g in groups)) == [None, None]
        assert torch.equal(groups[0].flat(), groups[1].flat())
        change = torch.zeros_like(start)
        for step in range(2):
            for group in groups:
                group.gradient(step)
                change -= 0.05 * torch.cat([p.grad.flatten() for p in group.model.parameters()]) / 2
        torch.testing.assert_close(groups[0].flat() - start, change)
    finally:
        for group in groups:
            group.leave()


@pytest.mark.parametrize(
    "method", ["localsgd(every=2, deadline=1.5)", "periodic(every=2, deadline=1.5, exchange=topk(ratio=0.1))"]
)
def test_a_late_group_contributes_later_and_nothing_is_lost(
    method: str, patient: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What the common model has moved by, and what is still to be sent, is all that the groups have done."""
    groups = [Group(patient, number) for number in range(3)]
    done = [torch.zeros(40 * 41) for _ in groups]  # each group's steps since it last contributed
    moved = [torch.zeros(40 * 41) for _ in groups]  # its part of the common model
    sizes: list[set[int]] = [set(), set(), set()]
    start = [torch.zeros(0)] * 3
    slept = threading.Event()
    back: list[int] = []  # the step of the sync round in which the late group contributes

    def trained(place: int) -> torch.Tensor:
        group = groups[place]
        session = group.attach(method, dense_below=0)
        start[place] = group.flat().clone()
        residuals, size = torch.zeros(40 * 41), session.rank_info.size

        def count() -> None:
            """After a sync round that this group has committed."""
            nonlocal residuals, size
            residuals *= session.rank_info.size / size  # they keep their weight in the mean
            size = session.rank_info.size
            kept = session.residuals()
            now = torch.cat([kept[name].flatten() for name in ("weight", "bias")]) if kept else 0 * residuals
            moved[place] += (done[place] - (residuals - now)) / size
            sizes[place].add(size)
            done[place].zero_()
            residuals = now.clone()

        while not back or session.step < back[0] + 8:
            if place == 2 and session.step >= 9 and not slept.is_set():
                time.sleep(6)
                slept.set()
            rounds = session._groups.age
            group.gradient(100 * place + session.step)
            done[place] -= 0.05 * torch.cat([p.grad.flatten() for p in group.model.parameters()])
            group.optimizer.step()
            if session._groups.age > rounds:
                count()
                if place == 2 and slept.is_set() and not back:
                    back.append(session.step)
            time.sleep(0.02)
        return group.flat()

    try:
        with caplog.at_level("INFO", "thinwire"):
            found = at_once(*(lambda place=place: trained(place) for place in range(3)))
        assert all(isinstance(one, torch.Tensor) for one in found), found
        assert sizes[2] == {3}
        assert sizes[0] == {2, 3}, "no sync round went on without the late group"
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])
        torch.testing.assert_close(found[0] - start[0], sum(moved), rtol=1e-4, atol=1e-5)
        assert "group2 was late: its change is part of the next sync round" in caplog.text
    finally:
        for group in groups:
            group.leave()


# -- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("a2sgd", "such as qsgd or topk"),
        ("spasgd", "such as pqasgd"),
        ("diloco(every=8, fragments=2)", "without fragments"),
        ("localsgd(every=8, overlap=2)", "overlap"),
        ("auto", "choose a method yourself"),
    ],
)
def test_methods_that_cannot_be_served_are_refused(method: str, message: str, lighthouse: str) -> None:
    group = Group(lighthouse, 0)
    with pytest.raises(thinwire.ConfigError, match=message):
        group.attach(method)
    assert not replica_groups.has_session(group.manager)
    group.leave()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_async_quorum": True}, "use_async_quorum=False"),
        ({"load_state_dict": None, "state_dict": None}, "load_state_dict"),
    ],
)
def test_managers_that_cannot_be_served_are_refused(options: dict, message: str, lighthouse: str) -> None:
    group = Group(lighthouse, 0, **options)
    with pytest.raises(thinwire.ConfigError, match=message):
        group.attach("topk")
    group.leave()


def test_other_arguments_that_cannot_be_served_are_refused(lighthouse: str) -> None:
    from torchft.manager import WorldSizeMode

    spare = Group(lighthouse, 0, world_size_mode=WorldSizeMode.FIXED_WITH_SPARES)
    with pytest.raises(thinwire.ConfigError, match="world_size_mode="):
        spare.attach("topk")
    group = Group(lighthouse, 0)
    with pytest.raises(thinwire.ConfigError, match="bfloat16"):
        group.attach("topk", scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(
        thinwire.ConfigError, match=r"process_group is not for .* the manager has process groups of its own"
    ):
        group.attach("topk", process_group=object())
    with pytest.raises(thinwire.ConfigError, match="must be a torchft"):
        thinwire.attach(group.model, "topk", manager=object())
    with pytest.raises(thinwire.ConfigError, match="counts the optimizer's steps"):
        thinwire.attach(group.model, "pqasgd", manager=group.manager)
    wrapped = torchft.Optimizer(group.manager, group.optimizer)
    with pytest.raises(thinwire.ConfigError, match="the optimizer inside it"):
        thinwire.attach(group.model, "pqasgd", manager=group.manager, optimizer=wrapped)
    with pytest.raises(thinwire.ConfigError, match="replica groups"):
        thinwire.attach(group.model, "localsgd(every=8, deadline=2)", optimizer=group.optimizer)
    session = group.attach("topk")
    with pytest.raises(thinwire.ConfigError, match="already"):
        group.attach("topk")
    with pytest.raises(thinwire.ThinwireError, match="start_quorum"):
        group.manager.should_commit()
    with pytest.raises(thinwire.ConfigError, match="throttled"):
        session.throttle("100mbit")
    session.detach()
    assert "should_commit" not in vars(group.manager)
    group.attach("topk").detach()
    for each in (spare, group):
        each.leave()
