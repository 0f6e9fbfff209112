"""This version against another one: what a change costs in step time and in memory, on one machine in one run.

    python benchmarks/versions.py --against ../before/.venv/bin/python

Sides, in turns, of each case: `ours`, of the environment that runs the script, and `before`, the same settings in the
environment of the other interpreter, which has another version installed (`pip install -e` of another checkout). The
cases are the sides of this project's strategy of in_memory.py, two_ranks.py, disk_masters.py, lock_free.py and memory.py.
Ratios: step time, of `memory` the peak resident memory, ours over before.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import disk_masters
import in_memory
import lock_free
import memory
import two_ranks
from common import MIB, Bar, argument_parser, disk_folder, publish, quicken, show_scores
from gpt import SHAPES
from race import Race, Score, Side

LIMIT = 1.03
TOKENS = 64
"""A sample's of cases in which the disk dominates."""

Sides = Callable[[str, argparse.Namespace, Path], Sequence[Side]]


def _few_tokens(sides: Callable[..., list[Side]]) -> Sides:
    return lambda size, args, folder: sides(SHAPES[size].with_sequence(TOKENS), args, folder)


CASES: dict[str, tuple[Sides, str, str]] = {
    "in_memory": (lambda size, args, folder: in_memory.sides(size, args), "ours", "25M,124M"),
    "two_ranks": (lambda size, args, folder: two_ranks.sides(size, args), "ours", "25M"),
    "disk_masters": (_few_tokens(disk_masters.sides), "ours", "124M"),
    "lock_free": (_few_tokens(lock_free.sides), "ours", "124M"),
    "memory": (memory.sides, "ours", "124M"),
}
"""What makes a case's sides, which of them is raced against itself, and at which sizes."""


def versions(case: str, size: str, args: argparse.Namespace, folder: Path) -> list[Side]:
    """One side of the case, in both environments."""
    make, name, _ = CASES[case]
    here = next(side for side in make(size, args, folder) if side.name == name)
    return [replace(here, name="ours"), replace(here, name="before", python=args.against)]


def bar(case: str, size: str, scores: dict[str, Score]) -> Bar:
    """What the case is compared by."""
    ours, before = scores["ours"], scores["before"]
    if case == "memory":
        peaks = (ours.peak_rss_bytes / MIB, before.peak_rss_bytes / MIB)
        return Bar(f"{case} {size}, peak over before", *peaks, "MiB", peaks[0] / peaks[1], LIMIT, at_least=False)
    ratio = ours.step_s / before.step_s
    return Bar(f"{case} {size}, step over before", ours.step_s, before.step_s, "s", ratio, LIMIT, at_least=False)


def main() -> None:
    """Race, print, and write what the command line asked for."""
    parser = argument_parser(__doc__, disk=True)
    parser.add_argument("--against", required=True, help="the Python of an environment with the other version")
    parser.add_argument("--cases", default=",".join(CASES), help="by comma (default: all)")
    parser.add_argument("--sizes", help="by comma (default: each case's own)")
    parser.set_defaults(batch=None, recompute="all", lock_free={"max_staleness": 16}, reduce_dtype="bfloat16")
    args = quicken(parser.parse_args())
    if unknown := set(args.cases.split(",")) - CASES.keys():
        parser.error(f"no case is called {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    all_bars: list[Bar] = []
    all_scores: dict[str, Score] = {}
    threads = args.threads
    for case in args.cases.split(","):
        sizes = "tiny" if args.quick else args.sizes or CASES[case][2]
        args.threads = 1 if case == "two_ranks" else threads
        args.batch = 1 if case in ("disk_masters", "lock_free") else None
        for size in sizes.split(","):
            print(f"{case}, GPT {size}, {SHAPES[size].numel:,} parameters")
            with disk_folder(args.disk_path) as folder, Race(versions(case, size, args, folder)) as race:
                scores = race.run(repeats=args.repeats, steps=args.steps, warmup=args.warmup)
            show_scores(scores, tokens_per_step=0)
            all_bars.append(bar(case, size, scores))
            all_scores |= {f"{case} {size} {name}": score for name, score in scores.items()}
    publish("versions.py", args, all_bars, all_scores)


if __name__ == "__main__":
    main()
