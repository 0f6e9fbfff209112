"""Runs that are there to be killed: imports everything once, then forks a run for each line that it reads.

A line is `FOLDER KIND STEPS RANKS`: a run that goes on from the newest checkpoint in `FOLDER/kept` if there is one, saves
after every step as KIND says ("full", "sharded", "async") and ends after so many steps. A KIND that ends with "+auto"
leaves it to `resume="auto"` which one that is; otherwise it is found here, by the step in its name. Each rank is a process;
their numbers are said first. Rank 0 says "began N with R" (ranks) before its first step, "saved N" when the checkpoint of
step N is in place as far as it knows, and "ended" when it has ended. "gone" is said when all of them are. Given as
arguments, a line is one run of this process, which a launcher may have made a rank of one machine or several; how many
there are is the launcher's then.
"""

from __future__ import annotations

import os
import socket
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ptm import AngelPTMStrategy

STEPS_PER_EPOCH = 5
STEP_S = float(os.environ.get("KILLED_RUN_STEP_S", "0"))
"""Seconds that a step waits, so that a run is not over before others have come."""
AUTO = "+auto"
SETTINGS: dict[str, dict[str, Any]] = {
    "full": {"offload_optimizer": "disk"},
    "sharded": {"offload_optimizer": "disk", "checkpoints": {"state_dict_type": "sharded"}},
    "async": {"lock_free": {"max_staleness": 0}, "checkpoints": {"state_dict_type": "sharded", "async_save": True}},
}


class Module(L.LightningModule):
    """Some hundred thousand parameters, so that saving takes a while; the data of a step are a function of its number and
    of the rank."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(192, 192) for _ in range(6))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        time.sleep(STEP_S)
        seed = self.trainer.global_step * 64 + self.trainer.global_rank
        x = torch.randn(4, 192, generator=torch.Generator().manual_seed(seed))
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class SaysSaved(ModelCheckpoint):
    """Says what is in place."""

    def on_train_start(self, trainer: L.Trainer, *arguments: Any) -> None:
        super().on_train_start(trainer, *arguments)
        if trainer.is_global_zero:
            print("began", trainer.global_step, "with", trainer.world_size, flush=True)

    def on_train_batch_end(self, trainer: L.Trainer, *arguments: Any) -> None:  # type: ignore[override]
        super().on_train_batch_end(trainer, *arguments)
        if trainer.is_global_zero and not trainer.strategy.settings.checkpoints.async_save:  # type: ignore[attr-defined]
            print("saved", trainer.global_step, flush=True)


def run(folder: Path, kind: str, steps: int, ranks: int) -> None:
    """Trains from the newest checkpoint on."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    kept = folder / "kept"
    keep = SaysSaved(kept, filename="{step}", every_n_train_steps=1, monitor="step", mode="max", save_top_k=2)
    format_, auto = kind.removesuffix(AUTO), kind.endswith(AUTO)
    newest = None if auto else max(kept.glob("step=*.ckpt"), key=step_of, default=None)
    settings = dict(SETTINGS[format_])
    settings["checkpoints"] = {**settings.get("checkpoints", {}), "resume": "auto" if auto else "never"}
    launched = {name: int(os.environ.get(name, ranks)) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE")}
    trainer = L.Trainer(
        strategy=AngelPTMStrategy(disk_path=folder / "disk", page_size="64KiB", host_memory="64MiB", **settings),
        accelerator="cpu",
        precision="32-true",
        devices=launched["LOCAL_WORLD_SIZE"],
        num_nodes=launched["WORLD_SIZE"] // launched["LOCAL_WORLD_SIZE"],
        max_steps=steps,
        use_distributed_sampler=False,  # an epoch has as many steps whatever the number of ranks
        callbacks=[keep],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder / "root",
    )
    module = Module()
    loader: DataLoader[Any] = DataLoader(range(STEPS_PER_EPOCH), batch_size=None)  # type: ignore[arg-type]
    trainer.fit(module, loader, ckpt_path=None if newest is None else str(newest))
    if trainer.is_global_zero:
        torch.save(module.state_dict(), folder / "weights.pt")
        print("ended", flush=True)


def step_of(path: Path) -> int:
    """The step that a checkpoint's name says."""
    return int(path.stem.partition("=")[2].partition("-")[0])


def forked(line: list[str], rank: int, port: int) -> int:
    """One rank of a run, in a process of its own; returns its number."""
    child = os.fork()
    if child:
        return child
    folder, kind, steps, ranks = line
    if ranks != "1":
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "tests"}
        os.environ.update({name: str(value) for name, value in {**numbers, **place}.items()})
    try:
        run(Path(folder), kind, int(steps), int(ranks))
    finally:
        os._exit(0)


def main() -> None:
    """A run for each line, one after the other, or that of the arguments."""
    warnings.simplefilter("ignore")
    if len(sys.argv) > 1:
        print("process", os.getpid(), flush=True)
        folder, kind, steps, ranks = sys.argv[1:]
        run(Path(folder), kind, int(steps), int(ranks))
        return
    for line in sys.stdin:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        children = [forked(line.split(), rank, port) for rank in range(int(line.split()[3]))]
        print("processes", *children, flush=True)
        for child in children:
            os.waitpid(child, 0)
        print("gone", flush=True)


if __name__ == "__main__":
    main()
