"""What does each callback cost a training step?

Sides, in turns, on the same GPT with the same logger (TensorBoard, each 10th step); masters are in RAM unless `--set` says:
  none              no callback
  <a callback>      that one alone, as it is without arguments
  recording         PerfettoTrace over all batches, which it is not made for
  all               all of them
Ratio: tokens/s, the side's over that of none. GradNormMonitor's is the price of the norm, and of updates that wait for it.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from common import (
    Bar,
    argument_parser,
    base_options,
    chosen,
    disk_folder,
    ours,
    publish,
    quicken,
    show_scores,
    side_environment,
)
from gpt import SHAPES
from race import Race, Score, Side, speed_ratios

BATCH = {"tiny": 2, "25M": 4, "124M": 2}
LIMIT = 0.99
NAMES = (
    "GradNormMonitor",
    "MemoryTimeline",
    "PageTracer",
    "PerfettoTrace",
    "PlanPrinter",
    "StalenessMonitor",
    "Throughput",
    "TransferMonitor",
)


def sides(size: str, args: argparse.Namespace, folder: Path) -> list[Side]:
    """The contestants, with the callbacks of each."""
    plain = ours(base_options(SHAPES[size], batch=args.batch or BATCH[size]), args)
    lists = {
        "none": {},
        **{name: {name: {}} for name in NAMES},
        "recording": {"PerfettoTrace": {"start": 0, "count": 1_000_000}},
        "all": {name: {} for name in NAMES},
    }
    return [
        replace(
            plain,
            name=name,
            options={**plain.options, "callbacks": callbacks, "logs": str(folder / name)},
            environment=side_environment(args),
        )
        for name, callbacks in lists.items()
    ]


def bars(size: str, scores: dict[str, Score], tokens_per_step: int) -> list[Bar]:
    """One bar for each side beside `none`."""
    found = []
    for name, score in scores.items():
        if name == "none" or "none" not in scores:
            continue
        pairs = speed_ratios(score, scores["none"])
        print(f"{size}, {name} over none in each repeat: {' '.join(f'{ratio:.3f}' for ratio in pairs)}")
        mine, none = (tokens_per_step / each.step_s for each in (score, scores["none"]))
        found.append(Bar(f"{size}, {name}", mine, none, "tokens/s", mine / none, LIMIT, at_least=True))
    return found


def main() -> None:
    """Race, print, and write what the command line asked for."""
    parser = argument_parser(__doc__)
    parser.add_argument("--size", default="25M", help=f"one of {', '.join(BATCH)}")
    parser.add_argument("--batch", type=int, help=f"samples a step (default: {BATCH})")
    args = quicken(parser.parse_args())
    size = "tiny" if args.quick else args.size
    with disk_folder(None) as folder, Race(chosen(sides(size, args, folder), args)) as race:
        scores = race.run(
            repeats=args.repeats, steps=args.steps, warmup=max(args.warmup, 6)
        )  # recorded: batches 2 to 4
    tokens_per_step = (args.batch or BATCH[size]) * SHAPES[size].sequence
    show_scores(scores, tokens_per_step=tokens_per_step)
    publish("callbacks.py", args, bars(size, scores, tokens_per_step), scores)


if __name__ == "__main__":
    main()
