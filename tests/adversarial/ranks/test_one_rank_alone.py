"""A forward that one rank computes alone, in any hook, goes on as with DDP. What needs all ranks is an error of all."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from kit.ranks.ddp_judge import Case, Sees, run_cases
from kit.ranks.harness import run_ranks
from kit.ranks.models import Tower
from kit.ranks.training import Training, loader, make_strategy, make_trainer, tokens

HOOKS = [
    *("on_fit_start", "on_sanity_check_start", "on_sanity_check_end", "on_train_start", "on_train_epoch_start"),
    *("on_train_batch_start", "on_train_batch_end", "on_validation_start", "on_validation_epoch_start"),
    *("on_validation_batch_end", "on_validation_epoch_end", "on_validation_end", "on_train_epoch_end", "on_train_end"),
    *("on_test_start", "on_test_epoch_start", "on_test_batch_end", "on_test_epoch_end", "on_test_end"),
    *("on_predict_start", "on_predict_epoch_start", "on_predict_batch_end", "on_predict_epoch_end", "on_predict_end"),
    *("on_save_checkpoint", "on_before_zero_grad", "on_before_optimizer_step", "on_before_backward", "on_fit_end"),
]
ENDS = ["on_train_epoch_end", "on_validation_epoch_end", "on_train_end", "on_test_end", "on_predict_epoch_end"]


class Alone(Sees):
    """Something is done by one rank alone, in some hooks."""

    who = 0

    def test_step(self, batch: Any, index: int) -> None:
        self.validation_step(batch, index)

    predict_step = test_step

    def hook(self) -> None:
        if self.trainer.global_rank == self.who:
            self.alone()

    @torch.no_grad()
    def alone(self) -> None:
        x = self.embedding(torch.arange(34).view(2, 17))
        for index in (2, 0):
            x = self.blocks[index](x)
        self.note(self.head(self.norm(x)).sum())


def hooked(cls: type[Alone], hooks: list[str]) -> type[Alone]:
    for hook in hooks:
        setattr(cls, hook, lambda self, *_, **__: self.hook())
    return cls


class RankZeroAlone(Alone):
    pass


class RankOneAlone(Alone):
    who = 1


hooked(RankZeroAlone, HOOKS)
hooked(RankOneAlone, HOOKS)


def every_loop(trainer: L.Trainer, module: Tower, data: Any) -> None:
    trainer.validate(module, data, verbose=False)
    trainer.fit(module, data, data)
    trainer.test(module, data, verbose=False)
    trainer.predict(module, data, return_predictions=False)


OPTIONS = {"max_epochs": 2, "num_sanity_val_steps": 1, "enable_checkpointing": True}


@pytest.mark.parametrize(
    ("build", "tiers"),
    [
        (RankZeroAlone, ("three_tiers",)),
        pytest.param(RankZeroAlone, ("ram", "all_on_disk"), marks=pytest.mark.slow),
        pytest.param(RankOneAlone, ("lock_free",), marks=pytest.mark.slow),
        pytest.param(RankOneAlone, ("masters_on_disk",), marks=pytest.mark.slow),
    ],
)
def test_a_forward_of_one_rank_alone(build: type[Alone], tiers: tuple[str, ...], disk: Path) -> None:
    run_cases([Case(build, tiers, options=OPTIONS, run=every_loop, batches=2)], 2, disk)


# -- what ends with an error of all ranks ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Ending:
    """Expected end of a run.

    Attributes:
        texts: parts of the error, by rank.
        settings: of the strategy; options: of the Trainer.
    """

    build: Callable[[], Alone]
    texts: tuple[tuple[str, ...], ...]
    hook: str
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


def ending(case: Ending, world_size: int, folder: str) -> str:
    """Type and text of the error of this rank's run."""
    torch.manual_seed(0)
    training = Training(case.build, batches=2)
    module = case.build()
    setattr(type(module), case.hook, lambda self, *_, **__: self.hook())
    trainer = make_trainer(training, make_strategy(folder, "ram", **case.settings), world_size, **case.options)
    data = loader(tokens(training, world_size), world_size)
    try:
        if "_test_" in case.hook:
            trainer.test(module, data, verbose=False)
        elif "_predict_" in case.hook:
            trainer.predict(module, data, return_predictions=False)
        else:
            trainer.fit(module, data, data)
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        delattr(type(module), case.hook)
    return "passed"


def endings(cases: list[Ending], world_size: int, folder: str) -> list[str]:
    return [ending(case, world_size, folder) for case in cases]


def assert_endings(cases: list[Ending], world_size: int, folder: Path) -> None:
    """In one start of ranks."""
    for rank, told in enumerate(run_ranks(endings, world_size, cases, world_size, str(folder), limit_s=240.0)):
        for case, text in zip(cases, told, strict=True):
            for part in case.texts[rank]:
                assert part in text, f"rank {rank}, {case.build} in {case.hook}: {text}"


class Saves(Alone):
    def alone(self) -> None:
        self.trainer.save_checkpoint("alone.ckpt")


class Gathers(Alone):
    def alone(self) -> None:
        with self.trainer.strategy.gathered(self, write=False):
            pass


class Reduces(Alone):
    def alone(self) -> None:
        dist.all_reduce(torch.ones(1))


class ReducesOrMeets(Alone):
    def hook(self) -> None:
        if self.trainer.global_rank:
            dist.barrier()
        else:
            dist.all_reduce(torch.ones(1))


class GathersOtherParts(Alone):
    def hook(self) -> None:
        with self.trainer.strategy.gathered(self.blocks[self.trainer.global_rank], write=False):
            pass


class LooksInside(Alone):
    """Rank 0 alone takes weights that all ranks have gathered."""

    def hook(self) -> None:
        with self.trainer.strategy.gathered(self, write=False):
            if self.trainer.is_global_zero:
                state = self.state_dict()
                assert not any(value.isnan().any() for value in state.values())
                assert torch.equal(state["blocks.1.up.weight"], self.blocks[1].up.weight)


class Raises(Alone):
    def alone(self) -> None:
        raise ValueError("this rank has had enough")


class RankOneRaises(Raises):
    who = 1


class RaisesBesideAForward(Alone):
    """The other rank computes alone meanwhile."""

    def hook(self) -> None:
        if self.trainer.global_rank:
            raise ValueError("this rank has had enough")
        self.alone()


class RaisesBesideACollective(Alone):
    def hook(self) -> None:
        if self.trainer.global_rank:
            raise ValueError("this rank has had enough")
        dist.all_reduce(torch.ones(1))


class RaisesWhileOthersEdit(Alone):
    def hook(self) -> None:
        with self.trainer.strategy.gathered(self):
            if self.trainer.global_rank:
                raise ValueError("this rank has had enough")
            dist.all_reduce(torch.ones(1))


class EditsBesideAForward(Alone):
    """The other rank goes on to the end of the block."""

    def hook(self) -> None:
        with self.trainer.strategy.gathered(self.blocks[1]):
            super().hook()


ENOUGH = "ValueError: this rank has had enough"
TOLD = "RankError: rank 1 failed with ValueError: this rank has had enough"
PLACES = ("[rank 0 at test_one_rank_alone.py", "rank 1 at test_one_rank_alone.py")
ON_EACH = "save_checkpoint and gathered need all ranks: call them on each of them"
MINE = "RankError: rank 0 reads, edits or saves weights and another rank"
THEIRS = "and another rank reads, edits or saves weights, so they would wait for each other for ever"


@pytest.mark.parametrize("build", [Saves, pytest.param(Gathers, marks=pytest.mark.slow)])
def test_weights_of_one_rank_alone_are_an_error_of_all(build: type[Alone], disk: Path) -> None:
    """A save of rank 0 alone raises on all ranks; with DDP it waits in Lightning's barrier until the time limit."""
    cases = [Ending(build, ((MINE, ON_EACH, *PLACES), (THEIRS, ON_EACH, *PLACES)), hook) for hook in ENDS]
    assert_endings(cases, 2, disk)


def test_what_others_do_otherwise_is_no_partner(disk: Path) -> None:
    """Rank 0 reads weights in a hook, and both save a checkpoint after it."""
    differs = "reads, edits or saves weights in another way than another rank, so their collectives would not match"
    cases = [
        Ending(
            Gathers,
            2 * (("is in a collective", ON_EACH, *PLACES),),
            "on_train_epoch_end",
            options={"enable_checkpointing": True},
        ),
        Ending(GathersOtherParts, 2 * ((differs, ON_EACH, *PLACES),), "on_train_batch_end"),
        Ending(
            ReducesOrMeets, 2 * (("is in a collective", "and another rank is in another one", *PLACES),), "on_train_end"
        ),
        Ending(Reduces, 2 * (("is in a collective", "has come to the end of the run", *PLACES),), "on_train_end"),
        Ending(
            Reduces, 2 * (("is in a collective", "goes on to another training batch", *PLACES),), "on_train_batch_end"
        ),
        Ending(Reduces, 2 * (("is in a collective", "is in an optimizer step", *PLACES),), "on_before_optimizer_step"),
    ]
    assert_endings(cases, 2, disk)


@pytest.mark.parametrize("hooks", [pytest.param(ENDS[:3], marks=pytest.mark.slow), ENDS[3:]])
def test_an_error_of_one_rank_alone(hooks: list[str], disk: Path) -> None:
    cases = []
    for hook in hooks:
        cases.append(Ending(Raises, ((ENOUGH,), ("RankError",)), hook))
        cases.append(Ending(RankOneRaises, ((TOLD,), (ENOUGH,)), hook))
        cases.append(Ending(RaisesBesideAForward, ((TOLD,), (ENOUGH,)), hook))
        cases.append(Ending(RaisesBesideACollective, ((TOLD,), (ENOUGH,)), hook))
        cases.append(Ending(EditsBesideAForward, (("passed",), ("passed",)), hook))
        cases.append(Ending(LooksInside, (("passed",), ("passed",)), hook))
        cases.append(Ending(RaisesWhileOthersEdit, (("RankError",), (ENOUGH,)), hook))
    assert_endings(cases, 2, disk)


# -- what one rank alone cannot read --------------------------------------------------------------------------------------


def resumed_from_a_copy(folder: Path) -> list[str]:
    """Fit, then resume with a copy of the checkpoint for each machine, rank 1's of which is damaged."""
    training, rank = Training(Tower, batches=2), int(os.environ["RANK"])
    data, told = loader(tokens(training, 2), 2), []
    for kind in ("full", "sharded"):
        strategy = make_strategy(folder, "ram", checkpoints={"state_dict_type": kind})
        trainer = make_trainer(training, strategy, 2)
        trainer.fit(training.build(), data)
        trainer.save_checkpoint(folder / kind)
        copy = folder / f"{kind}{rank}"
        file = (folder / kind / "lightning.pt", copy / "lightning.pt") if kind == "sharded" else (folder / kind, copy)
        if kind == "sharded":
            shutil.copytree(folder / kind, copy)
        else:
            shutil.copy(folder / kind, copy)
        if rank:
            file[1].write_bytes(file[0].read_bytes()[:100])
        for resume in (trainer, make_trainer(training, make_strategy(folder, "ram"), 2)):
            try:
                resume.fit(training.build(), data, ckpt_path=str(copy))
            except Exception as error:
                told.append(f"{type(error).__name__}: {error}")
    return told


def test_a_checkpoint_that_one_rank_cannot_read_ends_the_run_on_all(tmp_path: Path) -> None:
    other, damaged = run_ranks(resumed_from_a_copy, 2, tmp_path, limit_s=120.0)
    assert len(other) == len(damaged) == 4
    assert all(each.startswith("CheckpointError: rank 1: ") for each in other), other
    assert all(each.startswith("CheckpointError: ") and "rank" not in each for each in damaged), damaged
