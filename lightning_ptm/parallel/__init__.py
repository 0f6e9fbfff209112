"""Tensor parallelism: layers whose parameters ranks divide, over the same pages as everything else."""

from lightning_ptm.parallel.rules import (
    ColwiseParallel,
    Entering,
    Part,
    Partial,
    RowwiseParallel,
    Rule,
    Summed,
    VocabParallel,
)

__all__ = ["ColwiseParallel", "Entering", "Part", "Partial", "RowwiseParallel", "Rule", "Summed", "VocabParallel"]
