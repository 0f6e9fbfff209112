"""Cases of single parts: callbacks, experts, a head and its loss, and the threads that read and write blocks.

Sides of `callbacks`: `ours`, one run with all callbacks (sides/callbacks.py).
Sides of `experts`, on the same tokens, forward and backward of one layer in bf16 (sides/moe.py):
  ours   8 experts, each token computed by one, with room for all
  dense  one feed-forward of an expert's size: as many floating-point operations
Sides of `sliced_loss`, a head of GPT-2's sizes and its loss, forward and backward (sides/sliced_loss.py):
  ours   in slices of tokens
  whole  with whole logits
Sides of `token_slices`, a feed-forward of one long text, forward and backward (sides/token_slices.py):
  ours   in as many slices of tokens as "auto" chooses
  N      in N slices
  whole  not in slices, so nothing is recomputed
Sides of `io_uring` (sides/block_io.py): `threads` and `ring`, alone and beside a thread that computes.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence

from benchmarks.case import MIB, SEED, Case, Figure, Scores, Setup, speed, step
from benchmarks.race import Side, SkipCase

EXPERT_TOKENS = 4096
LOSS_TOKENS, VOCABULARY = 2048, 50304
TEXT_TOKENS, TEXT_WIDTH, COUNTS = 16384, 512, (2, 4, 8, 16, 32, 64, 128)


def _callbacks(setup: Setup) -> Sequence[Side]:
    options = {"steps": 15 if setup.quick else 61, "threads": setup.cores}
    return [Side("ours", "callbacks", options, threads=1)]


def _callbacks_figures(scores: Scores) -> Sequence[Figure]:
    if "ours" not in scores:
        return []
    found = scores["ours"].turns[0].extra
    return [
        Figure(name, cost["ms"], "ms", cost["step_ms"], cost["ms"] / cost["step_ms"], 0.01, at_least=False)
        for name, cost in found.items()
    ]


def _experts(setup: Setup) -> Sequence[Side]:
    width, tokens = (64, 256) if setup.quick else (512, EXPERT_TOKENS)
    options = {"width": width, "inner": 4 * width, "tokens": tokens, "seed": SEED}
    return [
        Side(name, "moe", {**options, "experts": experts}, threads=setup.cores)
        for name, experts in (("ours", 8), ("dense", 0))
    ]


def _experts_figures(scores: Scores) -> Sequence[Figure]:
    return speed(scores, "dense", tokens=EXPERT_TOKENS, limit=0.8)


def _sliced_loss(dtype: str) -> Callable[[Setup], Sequence[Side]]:
    def make(setup: Setup) -> Sequence[Side]:
        tokens, vocabulary = (256, 500) if setup.quick else (LOSS_TOKENS, VOCABULARY)
        options = {"tokens": tokens, "width": 768, "vocabulary": vocabulary, "dtype": dtype, "seed": SEED}
        return [
            Side(name, "sliced_loss", {**options, "at_once": at_once}, threads=setup.cores)
            for name, at_once in (("ours", 64 if setup.quick else None), ("whole", tokens))
        ]

    return make


def _sliced_loss_figures(scores: Scores) -> Sequence[Figure]:
    figures = step(scores, "whole", limit=1.05)
    if figures:
        ours, whole = (scores[side].peak_rss_bytes / MIB for side in ("ours", "whole"))
        logits = 4 * LOSS_TOKENS * VOCABULARY / MIB
        name = "fall of peak memory over whole logits in fp32"
        figures.append(Figure(name, whole - ours, "MiB", logits, (whole - ours) / logits, 0.8))
    return figures


def _token_slices(setup: Setup) -> Sequence[Side]:
    tokens = 64 if setup.quick else TEXT_TOKENS
    options = {"tokens": tokens, "width": TEXT_WIDTH, "inner": 4 * TEXT_WIDTH, "seed": SEED}
    counts = {"ours": None, **{str(count): count for count in COUNTS}, "whole": 1}
    return [
        Side(name, "token_slices", {**options, "slices": count}, threads=setup.cores) for name, count in counts.items()
    ]


def _token_slices_figures(scores: Scores) -> Sequence[Figure]:
    counts = [str(count) for count in COUNTS if str(count) in scores]
    if "ours" not in scores or not counts:
        return []
    fastest = min(counts, key=lambda name: scores[name].step_s)
    found = []
    for name, title, limit in (
        (fastest, "step over the fastest number", 1.03),
        ("whole", "step over whole", None),
    ):
        if name in scores:
            mine, other = scores["ours"].step_s, scores[name].step_s
            found.append(Figure(title, mine, "s", other, mine / other, limit, at_least=False))
    return found


def _io_uring(setup: Setup) -> Sequence[Side]:
    if importlib.util.find_spec("liburing") is None:
        raise SkipCase("io_uring needs its binding: pip install liburing")
    options = {"folder": str(setup.folder), "depth": 4, "block_bytes": 4 * MIB, "blocks": 16 if setup.quick else 1000}
    return [
        Side(f"{how}{' beside compute' if compute else ''}", "block_io", {**options, "how": how, "compute": compute})
        for compute in (False, True)
        for how in ("threads", "ring")
    ]


def _io_uring_figures(scores: Scores) -> Sequence[Figure]:
    found = []
    rows = (
        ("", "bytes_per_s", "B/s", "bytes/s over threads", True),
        ("", "cpu_s_per_gb", "s/GB", "CPU time over threads", False),
        (" beside compute", "bytes_per_s", "B/s", "bytes/s over threads, beside compute", True),
        (" beside compute", "products_per_s", "/s", "products/s over threads, beside compute", True),
    )
    for suffix, number, unit, name, at_least in rows:
        if {f"ring{suffix}", f"threads{suffix}"} <= scores.keys():
            ring, threads = (scores[f"{how}{suffix}"].extra(number) for how in ("ring", "threads"))
            limit = 1.05 if at_least else 1 / 1.05
            found.append(Figure(name, ring, unit, threads, ring / threads, limit, at_least))
    return found


CASES = (
    Case(
        id="callbacks",
        what="main job (configs/gpt.yaml), CPU time of the hooks of each callback, over that of a step",
        sides=_callbacks,
        figures=_callbacks_figures,
        tokens_per_step=16 * 256,
        repeats=1,
        steps=1,
        warmup=0,
    ),
    Case(
        id="experts",
        what="8 experts of a Switch layer of width 512, forward and backward",
        sides=_experts,
        figures=_experts_figures,
        tokens_per_step=EXPERT_TOKENS,
        repeats=7,
    ),
    *(
        Case(
            id=f"sliced_loss-{dtype}",
            what=f"head of width 768, vocabulary of {VOCABULARY:,}, {LOSS_TOKENS:,} tokens, {dtype}, forward and backward",
            sides=_sliced_loss(dtype),
            figures=_sliced_loss_figures,
            repeats=5,
            steps=1,
            warmup=1,
        )
        for dtype in ("float32", "bfloat16")
    ),
    Case(
        id=f"token_slices-{TEXT_WIDTH}",
        what=f"feed-forward of width {TEXT_WIDTH}, {TEXT_TOKENS:,} tokens, bf16, in numbers of slices of tokens",
        sides=_token_slices,
        figures=_token_slices_figures,
        repeats=9,
        steps=1,
        warmup=1,
    ),
    Case(
        id="io_uring",
        what="blocks of 4 MiB, 4 in flight, read and written by io_uring",
        sides=_io_uring,
        figures=_io_uring_figures,
        repeats=7,
        steps=1,
        warmup=1,
    ),
)
