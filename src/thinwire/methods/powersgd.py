"""Low-rank approximation by one step of the power method."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from thinwire.core import Channel, Exchange
from thinwire.methods.dense import exact_mean
from thinwire.methods.families.feedback import DenseMemory
from thinwire.methods.families.low_rank import (
    Factors,
    LowRank,
    first_factor,
    matrix,
    orthogonalise,
    times,
    write_product,
)


@dataclass(frozen=True)
class PowerSGD(LowRank):
    """Sends two thin matrices whose product approximates the mean gradient.

        M_i = g_i + e_i as a matrix;  P = orthogonalise(mean_i M_i Q)
        Q_i = M_i^T P;  Q = mean_i Q_i;  out = P Q^T;  e_i = M_i - P Q_i^T
        `alternate`: P_i = M_i orthogonalise(Q), out = mean_i P_i Q^T; in the next step
            Q_i = M_i^T orthogonalise(P), out = P mean_i Q_i^T; and so on

    Vectors, and matrices that two factors would not make smaller, are sent dense.

    Args:
        rank: the number of columns of the factors.
        warm_start: begin with Q of the last step instead of a new random one.
        feedback: add what is not sent to the next gradient.
        start_after: the number of dense steps before the first compressed one.
        alternate: send one factor per step, from the last value of the other: one round, half the bytes. The
            longer factor is sent in even steps, the shorter one in odd steps.

    Example:
        >>> from thinwire.methods import PowerSGD
        >>> str(PowerSGD(rank=2, alternate=True))
        'powersgd(rank=2, alternate=True)'

    Differences from the paper: the residual is M_i - P Q_i^T, as in the authors' library; M_i - P Q^T has the
    same sum over the ranks and more energy. QR instead of Gram-Schmidt.
    """

    name = "powersgd"
    family = "approximate"
    use_when = """The link is very slow and the model has wide matrices: two small means per step, whose bytes
    hardly grow with the number of workers."""
    avoid_when = """You train with AdamW: low-rank gradients with error feedback end worse than `dense` today.
    Or the latency is long: two rounds follow one another (`alternate=True` needs one)."""
    formula = "4 * min(rank, rows, cols) * (rows + cols)"
    rounds_per_step = "2 (the two factors), or 1 with alternate=True"
    compute = "three thin matrix products and a QR decomposition per matrix"
    reference = """Vogels, Karimireddy and Jaggi, "PowerSGD", 2019; `alternate`: Zhang, Zhang, Shi, Chu and
    Li, "Evaluation and optimization of gradient compression for distributed deep learning" (ACP-SGD), 2023"""

    async def run(self, x: torch.Tensor, out: torch.Tensor, state: Factors, ch: Channel) -> None:
        if ch.step < self.start_after:
            await exact_mean(x, out, ch)
            return
        n, m = x.numel() // state.q.shape[0], state.q.shape[0]
        # All tensors send their longer factors in the same steps: `payload_bytes` is that of such a step.
        turned = self.alternate and (n >= m) == (ch.step % 2 == 0)  # sending P is the same with M^T
        p, q = (state.q, state.p) if turned else (state.p, state.q)
        start = first_factor(p if self.alternate else q, ch, warm=self.warm_start, begun=state.begun)
        finite: bool | torch.Tensor = True
        with DenseMemory(state.error, x, out) as memory:
            M = matrix(memory.u.float(), m, turned)  # M = g + e
            if not self.alternate:
                start = await ch.mean(times(M, start))  # P = mean M Q
                finite = start.isfinite().all()
                if x.device.type != "cpu":  # the host does not wait for the answer: the commit has it
                    start = torch.where(finite, start, 0.0)
                elif not finite:  # the same on all ranks: all skip the second round
                    await ch.commit(False)
                    return
            P = orthogonalise(start)
            mine = times(M.T, P)  # Q_i = M^T P
            Q = await ch.mean(mine)  # Q = mean Q_i
            if await ch.commit(Q.isfinite().all() & finite):
                q.copy_(Q)
                state.begun = True
                e = memory.commit()
                if self.feedback:
                    matrix(e, m, turned).addmm_(P, mine.T, alpha=-1)  # e = M - P Q_i^T
        write_product(P, Q, matrix(out, m, turned))  # out = P Q^T

    def exact(self) -> Exchange:
        return replace(self, rank=2**31)  # factors are never smaller, so all tensors are sent dense
