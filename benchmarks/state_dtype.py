"""Optimizer states smaller than fp32: a step with master states on disk, and the loss of the main job.

Speed: GPT of width 1024, batch 1, every block recomputed, built on the meta device, under a hard memory cap on each process.
Sides, in turns, all with master states on disk:
  auto, bf16, int8   AngelPTMStrategy with this `optimizer_state_dtype`
Ratios: step time of auto over that of each. `--disk-mb-per-s` slows the disk down to a fixed speed, so that the disk is what
a step waits for; without it the disk is the machine's own.
Loss: the main job in RAM, over `--seeds` seeds: the mean validation loss of each over that of auto.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import mean

from capped import memory_cap
from common import (
    GIB,
    SEED,
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
    show_table,
)
from gpt import GPTShape, shape_of_numel
from main_job import main_job
from race import Race, Score, Side

WORDS = ("auto", "bf16", "int8")
SPEEDS = {"bf16": 1.3, "int8": 1.6}
LOSS_LIMIT = 1.01


def sides(shape: GPTShape, args: argparse.Namespace, folder: Path, groups: Mapping[str, str]) -> list[Side]:
    """The contestants, with what each is asked to train."""
    options = {**base_options(shape, batch=1), "meta": True}
    if args.disk_mb_per_s:
        options["disk_bytes_per_s"] = args.disk_mb_per_s * 1e6
    settings = {"page_size": f"{args.page_size}MiB", "disk_path": str(folder), "recompute": "all"}
    homes = {"offload_parameters": args.offload_parameters, "offload_optimizer": "disk"}
    return [
        replace(ours(options, args, settings | homes | {"optimizer_state_dtype": word}, memory_group=group), name=word)
        for word, group in groups.items()
    ]


def speed_bars(shape: GPTShape, scores: dict[str, Score], args: argparse.Namespace) -> list[Bar]:
    """Step time of auto over that of each."""
    made = []
    disk = f"a disk of {args.disk_mb_per_s:g} MB/s" if args.disk_mb_per_s else "disk"
    for word in WORDS:
        if word in scores:
            print(f"{word}: {scores[word].traffic_bytes / shape.numel:.1f} bytes of disk a parameter and step")
        if word in SPEEDS and {word, "auto"} <= scores.keys():
            mine, exact = scores[word].step_s, scores["auto"].step_s
            what = f"{shape.numel / 1e9:.2f}B in {args.cap_gib:g} GiB, states on {disk}, {word}: speed over auto"
            made.append(Bar(what, 1 / mine, 1 / exact, "steps/s", exact / mine, SPEEDS[word], at_least=True))
    return made


def validation_loss(word: str, seed: int, args: argparse.Namespace) -> float:
    """Of the main job."""
    with tempfile.TemporaryDirectory() as runs:
        cli = main_job(seed, args.train_steps, Path(runs), {"optimizer_state_dtype": word})
        cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    loss = float(cli.trainer.callback_metrics["val_loss"])
    print(f"{word}, seed {seed}: validation loss {loss:.5f}", flush=True)
    return loss


def loss_bars(args: argparse.Namespace) -> list[Bar]:
    """Mean loss of each over that of auto."""
    words = [word for word in WORDS if not args.sides or word in args.sides.split(",")]
    seeds = range(SEED, SEED + args.seeds)
    losses = {word: [validation_loss(word, seed, args) for seed in seeds] for word in words}
    if not args.seeds:
        return []
    rows = [(word, *(f"{loss:.5f}" for loss in found), f"{mean(found):.5f}") for word, found in losses.items()]
    show_table(("optimizer_state_dtype", *map(str, seeds), "mean"), rows)
    return [
        Bar(
            f"main job, {args.seeds} seeds, {word}: validation loss over auto",
            mean(losses[word]),
            mean(losses["auto"]),
            "nats",
            mean(losses[word]) / mean(losses["auto"]),
            LOSS_LIMIT,
            at_least=False,
        )
        for word in words
        if word != "auto" and "auto" in losses
    ]


def main() -> None:
    """Race, train, print, and write what the command line asked for."""
    parser = argument_parser(__doc__, disk=True)
    parser.add_argument("--params", type=float, default=1.2e9, help="parameters of the model; 0: no race")
    parser.add_argument("--cap-gib", type=float, default=4.0, help="memory that each process may take")
    parser.add_argument(
        "--parameter-home", default="device", help="on a CPU, device is RAM; 'disk': they come and go, too"
    )
    parser.add_argument("--disk-mb-per-s", type=float, default=0.0, help="slow the disk down to this; 0: its own speed")
    parser.add_argument("--train-steps", type=int, default=300, help="optimizer steps of each training")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each kind; 0: none")
    parser.set_defaults(repeats=2, steps=1, warmup=1)
    args = quicken(parser.parse_args())
    if args.quick:
        args.params, args.steps, args.train_steps, args.seeds = min(args.params, 7e7), 1, 6, min(args.seeds, 1)
    bars: list[Bar] = []
    scores: dict[str, Score] = {}
    if args.params:
        shape = shape_of_numel(args.params)
        print(f"GPT {shape.numel:,} parameters, {shape.layers} blocks, cap {args.cap_gib:g} GiB")
        try:
            with contextlib.ExitStack() as ends:
                folder = ends.enter_context(disk_folder(args.disk_path))
                cap = int(args.cap_gib * GIB)
                groups = {word: ends.enter_context(memory_cap(cap, f"_{word}")) for word in WORDS}
                race = ends.enter_context(Race(chosen(sides(shape, args, folder, groups), args)))
                scores = race.run(repeats=args.repeats, steps=args.steps, warmup=args.warmup)
        except SkipBenchmark as reason:
            print(f"SKIPPED: {reason}")
        else:
            show_scores(scores, tokens_per_step=shape.sequence)
            bars += speed_bars(shape, scores, args)
    bars += loss_bars(args)
    publish("state_dtype.py", args, bars, scores)


if __name__ == "__main__":
    main()
