"""Two gloo ranks on one machine, one intra-op thread each: the strategy against FSDP2.

Sides, in turns, on the same GPT with the same samples on each rank:
  ours         AngelPTMStrategy, devices=2
  fsdp2        `fully_shard` on each block, bf16 policy, fused AdamW, defaults otherwise (sides/fsdp2.py)
  fsdp2-keep   the same with reshard_after_forward=False: no second all-gather, all gathered parameters kept
Ratio: tokens/s of both ranks together, ours over the other. A turn lasts as long as its slower rank.
"""

from __future__ import annotations

import argparse

from common import (
    Bar,
    argument_parser,
    base_options,
    chosen,
    ours,
    publish,
    quicken,
    show_scores,
    side_environment,
    speed_bars,
)
from gpt import SHAPES
from race import Race, Score, Side

RANKS = 2
BATCH = {"tiny": 2, "25M": 2, "124M": 1}
LIMITS = {"fsdp2": 1.15, "fsdp2-keep": 1.0}


def sides(size: str, args: argparse.Namespace) -> list[Side]:
    """The contestants, with what each is asked to train."""
    options = base_options(SHAPES[size], batch=args.batch or BATCH[size])
    environment = side_environment(args)
    fsdp2 = {**options, "reduce_dtype": args.reduce_dtype}
    return [
        ours(options, args, devices=RANKS),
        Side("fsdp2", "fsdp2", {**fsdp2, "reshard_after_forward": True}, RANKS, 1, environment=environment),
        Side("fsdp2-keep", "fsdp2", {**fsdp2, "reshard_after_forward": False}, RANKS, 1, environment=environment),
    ]


def main() -> None:
    """Race, print, and write what the command line asked for."""
    parser = argument_parser(__doc__)
    parser.add_argument("--sizes", default="25M,124M", help=f"by comma, of {', '.join(BATCH)}")
    parser.add_argument("--batch", type=int, help=f"samples a step and rank (default: {BATCH})")
    parser.add_argument("--reduce-dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of FSDP2's policy")
    args = quicken(parser.parse_args())
    args.threads = 1
    all_bars: list[Bar] = []
    all_scores: dict[str, Score] = {}
    for size in ["tiny"] if args.quick else args.sizes.split(","):
        print(f"GPT {size}, {SHAPES[size].numel:,} parameters, {RANKS} ranks")
        with Race(chosen(sides(size, args), args)) as race:
            scores = race.run(repeats=args.repeats, steps=args.steps, warmup=args.warmup)
        tokens_per_step = RANKS * (args.batch or BATCH[size]) * SHAPES[size].sequence
        show_scores(scores, tokens_per_step=tokens_per_step)
        all_bars += speed_bars(f"{size} on {RANKS} ranks", scores, LIMITS, tokens_per_step)
        all_scores |= {f"{size} {name}": score for name, score in scores.items()}
    publish("two_ranks.py", args, all_bars, all_scores)


if __name__ == "__main__":
    main()
