"""Cases with every model state in RAM on one rank: what does the strategy cost when nothing has to move?

Sides, on the same GPT at sequence 256:
  ours      AngelPTMStrategy, every model state in RAM
  single    Lightning's own single-device strategy
  plain     a plain PyTorch loop: bf16 compute copy, fp32 masters, fused AdamW (sides/plain.py)
  returned  ours with Tuning(freed_memory="return")
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from benchmarks.case import Case, Figure, Scores, Setup, of_gpt, peak, speed, step
from benchmarks.race import Side

BATCH = {"main job": 16, "25M": 4, "124M": 2}
SEQUENCE = 256


def _sides(size: str, batch: int, names: Sequence[str], precision: str) -> Callable[[Setup], Sequence[Side]]:
    def make(setup: Setup) -> Sequence[Side]:
        options = {**of_gpt(setup.shape(size), batch=batch), "precision": precision}
        made = {
            "ours": setup.ours(options),
            "single": setup.single_device(options),
            "plain": Side("plain", "plain", options, threads=setup.cores),
            "returned": setup.ours(options, {"tuning": {"freed_memory": "return"}}, name="returned"),
        }
        return [made[name] for name in names]

    return make


def _figures(tokens: int) -> Callable[[Scores], Sequence[Figure]]:
    def read(scores: Scores) -> Sequence[Figure]:
        return [
            *speed(scores, "single", tokens=tokens, limit=1.0),
            *speed(scores, "plain", tokens=tokens, limit=1.0),
            *peak(scores, "single", limit=1.1),
            *step(scores, "returned", limit=1.0),
            *peak(scores, "single", ours="returned", name="peak memory over single, freed memory returned"),
            *_faults(scores),
        ]

    return read


def _faults(scores: Scores) -> list[Figure]:
    if not {"ours", "returned"} <= scores.keys():
        return []
    kept, returned = (
        float(sum(turn.page_faults for turn in scores[name].turns)) / sum(turn.steps for turn in scores[name].turns)
        for name in ("ours", "returned")
    )
    return [Figure("page faults of a step over those with freed memory returned", kept, "", returned, kept / returned)]


def _case(
    name: str,
    size: str,
    names: Sequence[str],
    *,
    batch: int | None = None,
    precision: str = "bf16-mixed",
    limit_s: float,
) -> Case:
    batch = batch or BATCH[size]
    tokens = batch * SEQUENCE
    what = f"GPT {size}, everything in RAM, {precision}"
    return Case(
        id=name,
        what=what,
        sides=_sides(size, batch, names, precision),
        figures=_figures(tokens),
        tokens_per_step=tokens,
        repeats=4,
        steps=3,
        warmup=1,
        limit_s=limit_s,
    )


# --- Matrix products of 16-bit tensors -----------------------------------------------------------------------------------


def _products_sides(size: str) -> Callable[[Setup], Sequence[Side]]:
    def make(setup: Setup) -> Sequence[Side]:
        from lightning_ptm.trainer.matmul_precision import has_arithmetic

        options = of_gpt(setup.shape(size), batch=BATCH[size])
        sides = [
            setup.ours(options, {"tuning": {"matmul_precision": "fp32"}}),
            setup.single_device({**options, "precision": "32-true"}),
        ]
        if has_arithmetic(torch.bfloat16):
            sides += [
                setup.ours(options, {"tuning": {"matmul_precision": name}}, name=name) for name in ("auto", "native")
            ]
        return sides

    return make


def _products_figures(scores: Scores) -> Sequence[Figure]:
    return [
        *step(scores, "single", limit=1.25, name="bf16-mixed step over single device's 32-true step"),
        *step(scores, "native", ours="auto", limit=1.02, name="step as chosen over step with torch's kernels"),
    ]


CASES = (
    _case("in_memory-25M", "25M", ("ours", "single", "plain"), limit_s=90.0),
    _case("in_memory-124M", "124M", ("ours", "single"), limit_s=60.0),
    _case("in_memory-124M-plain", "124M", ("ours", "plain"), limit_s=100.0),
    _case("freed_memory-124M", "124M", ("ours", "single", "returned"), limit_s=150.0),
    _case("freed_memory-124M-batch8", "124M", ("ours", "single", "returned"), batch=8, limit_s=400.0),
    _case("freed_memory-124M-fp32", "124M", ("ours", "single"), precision="32-true", limit_s=300.0),
    *(
        Case(
            id=f"matmul_precision-{size.replace(' ', '_')}",
            what=f"GPT {size}, everything in RAM, matrix products of 16-bit tensors in fp32",
            sides=_products_sides(size),
            figures=_products_figures,
            tokens_per_step=BATCH[size] * SEQUENCE,
        )
        for size in BATCH
    ),
)
