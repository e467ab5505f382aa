"""Signs of residual + gradient in stretches, in plain torch."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from thinwire.kernels.reference.quantisation import buckets
from thinwire.kernels.reference.sign import sign_means, sign_pack_means


def scales_in(numel: int, bucket: int, share: int) -> int:
    """How many scales there are for so many entries."""
    whole, rest = divmod(numel, share)
    return whole * buckets(share, bucket) + buckets(rest, bucket)


def _stretches(x: Tensor, share: int) -> tuple[Tensor, ...]:
    return cast("tuple[Tensor, ...]", x.split(share))


def feedback_signs(residual: Tensor, grad: Tensor, bucket: int, share: int) -> tuple[Tensor, Tensor]:
    coded = [sign_pack_means(part, bucket) for part in _stretches(residual + grad.float(), share)]
    return torch.cat([bits for bits, _ in coded]), torch.cat([means for _, means in coded])


def commit_signs(residual: Tensor, grad: Tensor, scales: Tensor, bucket: int, share: int) -> None:
    residual += grad.float()
    each = buckets(share, bucket)
    for number, part in enumerate(_stretches(residual, share)):
        mine = scales[each * number :][: buckets(part.numel(), bucket)]
        lost_by_signs(part, mine, bucket, 1.0, part)


def signs_again(
    residual: Tensor, grad: Tensor, packed: Sequence[Tensor], scales: Sequence[Tensor], bucket: int
) -> tuple[Tensor, Tensor, Tensor]:
    others = len(packed)
    mean = (residual + grad.float()) / (others + 1)
    decoded = torch.empty_like(mean)
    sign_means(packed, scales, bucket, mean.numel(), decoded)
    mean += decoded.mul_(others / (others + 1))
    return mean, *sign_pack_means(mean, bucket)


def lost_by_signs(x: Tensor, scales: Tensor, bucket: int, factor: float, out: Tensor) -> None:
    each = scales.repeat_interleave(bucket)[: x.numel()]
    out.copy_((x - torch.where(x >= 0, each, -each)) * factor)


def signs_joined(
    packed: Sequence[Tensor], scales: Sequence[Tensor], bucket: int, share: int, out: Tensor
) -> None:
    longest = min(share, out.numel())
    for codes, scale, part in zip(packed, scales, _stretches(out, share), strict=False):
        whole = torch.empty(longest, device=out.device)
        sign_means([codes], [scale], bucket, longest, whole)
        part.copy_(whole[: part.numel()])
