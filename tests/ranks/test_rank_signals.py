"""Signals of a scheduler: SIGTERM ends all ranks before the same batch, whichever of them it reaches; SLURM's saves between
batches."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from kit.ranks.harness import run_ranks
from kit.ranks.models import Tower
from kit.ranks.training import Training, loader, make_strategy, make_trainer, tokens
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from lightning_ptm.trainer.signals import Signals

BATCHES = 6


class Interrupted(Tower):
    """These ranks get a signal in the middle of the third step, in its forward."""

    def __init__(self, number: int, ranks: tuple[int, ...]) -> None:
        super().__init__()
        self.number, self.ranks = number, ranks
        self.validated = 0

    def loss(self, batch: Tensor, rank: int, step: int) -> Tensor | None:
        if self.trainer.training and self.trainer.global_step == 2 and rank in self.ranks:
            signal.raise_signal(self.number)
        return super().loss(batch, rank, step)


def ended(ranks: tuple[int, ...], folder: str, tier: str, batches: int) -> tuple[str, int]:
    training = Training(Tower, batches=batches)
    trainer = make_trainer(training, make_strategy(folder, tier), 2)
    module = Interrupted(signal.SIGTERM, ranks)
    try:
        trainer.fit(module, loader(tokens(training, 2), 2))
    except SIGTERMException as error:
        return type(error).__name__, trainer.global_step
    return "went on", trainer.global_step


@pytest.mark.diagonal
@pytest.mark.parametrize("tier", ["ram", "three_tiers"])
@pytest.mark.parametrize("ranks", [(0, 1), (0,), (1,)], ids=str)
def test_sigterm_ends_all_ranks_before_the_same_batch(ranks: tuple[int, ...], tier: str, disk: Path) -> None:
    assert run_ranks(ended, 2, ranks, str(disk), tier, BATCHES, limit_s=60) == [("SIGTERMException", 3)] * 2


def test_sigterm_in_the_last_step_is_not_swallowed(disk: Path) -> None:
    assert run_ranks(ended, 2, (1,), str(disk), "ram", 3, limit_s=60) == [("SIGTERMException", 3)] * 2


def test_what_comes_while_ranks_agree_is_for_the_next_time() -> None:
    comes = [True, False, False]

    def agree(asked: int) -> int:
        if comes.pop(0):
            signals.end(signal.SIGTERM, None)
        return asked

    signals = Signals(L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False), agree)
    signals.settle()
    with pytest.raises(SIGTERMException):
        signals.settle()
    signals.settle()


class Slurm(SLURMEnvironment):
    """Environment of a Slurm job that may be requeued, with the ranks of the tests."""

    @staticmethod
    def detect() -> bool:
        return True

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def world_size(self) -> int:
        return int(os.environ["WORLD_SIZE"])

    def global_rank(self) -> int:
        return int(os.environ["RANK"])

    def node_rank(self) -> int:
        return 0

    def local_rank(self) -> int:
        return int(os.environ["LOCAL_RANK"])

    @property
    def main_address(self) -> str:
        return os.environ["MASTER_ADDR"]

    @property
    def main_port(self) -> int:
        return int(os.environ["MASTER_PORT"])

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """None of a real job."""


def requeued(
    world_size: int, folder: str, tier: str, batches: int
) -> tuple[int, list[str], list[Tensor], list[Tensor]]:
    """Steps done; files written; the weights in the file, and those of a run that stops where it was saved."""
    os.environ["SLURM_JOB_ID"] = "7"
    os.environ["PATH"] = f"{folder}/bin:{os.environ['PATH']}"  # where scontrol is
    training = Training(Tower, batches=batches)
    root = Path(folder) / "root"

    def fit(steps: int, module: Tower, plugins: list[Any], root: Path) -> L.Trainer:
        trainer = make_trainer(
            training, make_strategy(folder, tier), world_size, max_steps=steps, plugins=plugins, default_root_dir=root
        )
        trainer.fit(module, loader(tokens(training, world_size), world_size))
        return trainer

    torch.manual_seed(0)
    trainer = fit(
        batches, Interrupted(signal.SIGUSR1, (0, 1)), [Slurm(auto_requeue=True, requeue_signal=signal.SIGUSR1)], root
    )
    torch.manual_seed(0)
    short = Interrupted(signal.SIGUSR1, ())
    fit(3, short, [], Path(folder) / "short")
    (saved,) = root.glob("hpc_ckpt_*")
    state = torch.load(saved, weights_only=True)
    names = [name for name, _ in short.named_parameters()]
    return (
        trainer.global_step,
        [state["global_step"], saved.name],
        [state["state_dict"][name] for name in names],
        [parameter.detach().clone() for parameter in short.parameters()],
    )


@pytest.mark.parametrize(
    ("world_size", "tier", "batches"),
    [
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, "ram", BATCHES), (2, "ram", 3))),
        (1, "three_tiers", 3),
        (2, "three_tiers", BATCHES),
    ],
)
def test_slurms_signal_saves_between_batches(
    world_size: int, tier: str, batches: int, disk: Path, tmp_path: Path
) -> None:
    """The third step of three is the last."""
    (tmp_path / "bin").mkdir()
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.write_text(f"#!/bin/sh\necho $@ >> {tmp_path}/asked\n")
    scontrol.chmod(0o755)
    for steps, (at, name), weights, expected in run_ranks(
        requeued, world_size, world_size, str(tmp_path), tier, batches
    ):
        assert (steps, at, name) == (batches, 3, "hpc_ckpt_1.ckpt")
        assert all(map(torch.equal, weights, expected))
    assert (tmp_path / "asked").read_text() == "requeue 7\n"
