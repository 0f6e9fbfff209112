"""The plain PyTorch loop of `plain.py` on ranks that divide the layers of blocks by hand: weights are cut here, forwards are
written out, with the autograd Functions of `lightning_ptm.parallel` between them, over plain collectives of gloo.

What no rank divides (embeddings, norms, the head) every rank has whole: its gradients are the same on all, so nothing is
reduced, and each rank updates all of it.

Options: those of `plain.py` that are `shape`, `batch`, `seed`.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpt import Block, GPTShape, batches, build
from benchmarks.race import Baton, take_turns
from benchmarks.sides.plain import updating


def run(options: dict[str, Any], baton: Baton) -> None:
    """Takes part in the race until it is over."""
    from lightning_ptm.memory.backend import CpuBackend
    from lightning_ptm.parallel.exchange import RankGroup

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo")
    try:
        group = RankGroup(dist.group.WORLD, CpuBackend())
        shape = GPTShape(**options["shape"])
        model = build(shape, dtype=torch.bfloat16, seed=options["seed"])
        model.blocks = nn.ModuleList(PartOfBlock(block, group) for block in model.blocks)  # type: ignore[arg-type]
        data = batches(shape, batch=options["batch"], seed=options["seed"])
        take_turns(baton, updating(model, data))
    finally:
        dist.destroy_process_group()


class PartOfBlock(nn.Module):
    """What a rank computes of a block: its heads, and its part of the wide layer.

    Args:
        whole: a block.
        group: `RankGroup`: who has the other parts.
    """

    def __init__(self, whole: Block, group: Any) -> None:
        super().__init__()
        self.group, self.heads = group, whole.attention.heads // group.size
        self.norm_1, self.norm_2 = whole.norm_1, whole.norm_2
        self.qkv = self._of_outputs(whole.attention.qkv, packed=3)
        self.up = self._of_outputs(whole.up)
        self.out, self.out_bias = self._of_inputs(whole.attention.out), whole.attention.out.bias
        self.down, self.down_bias = self._of_inputs(whole.down), whole.down.bias

    def _of_outputs(self, layer: nn.Linear, packed: int = 1) -> nn.Linear:
        for name, value in list(layer.named_parameters()):
            rows = value.detach().unflatten(0, (packed, self.group.size, -1))[:, self.group.index]
            setattr(layer, name, nn.Parameter(rows.flatten(0, 1).clone()))
        return layer

    def _of_inputs(self, layer: nn.Linear) -> nn.Parameter:
        return nn.Parameter(layer.weight.detach().chunk(self.group.size, 1)[self.group.index].clone())

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, _ = x.shape
        qkv = self.qkv(self.group.enter(self.norm_1(x))).view(batch, sequence, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(batch, sequence, -1)
        x = x + self.group.add_up(F.linear(mixed, self.out)) + self.out_bias
        wide = F.gelu(self.up(self.group.enter(self.norm_2(x))), approximate="tanh")
        out: Tensor = x + self.group.add_up(F.linear(wide, self.down)) + self.down_bias
        return out
