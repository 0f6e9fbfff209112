"""Unfreezing a part of a model in mid-run, masters on disk: how long, and with how much memory, until it trains?

Sides, in turns:
  ours   AngelPTMStrategy, masters on disk: before its third step, blocks that were frozen get gradients, and the run is laid
         out anew (lightning_ptm/trainer/rearranging.py); a process of its own each time
  disk   O_DIRECT alone: what has to move, as this disk likes it best (sides/disk.py): masters and moments of what was trained
         before are read and written once, and masters of what is unfrozen are written
Ratios: the time between the two steps, ours over the disk's; and the peak of resident memory meanwhile that is no file's (the
system could not take it back; sampled) beyond the larger of those of the steps before and behind.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

from common import MIB, Bar, argument_parser, base_options, disk_folder, publish, quicken, side_environment
from gpt import SHAPES, GPTShape
from sides.disk import DirectFile, best_pattern

TIME_LIMIT = 1.2
MEMORY_LIMIT_BYTES = 64 * MIB
SHARE = 124 / 355
STATE_BYTES, MASTER_BYTES = 12, 4


def frozen_blocks(shape: GPTShape) -> int:
    """The first blocks that have about `SHARE` of all elements."""
    block = 12 * shape.width**2
    return max(1, round(SHARE * shape.numel / block))


def parts(shape: GPTShape) -> tuple[int, int]:
    """Elements that are trained from the start, and those that are unfrozen."""
    import torch
    from gpt import GPT

    with torch.device("meta"):
        blocks = list(GPT(shape).blocks)[: frozen_blocks(shape)]
    unfrozen = sum(parameter.numel() for block in blocks for parameter in block.parameters())
    return shape.numel - unfrozen, unfrozen


class Peak(threading.Thread):
    """Looks at this process's resident memory that is no file's, every few milliseconds."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._most = 0

    def run(self) -> None:
        while True:
            self._most = max(self._most, self._now())
            time.sleep(0.005)

    def since_last(self) -> float:
        most, self._most = max(self._most, self._now()), 0
        return float(most)

    @staticmethod
    def _now() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon", "RssShmem")))


def train(options: dict[str, Any]) -> dict[str, float]:
    """One run, in this process: seconds and peaks of resident memory of its steps and of what is between them."""
    import torch
    from lightning.pytorch import Callback, Trainer
    from sides.trainer import Batches, GPTModule
    from torch.utils.data import DataLoader

    import lightning_ptm

    torch.set_num_threads(options["threads"])
    shape = GPTShape(**options["shape"])
    module = GPTModule(shape, seed=options["seed"], meta=False)
    chosen = list(module.model.blocks)[: frozen_blocks(shape)]  # type: ignore[union-attr]
    for block in chosen:
        block.requires_grad_(False)
    found: dict[str, float] = {}

    peak = Peak()
    peak.start()

    class Unfreezes(Callback):
        def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, index: int) -> None:
            if index == 1:
                peak.since_last()  # of the start
            if index == 2:
                trainer.strategy.engine.drain()  # type: ignore[attr-defined]
                found["before_bytes"] = peak.since_last()
                for block in chosen:
                    block.requires_grad_()
                self.began_s, self.began_cpu_s = time.perf_counter(), time.process_time()

    class Steps(GPTModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 2:
                found["seconds"] = time.perf_counter() - callback.began_s
                found["cpu_seconds"] = time.process_time() - callback.began_cpu_s
                found["between_bytes"] = peak.since_last()
            if batch_idx == 4:
                found["behind_bytes"] = peak.since_last()
            return super().training_step(batch, batch_idx)

    module.__class__ = Steps
    callback = Unfreezes()
    settings = options["settings"]
    trainer = Trainer(
        accelerator="cpu",
        precision="bf16-mixed",
        strategy=lightning_ptm.AngelPTMStrategy(**settings),
        max_steps=5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
        default_root_dir=settings["disk_path"],
    )
    trainer.fit(module, DataLoader(Batches(shape, batch=1, seed=1), batch_size=None))
    return found


def once(shape: GPTShape, args: argparse.Namespace, folder: Path) -> dict[str, float]:
    """`train` in a process of its own."""
    settings = {
        "page_size": f"{args.page_size}MiB",
        "disk_path": str(folder),
        "offload_optimizer": "disk",
        "offload_parameters": "device",
        "tuning": {"restore_weights": False},
        **dict(args.set),
    }
    options = {**base_options(shape, batch=1), "threads": args.threads, "settings": settings}
    done = subprocess.run(
        [sys.executable, __file__, "--one", json.dumps(options)],
        env={**os.environ, **side_environment(args)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Both sides in turns, print, and write what the command line asked for."""
    parser = argument_parser(__doc__, disk=True)
    parser.add_argument("--size", default="355M", choices=tuple(SHAPES))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.set_defaults(repeats=3)
    args = quicken(parser.parse_args())
    if args.one:
        print(json.dumps(train(json.loads(args.one))))
        return
    size = "tiny" if args.quick else args.size
    shape = SHAPES[size]
    trained, unfrozen = parts(shape)
    moved = 2 * STATE_BYTES * trained + MASTER_BYTES * unfrozen
    print(f"GPT {size}: {trained:,} parameters train, {unfrozen:,} are unfrozen; {moved / 1e9:.2f} GB have to move")
    runs, floors_s = [], []
    with disk_folder(args.disk_path) as folder:
        file_bytes = max(STATE_BYTES * trained, 4 * args.page_size * MIB)
        with DirectFile(str(folder), file_bytes=file_bytes, block_bytes=args.page_size * MIB) as file:
            file.fill()
            pattern = best_pattern(file)
            for repeat in range(args.repeats):
                runs.append(once(shape, args, folder))
                began_s = time.perf_counter()
                file.mixed(max(2, moved // (args.page_size * MIB)), pattern)
                floors_s.append(time.perf_counter() - began_s)
                print(
                    f"repeat {repeat + 1}: ours {runs[-1]['seconds']:.2f} s ({runs[-1]['cpu_seconds']:.2f} s of processors), "
                    f"disk {floors_s[-1]:.2f} s"
                )
    ratios = [run["seconds"] / floor for run, floor in zip(runs, floors_s, strict=True)]
    larger = [max(run["before_bytes"], run["behind_bytes"]) for run in runs]
    more = [run["between_bytes"] - most for run, most in zip(runs, larger, strict=True)]
    what = f"{size}, {unfrozen / 1e6:.0f}M of it unfrozen, masters on disk"
    seconds = median(run["seconds"] for run in runs)
    bars = [
        Bar(
            f"{what}: over moving the bytes", seconds, median(floors_s), "s", median(ratios), TIME_LIMIT, at_least=False
        ),
        Bar(
            f"{what}: peak memory beyond that of steps",
            median(more) / MIB,
            MEMORY_LIMIT_BYTES / MIB,
            "MiB",
            median(more) / MEMORY_LIMIT_BYTES,
            1.0,
            at_least=False,
        ),
    ]
    publish("unfreezing.py", args, bars, {})


if __name__ == "__main__":
    main()
