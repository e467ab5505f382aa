"""Several optimizers make one training step: what is refused, and when which callback is called."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import nn

from tests.hosts.common import batch, flat, mlp, muon_and_adamw
from thinwire import ConfigError
from thinwire.core.optimizers import Optimizers

ORDERS = ([0, 1], [1, 0])


class Training:
    """Two optimizers of one model, and what the callbacks have said."""

    def __init__(self, make: Callable[[nn.Module], list[torch.optim.Optimizer]] = muon_and_adamw) -> None:
        self.model = mlp()
        self.all = make(self.model)
        self.optimizers = Optimizers(self.all)
        self.said: list[str] = []
        for optimizer in self.all:
            optimizer.register_step_post_hook(lambda o, *_: self.said.append(f"{type(o).__name__} stepped"))

    def watch(self, **options: object) -> Callable[[], None]:
        return self.optimizers.watch(
            before=lambda: self.said.append("before"),
            each=lambda o: self.said.append(f"each {type(o).__name__}"),
            after=lambda: self.said.append("after"),
            **options,
        )

    def backward(self, scaler: torch.amp.GradScaler | None = None, *, overflow: Iterable[int] = ()) -> float:
        """With gradients of these optimizers that are not finite."""
        for optimizer in self.all:
            optimizer.zero_grad()
        loss = self.model(batch(0, 0)).square().mean()
        (loss if scaler is None else scaler.scale(loss)).backward()
        for which in overflow:
            self.all[which].param_groups[0]["params"][0].grad.view(-1)[0] = torch.inf
        return float(loss.detach())


@pytest.mark.parametrize("order", ORDERS)
def test_before_the_first_and_after_the_last_in_any_order(order: list[int]) -> None:
    training = Training()
    stop = training.watch()
    for _ in range(3):
        training.said.clear()
        training.backward()
        for which in order:
            training.all[which].step()
        first, last = (type(training.all[which]).__name__ for which in order)
        assert training.said == [
            "before",
            f"{first} stepped",
            f"each {first}",
            f"{last} stepped",
            f"each {last}",
            "after",
        ]
    stop()
    training.said.clear()
    training.all[0].step()
    training.all[0].step()
    assert training.said == ["Muon stepped"] * 2, "nobody watches any more"


@pytest.mark.parametrize("order", ORDERS)
def test_the_order_may_change_from_step_to_step(order: list[int]) -> None:
    training = Training()
    training.watch()
    for which in (*order, *reversed(order), *order):
        training.backward()
        training.all[which].step()
    assert training.said.count("before") == training.said.count("after") == 3
    assert training.said[-1] == "after"


@pytest.mark.parametrize("order", ORDERS)
def test_one_that_steps_twice_before_another_is_named_and_does_not_step(order: list[int]) -> None:
    training = Training()
    training.watch()
    training.backward()
    first, other = (training.all[which] for which in order)
    first.step()
    before = flat(training.model)
    expected = (
        rf"{type(first).__name__} \(optimizer\[{order[0]}\]\) steps a second time before "
        rf"{type(other).__name__} \(optimizer\[{order[1]}\]\) has stepped.*give it as scaler"
    )
    for _ in range(2):
        with pytest.raises(ConfigError, match=expected):
            first.step()
    assert torch.equal(flat(training.model), before)
    other.step()
    assert training.said[-1] == "after"


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("bad", [[0], [1], [0, 1]])
def test_a_step_that_a_scaler_skips_counts(order: list[int], bad: list[int]) -> None:
    training = Training()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    stop = training.watch(scaler=scaler)
    for number in range(3):
        training.backward(scaler, overflow=bad if number == 1 else ())
        training.said.clear()
        for which in order:
            scaler.step(training.all[which])
        scaler.update()
        assert training.said[-1:] == ["after"]
        assert training.said.count("after") == 1
        taken = [which for which in order if number != 1 or which not in bad]
        names = [type(training.all[which]).__name__ for which in taken]
        assert [said for said in training.said if said.startswith("each")] == [f"each {n}" for n in names]
        assert training.said[:1] == (["before"] if taken else ["after"]), "before the first that is taken"
    stop()
    assert "step" not in scaler.__dict__


def test_skipped_steps_have_their_turn_as_well() -> None:
    training = Training()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    training.watch(scaler=scaler)
    training.backward(scaler, overflow=[0])
    scaler.step(training.all[0])
    scaler.update()
    training.backward(scaler)
    with pytest.raises(
        ConfigError, match=r"Muon \(optimizer\[0\]\) steps a second time before AdamW"
    ) as found:
        scaler.step(training.all[0])
    assert "scaler=" not in str(found.value), "it has been given"


def test_a_disabled_scaler_and_foreign_optimizers_do_not_matter() -> None:
    training, other = Training(), Training()
    for scaler in (torch.amp.GradScaler("cpu", enabled=False), torch.amp.GradScaler("cpu", init_scale=1.0)):
        stop = training.watch(scaler=scaler)
        training.said.clear()
        for number in range(2):
            training.backward(scaler)
            other.backward(scaler, overflow=[0, 1] if number and scaler.is_enabled() else ())
            for optimizer in (*training.all, *other.all):
                scaler.step(optimizer)
            scaler.update()
        assert training.said.count("after") == 2
        stop()


@pytest.mark.parametrize("order", ORDERS)
def test_sessions_that_share_a_scaler_stop_in_any_order(order: list[int]) -> None:
    trainings = [Training(), Training()]
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    stops = [training.watch(scaler=scaler) for training in trainings]
    for remaining, which in zip((1, 0), order, strict=True):
        stops[which]()
        for training in trainings:
            training.said.clear()
            training.backward(scaler, overflow=[0, 1])
            for optimizer in training.all:
                scaler.step(optimizer)
        scaler.update()
        assert sum("after" in training.said for training in trainings) == remaining
        assert "after" not in trainings[which].said
    assert "step" not in scaler.__dict__


class Twice(torch.optim.AdamW):
    """Its step() calls that of its base class, whose hooks torch calls as well."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        return super().step(closure)


@pytest.mark.parametrize("order", ORDERS)
def test_a_step_that_calls_the_one_of_its_base_class_counts_once(order: list[int]) -> None:
    def make(model: nn.Module) -> list[torch.optim.Optimizer]:
        first, *rest = model.parameters()
        return [Twice([first]), torch.optim.AdamW(rest)]

    training = Training(make)
    training.watch()
    for _ in range(3):
        training.backward()
        for which in order:
            training.all[which].step()
    assert training.said.count("after") == training.said.count("before") == 3
    assert training.said.count("each Twice") == 3


def test_with_a_closure_what_comes_before_waits_for_its_gradients() -> None:
    training = Training()
    training.watch()
    training.all[0].step(lambda: training.said.append("closure") or training.backward())
    training.all[1].step(closure=lambda: training.said.append("closure") or 0.0)
    assert training.said == [
        *("closure", "before", "Muon stepped", "each Muon"),
        *("closure", "AdamW stepped", "each AdamW", "after"),
    ]


def test_a_step_that_raises_is_not_taken_and_can_be_taken_again() -> None:
    training = Training()
    training.watch()
    training.backward()
    muon, adamw = training.all
    muon.step()

    def fails() -> float:
        raise MemoryError("no memory")

    with pytest.raises(MemoryError):
        adamw.step(fails)
    assert "after" not in training.said
    with pytest.raises(ConfigError, match="steps a second time before AdamW"):
        muon.step()
    adamw.step()
    assert training.said[-1] == "after"


def test_a_failure_before_the_first_step_leaves_the_training_step_to_begin() -> None:
    training, tries = Training(), []

    def before() -> None:
        tries.append(1)
        if len(tries) == 1:
            raise RuntimeError("a rank is gone")

    training.optimizers.watch(before=before)
    training.backward()
    with pytest.raises(RuntimeError):
        training.all[0].step()
    for optimizer in training.all:
        optimizer.step()
    assert len(tries) == 2


def test_after_a_checkpoint_was_loaded_a_training_step_begins() -> None:
    training = Training()
    training.watch()
    training.backward()
    training.all[0].step()
    training.optimizers.begin_anew()
    for optimizer in training.all:
        optimizer.step()
    assert training.said.count("before") == 2
    assert training.said.count("after") == 1


# -- what is given -----------------------------------------------------------------------------------------


class Wrapper(torch.optim.Optimizer):
    """As those of Accelerate and Lightning."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


def test_one_or_a_list_or_none_with_wrappers_around_them() -> None:
    model = mlp()
    muon, adamw = muon_and_adamw(model)
    wrapped = Wrapper(Wrapper(muon))
    assert list(Optimizers()) == list(Optimizers([])) == []
    assert list(Optimizers(muon)) == list(Optimizers(wrapped)) == [muon]
    assert list(Optimizers((wrapped, adamw))) == list(Optimizers([muon, adamw])) == [muon, adamw]
    assert str(Optimizers([muon, adamw])) == "Muon and AdamW"


@pytest.mark.parametrize("given", [3, "adamw", nn.Linear(2, 2), [None], {"a": 1}, [nn.Linear(2, 2).weight]])
def test_what_is_no_optimizer_is_refused(given: object) -> None:
    with pytest.raises(ConfigError, match=r"takes a torch\.optim\.Optimizer or a list of them, not a"):
        Optimizers(given)


def test_an_optimizer_twice_and_a_parameter_twice_are_refused() -> None:
    model = mlp()
    muon, adamw = muon_and_adamw(model)
    with pytest.raises(ConfigError, match="the same Muon twice: give each once"):
        Optimizers([muon, adamw, Wrapper(muon)])
    also = torch.optim.SGD([next(model.parameters())], lr=0.1)
    expected = r"a parameter of shape \(40, 40\) is in Muon \(optimizer\[0\]\) and in SGD \(optimizer\[2\]\)"
    with pytest.raises(ConfigError, match=expected):
        Optimizers([muon, adamw, also])


def test_a_trainable_parameter_that_none_holds_is_named() -> None:
    model = mlp()
    muon, adamw = muon_and_adamw(model)
    named = dict(model.named_parameters())
    Optimizers().check_all_held(named)
    Optimizers([muon, adamw]).check_all_held(named)
    with pytest.raises(ConfigError, match=r"no optimizer holds '0\.weight' and 3 more \(given: AdamW\)"):
        Optimizers(adamw).check_all_held(named)
    for parameter in muon.param_groups[0]["params"][1:]:
        parameter.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"no optimizer holds '0\.weight' \(given: AdamW\)"):
        Optimizers(adamw).check_all_held(named)
    named["0.weight"].requires_grad_(False)
    Optimizers(adamw).check_all_held(named)
