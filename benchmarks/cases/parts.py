"""Cases of single parts: callbacks, experts, and the threads that read and write blocks.

Sides of `callbacks`: `ours`, one run with all callbacks (sides/callbacks.py).
Sides of `experts`, on the same tokens, forward and backward of one layer in bf16 (sides/moe.py):
  ours   8 experts, each token computed by one, with room for all
  dense  one feed-forward of an expert's size: as many floating-point operations
Sides of `io_uring` (sides/block_io.py): `threads` and `ring`, alone and beside a thread that computes.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from benchmarks.case import MIB, SEED, Case, Figure, Scores, Setup, speed
from benchmarks.race import Side, SkipCase

EXPERT_TOKENS = 4096


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
