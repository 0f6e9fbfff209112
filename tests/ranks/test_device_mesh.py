"""`self.device_mesh` of a module: the axes of Lightning's ModelParallelStrategy with any number of ranks, or a sentence."""

from __future__ import annotations

import copy
import gc
import os
from typing import Any

import lightning as L
import pytest
import torch
from kit.ranks.harness import run_ranks
from kit.ranks.tensor_blocks import Blocks, loader, module_of, trainer_of

from lightning_ptm import AngelPTMStrategy
from lightning_ptm.errors import RankError, UsageError


class Asks(Blocks):
    """Notes sizes of axes and its places there in `configure_model`, and who is in its groups in a step."""

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        axes = [self.device_mesh[name] for name in ("data_parallel", "tensor_parallel")]
        self.seen = [(axis.size(), axis.get_local_rank()) for axis in axes]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert self.device_mesh is not None
        sums = torch.full((2,), 1 << self.global_rank)
        for number, name in enumerate(("data_parallel", "tensor_parallel")):
            torch.distributed.all_reduce(sums[number : number + 1], group=self.device_mesh[name].get_group())
        self.seen.append(tuple(sums.tolist()))
        return super().training_step(batch, batch_idx)


def asked(ranks: int, tensor: int) -> list[Any]:
    torch.manual_seed(0)
    module = Asks()
    trainer = trainer_of(ranks, tensor)
    for _ in range(2):  # the second run has the mesh of the first
        trainer.fit(module, loader(4 // tensor))
        assert module.device_mesh is None
        trainer.fit_loop.max_epochs = 2
    return module.seen


@pytest.mark.parametrize(("ranks", "tensor"), [(2, 1), (2, 2)])
def test_any_number_of_ranks_has_both_axes(ranks: int, tensor: int) -> None:
    for rank, seen in enumerate(run_ranks(asked, ranks, ranks, tensor)):
        both, mine = 3, 1 << rank
        assert seen == ([(2, rank), (1, 0), (both, mine)] if tensor == 1 else [(1, 0), (2, rank), (mine, both)])


class Needs(Blocks):
    def configure_model(self) -> None:
        assert self.device_mesh is not None
        self.device_mesh["tensor_parallel"].get_group()


def test_one_rank_has_axes_of_one_without_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")  # `trainer_of` would

    class Looks(L.Callback):
        def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
            for mesh in (module.device_mesh, copy.deepcopy(module.device_mesh)):
                assert (mesh.size(), mesh.ndim, mesh.get_coordinate()) == (1, 2, (0, 0))
                assert (mesh["data_parallel"].size(), mesh["tensor_parallel"].get_local_rank()) == (1, 0)
                with pytest.raises(KeyError, match=r"device_mesh\['pipeline'\]: the mesh has only the axes"):
                    mesh["pipeline"]

    module = module_of()
    trainer_of(1, 1, callbacks=[Looks()]).fit(module, loader(2))
    assert module.device_mesh is None
    with pytest.raises(UsageError, match=r"one rank, which has no process groups, .* without get_group; ask"):
        trainer_of(1, 1).fit(Needs(), loader(2))
    with pytest.raises(UsageError, match=r"device_mesh exists on several ranks only, from set-up on"):
        AngelPTMStrategy(tensor_parallel_size=2).device_mesh["data_parallel"]


def left_over(tensor: int) -> list[tuple[int, int]]:
    """Files and threads of this process after each of some runs."""
    seen = []
    for _ in range(4):
        trainer_of(2, tensor).fit(module_of(), loader(2))
        gc.collect()
        seen.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    return seen


@pytest.mark.parametrize("tensor", [1, 2])
def test_runs_of_one_process_have_the_groups_of_the_first(tensor: int) -> None:
    """torch keeps groups, with their connections and threads: a search with hundreds of Trainers ran out of files."""
    for seen in run_ranks(left_over, 2, tensor):
        assert seen[-1] <= seen[0], seen


class Breaks(Blocks):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_rank == 1:
            raise ValueError("of one rank")
        return super().training_step(batch, batch_idx)


def after_a_failure() -> tuple[str, float]:
    trainer_of(2, 2).fit(module_of(), loader(2))
    try:
        trainer_of(2, 2).fit(Breaks(), loader(2))
    except (RankError, ValueError) as error:
        told = str(error)
    trainer_of(2, 2).fit(module := module_of(), loader(2))
    return told, module.losses[-1]


def test_a_run_behind_one_that_has_failed_on_a_rank_has_new_groups() -> None:
    (told, ours), (_, theirs) = run_ranks(after_a_failure, 2)
    assert "rank 1 failed with ValueError: of one rank" in told
    assert ours == theirs
