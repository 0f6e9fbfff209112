"""Parameters are unfrozen between two batches on two ranks: the weights are those of one rank with both ranks' batches, and a
rank that unfreezes alone ends the run on both. (DDP does not reduce gradients of what was frozen when it began.)"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
from kit.fits import quiet_trainer
from kit.outcomes import Outcome
from kit.ranks.harness import run_ranks, watch_ranks
from kit.ranks.tensor_blocks import Blocks, trainer_of, weights_of
from kit.ranks.tensor_blocks import loader as rows_of_blocks
from kit.ranks.training import Training, fit_in_all_tiers, loader, make_strategy
from test_expert_parallel import MomentumMoE
from torch import Tensor, nn

from lightning_ptm.checkpoints.carried_states import CarriedStates, StatesInFiles
from lightning_ptm.memory.disk import FileOps
from lightning_ptm.storage.writer import SaveOps
from lightning_ptm.trainer import relayout
from lightning_ptm.trainer.run import Run

WIDTH = 64


class Net(L.LightningModule):
    """Trains its blocks from the second epoch on.

    Args:
        alone: on rank 0 only.
        whole: by an optimizer that updates whole parameters.
        cut: its head's bias later than the weight, which trains no more in the third epoch.
        rate: of learning.
    """

    def __init__(self, *, alone: bool = False, whole: bool = False, cut: bool = False, rate: float = 1e-2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.whole, self.cut, self.rate = whole, cut, rate
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.blocks.requires_grad_(False)
        self.head = nn.Linear(WIDTH, 8)
        self.wide = nn.Linear(WIDTH, 500)
        self.head.bias.requires_grad_(not cut)
        self.alone = alone

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        for block in self.blocks:
            batch = batch + torch.tanh(block(batch))
        return self.head(batch).square().mean() + self.wide(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        chosen = [*self.head.parameters(), *self.wide.parameters()]
        chosen = [each for each in chosen if each.requires_grad]
        if self.whole:
            return torch.optim.Adafactor(chosen, lr=self.rate)
        return torch.optim.AdamW(chosen, lr=self.rate, weight_decay=0.0, fused=True)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1 and (self.trainer.is_global_zero or not self.alone):
            self.blocks.requires_grad_(True)
            more = [*self.blocks.parameters(), *([self.head.bias] if self.cut else [])]
            self.head.bias.requires_grad_(True)
            self.optimizers().add_param_group({"params": more})
        if self.current_epoch == 2 and self.cut:
            gone = [self.head.weight.requires_grad_(False), self.blocks[0].weight.requires_grad_(False)]
            for group in self.optimizers().param_groups:  # else they would rest where they are
                group["params"] = [each for each in group["params"] if all(each is not other for other in gone)]
            # What unfreezes nothing lays nothing out anew.
            self.further = nn.Parameter(torch.zeros(3, dtype=self.wide.bias.dtype))


def weights(
    home: str | None,
    folder: Path,
    ranks: int = 1,
    *,
    ops: SaveOps | None = None,
    files: FileOps | None = None,
    carrying: Callable[[Run, Any], CarriedStates] = relayout.carried_by,
    module: Net | None = None,
    epochs: int = 3,
    precision: Any = "64-true",
    **options: Any,
) -> dict[str, Tensor]:
    dtype = torch.float64 if precision == "64-true" else torch.float32
    rows = torch.randn(32, WIDTH, dtype=dtype, generator=torch.Generator().manual_seed(1))
    module = Net(**options) if module is None else module
    trainer = quiet_trainer(
        "auto" if home is None else make_strategy(folder, home),
        devices=ranks,
        precision=precision,
        max_epochs=epochs,
        gradient_clip_val=0.1,
        use_distributed_sampler=False,
    )
    if home is not None:
        trainer.strategy.save_ops, trainer.strategy.file_ops = ops, files
    with patch.object(relayout, "carried_by", carrying):
        trainer.fit(module, loader(rows, ranks, 8 // ranks))
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def weights_here(home: str, folder: Path, **options: Any) -> dict[str, Tensor]:
    return weights(home, folder, 2, **options)


@pytest.mark.slow_unless("lock_free-False")
@pytest.mark.parametrize(
    ("home", "whole"),
    [
        ("masters_on_disk", True),
        ("lock_free", False),
        *(pytest.param(home, False, marks=pytest.mark.slow) for home in ("ram", "masters_on_disk", "all_on_disk")),
        *(pytest.param(home, True, marks=pytest.mark.slow) for home in ("ram", "all_on_disk", "lock_free")),
    ],
)
def test_ranks_train_what_is_unfrozen(home: str, whole: bool, disk: Path) -> None:
    expected = weights(None, disk, whole=whole)
    for found in run_ranks(partial(weights_here, whole=whole), 2, home, disk):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)
    assert not [*disk.iterdir()]


def unfreezes_alone(folder: Path) -> None:
    weights("masters_on_disk", folder, 2, alone=True)


def test_a_rank_that_unfreezes_alone_ends_the_run_on_both(disk: Path) -> None:
    outcomes = watch_ranks(unfreezes_alone, 2, disk, limit_s=60)
    assert all("RankError" in outcome.error for outcome in outcomes), [str(outcome) for outcome in outcomes]
    assert not [*disk.iterdir()]


class Killed(FileOps):
    """When the next pages are written."""

    anew = False

    def duplicate(self, fd: int) -> int:
        self.anew = True
        return super().duplicate(fd)

    def pwritev(self, *args: Any) -> int:
        if self.anew:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().pwritev(*args)


def is_killed(folder: Path) -> None:
    weights("masters_on_disk", folder, files=Killed(), cut=True)


def test_of_a_killed_run_nothing_is_left(disk: Path) -> None:
    (outcome,) = watch_ranks(is_killed, 1, disk, limit_s=60)
    assert outcome.exit_code == -signal.SIGKILL
    assert not [*disk.iterdir()]


class KilledInFiles(SaveOps):
    def pwritev(self, *_: Any) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return 0


def in_files(run: Run, optimizers: Any) -> CarriedStates:
    """Carries states in files, as on devices."""
    return StatesInFiles(run.engine, run.module, optimizers, run.room, ranks_here=2, ops=run.builder.save_ops())


def is_killed_in_files(folder: Path) -> None:
    weights("masters_on_disk", folder, ops=KilledInFiles(), carrying=in_files)


def test_what_a_killed_run_leaves_is_gone_with_the_next_one(disk: Path) -> None:
    (outcome,) = watch_ranks(is_killed_in_files, 1, disk, limit_s=60)
    assert outcome.exit_code == -signal.SIGKILL
    assert [*disk.iterdir()]
    weights("masters_on_disk", disk, epochs=1)  # unfreezes nothing
    assert not [*disk.iterdir()]


@pytest.mark.slow_unless("False")
@pytest.mark.parametrize("whole", [False, True])
def test_through_files_it_is_the_same(disk: Path, whole: bool) -> None:
    expected = weights(None, disk, whole=whole)
    for found in run_ranks(partial(weights_here, whole=whole, carrying=in_files), 2, "masters_on_disk", disk):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)


def weights_and_bytes(home: str, folder: Path, ranks: int = 2, **options: Any) -> tuple[dict[str, Tensor], int]:
    """Also how much has gone from rank to rank."""
    made: list[Any] = []

    def carrying(run: Run, optimizers: Any) -> CarriedStates:
        made.append(carry(run, optimizers))
        return made[-1]  # type: ignore[no-any-return]

    carry = relayout.carried_by
    found = weights(home, folder, ranks, carrying=carrying, cut=True, **options)
    return found, sum(each.handed.resharder.sent_bytes for each in made)


@pytest.mark.slow_unless("ram")
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("home", ["ram", "masters_on_disk", "all_on_disk"])
def test_what_another_rank_is_to_have_goes_to_it(home: str, whole: bool, disk: Path) -> None:
    """Parts of a flat are unfrozen, and frozen again: the rest of it lies elsewhere on both ranks."""
    expected = weights(None, disk, whole=whole, cut=True)
    for found, sent_bytes in run_ranks(partial(weights_and_bytes, whole=whole), 2, home, disk):
        assert sent_bytes > 0
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)


def mixed(home: str, folder: Path, ranks: int) -> tuple[dict[str, Tensor], int]:
    """A rank of two has what one has: masters of what trains by turns keep all their bits."""
    return weights_and_bytes(home, folder, ranks, precision="bf16-mixed", rate=0.0)


@pytest.mark.slow_unless("ram")
@pytest.mark.parametrize("home", ["ram", "all_on_disk"])
def test_under_mixed_precision_all_bits_go_along(home: str, disk: Path) -> None:
    began = {name: value.detach().clone() for name, value in Net(cut=True).state_dict().items()}
    for found, sent_bytes in run_ranks(mixed, 2, home, disk, 2):
        assert sent_bytes > 0
        assert all(torch.equal(found[name], value) for name, value in began.items())


class Breaks(FileOps):
    """On rank 1, once a run is laid out anew."""

    anew = False

    def duplicate(self, fd: int) -> int:
        self.anew = True
        return super().duplicate(fd)

    def preadv(self, *args: Any) -> int:
        if self.anew and os.environ.get("RANK") == "1":
            raise OSError(5, "Input/output error")
        return super().preadv(*args)


def breaks(folder: Path) -> None:
    weights("masters_on_disk", folder, 2, files=Breaks(), cut=True)


def test_a_disk_that_fails_on_one_rank_ends_the_run_on_both(disk: Path) -> None:
    first, second = watch_ranks(breaks, 2, disk, limit_s=60)
    assert "PageIOError" in second.error and "RankError" in first.error, (str(first), str(second))
    assert not [*disk.iterdir()]


class Taken(Net):
    """Module whose head is replaced; other code owns the old head then."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.old = [self.head.weight]
            head = nn.Linear(WIDTH, 8).to(self.head.weight.dtype)
            with torch.no_grad():
                head.weight.fill_(0.25)
                head.bias.fill_(0.5)
            self.head = head
            self.optimizers().add_param_group({"params": list(head.parameters())})


def old_head(home: str | None, folder: Path, ranks: int) -> Tensor:
    module = Taken()
    weights(home, folder, ranks, module=module)
    return module.old[0].detach().clone()


def test_what_no_module_has_any_more_is_whole_on_all_ranks(disk: Path) -> None:
    expected = old_head(None, disk, 1)
    for found in run_ranks(old_head, 2, "masters_on_disk", disk, 2):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


class Later(Blocks):
    """Trains its second block from the second epoch on."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.blocks[0].parameters(), lr=1e-2)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.blocks[1].requires_grad_(True)
            self.optimizers().add_param_group({"params": list(self.blocks[1].parameters()), "lr": 3e-3})


class LaterInTwo(Blocks):
    """Module whose blocks are in two optimizers.

    More of them is unfrozen in the second epoch and in the third, in which what trained first rests, until the
    fourth.
    """

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.blocks[1].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        first = list(self.blocks[0].parameters())
        return [torch.optim.Adam(first, lr=1e-2, fused=True), torch.optim.SGD(first, lr=1e-1, momentum=0.9, fused=True)]

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()
            for each in self.optimizers():  # type: ignore[union-attr]
                each.zero_grad()

    def on_train_epoch_start(self) -> None:
        if self.current_epoch in (1, 2):
            more = self.blocks[1].expand if self.current_epoch == 1 else self.blocks[1].project
            more.requires_grad_(True)
            for optimizer in self.optimizers():  # type: ignore[union-attr]
                optimizer.add_param_group({"params": list(more.parameters()), "lr": 3e-3})
        if self.current_epoch > 1:
            self.blocks[0].requires_grad_(self.current_epoch == 3)


def weights_of_parts(
    ranks: int, tensor: int, settings: dict[str, Any], kind: type[Blocks] = Later
) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = kind()
    clip = 0.5 if module.automatic_optimization else None
    trainer_of(ranks, tensor, settings, max_epochs=4, gradient_clip_val=clip).fit(module, rows_of_blocks(8))
    return weights_of(module)


@pytest.mark.slow_unless("home2-LaterInTwo-2")
@pytest.mark.parametrize(
    ("home", "kind", "ranks"),
    [
        pytest.param({"offload_optimizer": "disk"}, Later, 2, marks=pytest.mark.slow),
        ({"offload_optimizer": "disk", "offload_parameters": "disk"}, Later, 2),
        ({"offload_optimizer": "disk"}, LaterInTwo, 2),
        pytest.param(
            {"offload_optimizer": "disk", "offload_parameters": "disk"}, LaterInTwo, 4, marks=pytest.mark.slow
        ),
    ],
)
def test_ranks_of_a_tensor_group_train_their_parts(
    home: dict[str, Any], kind: type[Blocks], ranks: int, disk: Path
) -> None:
    replicas = ranks // 2  # that see as many batches
    expected = run_ranks(weights_of_parts, replicas, replicas, 1, {}, kind)[0]
    for found in run_ranks(weights_of_parts, ranks, ranks, 2, {**home, "disk_path": str(disk)}, kind):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-9)
    assert not [*disk.iterdir()]


class LateExperts(MomentumMoE):
    """Trains half of its experts, and a part of the root, from the second batch on, and rests with others from the third."""

    def __init__(self) -> None:
        super().__init__()
        self.late = [self.head.weight, *list(self.blocks[0].parameters())[::2], *self.blocks[1].parameters()]
        for each in self.late:
            each.requires_grad_(False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        chosen = [each for each in self.parameters() if each.requires_grad]
        return torch.optim.SGD(chosen, lr=0.1, momentum=0.9, fused=True)

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        if index == 1:
            for each in self.late:
                each.requires_grad_(True)
            self.optimizers().add_param_group({"params": self.late})
        if index == 2:
            self.head.bias.requires_grad_(False)
            for each in list(self.blocks[1].parameters())[1::2]:
                each.requires_grad_(False)
            self.embedding.weight.requires_grad_(False)
        if index == 3:
            self.embedding.weight.requires_grad_(True)


class LateExpertsInTwo(LateExperts):
    """Model with late experts in two optimizers, which step by turns; those that rest are laid out again, and continue
    later."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.last = list(self.blocks[0].parameters())[1:2]
        self.last[0].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        chosen = [each for each in self.parameters() if each.requires_grad]
        return [super().configure_optimizers(), torch.optim.AdamW(chosen, lr=1e-2, fused=True)]

    def optimizers(self, *args: Any, **kwargs: Any) -> Any:
        return super().optimizers(*args, **kwargs)[0]

    def training_step(self, batch: Tensor, index: int) -> None:  # type: ignore[override]
        for optimizer in super().optimizers():
            self.manual_backward(super().training_step(batch, index))
            optimizer.step()
            self.zero_grad()

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        super().on_train_batch_start(batch, index)
        if index == 1:
            super().optimizers()[1].add_param_group({"params": self.late, "lr": 1e-3})
        if index == 2:
            self.last[0].requires_grad_(True)
            for optimizer in super().optimizers():
                optimizer.add_param_group({"params": self.last})
        if index == 4:
            self.requires_grad_(True)


def of_experts(folder: Path, size: int, tiers: list[str], kind: type[LateExperts]) -> dict[str, Outcome]:
    settings = {"units": ["MixtureOfExperts", "Expert"], "expert_parallel_size": size}
    return fit_in_all_tiers(Training(kind, "64-true", batches=6), 2, folder, settings, tiers)


@pytest.mark.slow_unless("LateExpertsInTwo-tiers1")
@pytest.mark.parametrize(
    ("kind", "tiers"),
    [
        (LateExperts, ["ram", "masters_on_disk", "all_on_disk"]),
        (LateExpertsInTwo, ["masters_on_disk"]),
        pytest.param(LateExpertsInTwo, ["ram", "all_on_disk", "three_tiers"], marks=pytest.mark.slow),
    ],
)
def test_ranks_that_divide_experts_train_those_that_they_have(
    kind: type[LateExperts], tiers: list[str], disk: Path
) -> None:
    whole = run_ranks(of_experts, 2, disk, 1, ["ram"], kind)
    for rank, found in enumerate(run_ranks(of_experts, 2, disk, 2, tiers, kind)):
        for ours in found.values():
            torch.testing.assert_close(ours.losses, whole[rank]["ram"].losses, rtol=0, atol=1e-9)
            torch.testing.assert_close(ours.weights, whole[rank]["ram"].weights, rtol=0, atol=1e-9)
