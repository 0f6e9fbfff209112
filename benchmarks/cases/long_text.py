"""Cases of one long text under a memory limit: a training step whose activations are on disk, on a CPU.

Sides:
  ours   this project's GPT with AngelPTMStrategy, optimizer states and activations on disk, the loss in slices, and
         feed-forwards of 25M in slices of 1,024 tokens, more than "auto" chooses

A case has one step, which includes what only a first step does. Its limit counts the page cache, too; the figure is what
the process had resident. Attention to 131,072 tokens takes 6e13 operations
for each block, so that this step takes 40 minutes on two cores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.case import GIB, Case, Figure, Scores, Setup
from benchmarks.race import Side

LIMITS_GIB = {"25M": 4, "124M": 6}
IN_SLICES, TOKENS_OF_SLICE = ("25M",), 1024
LENGTHS = {"25M": (16384, 32768, 131072), "124M": (8192, 16384, 32768)}


def _sides(size: str, tokens: int) -> Callable[[Setup], Sequence[Side]]:
    def make(setup: Setup) -> Sequence[Side]:
        shape = setup.shape(size)
        length = shape.sequence if setup.quick else tokens
        sizes = {
            "width": shape.width,
            "layers": shape.layers,
            "heads": shape.heads,
            "vocab_size": shape.vocabulary,
        }
        settings = {
            "disk_path": str(setup.folder),
            "offload_parameters": "device",
            "offload_optimizer": "disk",
            "offload_activations": "disk",
            "slices": {"*.feed_forward": ("tokens", max(1, length // TOKENS_OF_SLICE))} if size in IN_SLICES else 1,
            "tuning": {"freed_memory": "return", "restore_weights": False},
        }
        options = {
            "model": {**sizes, "sequence_length": length, "tie_head": True, "meta": True},
            "data": {"sequence_length": length, "batch_size": 1},
            "settings": {**settings, **setup.settings},
            "precision": "bf16-mixed",
        }
        group = setup.memory_cap(LIMITS_GIB[size] * GIB, "ours")
        return [Side("ours", "configured", options, threads=setup.cores, memory_group=group)]

    return make


def _figures(size: str) -> Callable[[Scores], Sequence[Figure]]:
    def read(scores: Scores) -> Sequence[Figure]:
        if "ours" not in scores:
            return []
        mine, limit = scores["ours"], LIMITS_GIB[size]
        resident = mine.peak_rss_bytes / GIB
        return [
            Figure("peak memory over the limit", resident, "GiB", limit, resident / limit, 1.0, at_least=False),
            Figure("step", mine.step_s, "s"),
            Figure("written to disk", mine.turns[0].written_bytes / GIB, "GiB"),
        ]

    return read


CASES = tuple(
    Case(
        id=f"long_text-{size}-{tokens}",
        what=f"GPT {size}, one text of {tokens:,} tokens, bf16-mixed, {LIMITS_GIB[size]} GiB of memory in all",
        sides=_sides(size, tokens),
        figures=_figures(size),
        tokens_per_step=tokens,
        repeats=1,
        steps=1,
        warmup=0,
        limit_s=4 * 3600.0,
    )
    for size, lengths in LENGTHS.items()
    for tokens in lengths
)
