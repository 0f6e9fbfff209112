"""FSDP2: `fully_shard` on each block and on the root, the bf16 policy, fused AdamW on the fp32 shards, gloo or NCCL.

Options: `shape`, `batch` (of each rank), `seed`, `device` ("cpu" or "cuda"); `reshard_after_forward` false keeps the
gathered parameters until the backward pass has used them; `reduce_dtype` is the dtype of the reduce-scatter, by name.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.gpt import GPTShape, adamw, batches, build
from benchmarks.race import Baton, take_turns
from benchmarks.sides.devices import own_device, peaks, start_processes


def run(options: dict[str, Any], baton: Baton) -> None:
    """Takes part in the race until it is over."""
    start_processes(options.get("device", "cpu"))
    try:
        _race(options, baton)
    finally:
        dist.destroy_process_group()


def _race(options: dict[str, Any], baton: Baton) -> None:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    shape = GPTShape(**options["shape"])
    kind = options.get("device", "cpu")
    device = own_device(kind)
    recompute = options.get("recompute", False)
    model = build(shape, dtype=torch.float32, seed=options["seed"], recompute=recompute, device=device)
    mesh = init_device_mesh(kind, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=getattr(torch, options["reduce_dtype"]))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=options["reshard_after_forward"])
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=options["reshard_after_forward"])
    optimizer = adamw(model.parameters())
    data = batches(shape, batch=options["batch"], seed=options["seed"] + dist.get_rank(), device=device)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = model(*next(data))
        loss.backward()
        optimizer.step()
        return float(loss.item())

    take_turns(baton, step, lambda: peaks(kind))
