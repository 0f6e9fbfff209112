"""Everything in RAM, one rank: what does the strategy cost when nothing has to move?

Sides, in turns, on the same GPT at sequence 256 and mixed bf16 precision:
  ours     AngelPTMStrategy, every model state in RAM
  plain    a plain PyTorch loop: bf16 compute copy, fp32 masters, fused AdamW (sides/plain.py)
  single   Lightning's own single-device strategy, precision="bf16-mixed"
Ratio: tokens/s, ours over the other.
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

BATCH = {"tiny": 2, "25M": 4, "124M": 2}
LIMITS = {"plain": 1.0, "single": 1.0}


def sides(size: str, args: argparse.Namespace) -> list[Side]:
    """The contestants, with what each is asked to train."""
    options = base_options(SHAPES[size], batch=args.batch or BATCH[size])
    environment = side_environment(args)
    single = {**options, "precision": "bf16-mixed"}
    return [
        ours(options, args),
        Side("plain", "plain", options, threads=args.threads, environment=environment),
        Side("single", "trainer", single, threads=args.threads, environment=environment),
    ]


def main() -> None:
    """Race, print, and write what the command line asked for."""
    parser = argument_parser(__doc__)
    parser.add_argument("--sizes", default="25M,124M", help=f"by comma, of {', '.join(BATCH)}")
    parser.add_argument("--batch", type=int, help=f"samples a step (default: {BATCH})")
    args = quicken(parser.parse_args())
    all_bars: list[Bar] = []
    all_scores: dict[str, Score] = {}
    for size in ["tiny"] if args.quick else args.sizes.split(","):
        print(f"GPT {size}, {SHAPES[size].numel:,} parameters")
        with Race(chosen(sides(size, args), args)) as race:
            scores = race.run(repeats=args.repeats, steps=args.steps, warmup=args.warmup)
        tokens_per_step = (args.batch or BATCH[size]) * SHAPES[size].sequence
        show_scores(scores, tokens_per_step=tokens_per_step)
        all_bars += speed_bars(f"{size} in RAM", scores, LIMITS, tokens_per_step)
        all_scores |= {f"{size} {name}": score for name, score in scores.items()}
    publish("in_memory.py", args, all_bars, all_scores)


if __name__ == "__main__":
    main()
