"""Language models for examples and benchmarks: ordinary LightningModules that know nothing of pages."""

from __future__ import annotations

from lightning_ptm.models.gpt import GPT
from lightning_ptm.models.t5 import T5
from lightning_ptm.models.t5_moe import T5MoE

__all__ = ["GPT", "T5", "T5MoE"]
