"""Sharded tensors (DTensor), as FSDP2 makes them: a rank works on its own shard of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch

_MARK = "[shard "


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether the tensor is spread over several ranks. By its interface: importing DTensor takes a second."""
    return hasattr(tensor, "to_local")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard, a view of its memory; a tensor that is not sharded is its own."""
    if not is_sharded(tensor):
        return tensor
    return cast(torch.Tensor, cast(Any, tensor.detach()).to_local())


def is_first_shard(tensor: torch.Tensor) -> bool:
    """Whether this rank is the one of all shards that speaks for them."""
    return not is_sharded(tensor) or not any(cast(Any, tensor).device_mesh.get_coordinate())


def named_shards(parameters: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The parameters by name and shard: "head.weight[shard 0 of 2]". State belongs to a shard."""
    return {name + _shard_of(parameter): parameter for name, parameter in parameters}


def parameter_name(name: str) -> str:
    """The name without the shard."""
    return name.partition(_MARK)[0]


def local_state(state: object) -> Any:
    """The same nested state, with this rank's shard in place of every sharded tensor."""
    if isinstance(state, Mapping):
        return {key: local_state(value) for key, value in cast("Mapping[Any, object]", state).items()}
    if isinstance(state, list | tuple):
        values = [local_state(value) for value in cast("list[object]", state)]
        return tuple(values) if isinstance(state, tuple) else values
    return local(state) if isinstance(state, torch.Tensor) else state


def sharded_like(shard: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A tensor that is sharded as `parameter` is, with this shard here; the shard itself if that is not."""
    if not is_sharded(parameter):
        return shard
    from torch.distributed.tensor import DTensor

    whole = cast(DTensor, parameter.detach())
    return DTensor.from_local(
        shard,
        whole.device_mesh,
        whole.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def _shard_of(parameter: torch.Tensor) -> str:
    if not is_sharded(parameter):
        return ""
    mesh = cast(Any, parameter).device_mesh
    place = ",".join(map(str, cast("list[int]", mesh.get_coordinate())))
    return f"{_MARK}{place} of {','.join(map(str, cast('tuple[int, ...]', mesh.shape)))}]"
