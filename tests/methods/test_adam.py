"""Adam's momentum through an exchange: the papers' steps, the frozen second moment, refusals, resuming."""

import copy
import itertools
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from tests.laws.cohort import Cohort, same_bits, same_state
from thinwire import ConfigError, Session
from thinwire.errors import ThinwireError
from thinwire.methods import Adam, Dense, EFSign, TopK
from thinwire.net.rank_info import RankInfo

SHAPES = {"wide": (24, 37), "bias": (5,)}
SIZE = 3
VARIANTS = {"plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


class Replicas:
    """Ranks in lock-step, each with parameters and an optimizer of its own; `groups` are options by name."""

    def __init__(
        self,
        method: Adam,
        kind: type[torch.optim.Optimizer] = torch.optim.AdamW,
        *,
        groups: Mapping[str, Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> None:
        self.cohort = Cohort(method, SIZE, SHAPES)
        rng = torch.Generator().manual_seed(3)
        start = {name: torch.randn(shape, generator=rng) for name, shape in SHAPES.items()}
        self.parameters = [
            {name: torch.nn.Parameter(tensor.clone()) for name, tensor in start.items()} for _ in range(SIZE)
        ]
        groups = groups or {name: {} for name in SHAPES}
        self.optimizers = [
            kind([{"params": [named[name]], **more} for name, more in groups.items()], lr=0.01, **options)
            for named in self.parameters
        ]
        self.cohort.sessions = [
            Session(
                named.items(),
                method,
                rank_info=RankInfo(rank, SIZE),
                dense_below=64,
                optimizer=optimizer,
            )
            for rank, (named, optimizer) in enumerate(zip(self.parameters, self.optimizers, strict=True))
        ]

    def step(
        self, inputs: list[dict[str, torch.Tensor]], *, closure: bool = False
    ) -> dict[str, torch.Tensor]:
        """One step of every rank; returns the mean that rank 0 got."""
        means = self.cohort.average(inputs)
        for named, optimizer, mean in zip(self.parameters, self.optimizers, means, strict=True):

            def gradients(named=named, mean=mean) -> float:
                for name, parameter in named.items():
                    parameter.grad = mean[name].clone()
                return 0.5

            if closure:
                assert optimizer.step(gradients) == 0.5
            else:
                gradients()
                optimizer.step()
            for name, parameter in named.items():
                assert same_bits(parameter.grad, mean[name]), "gradients are as they were"
        for name in SHAPES:
            assert all(same_bits(self.parameters[0][name], other[name]) for other in self.parameters)
        return means[0]


def agreeing(step: int) -> list[dict[str, torch.Tensor]]:
    """Gradients of ranks that agree on the sign: no second moment is next to nothing."""
    rng = torch.Generator().manual_seed(step)
    common = {name: torch.randn(shape, generator=rng) for name, shape in SHAPES.items()}
    common = {name: tensor + tensor.sign() for name, tensor in common.items()}
    return [
        {
            name: tensor + 0.5 * torch.rand(tensor.shape, generator=rng) * tensor.sign()
            for name, tensor in common.items()
        }
        for _ in range(SIZE)
    ]


@given(st.integers(0, 5), st.sampled_from([0.0, 0.1]), st.sampled_from([(0.9, 0.999), (0.5, 0.95)]))
@settings(max_examples=12, deadline=None)
def test_steps_equal_adam_by_hand_in_double_precision(warmup: int, decay: float, betas) -> None:
    warmup += 1
    method = Adam(Dense(), warmup=warmup, refresh=None, beta1=betas[0])
    ranks = Replicas(method, betas=betas, weight_decay=decay)
    theta = {name: p.detach().double() for name, p in ranks.parameters[0].items()}
    m, v = ({name: torch.zeros(shape).double() for name, shape in SHAPES.items()} for _ in range(2))
    for t in range(1, 10):
        inputs = agreeing(t)
        for name in SHAPES:
            g = sum(one[name].double() for one in inputs) / SIZE
            m[name] = betas[0] * m[name] + (1 - betas[0]) * g
            if t <= warmup:
                v[name] = betas[1] * v[name] + (1 - betas[1]) * g * g
            scale = (v[name] / (1 - betas[1] ** min(t, warmup))).sqrt() + 1e-8
            theta[name] = theta[name] * (1 - 0.01 * decay) - 0.01 * m[name] / (1 - betas[0] ** t) / scale
        ranks.step(inputs, closure=t % 2 == 0)
        for name, parameter in ranks.parameters[0].items():
            assert torch.allclose(parameter.double(), theta[name], rtol=2e-5, atol=2e-6), (t, name)


WARMUP = 4
GROUPS = {
    "wide": {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1},
    "bias": {"lr": 0.03, "betas": (0.9, 0.95), "eps": 1e-3, "weight_decay": 0.0},
}
RATES = {
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(
        optimizer, [0.02, 0.05], total_steps=12, cycle_momentum=False
    ),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 12),
}


def trajectory(kind, rates: str, *, as_tensors: bool = False, **options) -> torch.Tensor:
    """The parameters after every step, exact and frozen ones; checked against the formula in float64."""
    decays = kind is torch.optim.AdamW
    groups = {
        name: {**group, "weight_decay": group["weight_decay"] * decays} for name, group in GROUPS.items()
    }
    for group in groups.values():
        group["lr"] = torch.tensor(group["lr"], dtype=torch.float64) if as_tensors else group["lr"]
    ranks = Replicas(Adam(Dense(), warmup=WARMUP, refresh=None), kind, groups=groups, **options)
    schedules = [RATES[rates](optimizer) for optimizer in ranks.optimizers]
    theta = {name: p.detach().double() for name, p in ranks.parameters[0].items()}
    m, v = ({name: torch.zeros(shape).double() for name, shape in SHAPES.items()} for _ in range(2))
    found = []
    for t in range(1, 11):
        inputs = agreeing(t)
        for name, group in zip(SHAPES, ranks.optimizers[0].param_groups, strict=True):
            g = sum(one[name].double() for one in inputs) / SIZE
            lr, (beta1, beta2), decay = float(group["lr"]), group["betas"], group["weight_decay"]
            m[name] = beta1 * m[name] + (1 - beta1) * g
            if t <= WARMUP:
                v[name] = beta2 * v[name] + (1 - beta2) * g * g
            scale = (v[name] / (1 - beta2 ** min(t, WARMUP))).sqrt() + group["eps"]
            theta[name] = theta[name] * (1 - lr * decay) - lr * m[name] / (1 - beta1**t) / scale
        ranks.step(inputs)
        for schedule in schedules:
            schedule.step()
        for name, parameter in ranks.parameters[0].items():
            assert torch.allclose(parameter.double(), theta[name], rtol=2e-5, atol=2e-6), (t, name)
        found.append(torch.cat([p.detach().flatten() for p in ranks.parameters[0].values()]))
    return torch.stack(found)


@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_fused_foreach_and_plain_optimizers_go_the_same_way(kind, rates: str) -> None:
    """With groups of their own rates, decays, second betas and eps, and a rate that changes in every step."""
    plain, *others = (trajectory(kind, rates, **options) for options in VARIANTS.values())
    for other in others:
        assert torch.allclose(plain, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize("variant", ["plain", "fused"])  # torch's foreach takes none
def test_learning_rates_may_be_tensors(variant: str, rates: str) -> None:
    trajectory(torch.optim.AdamW, rates, as_tensors=True, **VARIANTS[variant])


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_second_moments_are_those_of_torch_at_the_end_of_the_warm_up(options) -> None:
    """The frozen steps leave v and the count of steps alone, whatever torch's own step does in the others."""
    ranks, plain = (Replicas(Adam(EFSign(), warmup=WARMUP), **options) for _ in range(2))
    for session in plain.cohort.sessions:
        session.detach()
    for step in range(8):
        inputs = ranks.cohort.inputs(step)
        ranks.step(inputs)
        if step < WARMUP:
            plain.step(inputs)
    for name in SHAPES:
        frozen, last = (each.optimizers[0].state[each.parameters[0][name]] for each in (ranks, plain))
        for kept in ("exp_avg_sq", "step"):
            assert same_bits(frozen[kept], last[kept]), (name, kept)
        assert not same_bits(frozen["exp_avg"], last["exp_avg"]), "it is the momentum of the last frozen step"


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_within_the_warm_up_it_is_torchs_own_step_bit_for_bit(kind, options) -> None:
    ranks, plain = (Replicas(Adam(warmup=50), kind, **options) for _ in range(2))
    for session in plain.cohort.sessions:
        session.detach()  # no hooks any more
    for step in range(8):
        inputs = ranks.cohort.inputs(step)
        ranks.step(inputs)
        plain.step(inputs)
    assert same_state(
        [dict(named) for named in ranks.parameters], [dict(named) for named in plain.parameters]
    )
    assert same_state(ranks.optimizers[0].state_dict(), plain.optimizers[0].state_dict())


@pytest.mark.parametrize("refresh", [None, 2])
def test_torchs_second_moment_changes_in_the_warm_up_alone(refresh: int | None) -> None:
    method = Adam(EFSign(), warmup=3, refresh=refresh)
    ranks, changed = Replicas(method), []
    for step in range(14):
        before = {n: ranks.optimizers[0].state[p] for n, p in ranks.parameters[0].items()}
        old = {n: kept["exp_avg_sq"].clone() for n, kept in before.items() if kept}
        ranks.step(ranks.cohort.inputs(step))
        state = ranks.optimizers[0].state
        now = {n: state[p]["exp_avg_sq"] for n, p in ranks.parameters[0].items()}
        if not old or any(not same_bits(now[n], old[n]) for n in SHAPES):
            changed.append(step)
            assert not old or all(not same_bits(now[n], old[n]) for n in SHAPES), "all tensors at once"
    assert changed == [0, 1, 2] == [step for step in range(14) if method.is_exact(step)]
    assert float(state[ranks.parameters[0]["wide"]]["step"]) == len(changed)


@pytest.mark.parametrize(("warmup", "times"), [(2, 2), (1, 3), (3, 2)])
def test_steps_follow_the_mean_squares_of_all_ranks(warmup: int, times: int) -> None:
    """By hand, in double precision: m is an average of c g, and c = sqrt(s_0 / s) changes with s."""
    cohort = Cohort(Adam(Dense(), warmup=warmup, refresh=times), SIZE, {"wide": (24, 37)})
    m, own, since, c = torch.zeros(24, 37).double(), 0.0, 0, torch.ones(24, 37).double()
    s = s_0 = None
    due, renewed = warmup, []
    for step in range(13):
        inputs = cohort.inputs(step)
        gradients = [(step + 1) * one["wide"].double() for one in inputs]  # they grow
        out = cohort.average([{"wide": g.float()} for g in gradients])[0]["wide"].double()
        mean = sum(gradients) / SIZE
        own, since = own + sum(g.square() for g in gradients) / SIZE, since + 1
        m = 0.9 * m + 0.1 * (mean if step < warmup else c * mean)
        assert torch.allclose(out, mean if step < warmup else m, rtol=0.02, atol=0.02), step
        if step + 1 == due:
            due *= times
            s = own / since if s is None else s / times + (1 - 1 / times) * own / since
            s_0 = s if step + 1 == warmup else s_0
            m, c = m * (s_0 / s).sqrt() / c, (s_0 / s).sqrt()
            own, since, renewed = 0.0, 0, [*renewed, step]
    assert len(renewed) >= 3
    assert c.median() < 0.9, "later gradients were larger"
    roots = [session.engine.states.entries()["wide"] for session in cohort.sessions]
    assert all(same_bits(other["s"], roots[0]["s"]) for other in roots)


def test_renewals_are_rare_and_metered() -> None:
    """Sixteen bits for each entry, at 2, 4, 8, ... times the warm-up, and nothing more than without."""
    sent = {}
    for refresh in (None, 2):
        cohort = Cohort(Adam(EFSign(bucket=4096), warmup=2, refresh=refresh), 2, {"wide": (90, 100)})
        seen = [0]
        for step in range(17):
            cohort.average(cohort.inputs(step))
            seen.append(cohort.driver.meters[0].total.payload_bytes)
        sent[refresh] = [after - before for before, after in itertools.pairwise(seen)]
    more = {step: a - b for step, (a, b) in enumerate(zip(sent[2], sent[None], strict=True)) if a != b}
    assert more == dict.fromkeys((1, 3, 7, 15), 2 * 9000)


@pytest.mark.parametrize("inner", [EFSign(bucket=4096), TopK(ratio=0.1), TopK(ratio=0.1, chunk=64)])
def test_error_feedback_loses_no_momentum(inner) -> None:
    """W m' + residuals' = sum of (beta1 m + (1 - beta1) g_i) + residuals, in every step after the warm-up."""
    cohort = Cohort(Adam(inner, warmup=2, refresh=None), SIZE, {"wide": (90, 100)})
    m = torch.zeros(90, 100).double()
    for step in range(6):
        inputs, before = cohort.inputs(step), cohort.residuals()["wide"]
        out = cohort.average(inputs)[0]["wide"].double()
        total = sum(one["wide"].double() for one in inputs)
        if step < 2:
            m = 0.9 * m + 0.1 * out
            continue
        given = SIZE * 0.9 * m + 0.1 * total + before
        arrived = SIZE * out + cohort.residuals()["wide"]
        assert (arrived - given).abs().max() < 2e-5
        m = out


@pytest.mark.parametrize("refresh", [None, 2])
def test_entries_that_never_have_a_gradient_stay_where_they_are(refresh: int | None) -> None:
    """Like a row for padding. Signs of zeros are not zeros, and there is no second moment to divide by."""
    ranks = Replicas(Adam(EFSign(), warmup=2, refresh=refresh), weight_decay=0.0)
    start = ranks.parameters[0]["wide"].detach().clone()
    for step in range(20):
        inputs = agreeing(step)
        for one in inputs:
            one["wide"][3] = 0
        mean = ranks.step(inputs)
    assert (mean["wide"][3].abs().min() > 0) == (refresh is None)
    moved = (ranks.parameters[0]["wide"] - start).abs()
    assert moved[3].max() == 0
    assert 0 < moved.max() < 1


@pytest.mark.parametrize("inner", [Dense(), EFSign(bucket=4096)])
def test_entries_whose_first_gradient_comes_after_the_warm_up_follow_once_s_is_renewed(inner) -> None:
    """Like the row of a rare word: there is no second moment, and s tells how large it would be."""
    ranks, moved = Replicas(Adam(inner, warmup=4, refresh=2), weight_decay=0.0), []
    for step in range(40):
        before = ranks.parameters[0]["wide"].detach().clone()
        inputs = agreeing(step)
        for one in inputs:
            one["wide"][3] *= 0.01 * (step > 5)  # and smaller than the others
        mean = ranks.step(inputs)
        assert mean["wide"].isfinite().all(), step
        moved.append((ranks.parameters[0]["wide"] - before).detach().abs())
    assert all(each[3].max() == 0 for each in moved[4:8]), "after 8 steps s is renewed"
    assert all(each[3].min() > 0 for each in moved[9:])
    later = torch.stack(moved[32:]).mean(0).mean(1)
    assert 0.3 < later[3] / later[[0, 1, 2, 4, 5]].mean() < 3, "about as far as entries with larger gradients"


def test_a_resumed_run_goes_on_bit_for_bit() -> None:
    method = Adam(TopK(ratio=0.1), warmup=4, refresh=2)
    straight, resumed = Replicas(method), Replicas(method)
    for step in range(14):
        if step == 7:
            for rank in range(SIZE):
                state = straight.cohort.sessions[rank].state_dict()
                resumed.cohort.sessions[rank].load_state_dict(state)
                resumed.optimizers[rank].load_state_dict(
                    copy.deepcopy(straight.optimizers[rank].state_dict())
                )
                for name, parameter in resumed.parameters[rank].items():
                    parameter.data.copy_(straight.parameters[rank][name])
        inputs = straight.cohort.inputs(step)
        straight.step(inputs)
        if step >= 7:
            resumed.step(inputs)
    for name in SHAPES:
        assert same_bits(straight.parameters[0][name], resumed.parameters[0][name])


@pytest.mark.parametrize("shrinks", [True, False])
def test_with_another_world_size_the_momentum_goes_on(shrinks: bool) -> None:
    """The mean of what the ranks have is the old momentum, however the states are dealt out."""
    old, new = (4, 2) if shrinks else (2, 4)
    before = Cohort(Adam(Dense(), warmup=1), old, {"wide": (24, 37)})
    for step in range(3):
        m = before.average(before.inputs(step))[0]["wide"]
    after = Cohort(Adam(Dense(), warmup=1), new, {"wide": (24, 37)})
    states = [session.state_dict() for session in before.sessions]
    for rank, session in enumerate(after.sessions):
        mine = states[rank::new]
        session.load_state_dict(mine or states[0], on_resize="sum" if mine else "drop")
    nothing = [{"wide": torch.zeros(24, 37)} for _ in range(new)]
    assert torch.allclose(after.average(nothing)[0]["wide"], 0.9 * m, atol=1e-6)


def test_a_loss_scale_changes_nothing() -> None:
    """The scaler multiplies gradients, and divides what it gets: the momentum follows when it changes."""

    class Scale:
        value = 4.0

        def get_scale(self) -> float:
            return self.value

    scale = Scale()
    parameters = [("wide", torch.zeros(24, 37))]
    scaled, plain = (
        Session(parameters, Adam(Dense(), warmup=2), rank_info=RankInfo(0, 1), dense_below=0, scaler=scaler)
        for scaler in (scale, None)
    )
    cohort = Cohort("dense", 1)
    for step in range(5):
        scale.value = 2.0 ** (step % 3)
        gradient = cohort.inputs(step)[0]["wide"]
        results = []
        for session, factor in ((scaled, scale.value), (plain, 1.0)):
            session.engine.begin_step()
            result, views = session.engine.views({"wide": gradient * factor})
            session.engine.end_step(cohort.driver.run([session.engine.program(views)]))
            results.append(result["wide"] / factor)
        assert torch.allclose(*results, atol=1e-6)


def refuse(match: str, kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **options) -> None:
    named = {"w": torch.nn.Parameter(torch.zeros(40, 50))}
    with pytest.raises(ConfigError, match=match):
        Session(named.items(), "adam", rank_info=RankInfo(0, 1), optimizer=kind(named.values(), **options))


def test_optimizers_that_cannot_take_frozen_steps_are_refused() -> None:
    refuse("not of SGD", torch.optim.SGD)
    refuse("not of NAdam", torch.optim.NAdam)
    refuse(r"beta1=0\.8", betas=(0.8, 0.999))
    refuse("weight decay", torch.optim.Adam, weight_decay=0.1)
    for option in ("amsgrad", "maximize", "capturable", "differentiable"):
        refuse(rf"AdamW\({option}=True\): .+\. Leave {option} out", **{option: True})


def test_a_beta_that_changes_on_the_way_is_an_error() -> None:
    ranks = Replicas(Adam(warmup=1))
    ranks.step(ranks.cohort.inputs(0))
    ranks.optimizers[0].param_groups[0]["betas"] = (0.85, 0.999)
    with pytest.raises(ConfigError, match="OneCycleLR"):
        ranks.step(ranks.cohort.inputs(1))


def test_a_parameter_without_a_second_moment_is_an_error() -> None:
    ranks = Replicas(Adam(warmup=1))
    ranks.step(ranks.cohort.inputs(0))
    del ranks.optimizers[0].state[ranks.parameters[0]["bias"]]
    with pytest.raises(ThinwireError, match="'bias' has its first step after the warm-up"):
        ranks.step(ranks.cohort.inputs(1))


def test_a_fused_step_that_a_scaler_has_skipped_makes_no_second_moment() -> None:
    """torch makes the state of a parameter in a skipped step as well, with no step counted."""
    ranks = Replicas(Adam(warmup=1), fused=True)
    ranks.step(ranks.cohort.inputs(0))
    optimizer, bias = ranks.optimizers[0], ranks.parameters[0]["bias"]
    del optimizer.state[bias]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(1))
    means = ranks.cohort.average(ranks.cohort.inputs(1))[0]
    for factor, error in ((torch.nan, None), (8.0, "'bias' has its first step after the warm-up")):
        for name, parameter in ranks.parameters[0].items():
            parameter.grad = means[name] * factor
        before = [p.detach().clone() for p in ranks.parameters[0].values()]
        if error is None:
            scaler.step(optimizer)
            scaler.update()
            assert float(optimizer.state[bias]["step"]) == 0
        else:
            with pytest.raises(ThinwireError, match=error):
                scaler.step(optimizer)
        after = ranks.parameters[0].values()
        assert all(same_bits(old, new) for old, new in zip(before, after, strict=True))


def test_a_group_without_gradients_stays_where_it_is() -> None:
    ranks = Replicas(Adam(warmup=1), fused=True)
    ranks.step(ranks.cohort.inputs(0))
    means = ranks.cohort.average(ranks.cohort.inputs(1))[0]
    before = {name: p.detach().clone() for name, p in ranks.parameters[0].items()}
    ranks.parameters[0]["wide"].grad, ranks.parameters[0]["bias"].grad = means["wide"], None
    ranks.optimizers[0].step()
    moved = {name for name, p in ranks.parameters[0].items() if not same_bits(p, before[name])}
    assert moved == {"wide"}


def test_a_refused_step_leaves_gradients_and_parameters_alone() -> None:
    """Of the first group as well, if the second one is at fault."""
    ranks = Replicas(Adam(warmup=1))
    ranks.step(ranks.cohort.inputs(0))
    ranks.optimizers[0].param_groups[1]["amsgrad"] = True
    before = {name: p.detach().clone() for name, p in ranks.parameters[0].items()}
    with pytest.raises(ConfigError, match="amsgrad"):
        ranks.step(ranks.cohort.inputs(1))
    for name, parameter in ranks.parameters[0].items():
        assert parameter.grad is not None
        assert same_bits(parameter, before[name])


@pytest.mark.parametrize("inner", ["dgc", "heavyball", "sketched", "a2sgd", "lag", "lasg", "adam"])
def test_exchanges_with_rules_of_their_own_are_refused(inner: str) -> None:
    with pytest.raises(ConfigError, match=f"{inner} cannot be its exchange"):
        Cohort(f"adam(exchange={inner})", 1)


def test_a_mixture_of_momenta_and_gradients_is_refused() -> None:
    with pytest.raises(ConfigError, match="put the route inside"):
        Cohort("route(default=adam, rules=(('bias', dense),))", 1, SHAPES)
    for method in ("warmup(method=adam)", "periodic(exchange=adam)"):
        with pytest.raises(ConfigError, match="momentum"):
            Cohort(method, 1)


def test_options_are_checked() -> None:
    for bad in ({"warmup": 0}, {"refresh": 1}, {"beta1": 1.0}, {"beta1": math.nan}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            Adam(**bad)
