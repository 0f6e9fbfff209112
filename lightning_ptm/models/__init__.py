"""Models for the main job and for benchmarks: ordinary LightningModules that know nothing of pages."""

from __future__ import annotations

from lightning_ptm.models.gpt import GPT

__all__ = ["GPT"]
