"""Lock-free updates with master states on disk: what does compute still wait for?

Sides, in turns, on the same GPT, with so few tokens a step that the disk dominates:
  ours         AngelPTMStrategy(lock_free=True, max_staleness=16)
  synchronous  the same without lock_free: updates behind the backward pass and the next forward
  compute      forward and backward of the bf16 model alone, no optimizer, freed memory kept as by ours (sides/plain.py)
  stream       the updater alone, with nothing computing (sides/stream.py)
  disk         O_DIRECT alone, as many bytes read as written, as this disk likes best (sides/disk.py)
Once with all cores computing, and once with one core fewer, which is left to the updates (`--threads` says how many
compute in the first case); for each number of tokens that `--sequence` names. The last two sides have no tokens, and a
race of their own before. Printed beside: how far from balance a setting is (synchronous over compute), mean and
largest staleness (benchmarks/lock_free_loss.py tells what it costs; sides take different numbers of steps here).
A turn of a side that trains begins with steps that do not count, so that updates are in full course when the clock starts.
Ratios: tokens/s of ours over synchronous (bar: 2.96, the paper's, or 0.9 of what compute alone would give, if that is
less); step time of ours over compute; bytes a second of stream over the disk's.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median

from common import (
    KEEP_FREED_MEMORY,
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
from common import MASTER_BYTES_PER_PARAMETER as STEP_BYTES
from disk_masters import compute_side, disk_side, page_speed
from gpt import SHAPES, GPTShape
from race import Race, Score, Side

PAPERS_SPEED_UP = 2.96
COMPUTE_LIMIT = {"to spare": 1.10, "that compute": 1.25}
STREAM_LIMIT = 0.90
LONGER = {"ours": 5, "compute": 3}
"""How many times as many steps a turn has: a pass of updates goes on for several of these sides' steps."""


def sides(shape: GPTShape, args: argparse.Namespace, folder: Path) -> list[Side]:
    """The contestants, with what each is asked to train."""
    options = base_options(shape, batch=args.batch)
    settings = {
        "page_size": f"{args.page_size}MiB",
        "disk_path": str(folder),
        "offload_parameters": "auto",
        "offload_optimizer": "disk",
        "tuning": {"freed_memory": "keep"},
    }
    lock_free = {"lock_free": {"max_staleness": args.max_staleness}}
    return [
        ours(options, args, settings | lock_free),
        replace(ours(options, args, settings), name="synchronous"),
        replace(compute_side(options, args), environment=side_environment(args) | KEEP_FREED_MEMORY),
    ]


def stream_sides(shape: GPTShape, args: argparse.Namespace, folder: Path) -> list[Side]:
    """The updater alone, and the disk alone."""
    page_bytes = args.page_size * MIB
    options = {"folders": [str(folder)], "numel": shape.numel, "flats": 16, "page_bytes": page_bytes}
    return [
        Side("stream", "stream", options, threads=args.threads),
        disk_side(args, folder, step_bytes=STEP_BYTES * shape.numel, file_bytes=STEP_BYTES // 2 * shape.numel),
    ]


def bars(size: str, scores: Mapping[str, Score], cores: str) -> list[Bar]:
    """The bars of the sides that took part."""
    made: list[Bar] = []
    if "ours" in scores:
        made += _of_lock_free(scores, f"{size} lock-free, cores {cores}", COMPUTE_LIMIT[cores])
    return made


def stream_bar(size: str, scores: Mapping[str, Score]) -> Bar:
    """The updates' stream over the disk."""
    speed = median(turn.extra["page_bytes"] / turn.seconds for turn in scores["stream"].turns)
    alone = scores["disk"].traffic_bytes / scores["disk"].step_s
    name = f"{size} updates' stream alone over the disk"
    return Bar(name, speed / 1e9, alone / 1e9, "GB/s", speed / alone, STREAM_LIMIT, at_least=True)


def _of_lock_free(scores: Mapping[str, Score], what: str, limit: float) -> list[Bar]:
    """What the lock-free side is measured by; prints what else there is to know of it."""
    made: list[Bar] = []
    mine = scores["ours"]
    if "compute" in scores:
        alone_s = scores["compute"].step_s
        ratio = mine.step_s / alone_s
        made.append(Bar(f"{what}: step over compute alone", mine.step_s, alone_s, "s", ratio, limit, at_least=False))
    if "synchronous" in scores and "compute" in scores:
        waiting_s, alone_s = scores["synchronous"].step_s, scores["compute"].step_s
        gain = min(PAPERS_SPEED_UP, 0.9 * waiting_s / alone_s)
        ratio = waiting_s / mine.step_s
        print(f"{what}: synchronous takes {waiting_s / alone_s:.2f} x compute alone")
        made.append(
            Bar(
                f"{what}: speed over synchronous", 1 / mine.step_s, 1 / waiting_s, "steps/s", ratio, gain, at_least=True
            )
        )
    staleness = median(turn.extra["mean_staleness"] for turn in mine.turns)
    largest = mine.turns[-1].extra["max_staleness"]
    stream = median(page_speed(turn) for turn in mine.turns)
    print(
        f"{what}: mean staleness {staleness:.2f} steps, largest {largest:.0f}; "
        f"the updates' stream beside compute {stream / 1e9:.2f} GB/s"
    )
    return made


def _steps_before(name: str, args: argparse.Namespace) -> int:
    """Steps of a turn that do not count: as many updates are to be under way when the clock starts as when it stops."""
    return args.max_staleness if name == "ours" and not args.quick else 1


def _counts(text: str) -> tuple[int, ...]:
    return tuple(int(count) for count in text.split(","))


def main() -> None:
    """Race, print, and write what the command line asked for."""
    parser = argument_parser(__doc__, disk=True)
    parser.add_argument("--size", default="124M", choices=tuple(SHAPES))
    parser.add_argument("--batch", type=int, default=1, help="samples a step")
    parser.add_argument(
        "--sequence", type=_counts, default=(64,), help="tokens of a sample, by comma; few, so that the disk dominates"
    )
    parser.add_argument("--max-staleness", type=int, default=16)
    # Updates pile up until the bound is near.
    parser.set_defaults(repeats=3, steps=8, warmup=18)
    args = quicken(parser.parse_args())
    size = "tiny" if args.quick else args.size
    all_bars: list[Bar] = []
    all_scores: dict[str, Score] = {}
    threads = args.threads
    nowhere = Path()
    all_sides = [*stream_sides(SHAPES[size], args, nowhere), *sides(SHAPES[size], args, nowhere)]
    asked = {side.name for side in chosen(all_sides, args)}
    if {"stream", "disk"} <= asked:
        shape = SHAPES[size]
        with disk_folder(args.disk_path) as folder, Race(stream_sides(shape, args, folder)) as race:
            scores = race.run(repeats=args.repeats, steps=args.steps, warmup=args.warmup)
        show_scores(scores, tokens_per_step=0)
        all_bars.append(stream_bar(size, scores))
        all_scores |= scores
    for sequence in args.sequence:
        shape = SHAPES[size].with_sequence(sequence)
        tokens = args.batch * sequence
        print(f"GPT {size}, {shape.numel:,} parameters, {tokens} tokens a step, page {args.page_size * MIB}")
        for cores, computing in (("that compute", threads), ("to spare", threads - 1)):
            if computing < 1:
                print("this machine has no core to spare")
                continue
            args.threads = computing
            print(f"cores {cores}: {computing} threads compute")
            with disk_folder(args.disk_path) as folder:
                here = [side for side in sides(shape, args, folder) if side.name in asked]
                if not here:
                    continue
                with Race(here) as race:
                    scores = race.run(
                        repeats=args.repeats,
                        steps=args.steps,
                        warmup=args.warmup,
                        before={side.name: _steps_before(side.name, args) for side in here},
                        longer={name: LONGER[name] for name in LONGER if not args.quick},
                    )
            show_scores(scores, tokens_per_step=tokens)
            all_bars += bars(f"{size}, {tokens} tokens,", scores, cores)
            all_scores |= {f"{tokens} tokens, cores {cores} {name}": score for name, score in scores.items()}
    publish("lock_free.py", args, all_bars, all_scores)


if __name__ == "__main__":
    main()
