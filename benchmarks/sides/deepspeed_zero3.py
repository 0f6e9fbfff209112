"""DeepSpeed ZeRO-3 with its optimizer on NVMe or in RAM, one rank, on its CPU accelerator or on a GPU.

Runs in DeepSpeed's own environment, so it imports nothing but torch, DeepSpeed and the shared model. The
environment variables that DeepSpeed needs before it is imported are set by benchmarks/deepspeed.py.

Options: `shape`, `batch`, `seed`; `device` "cpu" or "cuda"; `folder` (on the disk), None: the optimizer is in RAM;
`pipeline` true overlaps reads, update and writes of small sub-groups, false updates the whole model in one (DeepSpeed's
default).
"""

from __future__ import annotations

import os
import socket
from typing import Any

import deepspeed
import torch

from benchmarks.gpt import LEARNING_RATE, GPTShape, batches, build
from benchmarks.race import Baton, take_turns
from benchmarks.sides.devices import own_device, peaks

SUB_GROUP_NUMEL = 20_000_000
BUFFERS_PIPELINED = 16  # three states and a gradient of the group before, this one and the next, and room: 4 asserts
BUFFERS = 4


def configuration(options: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed's configuration; what is not named stays at its default."""
    pipeline = options.get("pipeline", False)
    return {
        "train_micro_batch_size_per_gpu": options["batch"],
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": 0.01}},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": SUB_GROUP_NUMEL if pipeline else 10**9,
            "offload_optimizer": {"device": "cpu", "pin_memory": True}
            if options["folder"] is None
            else {
                "device": "nvme",
                "nvme_path": options["folder"],
                "pin_memory": False,
                "buffer_count": BUFFERS_PIPELINED if pipeline else BUFFERS,
                "pipeline_read": pipeline,
                "pipeline_write": pipeline,
            },
        },
        "aio": {
            "block_size": 2**20,
            "queue_depth": 16,
            "thread_count": 1,
            "single_submit": False,
            "overlap_events": True,
        },
    }


def run(options: dict[str, Any], baton: Baton) -> None:
    """Takes part in the race until it is over."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    kind = options.get("device", "cpu")
    device = own_device(kind)
    deepspeed.init_distributed("gloo" if kind == "cpu" else "nccl")
    shape = GPTShape(**options["shape"])
    model = build(shape, dtype=torch.float32, seed=options["seed"], recompute=options.get("recompute", False))
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=configuration(options), dist_init_required=False
    )
    data = batches(shape, batch=options["batch"], seed=options["seed"], device=device)

    def step() -> float:
        loss = engine(*next(data))
        engine.backward(loss)
        engine.step()
        return float(loss.item())

    take_turns(baton, step, lambda: peaks(kind))
    torch.distributed.destroy_process_group()
