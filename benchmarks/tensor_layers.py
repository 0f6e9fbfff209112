"""Layers that ranks divide, gloo, one intra-op thread each: what do pages, hooks and Trainer cost over a plain loop?

Sides, in turns, on the same GPT with the same samples, every model state in RAM, for each size of a tensor group:
  ours     AngelPTMStrategy(tensor_parallel_size=...)
  loop     a plain PyTorch loop: with one rank sides/plain.py; with two, layers that are cut by hand, the autograd Functions
           of lightning_ptm.parallel between them, plain collectives, fused AdamW (sides/parts.py)
Ratio: the step, ours over the loop's. A turn lasts as long as its slowest rank. The CPU time of all ranks is printed beside:
it tells more on a machine that does other things.
"""

from __future__ import annotations

import argparse
from statistics import median

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
)
from gpt import SHAPES
from race import Race, Score, Side, speed_ratios

BATCH = {"tiny": 2, "25M": 2, "124M": 1}
LIMIT = 1.05


def sides(size: str, tensor: int, args: argparse.Namespace) -> list[Side]:
    """The contestants, with what each is asked to train."""
    options = base_options(SHAPES[size], batch=args.batch or BATCH[size])
    module = "parts" if tensor > 1 else "plain"
    groups = {"tensor_parallel_size": tensor} if tensor > 1 else {}
    return [
        ours(options, args, groups, devices=tensor),
        Side("loop", module, options, tensor, args.threads, environment=side_environment(args)),
    ]


def bars(what: str, scores: dict[str, Score]) -> list[Bar]:
    """The step, ours over the loop's: the median of the ratios of turns that were beside each other."""
    if not {"ours", "loop"} <= scores.keys():
        return []
    mine, theirs = scores["ours"], scores["loop"]
    ratios = speed_ratios(theirs, mine)
    print(f"{what}, step over the loop's in each repeat: {' '.join(f'{ratio:.3f}' for ratio in ratios)}")
    cpu_s = [median(turn.cpu_s / turn.steps for turn in score.turns) for score in (mine, theirs)]
    print(f"{what}, CPU time over the loop's: {cpu_s[0]:.3f} s over {cpu_s[1]:.3f} s, {cpu_s[0] / cpu_s[1]:.3f}")
    return [
        Bar(f"{what}, step over the loop's", mine.step_s, theirs.step_s, "s", median(ratios), LIMIT, at_least=False)
    ]


def main() -> None:
    """Race, print, and write what the command line asked for."""
    parser = argument_parser(__doc__)
    parser.add_argument("--sizes", default="25M,124M", help=f"by comma, of {', '.join(BATCH)}")
    parser.add_argument("--tensor", default="1,2", help="ranks of a tensor group, by comma")
    parser.add_argument("--batch", type=int, help=f"samples a step (default: {BATCH})")
    parser.set_defaults(threads=1)
    args = quicken(parser.parse_args())
    all_bars: list[Bar] = []
    all_scores: dict[str, Score] = {}
    for size in ["tiny"] if args.quick else args.sizes.split(","):
        for tensor in map(int, args.tensor.split(",")):
            print(f"GPT {size}, {SHAPES[size].numel:,} parameters, tensor {tensor}")
            with Race(chosen(sides(size, tensor, args), args)) as race:
                scores = race.run(repeats=args.repeats, steps=args.steps, warmup=args.warmup)
            show_scores(scores, tokens_per_step=(args.batch or BATCH[size]) * SHAPES[size].sequence)
            all_bars += bars(f"{size} tensor {tensor}", scores)
            all_scores |= {f"{size} tensor {tensor} {side}": score for side, score in scores.items()}
    publish("tensor_layers.py", args, all_bars, all_scores)


if __name__ == "__main__":
    main()
