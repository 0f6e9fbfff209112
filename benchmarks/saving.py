"""Sharded checkpoints: how near to the disk's own speed, with how much memory, and what they cost a run that goes on?

Sides, in turns:
  ours     AngelPTMStrategy, everything in RAM: trainer.save_checkpoint of weights and optimizer states, with nothing else
           going on (sides/saver.py)
  on_disk  the same with master states on disk: all that is written is read from the same disk first
  write    as many bytes written to a new file in order, past the page cache, by as many threads as this disk likes best,
           and synced (sides/writer.py)
  train    training steps without a checkpoint; before: with one, written before training goes on; behind: with one that is
           written behind training, and waited for at the end of the turn
With `--kind full`, ordinary checkpoints, one file that rank 0 writes; nothing trains meanwhile, and a third side,
all_on_disk, has the parameters on disk, too. Their tensors are all in memory at once: the bar is the file's size and a tenth.
Ratios: bytes a second of ours over those of the disk; memory that a save adds to the process's peak over 200 MB; seconds
that a checkpoint costs behind training over those before it goes on.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from statistics import median

from common import (
    MIB,
    Bar,
    argument_parser,
    base_options,
    disk_folder,
    ours,
    publish,
    quicken,
    show_scores,
    side_environment,
)
from gpt import SHAPES, GPTShape
from race import Race, Score, Side

BYTES_PER_PARAMETER = 12  # fp32 parameter and two moments
SPEED_LIMIT = 0.85
ADDED_LIMIT_BYTES = 200 * 10**6
WHERE = {"ours": "", "on_disk": " masters on disk", "all_on_disk": " all on disk"}


def saving_sides(shape: GPTShape, args: argparse.Namespace, folder: Path) -> list[Side]:
    """Those that only write."""
    options = base_options(shape, batch=1)
    settings = {"page_size": f"{args.page_size}MiB", "checkpoints": {"state_dict_type": args.kind}}
    made = []
    homes_of: dict[str, dict[str, str]] = {
        "ours": {},
        "on_disk": {"disk_path": str(folder), "offload_optimizer": "disk"},
    }
    if args.kind == "full":
        homes_of["all_on_disk"] = {**homes_of["on_disk"], "offload_parameters": "disk"}
    for name, homes in homes_of.items():
        place = folder / name
        place.mkdir()
        side = ours({**options, "meta": True, "folder": str(place)}, args, settings | homes)
        made.append(replace(side, name=name, module="saver"))
    alone = {
        "folder": str(folder),
        "block_bytes": args.page_size * MIB,
        "file_bytes": BYTES_PER_PARAMETER * shape.numel,
    }
    return [*made, Side("write", "writer", alone, environment=side_environment(args))]


def training_sides(shape: GPTShape, args: argparse.Namespace, folder: Path) -> list[Side]:
    """Those that train meanwhile."""
    options = {**base_options(shape, batch=args.batch), "meta": True}
    settings = {
        "page_size": f"{args.page_size}MiB",
        "disk_path": str(folder),
        "offload_optimizer": args.offload_optimizer,
    }
    settings |= {"checkpoints": {"state_dict_type": "sharded"}}
    made = [replace(ours(options, args, settings), name="train")]
    for name, behind in (("before", False), ("behind", True)):
        saves = {**options, "save_to": str(folder / f"{name}.ckpt")}
        made.append(
            replace(
                ours(saves, args, settings | {"checkpoints": {"state_dict_type": "sharded", "async_save": behind}}),
                name=name,
            )
        )
    return made


def saving_bars(size: str, kind: str, scores: dict[str, Score]) -> list[Bar]:
    """Speed and memory of a save."""
    made = []
    for name, where in WHERE.items():
        mine, disk = scores.get(name), scores.get("write")
        if mine is None:
            continue
        if disk is not None:
            speeds = [
                median(turn.extra["saved_bytes"] / turn.step_s for turn in score.turns) / 1e9 for score in (mine, disk)
            ]
            what = f"{size}{where} {kind} save, bytes/s over the disk's sequential writes"
            made.append(Bar(what, *speeds, "GB/s", speeds[0] / speeds[1], SPEED_LIMIT, at_least=True))
        added = max(turn.extra["added_bytes"] for turn in mine.turns)
        file_bytes = mine.turns[0].extra["saved_bytes"]
        limit, text, most = (ADDED_LIMIT_BYTES, "200 MB", 1.0) if kind == "sharded" else (file_bytes, "its size", 1.1)
        what = f"{size}{where} {kind} save, memory added over {text}"
        made.append(Bar(what, added / MIB, limit / MIB, "MiB", added / limit, most, at_least=False))
    return made


def training_bars(size: str, scores: dict[str, Score], steps: int) -> list[Bar]:
    """What a checkpoint costs."""
    if not {"train", "before", "behind"} <= scores.keys():
        return []
    before, behind = ((scores[name].step_s - scores["train"].step_s) * steps for name in ("before", "behind"))
    stalls = {name: median(turn.extra["save_stall_s"] for turn in scores[name].turns) for name in ("before", "behind")}
    print(
        f"seconds in which compute waited for a checkpoint: before {stalls['before']:.3f}, behind {stalls['behind']:.3f}"
    )
    what = f"{size} seconds that a checkpoint costs, behind training over before it goes on"
    return [Bar(what, behind, before, "s", behind / before, 1.0, at_least=False)]


def main() -> None:
    """Race, print, and write what the command line asked for."""
    parser = argument_parser(__doc__, disk=True)
    parser.add_argument("--size", default="355M", choices=tuple(SHAPES))
    parser.add_argument("--kind", default="sharded", choices=("sharded", "full"), help="of the checkpoints")
    parser.add_argument("--training-size", default="124M", choices=tuple(SHAPES))
    parser.add_argument("--batch", type=int, default=1, help="samples a step, where there is training")
    parser.add_argument("--master-home", default="disk", choices=("disk", "host"), help="where there is training")
    parser.set_defaults(repeats=5, steps=6, warmup=1)
    args = quicken(parser.parse_args())
    size, training_size = ("tiny", "tiny") if args.quick else (args.size, args.training_size)
    all_bars: list[Bar] = []
    all_scores: dict[str, Score] = {}
    with disk_folder(args.disk_path) as folder:
        with Race([side for side in saving_sides(SHAPES[size], args, folder) if wanted(side, args)]) as race:
            scores = race.run(repeats=args.repeats, steps=1, warmup=1)
        show_scores(scores, tokens_per_step=0)
        all_bars += saving_bars(size, args.kind, scores)
        all_scores |= scores
    if args.kind == "full":
        publish("saving.py", args, all_bars, all_scores)
        return
    shape = SHAPES[training_size]
    with disk_folder(args.disk_path) as folder:
        with Race([side for side in training_sides(shape, args, folder) if wanted(side, args)]) as race:
            scores = race.run(repeats=args.repeats, steps=args.steps, warmup=args.warmup)
        show_scores(scores, tokens_per_step=args.batch * shape.sequence)
        all_bars += training_bars(training_size, scores, args.steps)
        all_scores |= scores
    publish("saving.py", args, all_bars, all_scores)


def wanted(side: Side, args: argparse.Namespace) -> bool:
    """Whether `--sides` names it, or names none."""
    return not args.sides or side.name in args.sides.split(",")


if __name__ == "__main__":
    main()
