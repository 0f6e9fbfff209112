"""A plain PyTorch loop on ranks that divide the tokens of each text, with the autograd Functions of
`lightning_ptm.parallel.context_attention` over plain collectives of gloo. Everything in fp32.

Each rank has the whole model and updates all of it; gradients are averaged by one all-reduce of all of them in a row.

Options: `shape`, `batch`, `seed`; `way`: the setting `context_parallel`.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpt import Attention, GPTShape, adamw, batches, build
from benchmarks.race import Baton, take_turns


def run(options: dict[str, Any], baton: Baton) -> None:
    """Takes part in the race until it is over."""
    from lightning_ptm.memory.backend import CpuBackend
    from lightning_ptm.parallel.context import ContextParallel
    from lightning_ptm.parallel.exchange import RankGroup

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo")
    try:
        context = ContextParallel(RankGroup(dist.group.WORLD, CpuBackend()), options["way"])
        shape = GPTShape(**options["shape"])
        model = build(shape, dtype=torch.float32, seed=options["seed"])
        for block in model.blocks:
            block.attention = DividedAttention(block.attention, context)  # type: ignore[arg-type, assignment]
        data = batches(shape, batch=options["batch"], seed=options["seed"])
        positions = context.own_positions(shape.sequence // context.group.size)
        parameters = list(model.parameters())
        optimizer = adamw(parameters)

        def step() -> float:
            tokens, targets = (context.part(each) for each in next(data))
            optimizer.zero_grad()
            loss: Tensor = model(tokens, targets, positions)
            loss.backward()
            gradients = [each.grad for each in parameters if each.grad is not None]
            row = torch.cat([each.flatten() for each in gradients])
            dist.all_reduce(row)
            row /= context.group.size
            for gradient, summed in zip(gradients, row.split([each.numel() for each in gradients]), strict=True):
                gradient.copy_(summed.view_as(gradient))
            optimizer.step()
            return loss.item()

        take_turns(baton, step)
    finally:
        dist.destroy_process_group()


class DividedAttention(torch.nn.Module):
    """The attention of a block, of this rank's tokens.

    Args:
        whole: the attention of whole texts, whose layers it takes.
        context: `ContextParallel`: who has the other tokens.
    """

    def __init__(self, whole: Attention, context: Any) -> None:
        super().__init__()
        self.context, self.heads = context, whole.heads
        self.qkv, self.out = whole.qkv, whole.out

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        query, key, value = self.qkv(x).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = self.context.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, tokens, -1))
        return out
