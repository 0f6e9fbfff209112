"""A mixture of experts on one rank: what do routing, sorting and smaller matrices cost?

Sides, in turns, on the same tokens (forward and backward of one layer in bf16, no optimizer):
  ours     8 experts, each token computed by one, none without room
  dense    one feed-forward of an expert's size: as many floating-point operations
Ratio: tokens/s, ours over dense.
"""

from __future__ import annotations

import argparse

from common import SEED, argument_parser, chosen, publish, quicken, show_scores, side_environment, speed_bars
from race import Race, Side

LIMITS = {"dense": 0.8}


def sides(args: argparse.Namespace) -> list[Side]:
    """The contestants, with what each is asked to compute."""
    options = {"width": args.width, "inner": 4 * args.width, "tokens": args.tokens, "jitter": args.jitter, "seed": SEED}
    environment = side_environment(args)
    return [
        Side(name, "moe", {**options, "experts": experts}, threads=args.threads, environment=environment)
        for name, experts in (("ours", args.experts), ("dense", 0))
    ]


def main() -> None:
    """Race, print, and write what the command line asked for."""
    parser = argument_parser(__doc__)
    parser.add_argument("--width", type=int, default=512, help="elements of a token; a feed-forward is 4 times as wide")
    parser.add_argument("--tokens", type=int, default=4096, help="of a step")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument(
        "--jitter", type=float, default=0.0, help="noise on the router's input; one core draws it on a CPU"
    )
    args = quicken(parser.parse_args())
    if args.quick:
        args.width, args.tokens = 64, 256
    with Race(chosen(sides(args), args)) as race:
        scores = race.run(repeats=args.repeats, steps=args.steps, warmup=args.warmup)
    show_scores(scores, tokens_per_step=args.tokens)
    bars = speed_bars(f"{args.experts} experts of {args.width}", scores, LIMITS, args.tokens)
    publish("moe.py", args, bars, scores)


if __name__ == "__main__":
    main()
