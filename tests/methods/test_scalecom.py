"""ScaleCom: commutativity, the identity with 1/beta, reduction to top-k, one index set for all."""

import pytest
import torch

from tests.laws.cohort import Cohort, same_state, total
from thinwire import PayloadError, kernels
from thinwire.methods import ScaleCom, TopK

SHAPES = {"wide": (24, 37)}
N = 24 * 37


def test_commutativity() -> None:
    """Selecting and averaging commute: the output is the selection of the mean of what had piled up."""
    cohort, size = Cohort(ScaleCom(0.05), 5, SHAPES), 5
    piled_up = torch.zeros(24, 37, dtype=torch.float64)
    for step in range(3):
        inputs = cohort.inputs(step)
        piled_up += total(inputs)["wide"] / size
        output = cohort.average(inputs)[0]["wide"].double()
        chosen = output != 0
        assert int(chosen.sum()) == int(0.05 * N)
        assert torch.allclose(output[chosen], piled_up[chosen], atol=1e-5)
        piled_up[chosen] = 0


@pytest.mark.parametrize("method", [ScaleCom(0.1), ScaleCom(0.05, beta=0.3), ScaleCom(chunk=20, beta=0.1)])
def test_all_that_was_sent_and_memory_over_beta_are_all_gradients(method: ScaleCom) -> None:
    cohort, size = Cohort(method, 3, SHAPES), 3
    sent, given = torch.zeros(24, 37, dtype=torch.float64), torch.zeros(24, 37, dtype=torch.float64)
    for step in range(20):
        inputs = cohort.inputs(step)
        given += total(inputs)["wide"]
        sent += size * cohort.average(inputs)[0]["wide"].double()
    memory = sum(s.engine.states.entries()["wide"]["error"].double() for s in cohort.sessions).view(24, 37)
    assert torch.allclose(sent + memory / method.beta, given, atol=1e-3)
    if method.beta < 1:
        assert not torch.allclose(sent + memory, given, atol=1.0), "without 1/beta it fails"


def test_one_rank_with_beta_one_is_topk_with_error_feedback() -> None:
    scalecom, topk = Cohort(ScaleCom(0.1), 1, SHAPES), Cohort(TopK(ratio=0.1), 1, SHAPES)
    for step in range(5):
        inputs = scalecom.inputs(step)
        assert same_state(scalecom.average(inputs), topk.average(inputs))
        assert same_state(scalecom.residuals(), topk.residuals())


@pytest.mark.parametrize("chunk", [20, 300])
def test_one_rank_with_chunks_is_the_largest_of_each_chunk_with_error_feedback(chunk: int) -> None:
    cohort, e = Cohort(ScaleCom(chunk=chunk), 1, SHAPES), torch.zeros(N)
    for step in range(5):
        inputs = cohort.inputs(step)
        u = e + inputs[0]["wide"].view(-1)
        sent = kernels.chunk_argmax(u, chunk).long()
        e = u.clone()
        e[sent] = 0
        (output,) = cohort.average(inputs)
        assert torch.equal(output["wide"].view(-1), u - e)


@pytest.mark.parametrize("method", [ScaleCom(0.1), ScaleCom(chunk=20)])
def test_all_ranks_send_the_indices_that_the_leader_of_the_step_chose(method: ScaleCom) -> None:
    size, memory = 3, torch.zeros(3, N)
    cohort = Cohort(method, size, SHAPES)
    for step in range(7):
        inputs = cohort.inputs(step)
        g = torch.stack([one["wide"].view(-1) for one in inputs])
        chosen = method.code(N).choose(memory[step % size], g[step % size]).long()
        for output in cohort.average(inputs):
            assert torch.equal(output["wide"].view(-1).nonzero().view(-1), chosen)
        memory += g
        memory[:, chosen] = 0


@pytest.mark.parametrize("chunk", [2, 20, 256, 257, 300, 65536])
def test_exactly_one_index_per_chunk_comes_through_the_code(chunk: int) -> None:
    method, n = ScaleCom(chunk=chunk), 10_007
    rng = torch.Generator().manual_seed(chunk)
    indices = method.code(n).choose(torch.zeros(n), torch.randn(n, generator=rng))
    assert torch.equal(indices // chunk, torch.arange(-(-n // chunk), dtype=torch.int32))
    code = method.code(n).encode(indices)
    assert code.numel() == method.code(n).bytes
    assert torch.equal(method.code(n).decode(code), indices)


@pytest.mark.parametrize("chunk", [20, 300])
def test_a_code_that_leaves_its_chunk_or_the_tensor_is_refused(chunk: int) -> None:
    n = 605
    method = ScaleCom(chunk=chunk).code(n)
    code = method.encode(torch.arange(0, n, chunk, dtype=torch.int32))
    wrong = [code[:-2], torch.full_like(code, 255)]
    beyond = code.clone()
    beyond[-len(code) // method.k :][0] = 7  # the last chunk has five entries
    for bad in (*wrong, beyond):
        with pytest.raises(PayloadError):
            method.decode(bad)


def test_the_extra_bytes_go_round() -> None:
    """In W steps every rank has been the leader once, so all have handed over the same."""
    cohort = Cohort(ScaleCom(0.1), 4, SHAPES)
    for step in range(4):
        cohort.average(cohort.inputs(step))
    assert len({meter.payload_bytes for meter in cohort.driver.meters}) == 1
