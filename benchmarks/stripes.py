"""Several disk paths: does the updates' stream get as many times faster as there are disks?

Sides, in turns: the updater alone (sides/stream.py), AdamW over master states that are striped over 1, 2 and 4 paths. Each
path is a disk of `--mb-per-s`, reads and writes together: the real disk slowed down (slow_disk.py), so that one disk can
stand for several; what they add up to has to stay below what the real one and the processor can do.
Ratio: bytes a second of n paths over n times those of one.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median

from common import MIB, Bar, argument_parser, chosen, disk_folder, publish, quicken, side_environment
from gpt import SHAPES
from race import Race, Side

LIMIT = 0.95
PATHS = (1, 2, 4)


def main() -> None:
    """Race, print, and write what the command line asked for."""
    parser = argument_parser(__doc__, disk=True)
    parser.add_argument("--size", default="124M", choices=tuple(SHAPES))
    parser.add_argument("--mb-per-s", type=float, default=500.0, help="bandwidth of each disk")
    parser.set_defaults(repeats=3, steps=3, warmup=1)
    args = quicken(parser.parse_args())
    size = "tiny" if args.quick else args.size
    with disk_folder(args.disk_path) as folder:
        sides = [_side(SHAPES[size].numel, count, args, folder) for count in PATHS]
        with Race(chosen(sides, args)) as race:
            scores = race.run(repeats=args.repeats, steps=args.steps, warmup=args.warmup)
    speeds = {
        name: median(turn.extra["page_bytes"] / turn.seconds for turn in score.turns) for name, score in scores.items()
    }
    one = speeds.get(_name(1), 0.0)
    bars = [
        Bar(
            f"{size} updates' stream, {count} disks of {args.mb_per_s:.0f} MB/s over {count} times one",
            speeds[_name(count)] / 1e9,
            count * one / 1e9,
            "GB/s",
            speeds[_name(count)] / (count * one),
            LIMIT,
            at_least=True,
        )
        for count in PATHS[1:]
        if one and _name(count) in speeds
    ]
    publish("stripes.py", args, bars, scores)


def _name(count: int) -> str:
    return f"{count} path{'s' if count > 1 else ''}"


def _side(numel: int, count: int, args: argparse.Namespace, folder: Path) -> Side:
    folders = [folder / f"{count}-{index}" for index in range(count)]
    for path in folders:
        path.mkdir()
    options = {
        "folders": [str(path) for path in folders],
        "numel": numel,
        "flats": 16,
        "page_bytes": args.page_size * MIB,
        "bytes_per_s": args.mb_per_s * 1e6,
    }
    return Side(_name(count), "stream", options, threads=args.threads, environment=side_environment(args))


if __name__ == "__main__":
    main()
