"""Muon for matrices and AdamW for the rest, masters on disk: is a step as long as its arithmetic, or its bytes, demand?

Sides, in turns, for each way in which users have the two optimizers (`--optimizers`):
  ours     AngelPTMStrategy, masters on disk, compute parameters in RAM
  loop     a plain PyTorch loop in RAM: the same compute, then the same optimizer on all parameters (sides/plain.py)
  disk     O_DIRECT alone: what such a step reads and writes, 8 bytes each of an element that Muon moves (master, momentum)
           and 12 of one that AdamW moves, as this disk likes it best (sides/disk.py)
Ratio: step time of ours over max(loop, disk). CPU time is printed beside: it tells more on a machine that does other things.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median

import torch
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
from disk_masters import disk_side
from gpt import GPT, SHAPES, GPTShape
from race import Race, Score, Side
from sides.optimizers import is_matrix

LIMIT = 1.15
WAYS = {"one": "muon", "two": "muon_and_adamw"}
"""One class that has both, or two optimizers and manual optimization."""
MUON_BYTES = 8
ADAMW_BYTES = 12


def state_bytes(shape: GPTShape) -> int:
    """Of master parameters and moments, which a step reads and writes once each."""
    with torch.device("meta"):
        named = list(GPT(shape).named_parameters())
    return sum((MUON_BYTES if is_matrix(name, each) else ADAMW_BYTES) * each.numel() for name, each in named)


def sides(shape: GPTShape, way: str, args: argparse.Namespace, folder: Path) -> list[Side]:
    """The contestants, with what each is asked to train."""
    options = {**base_options(shape, batch=args.batch), "optimizer": WAYS[way]}
    settings = {"page_size": f"{args.page_size}MiB", "disk_path": str(folder)}
    homes = {"offload_parameters": "device", "offload_optimizer": "disk"}
    size = state_bytes(shape)
    return [
        ours(options, args, settings | homes),
        Side("loop", "plain", options, threads=args.threads, environment=side_environment(args)),
        disk_side(args, folder, step_bytes=2 * size, file_bytes=size),
    ]


def bars(what: str, shape: GPTShape, scores: dict[str, Score]) -> list[Bar]:
    """The bar of step time, when all sides took part."""
    if not {"ours", "loop", "disk"} <= scores.keys():
        return []
    mine, loop = scores["ours"], scores["loop"]
    # The disk moves whole blocks, at small sizes other bytes than a step demands: what counts is its speed.
    demanded = 2 * state_bytes(shape)
    disk_s = scores["disk"].step_s * demanded / scores["disk"].traffic_bytes
    floor_s = max(loop.step_s, disk_s)
    cpu_s = [median(turn.cpu_s / turn.steps for turn in score.turns) for score in (mine, loop)]
    print(f"{what}, CPU time over the loop's: {cpu_s[0]:.3f} s over {cpu_s[1]:.3f} s, {cpu_s[0] / cpu_s[1]:.3f}")
    print(f"{what}: ours moved {mine.traffic_bytes / demanded:.3f} x what its states demand (as the kernel counts)")
    print(f"{what}: the disk alone takes {disk_s:.3f} s for that demand, the loop {loop.step_s:.3f} s")
    title = f"{what}, masters on disk, step over max(compute and arithmetic, disk)"
    return [Bar(title, mine.step_s, floor_s, "s", mine.step_s / floor_s, LIMIT, at_least=False)]


def main() -> None:
    """Race, print, and write what the command line asked for."""
    parser = argument_parser(__doc__, disk=True)
    parser.add_argument("--size", default="124M", choices=tuple(SHAPES))
    parser.add_argument("--optimizers", default="one,two", help=f"by comma, of {', '.join(WAYS)}")
    parser.add_argument("--batch", type=int, default=1, help="samples a step")
    parser.add_argument("--sequence", type=int, default=256, help="tokens of a sample")
    args = quicken(parser.parse_args())
    size = "tiny" if args.quick else args.size
    shape = SHAPES[size].with_sequence(args.sequence)
    all_bars: list[Bar] = []
    all_scores: dict[str, Score] = {}
    for way in args.optimizers.split(","):
        what = f"{size} Muon and AdamW, {'one class' if way == 'one' else 'two optimizers'}"
        print(f"{what}: {shape.numel:,} parameters, {state_bytes(shape) / 1e9:.2f} GB of states, batch {args.batch}")
        with disk_folder(args.disk_path) as folder, Race(chosen(sides(shape, way, args, folder), args)) as race:
            scores = race.run(repeats=args.repeats, steps=args.steps, warmup=args.warmup)
        show_scores(scores, tokens_per_step=args.batch * args.sequence)
        all_bars += bars(what, shape, scores)
        all_scores |= {f"{way} {side}": score for side, score in scores.items()}
    publish("muon.py", args, all_bars, all_scores)


if __name__ == "__main__":
    main()
