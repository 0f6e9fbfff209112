"""Tensor parallelism: layers whose parameters are sharded over the ranks of a tensor group and stored in pages."""

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
