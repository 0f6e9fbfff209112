"""Tensor parallelism: layers whose parameters ranks divide, over the same pages as everything else."""

from lightning_ptm.parallel.rules import Columns, Entering, Part, Partial, Rows, Rule, Summed, Vocabulary

__all__ = ["Columns", "Entering", "Part", "Partial", "Rows", "Rule", "Summed", "Vocabulary"]
