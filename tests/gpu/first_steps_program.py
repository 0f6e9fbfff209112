"""Fits with `device_memory="auto"` whose first step is unlike later ones, on the fake device: `python first_steps_program.py
FOLDER NAME...`, with names of `CASES`.

I1: losses and weights are, bit for bit, those of the same training with everything on the device.
I2: the run is laid out again as often as a case says.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import fake_device  # before torch
import lightning as L
import told_cases
import torch
from fake_library import NAME
from fits_program import EXPERTS, VOCABULARY, Dense, Net, same_weights
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_ptm import AngelPTMStrategy
from lightning_ptm.memory import activation_buffers
from lightning_ptm.memory.activation_buffers import HostBuffers
from lightning_ptm.runtime.engine import set_up
from lightning_ptm.terms import Tier
from lightning_ptm.trainer import relayout
from lightning_ptm.trainer.run import Run

Shape = tuple[int, int]
"""Samples and tokens of a batch."""


def batches(*shapes: Shape) -> list[Tensor]:
    made = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCABULARY, shape, generator=made) for shape in shapes]


class Fits:
    """Compares a fit in pages with a plain one.

    Args:
        device_bytes: bytes of the device that the fit in pages may take.
        evaluated: batches of validations.
        settings: of the strategy.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        data: list[Tensor],
        device_bytes: int,
        *callbacks: Callable[[], L.Callback],
        evaluated: Sequence[Tensor] = (),
        **settings: Any,
    ) -> None:
        self._make, self._data, self._device_bytes, self._callbacks = make, data, device_bytes, callbacks
        self._evaluated, self._settings = evaluated, settings
        self.laid_out: list[bool] = []
        """For each re-layout, whether pages got the least budget."""

    def plain(self, **options: Any) -> Any:
        return self._fit(SingleDeviceStrategy(torch.device(NAME, 0)), **options)

    def paged(self, **options: Any) -> Any:
        whole = relayout.lay_out_again

        def lay_out(run: Run) -> None:
            self.laid_out.append(run.device_budget.beside_bytes is None)
            whole(run)

        relayout.lay_out_again = lay_out
        gc.collect()
        taken = torch.empty(fake_device.lib.fc_capacity() - self._device_bytes, dtype=torch.uint8, device=NAME)
        try:
            with told_cases.in_order():
                # What is tested is the budget beside activations that are all kept.
                kept = {"recompute": "none", "offload_activations": "none"}
                settings = {"page_size": "64KiB", "host_memory": "64MiB", **kept, **self._settings}
                return self._fit(AngelPTMStrategy(**settings), **options)
        finally:
            relayout.lay_out_again = whole
            del taken

    def _fit(self, strategy: Any, **options: Any) -> Any:
        gc.collect()
        torch.manual_seed(0)
        module = self._make()
        trainer = L.Trainer(
            accelerator=NAME,
            devices=1,
            strategy=strategy,
            num_sanity_val_steps=0,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            callbacks=[make() for make in self._callbacks] or None,
            **{"max_epochs": 1, **options},
        )
        evaluated = [DataLoader(self._evaluated, batch_size=None)] if self._evaluated else []  # type: ignore[arg-type]
        trainer.fit(module, DataLoader(self._data, batch_size=None), *evaluated)
        return module.cpu()

    def check(self, laid_out: list[bool], **options: Any) -> None:
        theirs = self.plain(**options)
        ours = self.paged(**options)
        same_weights(ours, theirs)
        assert self.laid_out == laid_out, self.laid_out


FOLLOWS, LEAST = False, True


class Unfreezes(BaseFinetuning):
    """Trains the head alone in the first epoch."""

    def freeze_before_training(self, pl_module: L.LightningModule) -> None:
        self.freeze([pl_module.blocks, pl_module.embedding])

    def finetune_function(self, pl_module: L.LightningModule, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(
                [pl_module.blocks, pl_module.embedding], optimizer, lr=1e-3, initial_denom_lr=1
            )


class TrainsItsHead(Net):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=1e-2, fused=True)


def check_unfrozen(folder: Path) -> None:
    """Its first steps keep no activations of the frozen part, and update on the device what is updated in RAM later."""
    Fits(partial(TrainsItsHead, "dense"), batches(*[(8, 33)] * 2), 9 << 19, Unfreezes).check(
        [FOLLOWS, LEAST, FOLLOWS], max_epochs=3
    )


class NoLossAtFirst(Net):
    def training_step(self, batch: Tensor, index: int) -> Tensor | None:
        return super().training_step(batch, index) if index else None


def check_no_loss(folder: Path) -> None:
    Fits(partial(NoLossAtFirst, "dense"), batches(*[(8, 33)] * 4), 9 << 19).check([FOLLOWS])


class HeadApart(Net):
    """Two optimizers in turn: at each step the gradients of the other one wait in `.grad`."""

    automatic_optimization = False

    def configure_optimizers(self) -> Any:
        below = [*self.embedding.parameters(), *self.blocks.parameters()]
        return (
            torch.optim.AdamW(below, lr=1e-2, fused=True),
            torch.optim.AdamW(self.head.parameters(), lr=1e-2, fused=True),
        )

    def training_step(self, batch: Tensor, index: int) -> None:  # type: ignore[override]
        below, head = self.optimizers()
        self.manual_backward(super().training_step(batch, index))
        used = head if index < 2 else below
        used.step()
        used.zero_grad()


def check_gradients_wait(folder: Path) -> None:
    Fits(partial(HeadApart, "dense"), batches(*[(4, 33)] * 5), 5 << 20).check([FOLLOWS])


class ClearsLate(Net):
    """Zeroes gradients before the next backward, and only every other time, so that steps use sums."""

    automatic_optimization = False

    def training_step(self, batch: Tensor, index: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        if index % 2 == 0:
            optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, index))
        optimizer.step()


def check_gradients_stay(folder: Path) -> None:
    """The next layout has the gradients that the user has still to clear, whose sums are in fp32 in the second case."""
    given, mixed = batches(*[(4, 33)] * 5), {"precision": "bf16-mixed"}
    make = partial(ClearsLate, "dense")
    Fits(make, given, 4 << 20).check([FOLLOWS])
    theirs = Fits(make, given, 30 << 20, offload_parameters="device", offload_optimizer="device").paged(**mixed)
    fits = Fits(make, given, 5 << 19)
    same_weights(fits.paged(**mixed), theirs)
    assert fits.laid_out == [FOLLOWS], fits.laid_out


def check_longer_within_a_step(folder: Path) -> None:
    """Batches differ, and the longest comes while gradients are pending."""
    lengths = [17, 12, 17, 15, 17, 17, 24, 17, 17, 17]
    Fits(partial(Net, "dense"), batches(*[(4, each) for each in lengths]), 7 << 19).check(
        [FOLLOWS], accumulate_grad_batches=4
    )


class CallsABlockLate(Net):
    """Its last block is called from the third batch on."""

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        x = self.embedding(batch[:, :-1])
        for block in self.blocks if index > 1 else self.blocks[:-1]:
            x = block(x)
        loss = functional.cross_entropy(self.head(x).flatten(0, 1).float(), batch[:, 1:].flatten())
        self.losses.append(loss.detach().clone())
        return loss


def check_late_unit(folder: Path) -> None:
    """The block's gradients and activations have room, and the step with them is traced."""
    Fits(partial(CallsABlockLate, "dense"), batches(*[(4, 33)] * 6), 6 << 20).check([FOLLOWS, LEAST, FOLLOWS])


class Wide(Net):
    """Most of the model is in the root unit."""

    def __init__(self) -> None:
        super().__init__("dense")
        self.embedding, self.head = nn.Embedding(4096, 64), nn.Linear(64, 4096)


def check_little_memory(folder: Path) -> None:
    """The second layout needs the memory of the first, down to what a copy of pages to RAM has referred to."""
    Fits(Wide, batches(*[(4, 17)] * 3), 9 << 20).check([FOLLOWS])


class Hogs(Net):
    def training_step(self, batch: Tensor, index: int) -> Tensor:
        if index == 3:
            torch.empty(2 << 20, dtype=torch.uint8, device=self.device)
        return super().training_step(batch, index)


def check_out_of_memory(folder: Path) -> None:
    """The error says what pages take, and the number that it gives works."""
    fits = Fits(partial(Hogs, "dense"), batches(*[(4, 17)] * 5), 9 << 19)
    try:
        fits.paged()
    except torch.OutOfMemoryError as error:
        (note,) = error.__notes__
    else:
        raise AssertionError("memory sufficed")
    gc.collect()  # frees what the error's frames had
    assert note.startswith("Pages of model states take ") and "of the device, which leave room for steps" in note, note
    number = note.split("set device_memory='")[1].split("'")[0]
    again = Fits(partial(Net, "dense"), batches(*[(4, 17)] * 2), 9 << 19, device_memory=number)
    again.paged()
    assert again.laid_out == []


class Evaluated(Net):
    def validation_step(self, batch: Tensor, index: int) -> None:
        self.training_step(batch, index)


def check_larger_evaluation(folder: Path) -> None:
    """The first evaluation makes room, and later ones find it."""
    larger = batches(*[(12, 33)] * 2)
    Fits(partial(Evaluated, "dense"), batches(*[(4, 17)] * 12), 4 << 20, evaluated=larger).check(
        [FOLLOWS, LEAST, FOLLOWS], val_check_interval=3
    )


class CallsExpertsLate(Net):
    """All tokens of the first batches are alike, and go to one expert."""

    def __init__(self) -> None:
        super().__init__("experts")

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return super().training_step(batch if index > 1 else batch * 0, index)


def check_late_experts(folder: Path) -> None:
    """Gradients of experts that no traced step has called wait for the norm beside those of others. The first step with
    them keeps their activations, too, wherever it fits beside the least pages."""
    late = batches(*[(4, 33)] * 8)
    Fits(CallsExpertsLate, late, 4 << 20, **EXPERTS).check([FOLLOWS, LEAST, FOLLOWS], gradient_clip_val=0.1)
    Fits(CallsExpertsLate, late, 3 << 20, **EXPERTS).check([FOLLOWS, LEAST, FOLLOWS])
    Fits(CallsExpertsLate, late, 5 << 19, **EXPERTS).check([FOLLOWS, LEAST])


def check_clipped(folder: Path) -> None:
    """Gradients that were clipped in place wait in `.grad` for the whole forward of the next step."""
    Fits(partial(Net, "dense"), batches(*[(4, 33)] * 4), 6 << 20).check([FOLLOWS], gradient_clip_val=0.1)
    Fits(partial(Net, "experts"), batches(*[(4, 33)] * 4), 6 << 20, **EXPERTS).check([FOLLOWS], gradient_clip_val=0.1)


class SevenBlocks(Net):
    """Gradients take much beside the states of its optimizer."""

    def __init__(self) -> None:
        super().__init__("dense")
        self.blocks = nn.ModuleList([Dense() for _ in range(7)])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


class Waits(L.Callback):
    """Updates wait for all gradients."""

    def on_before_optimizer_step(self, *_: Any) -> None:
        pass


class Reads(L.Callback):
    def on_before_optimizer_step(self, trainer: L.Trainer, module: L.LightningModule, _: Any) -> None:
        self.norms = [float(each.grad.norm()) for each in module.parameters() if each.grad is not None]


def check_not_clipped(folder: Path) -> None:
    """Gradients in 16 bits that no step clips stay in `.grad` for the whole forward of the next step, too."""
    given, mixed = batches(*[(4, 33)] * 4), {"precision": "bf16-mixed"}
    on_device = {"offload_parameters": "device", "offload_optimizer": "device"}
    theirs = Fits(SevenBlocks, given, 30 << 20, Waits, **on_device).paged(**mixed)
    fits = Fits(SevenBlocks, given, 6 << 20, Waits)
    same_weights(fits.paged(**mixed), theirs)
    assert fits.laid_out == [FOLLOWS], fits.laid_out


def check_read(folder: Path) -> None:
    """What a hook reads of gradients in pages is on the device until Lightning zeroes them. In the second case, the least of
    the first step leaves too little for that, and the least that a plan needs leaves nothing over."""
    for size, laid_out in ((28 << 18, [FOLLOWS]), ((5 << 20) - (8 << 10), [LEAST])):
        Fits(partial(Net, "dense"), batches(*[(8, 33)] * 4), size, Reads).check(laid_out)


class TwelveBlocks(Net):
    """Activations take much beside all else."""

    def __init__(self) -> None:
        super().__init__("dense")
        self.blocks = nn.ModuleList([Dense() for _ in range(12)])


class Handlings(L.Callback):
    """After each step: the number of units whose activations were not kept, and whether that stays so in the layout."""

    seen: list[tuple[int, bool]]

    def __init__(self) -> None:
        Handlings.seen = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if isinstance(trainer.strategy, AngelPTMStrategy):
            policy = trainer.strategy.engine.activation_policy
            self.seen.append((0, True) if policy is None else (len(policy.in_force), policy._given is not None))


def check_activations(folder: Path) -> None:
    """Without a setting. Pages follow once steps treat activations as they will: what has no room leaves, is measured, and
    then fewer units' leave; this stays until a longer batch comes."""
    auto = {"recompute": "auto", "offload_activations": "auto"}
    shapes = [(8, 65)] * 5 + [(14, 65)] * 5
    Fits(TwelveBlocks, batches(*shapes), 24 << 20, Handlings, **auto).check([FOLLOWS, LEAST, FOLLOWS])
    units = [count for count, _ in Handlings.seen]
    assert [given for _, given in Handlings.seen] == [*[False] * 4, True] * 2, Handlings.seen
    assert units[0] == units[1] > units[2] == units[3] == units[4] > 0, units
    assert units[5] == units[6] >= units[7] == units[8] == units[9] > units[4], units
    kept = Fits(TwelveBlocks, batches(*shapes[:3]), 60 << 20, Handlings, **auto)
    kept.check([FOLLOWS])
    assert Handlings.seen == [(0, False), (0, True), (0, True)], Handlings.seen


class RamFills(L.Callback):
    """From the fifth step on, RAM has room for one storage of a block; `on_disk` is whether that step used the disk."""

    left_bytes, on_disk = 1 << 30, False

    def __init__(self) -> None:
        RamFills.left_bytes = 1 << 30

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, index: int) -> None:
        if index == 4:
            RamFills.left_bytes = 1 << 18

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if isinstance(trainer.strategy, AngelPTMStrategy):
            offload = trainer.strategy.engine.offload
            RamFills.on_disk = offload is not None and any(
                tier is Tier.DISK and mover.sent_bytes > 0 for tier, mover in offload._movers.items()
            )


class FewBuffers(HostBuffers):
    """RAM for activations, as much as `RamFills` leaves."""

    def __init__(self, backend: Any, *, free_bytes: Callable[[], int]) -> None:
        del free_bytes
        super().__init__(
            backend, free_bytes=lambda: activation_buffers._RESERVE_BYTES + RamFills.left_bytes - self.total_bytes
        )


def check_activations_in_short_ram(folder: Path) -> None:
    """In the layout that has the traced step's handlings, all of which are in RAM, RAM has no room: they go to disk."""
    auto = {"recompute": "none", "offload_activations": "auto", "disk_path": str(folder)}
    set_up.HostBuffers = FewBuffers  # type: ignore[misc]
    try:
        fits = Fits(TwelveBlocks, batches(*[(8, 65)] * 7), 24 << 20, Handlings, RamFills, **auto)
        fits.check([FOLLOWS])
    finally:
        set_up.HostBuffers = HostBuffers  # type: ignore[misc]
    assert [given for _, given in Handlings.seen] == [*[False] * 4, *[True] * 3], Handlings.seen
    assert RamFills.on_disk


CASES = {
    "activations": check_activations,
    "activations in short RAM": check_activations_in_short_ram,
    "unfrozen": check_unfrozen,
    "no loss": check_no_loss,
    "gradients wait": check_gradients_wait,
    "gradients stay": check_gradients_stay,
    "longer within a step": check_longer_within_a_step,
    "late unit": check_late_unit,
    "little memory": check_little_memory,
    "out of memory": check_out_of_memory,
    "larger evaluation": check_larger_evaluation,
    "late experts": check_late_experts,
    "clipped": check_clipped,
    "not clipped": check_not_clipped,
    "read": check_read,
}


def main(folder: Path, names: list[str]) -> None:
    told_cases.prepare(least_bytes=4096)
    told_cases.go_through((name, "", partial(CASES[name], folder)) for name in names)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
