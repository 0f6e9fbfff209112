"""Compute parameters in RAM, masters on disk: how much memory does the process take beyond what it must?

Sides:
  ours         AngelPTMStrategy with freed_memory="return", as it is set by itself where RAM is short; the model is built
               on the meta device, so that building it is no peak
  activations  forward and backward of the bf16 model alone, freed memory returned at once: its peak less what was
               resident before the first step and less 2 bytes a parameter of gradients is the activations
  lock_free    as ours, with lock_free=True
  pass         as activations, with each gradient dropped when it is complete: its peak less what was resident before is
               what a pass takes beside parameters and gradients. Lock-free gradients of earlier steps wait while it is
               at its peak, in the middle, where the gradients of its own step are not there yet
Ratio: peak resident memory of ours, from start to end, over 4 bytes a parameter + activations + 600 MB; of lock_free over
4 bytes a parameter + what a pass takes + 64 pages + fixed costs: what its process takes before anything is built (most of
it Lightning), and what torch's libraries keep after a first small step.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from common import (
    MIB,
    RETURN_FREED_MEMORY,
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
from race import Race, Score, Side

ALLOWANCE_BYTES = 600 * 10**6
MODEL_BYTES_PER_PARAMETER = 4  # p16 and g16
GRADIENT_BYTES_PER_PARAMETER = 2
PARAMETER_BYTES = 2  # p16, all that the activations side holds before its first step
PAGES_IN_FLIGHT = 64
BATCH = {"tiny": 2, "25M": 4, "124M": 2, "355M": 2}


def sides(size: str, args: argparse.Namespace, folder: Path) -> list[Side]:
    """The contestants, with what each is asked to train."""
    options = base_options(SHAPES[size], batch=args.batch or BATCH[size])
    settings = {"page_size": f"{args.page_size}MiB", "disk_path": str(folder), "recompute": args.recompute}
    settings["tuning"] = {"freed_memory": "return"}
    homes = {"offload_parameters": "device", "offload_optimizer": "disk"}
    alone = {**options, "update": False, "recompute": args.recompute == "all"}
    return [
        ours({**options, "meta": True}, args, settings | homes),
        replace(ours({**options, "meta": True}, args, settings | {"lock_free": True}), name="lock_free"),
        *(
            Side(name, "plain", options, threads=args.threads, environment=side_environment(args) | RETURN_FREED_MEMORY)
            for name, options in (("activations", alone), ("pass", {**alone, "keep_gradients": False}))
        ),
    ]


def bars(size: str, scores: dict[str, Score], page_bytes: int) -> list[Bar]:
    """The bars of one size; prints what they allow."""
    numel = SHAPES[size].numel
    made = []
    parameters = MODEL_BYTES_PER_PARAMETER * numel
    allowed: dict[str, float] = {}
    if alone := scores.get("activations"):
        activations = alone.peak_rss_bytes - _idle(alone) - GRADIENT_BYTES_PER_PARAMETER * numel
        print(f"{size}: activations of a step are {activations / MIB:,.0f} MiB")
        allowed["ours"] = parameters + activations + ALLOWANCE_BYTES
    if (alone := scores.get("pass")) and (mine := scores.get("lock_free")):
        peak = alone.peak_rss_bytes - _idle(alone)
        libraries = _idle(alone) - PARAMETER_BYTES * numel - alone.turns[0].extra["empty_rss_bytes"]
        fixed = mine.turns[0].extra["empty_rss_bytes"] + libraries
        print(f"{size}: a pass takes {peak / MIB:,.0f} MiB, fixed costs {fixed / MIB:,.0f} MiB")
        allowed["lock_free"] = parameters + peak + PAGES_IN_FLIGHT * page_bytes + fixed
    for name, bytes_allowed in allowed.items():
        if mine := scores.get(name):
            ratio = mine.peak_rss_bytes / bytes_allowed
            sizes = mine.peak_rss_bytes / MIB, bytes_allowed / MIB
            what = f"{size}{' lock-free' if name == 'lock_free' else ''} peak memory over what is allowed"
            made.append(Bar(what, *sizes, "MiB", ratio, 1.0, at_least=False))
    return made


def _idle(alone: Score) -> float:
    """Bytes that were resident before the first step."""
    return alone.turns[0].extra["idle_rss_bytes"]


def main() -> None:
    """Race, print, and write what the command line asked for."""
    parser = argument_parser(__doc__, disk=True)
    parser.add_argument("--sizes", default="124M,355M", help=f"by comma, of {', '.join(BATCH)}")
    parser.add_argument("--batch", type=int, help=f"samples a step (default: {BATCH})")
    parser.add_argument("--recompute", default="none", choices=("none", "all"))
    parser.set_defaults(repeats=3)
    args = quicken(parser.parse_args())
    all_bars: list[Bar] = []
    all_scores: dict[str, Score] = {}
    for size in ["tiny"] if args.quick else args.sizes.split(","):
        print(f"GPT {size}, {SHAPES[size].numel:,} parameters")
        with disk_folder(args.disk_path) as folder, Race(chosen(sides(size, args, folder), args)) as race:
            scores = race.run(repeats=args.repeats, steps=args.steps, warmup=args.warmup)
        show_scores(scores, tokens_per_step=(args.batch or BATCH[size]) * SHAPES[size].sequence)
        all_bars += bars(size, scores, args.page_size * MIB)
        all_scores |= {f"{size} {name}": score for name, score in scores.items()}
    publish("memory.py", args, all_bars, all_scores)


if __name__ == "__main__":
    main()
