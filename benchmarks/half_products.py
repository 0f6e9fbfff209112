"""Mixed bf16 precision on CPUs with and without 16-bit arithmetic: what does it cost over fp32, and over torch's kernels?

Sides, in turns, on the same GPT at sequence 256, one rank, everything in RAM:
  ours     AngelPTMStrategy, precision="bf16-mixed", products in fp32 (matmul_precision="fp32"), on any CPU
  single   Lightning's own single-device strategy, precision="32-true"
and, where the CPU has 16-bit arithmetic,
  auto     AngelPTMStrategy, precision="bf16-mixed", as it chooses by itself
  native   the same with matmul_precision="native"
Ratio: seconds of a step, ours over single, and auto over native.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch
from common import Bar, argument_parser, base_options, chosen, ours, publish, quicken, show_scores, side_environment
from gpt import SHAPES, GPTShape
from race import Race, Score, Side

from lightning_ptm.trainer.matmul_precision import has_arithmetic

MAIN_JOB = "main job"
SIZES = {**SHAPES, MAIN_JOB: GPTShape(layers=4, width=192, heads=6, vocabulary=256)}
BATCH = {"tiny": 2, MAIN_JOB: 16, "25M": 4, "124M": 2}
OVER_FP32, OVER_NATIVE = 1.25, 1.02


def sides(size: str, args: argparse.Namespace) -> list[Side]:
    """The contestants, with what each is asked to train."""
    options = base_options(SIZES[size], batch=args.batch or BATCH[size])
    single = {**options, "precision": "32-true"}
    found = [
        ours(options, args, {"tuning": {"matmul_precision": "fp32"}}),
        Side("single", "trainer", single, threads=args.threads, environment=side_environment(args)),
    ]
    if has_arithmetic(torch.bfloat16):
        found += [
            replace(ours(options, args, {"tuning": {"matmul_precision": name}}), name=name)
            for name in ("auto", "native")
        ]
    return found


def bars(size: str, scores: dict[str, Score]) -> list[Bar]:
    """Seconds of a step over another side's."""
    found = []
    for mine, other, limit in (("ours", "single", OVER_FP32), ("auto", "native", OVER_NATIVE)):
        if mine in scores and other in scores:
            ours_s, other_s = scores[mine].step_s, scores[other].step_s
            what = f"{size}, bf16-mixed {mine}: step over {other}"
            found.append(Bar(what, ours_s, other_s, "s", ours_s / other_s, limit, at_least=False))
    return found


def main() -> None:
    """Race, print, and write what the command line asked for."""
    parser = argument_parser(__doc__)
    parser.add_argument("--sizes", default=f"{MAIN_JOB},25M,124M", help=f"by comma, of {', '.join(BATCH)}")
    parser.add_argument("--batch", type=int, help=f"samples a step (default: {BATCH})")
    args = quicken(parser.parse_args())
    all_bars: list[Bar] = []
    all_scores: dict[str, Score] = {}
    for size in ["tiny"] if args.quick else args.sizes.split(","):
        print(f"GPT {size}, {SIZES[size].numel:,} parameters")
        with Race(chosen(sides(size, args), args)) as race:
            scores = race.run(repeats=args.repeats, steps=args.steps, warmup=args.warmup)
        show_scores(scores, tokens_per_step=(args.batch or BATCH[size]) * SIZES[size].sequence)
        all_bars += bars(size, scores)
        all_scores |= {f"{size} {name}": score for name, score in scores.items()}
    publish("half_products.py", args, all_bars, all_scores)


if __name__ == "__main__":
    main()
