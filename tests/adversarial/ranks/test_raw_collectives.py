"""Collectives of torch.distributed in steps in which ranks use different units: what goes on with DDP goes on, to the bit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn
from kit.ranks.ddp_judge import Case, Sees, run_cases
from torch import Tensor, nn
from torch.distributed import all_reduce as reduced_by_name
from torchmetrics import MeanMetric


class Talks(Sees):
    """Rank 1 leaves block 1 out at every second step; ranks talk between the blocks, where one is ahead of the other."""

    def order(self, rank: int, step: int) -> Iterable[int]:
        return (0, 2) if rank == 1 and step % 2 == 0 else (0, 1, 2)

    def loss(self, batch: Tensor, rank: int, step: int) -> Tensor | None:
        x = self.embedding(batch[:, :-1])
        for index in self.order(rank, step):
            x = self.blocks[index](x)
            if index == 0:
                x = self.talk(x, rank)
        x = self.talk(x, rank)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def talk(self, x: Tensor, rank: int) -> Tensor:
        mean = x.detach().mean()
        dist.all_reduce(mean)
        self.note(mean)
        return x * (1 + mean)


class Contrasts(Talks):
    """Gradients go through the collective: it has one more in the backward pass, behind units that one rank has not used."""

    def talk(self, x: Tensor, rank: int) -> Tensor:
        everything = torch.stack(list(dist.nn.functional.all_gather(x.mean(dim=(0, 1)))))
        return x + everything.sum(dim=0) * 0.1


class _SynchronousNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.sum(dim=(0, 1))
        dist.all_reduce(total)
        return x - total / (2 * x.shape[0] * x.shape[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.sum(dim=(0, 1))
        dist.all_reduce(total)
        return gradient - total / (2 * gradient.shape[0] * gradient.shape[1])


class Normalizes(Talks):
    """Module with a batch norm over all ranks, as SyncBatchNorm, which needs a GPU."""

    def talk(self, x: Tensor, rank: int) -> Tensor:
        return _SynchronousNorm.apply(x)


class Everything(Talks):
    """Each kind of collective, of tensors and of objects, at once and later, by any name."""

    def talk(self, x: Tensor, rank: int) -> Tensor:
        value = x.detach().mean(dim=(0, 1))
        for act in (self.many, self.one, self.objects, self.later, self.functional):
            for result in act(value.clone(), rank):
                self.note(result)
        return x

    def many(self, value: Tensor, rank: int) -> Iterable[Tensor]:
        both = [torch.empty_like(value) for _ in range(2)]
        dist.all_gather(both, value)
        yield from both
        swapped = [torch.empty_like(value) for _ in range(2)]
        dist.all_to_all_single(torch.cat(swapped), torch.cat([value, value]))
        half = torch.empty(value.numel() // 2)
        dist.reduce_scatter(half, list(value.clone().view(2, -1)))
        yield half
        dist.barrier()
        dist.monitored_barrier()
        reduced_by_name(value, op=dist.ReduceOp.MAX)
        yield value

    def one(self, value: Tensor, rank: int) -> Iterable[Tensor]:
        dist.broadcast(value, src=1)
        yield value
        dist.reduce(value, dst=0)
        mine = torch.empty_like(value)
        dist.scatter(mine, [value, value + 1] if rank == 0 else None, src=0)
        yield mine
        both = [torch.empty_like(value) for _ in range(2)] if rank == 1 else None
        dist.gather(mine, both, dst=1)
        yield from both or []

    def objects(self, value: Tensor, rank: int) -> Iterable[Tensor]:
        both: list[Any] = [None, None]
        dist.all_gather_object(both, {"rank": rank, "of": value.sum().item()})
        yield torch.tensor([each["of"] for each in both])
        box = [rank]
        dist.broadcast_object_list(box, src=1)
        yield torch.tensor(box)

    def later(self, value: Tensor, rank: int) -> Iterable[Tensor]:
        other = value.clone() + 1
        works = [dist.all_reduce(value, async_op=True), dist.broadcast(other, src=0, async_op=True)]
        for work in works:
            work.wait()
        yield from (value, other)

    def functional(self, value: Tensor, rank: int) -> Iterable[Tensor]:
        functional = torch.distributed._functional_collectives
        yield functional.all_reduce(value, "sum", dist.group.WORLD) + 0


class OwnGroups(Talks):
    """Groups of the user's: of all ranks, of this rank alone, and one whose collectives a thread of the user's issues."""

    def on_fit_start(self) -> None:
        self.everybody = dist.new_group()
        self.alone = [dist.new_group([rank]) for rank in range(2)][self.trainer.global_rank]
        self.of_the_thread = dist.new_group()

    def talk(self, x: Tensor, rank: int) -> Tensor:
        if not hasattr(self, "everybody"):
            return x
        mean = x.detach().mean()
        dist.all_reduce(mean, group=self.everybody)
        if rank == 0:
            dist.all_reduce(mean, group=self.alone)
        self.note(mean)
        for _ in range(2):
            beside = mean.clone()
            thread = threading.Thread(target=dist.all_reduce, args=(beside,), kwargs={"group": self.of_the_thread})
            thread.start()
            # Waits for the other rank, which may compute what this one has no part in.
            threading.Thread(target=thread.join).start()
            self.waiting = (thread, beside)
        return x

    def on_train_batch_end(self, *_: Any) -> None:
        thread, beside = self.waiting
        thread.join()
        self.note(beside)


class Metric(Talks):
    """One that talks at each step, and one that Lightning reads."""

    def __init__(self) -> None:
        super().__init__()
        self.at_each, self.at_end = MeanMetric(dist_sync_on_step=True), MeanMetric()

    def talk(self, x: Tensor, rank: int) -> Tensor:
        self.note(self.at_each(x.detach().mean()))
        self.at_end.update(x.detach().mean())
        if self.trainer.training:
            self.log("mean", self.at_end, on_step=False, on_epoch=True)
        self.log("reduced", x.detach().mean(), sync_dist=True)
        return x

    def on_train_end(self) -> None:
        self.note(self.trainer.callback_metrics["mean"])


class InHooks(Talks):
    """Around the pass, and in its middle."""

    def talk(self, x: Tensor, rank: int) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: self.told(gradient) * 1e-3 + gradient)
        return x

    def told(self, value: Tensor) -> Tensor:
        value = value.detach().mean().clone()
        dist.all_reduce(value)
        self.note(value)
        return value

    def on_after_backward(self) -> None:
        self.told(torch.tensor(1.0))

    on_before_zero_grad = on_train_batch_end = on_before_optimizer_step = lambda self, *_: InHooks.on_after_backward(
        self
    )
    on_train_epoch_end = on_validation_epoch_end = on_train_end = on_before_backward = on_before_zero_grad


@pytest.mark.parametrize(
    ("builds", "tier"),
    [
        ([Contrasts, Normalizes], "all_on_disk"),
        pytest.param([Talks], "all_on_disk", marks=pytest.mark.slow),
        pytest.param([Talks, Contrasts, Normalizes], "ram", marks=pytest.mark.slow),
        ([OwnGroups, InHooks], "ram"),
        pytest.param([Everything, Metric], "ram", marks=pytest.mark.slow),
        pytest.param([Everything, OwnGroups, Metric, InHooks], "all_on_disk", marks=pytest.mark.slow),
    ],
)
def test_two_ranks(builds: list[Callable[[], Sees]], tier: str, disk: Path) -> None:
    run_cases([Case(build, (tier,)) for build in builds], 2, disk)


class SomeGather(Talks):
    """Two of three ranks at a time, in groups that overlap; each rank is somewhere else when they do."""

    def order(self, rank: int, step: int) -> Iterable[int]:
        return [(0, 1, 2), (0, 2), (0, 2, 1)][(rank + step) % 3]

    def setup(self, stage: str) -> None:
        self.pairs = [dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group([0, 2])]

    def talk(self, x: Tensor, rank: int) -> Tensor:
        value = x.detach().mean()
        for pair in self.pairs:
            if pair != dist.GroupMember.NON_GROUP_MEMBER:
                dist.all_reduce(value, group=pair)
        self.note(value)
        return x


def test_some_of_three_ranks(disk: Path) -> None:
    run_cases([Case(SomeGather, ("ram", "lock_free"), tolerance=1e-4)], 3, disk)
