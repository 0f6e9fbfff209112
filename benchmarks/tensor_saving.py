"""Sharded checkpoints of layers that ranks divide: as fast as one rank's?

Sides, in turns, each writing a checkpoint of weights and optimizer states with nothing else going on (sides/saver.py):
  one      one rank
  data     two ranks that share the pages, which cuts no parameter by columns
  tensor   two ranks of one tensor group: the weights whose inputs are divided are cut by columns
  behind   the same with `async_save`, until the checkpoint is there
and the same four with master states on disk. A turn lasts as long as its slowest rank; CPU seconds are of all its ranks.
Ratios: bytes a second of `tensor` over those of `one`; CPU seconds of `behind` over those of `tensor`.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from statistics import median

from common import (
    Bar,
    argument_parser,
    base_options,
    disk_folder,
    ours,
    publish,
    quicken,
    show_scores,
)
from gpt import SHAPES
from race import Race, Score, Side

LIMIT = 0.8
MOST_CPU = 2.0
RANKS = {"one": (1, 1), "data": (2, 1), "tensor": (2, 2), "behind": (2, 2)}
"""By name: all ranks, and those of a tensor group."""


def sides(size: str, where: str, args: argparse.Namespace, folder: Path) -> list[Side]:
    """The contestants that have their master states there."""
    options = base_options(SHAPES[size], batch=1)
    settings = {"page_size": f"{args.page_size}MiB", "checkpoints": {"state_dict_type": "sharded"}}
    if where == "on_disk":
        settings |= {"disk_path": str(folder), "offload_optimizer": "disk"}
    made = []
    for name, (ranks, tensor) in RANKS.items():
        if args.sides and name not in args.sides.split(","):
            continue
        place = folder / name
        place.mkdir()
        groups = {"tensor_parallel_size": tensor} if tensor > 1 else {}
        groups |= {"checkpoints": {"state_dict_type": "sharded", "async_save": True}} if name == "behind" else {}
        mine = {**options, "meta": True, "folder": str(place)}
        side = ours(mine, args, {**settings, **groups}, devices=ranks)
        made.append(replace(side, name=name, module="saver"))
    return made


def bars(what: str, scores: dict[str, Score]) -> list[Bar]:
    """The rate of a group's saves over one rank's, whose files have the same bytes, and the work of those behind training."""
    made = []
    if {"one", "tensor"} <= scores.keys():
        size_bytes = scores["one"].turns[0].extra["saved_bytes"]
        rates = [size_bytes / scores[name].step_s / 1e9 for name in ("tensor", "one")]
        ratio = rates[0] / rates[1]
        made.append(Bar(f"{what} sharded save, bytes/s over one rank's", *rates, "GB/s", ratio, LIMIT, True))
    if {"tensor", "behind"} <= scores.keys():
        cpu_s = [median(turn.cpu_s / turn.steps for turn in scores[name].turns) for name in ("behind", "tensor")]
        title = f"{what} sharded save behind training, CPU seconds over one that training waits for"
        made.append(Bar(title, *cpu_s, "s", cpu_s[0] / cpu_s[1], MOST_CPU, False))
    return made


def main() -> None:
    """Race, print, and write what the command line asked for."""
    parser = argument_parser(__doc__, disk=True)
    parser.add_argument("--size", default="124M", choices=tuple(SHAPES))
    parser.add_argument("--where", default="in_ram,on_disk", help="of master states, by comma")
    parser.set_defaults(repeats=7, threads=1)
    args = quicken(parser.parse_args())
    size = "tiny" if args.quick else args.size
    all_bars: list[Bar] = []
    all_scores: dict[str, Score] = {}
    for where in args.where.split(","):
        with disk_folder(args.disk_path) as folder, Race(sides(size, where, args, folder)) as race:
            scores = race.run(repeats=args.repeats, steps=1, warmup=1)
        show_scores(scores, tokens_per_step=0)
        all_bars += bars(f"{size} {where} tensor 2", scores)
        all_scores |= {f"{where} {side}": score for side, score in scores.items()}
    publish("tensor_saving.py", args, all_bars, all_scores)


if __name__ == "__main__":
    main()
