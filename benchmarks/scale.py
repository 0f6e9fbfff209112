"""Every model state at home on disk, under a hard memory cap on the process: how large, and how fast?

GPT of width 1024, sequence 256, batch 1, every block recomputed, built on the meta device. Sides, in turns:
  ours     AngelPTMStrategy, parameters and masters on disk, in a memory control group of --cap-gib
  disk     O_DIRECT alone, mixed reads and writes in blocks of a page (sides/disk.py), for the disk's own speed
  compute  forward, recomputation and backward of the bf16 model in RAM without a cap, no optimizer; left out, with a
           word, where the model does not fit into RAM
Ratios: parameters of the model that trained two steps over --largest; step time of ours over max(compute, the bytes
that it moved at the disk's speed), for sizes of at most --fast.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from capped import memory_cap
from common import (
    GIB,
    MIB,
    Bar,
    SkipBenchmark,
    argument_parser,
    base_options,
    chosen,
    disk_folder,
    ours,
    publish,
    quicken,
    show_scores,
)
from disk_masters import compute_side, disk_side
from gpt import GPTShape, shape_of_numel
from race import Race, Score, Side, SideError

STEP_LIMIT = 2.5
DISK_STEP_BYTES = 2 * GIB
COMPUTE_BYTES_PER_PARAMETER = 4
COMPUTE_SLACK_BYTES = 3 * GIB


def sides(shape: GPTShape, args: argparse.Namespace, folder: Path, group: str) -> list[Side]:
    """The contestants, with what each is asked to train."""
    options = base_options(shape, batch=1)
    settings = {"page_size": f"{args.page_size}MiB", "disk_path": str(folder), "recompute": "all"}
    homes = {"offload_parameters": "disk", "offload_optimizer": "disk"}
    capped = ours({**options, "meta": True}, args, settings | homes, memory_group=group)
    step_bytes = 64 * MIB if args.quick else DISK_STEP_BYTES
    racing = [capped, disk_side(args, folder, step_bytes=step_bytes, file_bytes=step_bytes)]
    needed, free = COMPUTE_BYTES_PER_PARAMETER * shape.numel + COMPUTE_SLACK_BYTES, available_bytes()
    if free - args.cap_gib * GIB > needed:
        racing.append(compute_side(options, args, recompute=True))
    else:
        print(f"compute alone left out: needs {needed / GIB:.1f} GiB beside the cap, {free / GIB:.1f} are available")
    return racing


def available_bytes() -> int:
    """Memory that a new process could take without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def bars(shape: GPTShape, scores: dict[str, Score], args: argparse.Namespace) -> list[Bar]:
    """The bars of one size that trained; prints what its step was made of."""
    billions, largest = shape.numel / 1e9, args.largest / 1e9
    made = []
    if "ours" in scores and shape.numel >= args.largest:
        what = f"parameters that trained two steps in {args.cap_gib:g} GiB"
        made.append(Bar(what, billions, largest, "billions", billions / largest, 1.0, at_least=True))
    if {"ours", "disk", "compute"} <= scores.keys():
        mine, disk = scores["ours"], scores["disk"]
        traffic_s = mine.traffic_bytes / (disk.traffic_bytes / disk.step_s)
        floor_s = max(scores["compute"].step_s, traffic_s)
        print(
            f"{billions:.2f}B: ours moved {mine.traffic_bytes / shape.numel:.1f} bytes a parameter and step, "
            f"{traffic_s:.2f} s at the disk's {disk.traffic_bytes / disk.step_s / 1e9:.2f} GB/s; "
            f"compute alone {scores['compute'].step_s:.2f} s"
        )
        if shape.numel <= 1.1 * args.fast:
            what = f"{billions:.2f}B in {args.cap_gib:g} GiB, step over max(compute, its disk traffic)"
            made.append(Bar(what, mine.step_s, floor_s, "s", mine.step_s / floor_s, STEP_LIMIT, at_least=False))
    return made


def failed(shape: GPTShape, args: argparse.Namespace) -> Bar:
    """The bar of a size that did not train."""
    what = f"{shape.numel / 1e9:.2f}B that did not train two steps in {args.cap_gib:g} GiB"
    return Bar(what, 0.0, shape.numel / 1e9, "billions", 0.0, 1.0, at_least=True)


def main() -> None:
    """Race, print, and write what the command line asked for."""
    parser = argument_parser(__doc__, disk=True)
    parser.add_argument("--params", default="1.2e9,3.0e9", help="parameters of the models, by comma")
    parser.add_argument("--largest", type=float, default=3.0e9, help="parameters that must train")
    parser.add_argument(
        "--fast", type=float, default=1.2e9, help="parameters up to which the step time is held to its bar"
    )
    parser.add_argument("--cap-gib", type=float, default=4.0, help="memory that the process may take")
    parser.set_defaults(repeats=2, steps=1, warmup=1)
    args = parser.parse_args()
    if args.quick:
        quicken(args)
        args.params, args.largest, args.steps = "7e7", 6e7, 1
    all_bars: list[Bar] = []
    all_scores: dict[str, Score] = {}
    for numel in args.params.split(","):
        shape = shape_of_numel(float(numel))
        print(f"GPT {shape.numel:,} parameters, {shape.layers} blocks, cap {args.cap_gib:g} GiB")
        try:
            with (
                disk_folder(args.disk_path) as folder,
                memory_cap(int(args.cap_gib * GIB)) as group,
                Race(chosen(sides(shape, args, folder, group), args)) as race,
            ):
                scores = race.run(repeats=args.repeats, steps=args.steps, warmup=args.warmup)
        except SkipBenchmark as reason:
            print(f"SKIPPED: {reason}")
            sys.exit(0)
        except SideError as error:
            print(error)
            all_bars.append(failed(shape, args))
            continue
        show_scores(scores, tokens_per_step=shape.sequence)
        all_bars += bars(shape, scores, args)
        all_scores |= {f"{numel} {name}": score for name, score in scores.items()}
    publish("scale.py", args, all_bars, all_scores)


if __name__ == "__main__":
    main()
