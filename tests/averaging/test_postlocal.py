"""Post-local steps: a data-parallel warm-up, second moments as those of means."""

import pytest
import torch

from tests.averaging.cohort import Cohort, adam, equal
from tests.averaging.test_schedule_laws import dense_trajectory
from tests.hosts.common import batch, flat, mlp
from thinwire import attach, parse
from thinwire.errors import ConfigError, ThinwireError
from thinwire.net.launch import run_local


def test_the_warm_up_is_data_parallel_training_with_adamw() -> None:
    """Within 2e-6 of the largest weight: a replica of its own second moments would be far off."""
    cohort = Cohort("postlocal(every=4, warmup=20)", 4, optimizer=adam)
    cohort.train(range(20))
    expected = dense_trajectory(4, 20, adam)
    largest = float(expected.abs().max())
    for model in cohort.models:
        torch.testing.assert_close(flat(model), expected, rtol=0, atol=2e-6 * largest)
    assert all(equal(model, cohort.models[0]) for model in cohort.models[1:])
    other = Cohort("diloco(every=4, warmup=20, outer_lr=1.0, outer_momentum=0.0)", 4, optimizer=adam)
    other.train(range(20))
    assert float((flat(other.models[0]) - expected).abs().max()) > 1e-3 * largest


def test_a_quantised_warm_up_stays_close_for_fewer_bytes() -> None:
    """All ranks take the same steps; 8 bits are closer to the exact means than 2."""
    exact, off, sent = dense_trajectory(4, 20, adam), {}, {}
    for bits in (None, 8, 2):
        cohort = Cohort(f"postlocal(every=4, warmup=20, warmup_bits={bits})", 4, optimizer=adam)
        cohort.train(range(20))
        assert all(equal(model, cohort.models[0]) for model in cohort.models[1:])
        off[bits] = float((flat(cohort.models[0]) - exact).norm() / (exact - flat(mlp())).norm())
        sent[bits] = cohort.driver.meters[0].total.sent_bytes
    assert off[None] < 1e-4 < off[8] < 0.25 < off[2]
    assert sent[8] < 0.6 * sent[None]
    assert sent[2] < 0.6 * sent[8]


def test_local_second_moments_grow_by_the_squared_gradient_over_the_ratio() -> None:
    cohort = Cohort("postlocal(every=8, warmup=50)", 3, optimizer=adam)
    cohort.train(range(50))
    session, model, optimizer = cohort.sessions[1], cohort.models[1], cohort.optimizers[1]
    before = {p: optimizer.state[p]["exp_avg_sq"].clone() for p in model.parameters()}
    cohort.train([50])
    assert session.gradient_warmup is not None
    ratios = session.gradient_warmup.ratios(3)
    assert any(ratio > 1.05 for ratio in ratios), "own gradients are as large as their mean?"
    assert len(set(ratios)) > 1, "each tensor has its own"
    for parameter, ratio in zip(model.parameters(), ratios, strict=True):
        assert parameter.grad is not None
        expected = 0.999 * before[parameter] + 0.001 * parameter.grad.square() / ratio
        torch.testing.assert_close(optimizer.state[parameter]["exp_avg_sq"], expected, rtol=1e-4, atol=1e-10)


@pytest.mark.parametrize("warmup", [0, 3])
def test_a_short_warm_up_tells_nothing_about_the_noise(warmup: int) -> None:
    cohort = Cohort(f"postlocal(every=4, warmup={warmup})", 4, optimizer=adam)
    cohort.train(range(warmup + 2))
    found = cohort.sessions[0].gradient_warmup
    assert found is not None
    assert set(found.ratios(4)) == {2.0}


@pytest.mark.parametrize(("common", "low", "high"), [(1.0, 1.0, 1.001), (0.0, 3.5, 4.0)])
def test_the_ratio_is_that_of_the_noise(common: float, low: float, high: float) -> None:
    """1 if all ranks have the same gradient, the number of ranks if they have nothing in common."""
    cohort = Cohort("postlocal(every=4, warmup=60)", 4)
    for step in range(60):
        for rank, model in enumerate(cohort.models):
            own = torch.Generator().manual_seed(100 * step + rank)
            shared = torch.Generator().manual_seed(step)
            for p in model.parameters():
                noise = torch.randn(p.shape, generator=own)
                p.grad = common * torch.randn(p.shape, generator=shared) + (1 - common) * noise
        cohort.average_gradients()
        cohort.advance()
    found = cohort.sessions[0].gradient_warmup
    assert found is not None
    matrices = [r for r, p in zip(found.ratios(4), cohort.models[0].parameters(), strict=True) if p.dim() > 1]
    assert all(low <= ratio <= high for ratio in matrices), matrices


def test_a_gradient_that_is_not_finite_skips_the_step_on_all_ranks() -> None:
    cohort = Cohort("postlocal(every=4, warmup=5)", 3, optimizer=adam)
    cohort.train(range(2))
    before = flat(cohort.models[0])
    for rank in range(3):
        cohort.backward(rank, 2)
    next(cohort.models[1].parameters()).grad.view(-1)[0] = float("inf")
    cohort.average_gradients()
    for optimizer in cohort.optimizers:
        optimizer.step()
    cohort.advance()
    assert all(torch.equal(flat(model), before) for model in cohort.models)
    assert [session.aborted for session in cohort.sessions] == [1, 1, 1]
    cohort.train(range(3, 9))
    cohort.sync()
    assert all(equal(model, cohort.models[0]) for model in cohort.models[1:])
    assert not torch.equal(flat(cohort.models[0]), before)
    assert torch.isfinite(flat(cohort.models[0])).all()


def test_a_step_whose_gradients_were_not_averaged_is_an_error() -> None:
    cohort = Cohort("postlocal(every=4, warmup=5)", 2)
    for rank in range(2):
        cohort.local_step(rank, 0)
    with pytest.raises(ThinwireError, match="gradients of step 0 have not been averaged"):
        cohort.advance()


def test_a_parameter_without_a_gradient_stays_as_it_is() -> None:
    cohort = Cohort("postlocal(every=4, warmup=5)", 2, optimizer=adam)
    first = [next(model.parameters()) for model in cohort.models]
    before = first[0].detach().clone()
    for step in range(3):
        for rank in range(2):
            cohort.backward(rank, step)
            first[rank].grad = None
        cohort.average_gradients()
        for optimizer in cohort.optimizers:
            optimizer.step()
        cohort.advance()
    assert all(torch.equal(parameter, before) for parameter in first)


def _trained(worker, method: str) -> torch.Tensor:
    model = mlp()
    optimizer = adam(model)
    session = attach(model, method, optimizer=optimizer, dense_below=64)
    for step in range(11):
        optimizer.zero_grad()
        model(batch(worker.rank, step)).square().mean().backward()
        optimizer.step()
    session.finish()
    return flat(model)


@pytest.mark.parametrize("bits", [None, 4])
def test_processes_do_as_lock_step_does(bits: int | None) -> None:
    """Warm-up, local steps and signs, through the optimizer's own hooks."""
    method = f"postlocal(every=3, warmup=4, warmup_bits={bits})"
    found = run_local(_trained, 2, method)
    cohort = Cohort(method, 2, optimizer=adam)
    cohort.train(range(11))
    cohort.sync()
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0], flat(cohort.models[0]), rtol=0, atol=2e-6)


def test_a_grad_scaler_is_refused() -> None:
    model = mlp()
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(ConfigError, match="GradScaler"):
        attach(model, "postlocal(every=4)", optimizer=adam(model), scaler=scaler)
    assert parse("postlocal(every=4, warmup=0)").warmup == 0
