"""Master states on disk, synchronous, batch so small that the disk dominates: how near to the disk's own speed?

Sides, in turns:
  ours     AngelPTMStrategy, masters on disk, compute parameters in RAM
  disk     O_DIRECT alone: 12 bytes a parameter read and 12 written, in blocks of a page, in the order and with the
           number of transfers in flight that this disk likes best (sides/disk.py)
  compute  forward and backward of the bf16 model alone, no optimizer (sides/plain.py)
Ratios: step time of ours over max(compute, disk); bytes a second of ours while a page is read or written, over those
of the disk. Time in which reads and writes go on together counts once.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from common import MASTER_BYTES_PER_PARAMETER as STEP_BYTES
from common import (
    MIB,
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
from gpt import SHAPES, GPTShape
from race import Race, Score, Side, Turn

STEP_LIMIT = 1.25
SPEED_LIMIT = 0.85


def sides(shape: GPTShape, args: argparse.Namespace, folder: Path) -> list[Side]:
    """The contestants, with what each is asked to train."""
    options = base_options(shape, batch=args.batch)
    settings = {"page_size": f"{args.page_size}MiB", "disk_path": str(folder)}
    homes = {"offload_parameters": "device", "offload_optimizer": "disk"}
    return [
        ours(options, args, settings | homes),
        disk_side(args, folder, step_bytes=STEP_BYTES * shape.numel, file_bytes=STEP_BYTES // 2 * shape.numel),
        compute_side(options, args),
    ]


def disk_side(args: argparse.Namespace, folder: Path, *, step_bytes: int, file_bytes: int) -> Side:
    """The disk alone, moving `step_bytes` a step over a file of `file_bytes`."""
    sizes = {"block_bytes": args.page_size * MIB, "step_bytes": step_bytes, "file_bytes": file_bytes}
    return Side("disk", "disk", {"folder": str(folder), **sizes})


def compute_side(options: Mapping[str, object], args: argparse.Namespace, *, recompute: bool = False) -> Side:
    """Forward and backward alone, everything in RAM."""
    alone = {**options, "update": False, "recompute": recompute}
    return Side("compute", "plain", alone, threads=args.threads, environment=side_environment(args))


def page_speed(turn: Turn) -> float:
    """Bytes a second at which pages moved while any was being read or written."""
    return (turn.extra["read_page_bytes"] + turn.extra["written_page_bytes"]) / turn.extra["disk_busy_s"]


def bars(size: str, shape: GPTShape, scores: dict[str, Score]) -> list[Bar]:
    """The bars of step time and of page bandwidth, when all sides took part."""
    if not {"ours", "disk", "compute"} <= scores.keys():
        return []
    mine, disk_s = scores["ours"], scores["disk"].step_s
    floor_s = max(scores["compute"].step_s, disk_s)
    disk_speed = scores["disk"].traffic_bytes / disk_s
    speed = median(page_speed(turn) for turn in mine.turns)
    liked = scores["disk"].turns[-1].extra
    print(f"the disk likes {liked['depth']:.0f} transfers in flight, in turns of {liked['burst']:.0f} (0: apart)")
    print(f"ours moved {mine.traffic_bytes / shape.numel:.1f} bytes a parameter and step (as the kernel counts)")
    step = f"{size} masters on disk, step over max(compute, disk)"
    pages = f"{size} masters on disk, page bandwidth over the disk's"
    return [
        Bar(step, mine.step_s, floor_s, "s", mine.step_s / floor_s, STEP_LIMIT, at_least=False),
        Bar(pages, speed / 1e9, disk_speed / 1e9, "GB/s", speed / disk_speed, SPEED_LIMIT, at_least=True),
    ]


def main() -> None:
    """Race, print, and write what the command line asked for."""
    parser = argument_parser(__doc__, disk=True)
    parser.add_argument("--size", default="124M", choices=tuple(SHAPES))
    parser.add_argument("--batch", type=int, default=1, help="samples a step")
    parser.add_argument("--sequence", type=int, default=32, help="tokens of a sample: few, so that the disk dominates")
    args = quicken(parser.parse_args())
    size = "tiny" if args.quick else args.size
    shape = SHAPES[size].with_sequence(args.sequence)
    print(f"GPT {size}, {shape.numel:,} parameters, batch {args.batch} x {args.sequence}")
    with disk_folder(args.disk_path) as folder, Race(chosen(sides(shape, args, folder), args)) as race:
        scores = race.run(repeats=args.repeats, steps=args.steps, warmup=args.warmup)
    show_scores(scores, tokens_per_step=args.batch * args.sequence)
    publish("disk_masters.py", args, bars(size, shape, scores), scores)


if __name__ == "__main__":
    main()
