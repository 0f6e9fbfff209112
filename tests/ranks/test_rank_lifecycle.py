"""On several ranks: what the loaders give, validation in mid-epoch, checkpoints, and weights edited by hand."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from kit.outcomes import Outcome
from kit.products import products_of
from kit.ranks.harness import run_ranks
from kit.ranks.models import MomentumTower, Tower
from kit.ranks.training import (
    BATCH,
    TIERS,
    PlainRanks,
    Training,
    fit,
    loader,
    make_strategy,
    make_trainer,
    outcome_of,
    plain,
    tokens,
)
from kit.settings import merged
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ptm.errors import CheckpointError
from lightning_ptm.sharded import load
from lightning_ptm.storage.writer import SaveOps


class Listener(Tower):
    """Remembers the first token of every row that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[int]] = []

    def training_step(self, batch: Tensor, index: int) -> Tensor | None:
        if index == 0:
            self.seen.append([])
        self.seen[-1] += batch[:, 0].tolist()
        return super().training_step(batch, index)


def rows_seen(world_size: int, folder: Path, shuffle: bool) -> list[list[int]]:
    """Per epoch, which rows this rank gets from a loader that knows nothing of ranks."""
    module = Listener()
    rows = torch.arange(4 * world_size * BATCH).unsqueeze(1).expand(-1, 17).remainder(97)
    data = DataLoader(rows, batch_size=BATCH, shuffle=shuffle)  # type: ignore[arg-type]
    options = {"use_distributed_sampler": True, "max_epochs": 2}
    make_trainer(Training(Listener), make_strategy(folder), world_size, **options).fit(module, data)
    return module.seen


@pytest.mark.parametrize("shuffle", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_lightning_gives_each_rank_its_own_rows(shuffle: bool, disk: Path) -> None:
    per_rank = run_ranks(rows_seen, 2, 2, disk, shuffle)
    everything = sorted(range(4 * 2 * BATCH))
    for epoch in range(2):
        assert sorted(row for seen in per_rank for row in seen[epoch]) == everything
    if shuffle:
        assert per_rank[0][0] != per_rank[0][1]


# -- validation -------------------------------------------------------------------------------------------------------


def fit_and_validate(training: Training, world_size: int, folder: Path, tier: str) -> Outcome:
    torch.manual_seed(0)
    module = training.build()
    trainer = make_trainer(
        training,
        make_strategy(folder, tier),
        world_size,
        val_check_interval=2,
        limit_val_batches=2,
        num_sanity_val_steps=1,
    )
    trainer.fit(module, loader(tokens(training, world_size), world_size), validation_rows(training, world_size))
    return outcome_of(module)


def validation_rows(training: Training, world_size: int) -> DataLoader[Any]:
    return loader(tokens(training, world_size, seed=2), world_size)


@pytest.mark.parametrize("precision", ["bf16-mixed", pytest.param("32-true", marks=pytest.mark.slow)])
@pytest.mark.parametrize("tier", [pytest.param("ram", marks=pytest.mark.slow), "three_tiers"])
def test_validation_in_mid_epoch(tier: str, precision: str, disk: Path) -> None:
    training = Training(Tower, precision)
    several = run_ranks(fit_and_validate, 2, training, 2, disk, tier)
    expected = [[], []]  # type: ignore[var-annotated]
    rows = tokens(training, 2, seed=2)

    def validate(step: int, ranks: PlainRanks, batches: int = 2) -> None:
        if step % 2:
            return
        for rank in range(2):
            for index in range(batches if step else 1):
                batch = rows[rank::2][index * BATCH : (index + 1) * BATCH]
                autocast = torch.autocast("cpu", torch.bfloat16, enabled=ranks.mixed)
                with torch.no_grad(), products_of(precision), autocast:
                    expected[rank].append(ranks.module.loss(batch, rank, 0))

    ranks = PlainRanks(training, 2)
    theirs = ranks.run(tokens(training, 2), before_step=validate)
    validate(4, ranks)
    for rank, ours in enumerate(several):
        ours.assert_equal(Outcome(theirs[rank].losses, theirs[rank].weights, expected[rank]))


# -- checkpoints ------------------------------------------------------------------------------------------------------

WHOLE = Training(MomentumTower, "bf16-mixed")
"""Two epochs of it, with a checkpoint after each."""


def fit_two_epochs(
    world_size: int,
    data_ranks: int,
    folder: Path,
    saved: Path,
    tier: str,
    resume: str | None = None,
    **settings: Any,
) -> Outcome:
    """Trains on the rows of `data_ranks` ranks, divided among `world_size`."""
    torch.manual_seed(0)
    module = WHOLE.build()
    keep = ModelCheckpoint(saved, filename="{epoch}", save_top_k=-1, every_n_epochs=1)
    trainer = make_trainer(
        WHOLE,
        make_strategy(folder, tier, **settings),
        world_size,
        enable_checkpointing=True,
        max_epochs=2,
        default_root_dir=saved,
        callbacks=[keep],
    )
    rows = loader(tokens(WHOLE, data_ranks), world_size, BATCH * data_ranks // world_size)
    trainer.fit(module, rows, ckpt_path=None if resume is None else str(saved / resume), weights_only=False)
    return outcome_of(module)


@pytest.mark.parametrize(
    ("first_tier", "second_tier"), [("ram", "three_tiers"), pytest.param("all_on_disk", "ram", marks=pytest.mark.slow)]
)
def test_a_checkpoint_goes_on_where_it_was_saved(first_tier: str, second_tier: str, disk: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    uninterrupted = run_ranks(fit_two_epochs, 2, 2, 2, disk, saved, first_tier)
    resumed = run_ranks(fit_two_epochs, 2, 2, 2, disk, tmp_path / "again", second_tier, str(saved / "epoch=0.ckpt"))
    for before, after in zip(uninterrupted, resumed, strict=True):
        after.assert_equal(Outcome(before.losses[WHOLE.batches :], before.weights))


def test_a_checkpoint_of_two_ranks_goes_on_on_one_and_three(disk: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    uninterrupted = run_ranks(fit_two_epochs, 2, 2, 6, disk, saved, "ram")
    checkpoint = torch.load(saved / "epoch=1.ckpt", weights_only=False)
    # What is saved is whole and precise, under the module's own names.
    assert checkpoint["state_dict"].keys() == uninterrupted[0].weights.keys()
    for name, weight in checkpoint["state_dict"].items():
        assert torch.equal(weight, uninterrupted[0].weights[name])
    loaded = MomentumTower.load_from_checkpoint(saved / "epoch=1.ckpt", weights_only=False)
    assert all(torch.equal(p, uninterrupted[0].weights[name]) for name, p in loaded.named_parameters())
    for world_size in (1, 3):
        folder = tmp_path / f"on{world_size}"
        resumed = run_ranks(fit_two_epochs, world_size, world_size, 6, disk, folder, "ram", str(saved / "epoch=0.ckpt"))
        for outcome in resumed:
            for name, weight in outcome.weights.items():
                # bf16 gradients are rounded before they are added up, in another grouping.
                torch.testing.assert_close(weight, uninterrupted[0].weights[name], rtol=0, atol=2e-3)


SHARDED = {"checkpoints": {"state_dict_type": "sharded"}}


def fit_sharded(
    world_size: int,
    data_ranks: int,
    folder: Path,
    checkpoints: Path,
    tier: str,
    resume: str | None = None,
    behind: bool = False,
) -> Outcome:
    return fit_two_epochs(
        world_size, data_ranks, folder, checkpoints, tier, resume, **merged(SHARDED, checkpoints={"async_save": behind})
    )


@pytest.mark.parametrize(
    ("first_tier", "second_tier", "behind"),
    [
        pytest.param("ram", "three_tiers", True, marks=pytest.mark.slow),
        pytest.param("all_on_disk", "ram", False, marks=pytest.mark.slow),
        pytest.param("all_on_disk", "ram", True, marks=pytest.mark.slow),
        ("lock_free", "masters_on_disk", True),
    ],
)
def test_a_sharded_checkpoint_goes_on_where_it_was_saved(
    first_tier: str, second_tier: str, behind: bool, disk: Path, tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    uninterrupted = run_ranks(fit_sharded, 2, 2, 2, disk, saved, first_tier, None, behind)
    resumed = run_ranks(fit_sharded, 2, 2, 2, disk, tmp_path / "again", second_tier, str(saved / "epoch=0.ckpt"))
    for before, after in zip(uninterrupted, resumed, strict=True):
        after.assert_equal(Outcome(before.losses[WHOLE.batches :], before.weights))
    # Nobody had all of it: both ranks wrote.
    for rank in range(2):
        assert json.loads((saved / "epoch=0.ckpt" / f"ranges-{rank:05d}.json").read_text())


class Noisy(Tower):
    """Draws random numbers, other ones on each rank."""

    def training_step(self, batch: Tensor, index: int) -> Tensor | None:
        loss = super().training_step(batch, index)
        if self.global_step == 0:
            torch.manual_seed(100 + self.global_rank)
        return None if loss is None else loss * torch.rand(())


def fit_noisily(world_size: int, folder: Path, checkpoints: Path, resume: str | None = None) -> Outcome:
    torch.manual_seed(0)
    training = Training(Noisy)
    module = training.build()
    keep = ModelCheckpoint(checkpoints, filename="{epoch}", save_top_k=-1, every_n_epochs=1)
    options = {"enable_checkpointing": True, "max_epochs": 2, "default_root_dir": checkpoints, "callbacks": [keep]}
    trainer = make_trainer(training, make_strategy(folder, "ram", **SHARDED), world_size, **options)
    trainer.fit(module, loader(tokens(training, world_size), world_size), ckpt_path=resume, weights_only=False)
    return outcome_of(module)


def test_each_rank_goes_on_with_its_own_random_numbers(disk: Path, tmp_path: Path) -> None:
    never = run_ranks(fit_noisily, 2, 2, disk, tmp_path / "never")
    again = run_ranks(fit_noisily, 2, 2, disk, tmp_path / "again", str(tmp_path / "never" / "epoch=0.ckpt"))
    for before, after in zip(never, again, strict=True):
        after.assert_same_weights(before)


def save_where_one_rank_cannot(world_size: int, folder: Path, target: Path, behind: bool) -> str:
    strategy = make_strategy(folder, "masters_on_disk", **merged(SHARDED, checkpoints={"async_save": behind}))

    class Fails(SaveOps):
        def fsync(self, fd: int) -> None:
            if strategy.global_rank == 1:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            super().fsync(fd)

    class Saves(L.Callback):
        seen = ""

        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 1:
                trainer.save_checkpoint(target)
            if trainer.global_step == 2:
                strategy.save_ops = Fails()
                with pytest.raises(CheckpointError) as caught:
                    trainer.save_checkpoint(target)
                    trainer.save_checkpoint(target.with_name("never.ckpt"))  # where the other is waited for
                self.seen = str(caught.value)
                strategy.save_ops = None

    saves = Saves()
    trainer = make_trainer(WHOLE, strategy, world_size, callbacks=[saves])
    trainer.fit(WHOLE.build(), loader(tokens(WHOLE, world_size), world_size))
    return saves.seen


@pytest.mark.parametrize("behind", [False, True])
def test_a_rank_that_cannot_write_is_an_error_on_all(behind: bool, disk: Path, tmp_path: Path) -> None:
    target = tmp_path / "x.ckpt"
    for text in run_ranks(save_where_one_rank_cannot, 2, 2, disk, target, behind):
        assert os.strerror(errno.EIO) in text
    assert load(target)["global_step"] == 1  # the earlier one; and the run went on
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["disk", "x.ckpt"]


def load_what_is_damaged(world_size: int, folder: Path, source: Path) -> str:
    trainer = make_trainer(WHOLE, make_strategy(folder, "ram", **SHARDED), world_size, max_epochs=2)
    with pytest.raises(CheckpointError) as caught:
        trainer.fit(WHOLE.build(), loader(tokens(WHOLE, world_size), world_size), ckpt_path=str(source))
    return str(caught.value)


def test_damage_that_one_rank_finds_is_an_error_on_all(disk: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    run_ranks(fit_sharded, 2, 2, 2, disk, saved, "ram")
    file = sorted((saved / "epoch=0.ckpt").glob("*.momentum_buffer.safetensors"))[-1]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    for text in run_ranks(load_what_is_damaged, 2, 2, disk, saved / "epoch=0.ckpt"):
        assert file.name in text and "checksum differs" in text


class Stops(L.Callback):
    """One rank fails while a checkpoint is on its way; the other is told."""

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 1:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "x.ckpt")
        if trainer.global_step == 2 and trainer.global_rank == 1:
            raise ValueError("the user's own")


def fail_while_saving(world_size: int, folder: Path, root: Path) -> str:
    strategy = make_strategy(folder, "masters_on_disk", **merged(SHARDED, checkpoints={"async_save": True}))
    trainer = make_trainer(WHOLE, strategy, world_size, default_root_dir=root, callbacks=[Stops()])
    with pytest.raises(Exception, match="the user's own") as caught:
        trainer.fit(WHOLE.build(), loader(tokens(WHOLE, world_size), world_size))
    return type(caught.value).__name__


def test_a_checkpoint_on_its_way_outlives_its_run(disk: Path, tmp_path: Path) -> None:
    names = run_ranks(fail_while_saving, 2, 2, disk, tmp_path)
    assert names[1] == "ValueError"
    assert load(tmp_path / "x.ckpt")["global_step"] == 1
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["disk", "x.ckpt"]


# -- weights by hand --------------------------------------------------------------------------------------------------


class EditInMidRun(L.Callback):
    """At step 2 every rank writes other values; on the next steps all have those of rank 0."""

    def __init__(self) -> None:
        self.read: list[Tensor] = []

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, index: int) -> None:
        if index != 2:
            return
        with trainer.strategy.gathered(module.blocks[1], module.norm):
            with torch.no_grad():
                module.blocks[1].down.weight.mul_(0.5 + trainer.global_rank)
            module.norm.weight.data = torch.full((64,), 0.25 + trainer.global_rank)
        with trainer.strategy.gathered(write=False):
            self.read = [module.blocks[1].down.weight.detach().clone(), module.norm.weight.detach().clone()]


def fit_with_edits(training: Training, world_size: int, folder: Path, tier: str) -> tuple[Outcome, list[Tensor]]:
    torch.manual_seed(0)
    module, edit = training.build(), EditInMidRun()
    trainer = make_trainer(training, make_strategy(folder, tier), world_size, callbacks=[edit])
    trainer.fit(module, loader(tokens(training, world_size), world_size))
    return outcome_of(module), edit.read


@pytest.mark.diagonal
@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
@pytest.mark.parametrize(
    "tier",
    [tier if tier in ("three_tiers", "lock_free") else pytest.param(tier, marks=pytest.mark.slow) for tier in TIERS],
)
def test_weights_edited_when_gathered(tier: str, precision: str, disk: Path) -> None:
    training = Training(Tower, precision)

    def edit(step: int, ranks: PlainRanks) -> None:
        if step == 2:
            with torch.no_grad():
                ranks.masters["blocks.1.down.weight"].mul_(0.5)
                ranks.masters["norm.weight"].fill_(0.25)
            after.extend(ranks.masters[name].detach().clone() for name in ("blocks.1.down.weight", "norm.weight"))
            ranks.publish()

    after: list[Tensor] = []
    theirs = PlainRanks(training, 2).run(tokens(training, 2), before_step=edit)
    for rank, (ours, read) in enumerate(run_ranks(fit_with_edits, 2, training, 2, disk, tier)):
        ours.assert_equal(theirs[rank])
        assert all(torch.equal(mine, other) for mine, other in zip(read, after, strict=True))


def fit_twice_and_test(training: Training, world_size: int, folder: Path) -> list[Outcome]:
    """Two fits of one module on one Trainer's worth of process groups, and one of another module."""
    torch.manual_seed(0)
    module = training.build()
    for _ in range(2):
        trainer = make_trainer(training, make_strategy(folder, "masters_on_disk"), world_size)
        trainer.fit(module, loader(tokens(training, world_size), world_size))
    trainer.validate(module, validation_rows(training, world_size), verbose=False)
    return [outcome_of(module), fit(training, world_size, folder)]


def test_one_fit_after_the_other(disk: Path) -> None:
    training = Training(Tower)
    first = plain(training, 2)
    again = PlainRanks(training, 2)
    with torch.no_grad():
        for name, master in again.masters.items():
            master.copy_(first[0].weights[name])
    second = again.run(tokens(training, 2))
    for rank, (twice, fresh) in enumerate(run_ranks(fit_twice_and_test, 2, training, 2, disk)):
        fresh.assert_equal(first[rank])
        assert len(twice.validation_losses) == training.batches
        Outcome(twice.losses, twice.weights).assert_equal(
            Outcome(first[rank].losses + second[rank].losses, second[rank].weights)
        )
