"""A program run twice: with the strategy where the program says, and by the judge, whose losses, weights and notes are right.

The judge is a plain Trainer (DDP on several ranks) where that has the same bits (`Program.by_plain_trainer`), else the
strategy with everything in RAM.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
from kit.fits import quiet_trainer
from kit.memory import strategy_with
from kit.products import products_of
from kit.twins import quietly
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from fuzz.module import VOCABULARY, Broken, Fuzzed
from fuzz.programs import BATCHES, Program

ROWS = 2
"""Rows of a batch."""
TIMEOUT_S = 60
Notes = list[tuple[str, Tensor]]


class Saves(L.Callback):
    """A checkpoint after the first epoch."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self._path)


class Rows(IterableDataset[Tensor]):
    """So many batches of this rank."""

    def __init__(self, batches: int, seed: int) -> None:
        rank = int(os.environ.get("RANK", "0"))
        generator = torch.Generator().manual_seed(10 * seed + rank)
        self._rows = torch.randint(0, VOCABULARY, (batches * ROWS, 9), generator=generator)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._rows)


def check(program: Program, folder: Path) -> str:
    """Returns the differences from the judge on this rank; empty if there are none."""
    disk = folder / "disk"
    disk.mkdir(parents=True, exist_ok=True)
    common = {"debug": {"poison": True}, "disk_path": disk, "timeout": timedelta(seconds=TIMEOUT_S)}

    def ours() -> Any:
        return strategy_with(**common, **program.strategy_settings())

    def judge() -> Any:
        if not program.by_plain_trainer:
            numbers = {name: value for name, value in program.settings if name in ("page_size", "tuning")}
            return strategy_with(**common, **numbers)
        return "auto" if program.ranks == 1 else _ddp()

    found = run(program, ours, folder / "ours.ckpt")
    assert program.ranks > 1 or not list(disk.iterdir()), "files were left on the disk"
    with products_of(program.precision) if program.by_plain_trainer else warnings.catch_warnings():
        expected = run(program, judge, folder / "judge.ckpt")
    return difference(found, expected, 0.0 if program.exact else 1e-3)


def _ddp() -> Any:
    from kit.ranks.ddp_judge import Judge

    return Judge()


def run(program: Program, strategy: Callable[[], Any], path: Path) -> Notes:
    """Notes of all fits, and weights and buffers after each."""
    notes: Notes = []
    module: Fuzzed | None = None
    for number, fit in enumerate(program.fits):
        with quietly():
            torch.manual_seed(0)
            if fit.begins != "same" or module is None:
                module = Fuzzed(program)
            module.fit_of = fit
            resumed = fit.begins == "resumed"
            trainer = _trainer(program, strategy(), fit.epochs + resumed, [Saves(path)] if number == 0 else [])
            validation = _loader(Rows(program.evaluations[trainer.global_rank], 2)) if program.evaluations else None
            try:
                trainer.fit(module, _loader(Rows(BATCHES, 1)), validation, ckpt_path=path if resumed else None)
            except Broken:
                if fit.breaks is None:
                    raise
            if fit.validates:
                trainer.validate(module, _loader(Rows(2, 3)), verbose=False)
        notes += module.notes
        module.notes = []
        notes += [(f"{name} after fit {number}", value.detach().clone()) for name, value in module.state_dict().items()]
    return notes


def _trainer(program: Program, strategy: Any, epochs: int, callbacks: list[L.Callback]) -> L.Trainer:
    options: dict[str, Any] = {}
    if not program.manual:
        options["accumulate_grad_batches"] = program.accumulate
        if program.clip is not None:
            options["gradient_clip_val"], options["gradient_clip_algorithm"] = program.clip
    return quiet_trainer(
        strategy,
        devices=program.ranks,
        precision=program.precision,
        max_epochs=epochs,
        limit_train_batches=BATCHES,
        num_sanity_val_steps=0,
        callbacks=callbacks,
        **options,
    )


def _loader(rows: Rows) -> DataLoader[Tensor]:
    # A generator of its own: a loader draws its seed from the global one, which dropout uses.
    return DataLoader(rows, batch_size=ROWS, generator=torch.Generator().manual_seed(0))


def difference(ours: Notes, theirs: Notes, tolerance: float) -> str:
    names = [name for name, _ in theirs]
    if [name for name, _ in ours] != names:
        return f"ours: {[name for name, _ in ours]}, the judge's: {names}"
    for at, ((name, mine), (_, other)) in enumerate(zip(ours, theirs, strict=True)):
        if mine.dtype != other.dtype or mine.shape != other.shape:
            return f"note {at}, {name}: {mine.dtype} {mine.shape}, the judge's {other.dtype} {other.shape}"
        if not torch.equal(mine, other) and not (tolerance and torch.allclose(mine, other, rtol=0, atol=tolerance)):
            return f"note {at} of {len(theirs)}, {name}: {mine.flatten()[:4]}, the judge's {other.flatten()[:4]}"
    return ""


def check_all(programs: Sequence[Program], folder: Path) -> list[str]:
    """One rank's part of one program after the other; the first that differs ends it."""
    found = []
    for number, program in enumerate(programs):
        try:
            found.append(check(program, folder / str(number)))
        except BaseException as error:
            error.add_note(str(program))
            raise
        if found[-1]:
            break
    return found


def ending(program: Program, folder: Path) -> str:
    """Type and text of the error that a run with the strategy ends with on this rank."""
    try:
        run(program, lambda: strategy_with(disk_path=folder, **program.strategy_settings()), folder / "x.ckpt")
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"
    return "passed"
