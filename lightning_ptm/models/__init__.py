"""Language models for examples and benchmarks, and their loss: ordinary LightningModules that know nothing of pages."""

from __future__ import annotations

from lightning_ptm.models.gpt import GPT
from lightning_ptm.models.t5 import T5
from lightning_ptm.models.t5_moe import T5MoE
from lightning_ptm.parallel.pending_logits import slice_loss
from lightning_ptm.parallel.sliced_loss import sliced_cross_entropy

__all__ = ["GPT", "T5", "T5MoE", "slice_loss", "sliced_cross_entropy"]
