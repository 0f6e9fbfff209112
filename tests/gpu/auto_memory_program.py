"""Fits with `device_memory="auto"` on the fake device, in a process that has no other: `python auto_memory_program.py FOLDER
NAME...`, with names such as `case 0`, of `CASES`, and `random batches`; as one rank of several, which torchrun's variables
tell.

I1: losses and weights are, bit for bit, those of the same training with everything on the device.
I2: the first step has the least device memory that its plan needs, and all later ones more: the run is laid out again once.
"""

from __future__ import annotations

import gc
import random
import sys
from functools import partial
from pathlib import Path
from typing import Any

import fake_device  # before torch
import lightning as L
import told_cases
import torch
from fake_library import NAME
from fit_cases import ACCUMULATED
from fits_program import EXPERTS, VOCABULARY, Net, Saves, Training, expected, prepare, same, train
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ptm import AngelPTMStrategy
from lightning_ptm.terms import Tier
from lightning_ptm.trainer import relayout

Case = tuple[Training, dict[str, Any], bool]
STEPS = 60
DEVICE_BYTES = 5 << 19
"""Room for less than the states and activations of a model."""
DISK = {"offload_optimizer": "disk"}
LOCK_FREE = {"lock_free": {"max_staleness": 0}}
CASES: list[Case] = [
    (("dense", "free", "each", "32-true"), {}, False),
    (("dense", "clipped", "by two", "32-true"), {}, True),
    (("dense", "clipped", "each", "bf16-mixed"), {"recompute": "all"}, True),
    (("dense", "free", "by two", "16-mixed"), LOCK_FREE, False),
    (("experts", "clipped", "each", "32-true"), {**DISK, **EXPERTS}, False),
    (("divided", "clipped", "each", "32-true"), {**EXPERTS, "expert_parallel_size": 2}, True),
]
"""Training, settings, and whether a second run goes on from a checkpoint of the middle."""


class Watches(L.Callback):
    """Bytes of the device's pages in each batch."""

    def __init__(self) -> None:
        self.pools: list[int] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.pools.append(trainer.strategy.engine.blueprint.pool_bytes[Tier.DEVICE])


def check(case: Case, folder: Path) -> None:
    training, settings, resumes = case
    disk, path = folder / "disk", folder / "half.ckpt"
    disk.mkdir(parents=True, exist_ok=True)
    laid_out: list[Any] = []

    def lay_out(run: Any) -> None:
        laid_out.append(run)
        whole(run)

    def strategy() -> AngelPTMStrategy:
        # What is tested is the budget beside activations that are all kept.
        ours = {"recompute": "none", "offload_activations": "none", **settings}
        return AngelPTMStrategy(page_size="64KiB", host_memory="64MiB", disk_path=disk, **ours)

    theirs = expected(training)
    whole, relayout.lay_out_again = relayout.lay_out_again, lay_out
    try:
        with told_cases.in_order():
            watches = Watches()
            taken = torch.empty(fake_device.lib.fc_capacity() - DEVICE_BYTES, dtype=torch.uint8, device=NAME)
            ours = train(training, strategy(), None, Saves(path), watches)
            same(ours, theirs, 2)
            first = ACCUMULATED[training[2]]
            before, after = set(watches.pools[:first]), set(watches.pools[first:])
            assert len(laid_out) == len(before) == len(after) == 1 and max(before) < max(after), watches.pools
            if resumes:
                same(train(training, strategy(), path), ours, 1)
                assert len(laid_out) == 2, laid_out
            del taken
    finally:
        relayout.lay_out_again = whole


def check_random_batches(folder: Path) -> None:
    """Batches and lengths change at random, with evaluations of larger ones: nothing fails, and numbers stay."""
    numbers = random.Random(0)
    shapes = [(numbers.randint(1, 6), numbers.randint(4, 48)) for _ in range(STEPS)]
    made = torch.Generator().manual_seed(1)
    batches = [torch.randint(0, VOCABULARY, shape, generator=made) for shape in shapes]
    larger = [torch.randint(0, VOCABULARY, (12, 64), generator=made)]

    class Evaluated(Net):
        def validation_step(self, batch: Tensor, index: int) -> None:
            self.training_step(batch, index)

    def trained(strategy: Any) -> Net:
        gc.collect()
        torch.manual_seed(0)
        module = Evaluated("dense")
        trainer = L.Trainer(
            accelerator=NAME,
            devices=1,
            strategy=strategy,
            max_epochs=1,
            val_check_interval=STEPS // 2,
            num_sanity_val_steps=0,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        )
        trainer.fit(module, DataLoader(batches, batch_size=None), DataLoader(larger, batch_size=None))
        return module.cpu()

    laid_out: list[Any] = []

    def lay_out(run: Any) -> None:
        laid_out.append(run)
        whole(run)

    theirs = trained(SingleDeviceStrategy(torch.device(NAME, 0)))
    whole, relayout.lay_out_again = relayout.lay_out_again, lay_out
    try:
        taken = torch.empty(fake_device.lib.fc_capacity() - 3 * DEVICE_BYTES, dtype=torch.uint8, device=NAME)
        ours = trained(AngelPTMStrategy(page_size="64KiB", host_memory="64MiB"))
        del taken
    finally:
        relayout.lay_out_again = whole
    assert torch.equal(torch.stack(ours.losses).cpu(), torch.stack(theirs.losses).cpu())
    for (name, weight), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(weight, other), name
    assert 1 < len(laid_out) <= 12, len(laid_out)


def main(folder: Path, names: list[str]) -> None:
    prepare()
    checks = {
        f"case {number}": (str(case), partial(check, case, folder / str(number))) for number, case in enumerate(CASES)
    }
    checks["random batches"] = "", partial(check_random_batches, folder)
    told_cases.go_through((name, *checks[name]) for name in names)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
