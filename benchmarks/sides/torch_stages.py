"""torch's own pipeline runtime: `PipelineStage` and `Schedule1F1B` on consecutive blocks, fused AdamW, fp32, gloo.

The first stage has the embeddings, the last one the norm and a head of its own: torch's stages share no weights, so the head
is not tied. Options: `shape`, `batch`, `micro_batches`, `seed`.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.gpt import GPT, GPTShape, adamw, batches, build
from benchmarks.race import Baton, take_turns


class Stage(nn.Module):
    """The blocks of one stage, with what precedes the first and follows the last."""

    def __init__(self, whole: GPT, stage: int, stages: int) -> None:
        super().__init__()
        count = len(whole.blocks) // stages
        self.tokens, self.positions = (whole.tokens, whole.positions) if stage == 0 else (None, None)
        self.blocks = whole.blocks[stage * count : (stage + 1) * count]
        self.norm, self.head = (whole.norm, whole.head) if stage == stages - 1 else (None, None)

    def forward(self, value: Tensor) -> Tensor:
        if self.tokens is not None and self.positions is not None:
            value = self.tokens(value) + self.positions(torch.arange(value.shape[1]))
        for block in self.blocks:
            value = block(value)
        if self.norm is not None and self.head is not None:
            value = self.head(self.norm(value))
        return value


def run(options: dict[str, Any], baton: Baton) -> None:
    """Takes part in the race until it is over."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo")
    try:
        _race(options, baton)
    finally:
        dist.destroy_process_group()


def _race(options: dict[str, Any], baton: Baton) -> None:
    rank, stages = dist.get_rank(), dist.get_world_size()
    shape = GPTShape(**options["shape"])
    model = build(shape, dtype=torch.float32, seed=options["seed"])
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    module = Stage(model, rank, stages)
    optimizer = adamw(module.parameters())
    schedule = Schedule1F1B(
        PipelineStage(module, rank, stages, torch.device("cpu")),
        n_microbatches=options["micro_batches"],
        loss_fn=lambda logits, targets: F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()),
    )
    data = batches(shape, batch=options["batch"], seed=options["seed"])

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        tokens, targets = next(data)
        losses: list[Tensor] = []
        if rank == stages - 1:
            schedule.step(target=targets, losses=losses)
        else:
            schedule.step(tokens)
        optimizer.step()
        return float(torch.stack(losses).mean()) if losses else 0.0

    take_turns(baton, step)
