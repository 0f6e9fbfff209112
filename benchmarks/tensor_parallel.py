"""Ranks that divide layers, gloo, one intra-op thread each: the strategy against torch's FSDP2 with parallelize_module.

Sides, in turns, on the same GPT with the same samples for each group of ranks:
  ours     AngelPTMStrategy(tensor_parallel_size=...)
  fsdp2    `parallelize_module` (DTensor) on each block, then `fully_shard`, bf16 policy, fused AdamW (sides/fsdp2.py)
Ratio: tokens/s of all groups together, ours over the other. A turn lasts as long as its slowest rank. Embedding and head are
whole on both sides.
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

BATCH = {"tiny": 2, "25M": 2, "124M": 1}
GROUPS = {"2": (2, 2), "2x2": (4, 2)}
"""By name: all ranks, and those of a group."""
LIMITS = {"fsdp2": 1.0}


def sides(size: str, ranks: int, tensor: int, args: argparse.Namespace) -> list[Side]:
    """The contestants, with what each is asked to train."""
    options = base_options(SHAPES[size], batch=args.batch or BATCH[size])
    theirs = {**options, "reduce_dtype": "bfloat16", "reshard_after_forward": True, "tensor": tensor}
    return [
        ours(options, args, {"tensor_parallel_size": tensor}, devices=ranks),
        Side("fsdp2", "fsdp2", theirs, ranks, 1, environment=side_environment(args)),
    ]


def main() -> None:
    """Race, print, and write what the command line asked for."""
    parser = argument_parser(__doc__)
    parser.add_argument("--sizes", default="25M", help=f"by comma, of {', '.join(BATCH)}")
    parser.add_argument("--groups", default="2,2x2", help=f"by comma, of {', '.join(GROUPS)}")
    parser.add_argument("--batch", type=int, help=f"samples a step and group (default: {BATCH})")
    args = quicken(parser.parse_args())
    args.threads = 1
    all_bars: list[Bar] = []
    all_scores: dict[str, Score] = {}
    for size in ["tiny"] if args.quick else args.sizes.split(","):
        for name in args.groups.split(","):
            ranks, tensor = GROUPS[name]
            print(f"GPT {size}, {SHAPES[size].numel:,} parameters, {ranks} ranks in groups of {tensor}")
            with Race(chosen(sides(size, ranks, tensor, args), args)) as race:
                scores = race.run(repeats=args.repeats, steps=args.steps, warmup=args.warmup)
            tokens_per_step = ranks // tensor * (args.batch or BATCH[size]) * SHAPES[size].sequence
            show_scores(scores, tokens_per_step=tokens_per_step)
            all_bars += speed_bars(f"{size} in groups, {name}", scores, LIMITS, tokens_per_step)
            all_scores |= {f"{size} {name} {side}": score for side, score in scores.items()}
    publish("tensor_parallel.py", args, all_bars, all_scores)


if __name__ == "__main__":
    main()
