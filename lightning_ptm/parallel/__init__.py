"""Tensor parallelism: layers whose parameters ranks divide, over the same pages as everything else."""

from lightning_ptm.parallel.rules import Columns, Partial, Rows, Rule, Summed, Vocabulary

__all__ = ["Columns", "Partial", "Rows", "Rule", "Summed", "Vocabulary"]
