"""One bit per entry, a magnitude per bucket and error feedback: `efsign` on a CPU, in few passes.

Codes, results and residuals have the bits of `Quantised.average` with a `DenseMemory`. But u = g + e is not
stored: it is summed where it is read, and e changes once, after the commit. The signs of u are not decoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from thinwire import kernels
from thinwire.core import Channel
from thinwire.methods.families.quantised import Parts, Quantised, padded


@dataclass(frozen=True)
class SignFeedback:
    """One step of one tensor."""

    codec: Quantised
    bucket: int
    error: torch.Tensor
    x: torch.Tensor
    out: torch.Tensor
    """May be x."""

    async def run(self, ch: Channel) -> None:
        """out = (1/W) sum Delta with Delta = (||u||_1 / n) sign(u) of every bucket; e = u - Delta."""
        n = self.x.numel()
        if self.codec.two_shot(n, ch.size, ch.link):
            await self._two_shots(self.codec.stretches(n, ch.size), ch)
            return
        share = max(8, -(-n // 8) * 8)
        own = kernels.feedback_signs(self.error, self.x, self.bucket, share)
        received = await ch.gather(own)
        if await ch.commit(self.codec.finite(received)):
            rounded = own[1].to(self.out.dtype).float()  # as the result is
            kernels.commit_signs(self.error, self.x, rounded, self.bucket, share)
        kernels.sign_means(*_sorted(received), self.bucket, n, self.out)

    async def _two_shots(self, stretches: Sequence[slice], ch: Channel) -> None:
        mine, share = stretches[ch.rank], max(8, -(-stretches[0].stop // 8) * 8)
        bits, means = kernels.feedback_signs(self.error, self.x, self.bucket, share)
        width, each = share // 8, -(-share // self.bucket)
        coded = [(bits[r * width :][:width], means[r * each :][:each]) for r in range(ch.size)]
        received = await ch.scatter(coded)
        others = [parts for rank, parts in enumerate(received) if rank != ch.rank]
        # A rank does not code its own share. Its u holds also what its second code lost in the last step.
        reduced, *again = kernels.signs_again(self.error[mine], self.x[mine], *_sorted(others), self.bucket)
        # Every code has the length of the longest stretch, so all ranks know the lengths.
        sent = [padded(part, longest.numel()) for part, longest in zip(again, coded[0], strict=True)]
        gathered = await ch.gather(sent)
        if await ch.commit(self.codec.finite(gathered)):
            self._subtract(slice(0, mine.start), means[: ch.rank * each], share)
            self._subtract(slice(mine.stop, None), means[(ch.rank + 1) * each :], share)
            # The owner of a stretch keeps what the second code lost.
            kernels.lost_by_signs(reduced, again[1], self.bucket, ch.size, self.error[mine])
        kernels.signs_joined(*_sorted(gathered), self.bucket, share, self.out)

    def _subtract(self, stretches: slice, means: torch.Tensor, share: int) -> None:
        """e = u - Delta in these stretches."""
        kernels.commit_signs(self.error[stretches], self.x[stretches], means, self.bucket, share)


def _sorted(received: Sequence[Parts]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """All bits, and all magnitudes."""
    return [bits for bits, _ in received], [magnitudes for _, magnitudes in received]
