"""What the paper says of DeMo: decoupled momentum, coefficients of a cosine transform, a signed step."""

import pytest
import torch

from tests.laws.cohort import Cohort
from thinwire import ConfigError, kernels, parse
from thinwire.kernels import Chunks
from thinwire.methods import DeMo

SHAPES = {"wide": (128, 100)}


def cosines(n: int) -> torch.Tensor:
    j = torch.arange(n, dtype=torch.float64)
    made = torch.cos(torch.pi / n * (j + 0.5) * j[:, None])
    return made / made.norm(dim=1, keepdim=True)


def largest(m: torch.Tensor, k: int) -> torch.Tensor:
    """What a rank sends, as a matrix: the k largest coefficients of each chunk of 64 x 50."""
    out = torch.zeros_like(m)
    left, right = cosines(64), cosines(50)
    for top in range(0, 128, 64):
        for side in range(0, 100, 50):
            y = left @ m[top : top + 64, side : side + 50] @ right.T
            kept = torch.zeros_like(y).view(-1)
            where = y.reshape(-1).abs().topk(k).indices
            kept[where] = y.reshape(-1)[where]
            out[top : top + 64, side : side + 50] = left.T @ kept.view(64, 50) @ right
    return out


def momentum(cohort: Cohort, rank: int) -> torch.Tensor:
    return cohort.sessions[rank].engine.states.entries()["wide"]["error"].view(128, 100)


@pytest.mark.parametrize("sign", [False, True])
def test_the_steps_of_the_paper(sign: bool) -> None:
    beta, size = 0.9, 3
    cohort = Cohort(DeMo(ratio=0.01, beta=beta, sign=sign), size, SHAPES)
    assert Chunks.of((128, 100)) == (128, 100, 64, 50)
    m = torch.zeros(size, 128, 100, dtype=torch.float64)
    for step in range(5):
        inputs = cohort.inputs(step)
        output = cohort.average(inputs)[0]["wide"].double()
        mean = torch.zeros(128, 100, dtype=torch.float64)
        for rank in range(size):
            m[rank] = beta * m[rank] + inputs[rank]["wide"]
            sent = largest(m[rank], 32)
            m[rank] -= sent
            mean += sent / size
            assert torch.allclose(momentum(cohort, rank).double(), m[rank], atol=1e-4)
        if sign:
            clear = mean.abs() > 1e-4
            assert torch.equal(output[clear], mean[clear].sign())
            assert bool(((output.abs() == 1) | (output == 0)).all())
        else:
            assert torch.allclose(output, mean, atol=1e-4)


def test_smooth_gradients_need_few_coefficients() -> None:
    """That is what the transform is for: one wave is one coefficient per chunk, not thousands of entries."""
    wave = torch.cos(torch.pi / 64 * (torch.arange(64) + 0.5) * 3)
    x = wave[:, None] * wave.repeat(2)
    cohort = Cohort("demo(ratio=0.0003, sign=False)", 2, {"wide": (64, 128)})
    out = cohort.average([{"wide": x}, {"wide": x}])[0]["wide"]
    assert torch.allclose(out, x, atol=1e-5)
    assert cohort.driver.meters[0].payload_bytes < 20


def test_what_was_not_sent_comes_later() -> None:
    """With beta = 1 and no sign, the sum of all results is the sum of all gradients, up to what is kept."""
    cohort = Cohort("demo(ratio=0.05, beta=1.0, sign=False)", 2, SHAPES)
    first, nothing = cohort.inputs(0), [{"wide": torch.zeros(128, 100)}] * 2
    total = cohort.average(first)[0]["wide"].clone()
    for _ in range(25):
        total += cohort.average(nothing)[0]["wide"]
    mean = (first[0]["wide"] + first[1]["wide"]) / 2
    assert (total - mean).norm() < 1e-4 * mean.norm()


def test_small_tensors_take_signed_steps_too() -> None:
    cohort = Cohort(DeMo(), 2, {"wide": (128, 100), "bias": (100,)}, dense_below=1024)
    inputs = cohort.inputs(0)
    out = cohort.average(inputs)[0]["bias"]
    assert set(out.unique().tolist()) <= {-1.0, 0.0, 1.0}
    assert out.count_nonzero() > 90


def test_the_payload_is_k_coefficients_of_every_chunk() -> None:
    size = 2
    for shape, k in (((128, 128), 4 * 40), ((130, 64), 3 * 28), ((64, 64), 40), ((5000,), 79)):
        cohort = Cohort("demo", size, {"wide": shape})
        cohort.average(cohort.inputs(0))
        total = Chunks.of(shape).total
        assert cohort.driver.meters[0].payload_bytes == DeMo().entry_bytes(total, k)
        assert cohort.sessions[0].payload_bytes() == DeMo().entry_bytes(total, k)


def test_it_trains_a_least_squares_problem_with_plain_sgd() -> None:
    """Signed steps with a falling rate come close to the common minimum."""
    rng = torch.Generator().manual_seed(0)
    target = torch.randn(64, 64, generator=rng)
    noise = [torch.randn(64, 64, generator=rng) for _ in range(4)]
    noise = [each - sum(noise) / 4 for each in noise]
    cohort = Cohort("demo(ratio=0.02, beta=0.9)", 4, {"wide": (64, 64)})
    w = torch.zeros(64, 64, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.03)
    for step in range(400):
        optimizer.param_groups[0]["lr"] = 0.03 * (1 - step / 400)
        gradients = [{"wide": w.detach() - target + 0.1 * each} for each in noise]
        w.grad = cohort.average(gradients)[0]["wide"]
        optimizer.step()
    assert (w.detach() - target).norm() < 0.05 * target.norm()


def test_the_reference_kernels_send_the_same_coefficients() -> None:
    with kernels.use_reference():
        other = Cohort("demo(sign=False)", 2, SHAPES).average(Cohort("demo", 2, SHAPES).inputs(0))[0]["wide"]
    here = Cohort("demo(sign=False)", 2, SHAPES)
    assert torch.allclose(here.average(here.inputs(0))[0]["wide"], other, atol=1e-4)


def test_wrong_options_are_refused() -> None:
    for options in (
        {"beta": 0.0},
        {"beta": 1.1},
        {"chunk": 0},
        {"chunk": 1000},
        {"sign": 1},
        {"feedback": False},
        {"scope": "model"},
    ):
        with pytest.raises(ConfigError):
            DeMo(**options)
    assert parse("demo(values=qsgd(bits=4), sign=False)").warning is None
