"""FSDP2: two replicas of a sharded model; the gradients between the replicas are compressed.

torchrun --standalone --nproc-per-node 4 examples/fsdp.py
"""

import torch
import torch.distributed as dist
from ddp_before import data
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import thinwire

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
for layer in model[::2]:
    fully_shard(layer, mesh=mesh["shard"])
fully_shard(model, mesh=mesh["shard"])
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
replicas = mesh["replicate"].get_group()
session = thinwire.attach(model, "topk(ratio=0.01)", optimizer=optimizer, process_group=replicas)

points, labels = data()
rng = torch.Generator().manual_seed(1 + dist.get_rank())
for _ in range(60):
    batch = torch.randint(len(points), (32,), generator=rng)
    optimizer.zero_grad()
    cross_entropy(model(points[batch]), labels[batch]).backward()
    optimizer.step()

accuracy = (model(points).argmax(1) == labels).float().mean()
if dist.get_rank() == 0:
    print(f"accuracy {accuracy:.3f} after {session.meter.steps} steps")
    print(f"{session.meter.sent_bytes / session.meter.steps:,.0f} bytes sent per step to the other replica")
dist.destroy_process_group()
