"""FSDP2: `fully_shard` on each block and on the root, the bf16 policy, fused AdamW on the fp32 shards, gloo or NCCL.

Options: `shape`, `batch` (of each rank), `seed`, `device` ("cpu" or "cuda"); `reshard_after_forward` false keeps the
gathered parameters until the backward pass has used them; `reduce_dtype` is the dtype of the reduce-scatter, by name. With
`tensor` above 1 blocks are cut by torch's `parallelize_module` over groups of so many ranks, and sharded over the others:
packed queries, keys and values in one piece, which computes something else than the whole model, as fast.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from gpt import GPTShape, batches, build
from race import Baton, take_turns
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from sides.devices import own_device, peaks, start_processes
from sides.optimizers import LEARNING_RATE


def run(options: dict[str, Any], baton: Baton) -> None:
    """Take part in the race until it is over."""
    start_processes(options.get("device", "cpu"))
    try:
        _race(options, baton)
    finally:
        dist.destroy_process_group()


def _cut(model: Any, mesh: DeviceMesh) -> None:
    plan = {
        "attention.qkv": ColwiseParallel(),
        "attention.out": RowwiseParallel(),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
    }
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
        block.attention.heads //= mesh.size()


def _race(options: dict[str, Any], baton: Baton) -> None:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    shape = GPTShape(**options["shape"])
    kind = options.get("device", "cpu")
    device = own_device(kind)
    recompute = options.get("recompute", False)
    model = build(shape, dtype=torch.float32, seed=options["seed"], recompute=recompute, device=device)
    tensor = options.get("tensor", 1)
    both = init_device_mesh(kind, (dist.get_world_size() // tensor, tensor), mesh_dim_names=("data", "tensor"))
    mesh = both["data"]
    if tensor > 1:
        _cut(model, both["tensor"])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=getattr(torch, options["reduce_dtype"]))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=options["reshard_after_forward"])
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=options["reshard_after_forward"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    data = batches(shape, batch=options["batch"], seed=options["seed"] + dist.get_rank() // tensor, device=device)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = model(*next(data))
        loss.backward()
        optimizer.step()
        return float(loss.item())

    take_turns(baton, step, lambda: peaks(kind))
