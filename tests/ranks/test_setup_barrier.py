"""A rank that fails while the run is set up ends the others at once, and all can fit again."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.ranks.harness import run_ranks
from kit.ranks.models import Tower
from kit.ranks.training import Training, loader, make_strategy, make_trainer, tokens
from test_uds import all_ranks

from lightning_ptm import RankError
from lightning_ptm.comm import SetupBarrier

PROMPT_S = 20.0


class FailsInSetUp(Tower):
    """Rank 1 fails there, once."""

    where = ""
    how = "raises"

    def fail(self, where: str) -> None:
        if where != self.where or self.trainer.global_rank != 1:
            return
        self.where = ""
        if self.how == "raises":
            raise ValueError("enough")
        signal.raise_signal(signal.SIGINT)

    def setup(self, stage: str) -> None:
        self.fail("setup")

    def configure_model(self) -> None:
        self.fail("configure_model")

    def configure_optimizers(self) -> Any:
        self.fail("configure_optimizers")
        return super().configure_optimizers()


def fitted_twice(where: str, how: str, folder: str) -> tuple[str, float, int, list[torch.Tensor]]:
    training = Training(Tower, batches=2)
    module = FailsInSetUp()
    module.where, module.how = where, how
    said, began_s = "", time.monotonic()
    try:
        make_trainer(training, make_strategy(folder, "ram"), 2).fit(module, loader(tokens(training, 2), 2))
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
    took_s = time.monotonic() - began_s
    trainer = make_trainer(training, make_strategy(folder, "ram"), 2)
    trainer.fit(module, loader(tokens(training, 2), 2))
    return said, took_s, trainer.global_step, [each.detach().clone() for each in module.parameters()]


@pytest.mark.parametrize("how", ["raises", "is interrupted"])
@pytest.mark.parametrize("where", ["setup", "configure_model", "configure_optimizers"])
def test_a_rank_that_fails_in_set_up_ends_the_others_and_all_fit_again(where: str, how: str, disk: Path) -> None:
    first, second = run_ranks(fitted_twice, 2, where, how, str(disk), limit_s=60)
    ours = "ValueError: enough" if how == "raises" else "KeyboardInterrupt"
    assert first[0].startswith(f"RankError: rank 1 failed with {ours} while the run was set up")
    assert second[0] == ("ValueError: enough" if how == "raises" else "SystemExit: 1")
    assert max(first[1], second[1]) < PROMPT_S
    assert first[2] == second[2] == 2
    assert all(map(torch.equal, first[3], second[3]))


def test_nobody_waits_for_long_where_nobody_says_anything() -> None:
    began_s = time.monotonic()
    SetupBarrier("here", 0, 2, dist.HashStore(), long_s=0.1).wait()
    assert 0.05 < time.monotonic() - began_s < 5


def test_all_go_on_when_all_are_there_and_hear_the_first_reason_where_one_is_not() -> None:
    board = dist.HashStore()
    ranks = [SetupBarrier("here", rank, 3, board, long_s=60) for rank in range(3)]
    others = SetupBarrier("of another run", 0, 3, board)

    def run(rank: int) -> None:
        others.fail("what is nothing to these")
        for _ in range(3):
            ranks[rank].wait()
        if rank == 1:
            ranks[1].fail("a reason")
            ranks[1].fail("another")
            return
        try:
            ranks[rank].wait()
        except RankError as error:
            ranks[rank].fail("what follows from it")
            raise error

    found = all_ranks(3, run)
    assert found[1] is None
    for rank in (0, 2):
        assert str(found[rank]).startswith(
            f"rank 1 failed with a reason while the run was set up, which needs all ranks, so rank {rank} stops too"
        )


class Gone:
    """A board whose rank is gone."""

    def add(self, *_: object) -> int:
        raise dist.DistNetworkError("connection reset")

    compare_set = add


def test_a_board_that_is_gone_is_no_news() -> None:
    """The collective tells that a rank is."""
    setup_barrier = SetupBarrier("here", 0, 2, Gone())  # type: ignore[arg-type]
    setup_barrier.wait()
    setup_barrier.fail("a reason")
