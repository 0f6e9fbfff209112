"""Small programs of ranks, drawn from a seed: units in any order, frozen ones, raw collectives between any of them, forwards
of one rank alone in hooks, evaluations of different lengths, any home of states, and, if asked for, a rank that raises.
"""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn
from ddp_judge import Case, Sees
from rank_training import BATCH, Training, tokens
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

TIERS = ["ram", "masters_on_disk", "all_on_disk", "three_tiers", "lock_free"]
KINDS = ["all_reduce", "barrier", "objects", "later", "gathered", "with_gradient", "pair"]
ALONE = [
    *("on_train_start", "on_train_batch_start", "on_train_batch_end", "on_train_epoch_end", "on_train_end"),
    *(
        "on_validation_start",
        "on_validation_epoch_end",
        "on_validation_end",
        "on_before_zero_grad",
        "on_save_checkpoint",
    ),
]
STEPS = 3


@dataclasses.dataclass(frozen=True)
class Program:
    """What ranks do; equal on all of them.

    Attributes:
        orders: by step and rank, the blocks that are called.
        talks: by step, kinds of collectives, and for each rank after how many of its blocks it comes to each.
        frozen: blocks; alone: (hook, rank) of forwards of one rank alone.
        evaluations: batches of each rank.
        raises: rank, step and block (in their order) after which it raises; "backward" instead of the latter.
    """

    orders: tuple[tuple[tuple[int, ...], ...], ...]
    talks: tuple[tuple[tuple[str, tuple[int, ...]], ...], ...]
    frozen: frozenset[int]
    alone: tuple[tuple[str, int], ...]
    evaluations: tuple[int, ...]
    raises: tuple[int, int, int] | tuple[int, str] | None


def draw(seed: int, world_size: int, *, raising: bool = False) -> tuple[Program, str, dict[str, Any], dict[str, Any]]:
    """A program, a tier, settings of the strategy and options of the Trainer."""
    drawn = random.Random(seed)
    orders = tuple(
        tuple(tuple(drawn.sample(range(3), drawn.choice([1, 2, 3, 3]))) for _ in range(world_size))
        for _ in range(STEPS)
    )
    talks = []
    for step in range(STEPS):
        places = [sorted(drawn.choices(range(len(order) + 1), k=3)) for order in orders[step]]
        count = drawn.choice([0, 1, 2, 3])
        talks.append(tuple((drawn.choice(KINDS), tuple(each[talk] for each in places)) for talk in range(count)))
    raises: Any = None
    if raising:
        rank = drawn.randrange(world_size)
        step = drawn.randrange(STEPS)
        hook = (rank, drawn.choice(ALONE))
        raises = drawn.choice([(rank, step, drawn.randrange(4)), hook])
    program = Program(
        orders,
        tuple(talks),
        frozenset(drawn.sample(range(3), drawn.choice([0, 0, 1]))),
        tuple((drawn.choice(ALONE), drawn.randrange(world_size)) for _ in range(drawn.choice([0, 1, 3]))),
        tuple(drawn.choice([1, 2, 3]) for _ in range(world_size)),
        raises,
    )
    settings: dict[str, Any] = {}
    options: dict[str, Any] = {"enable_checkpointing": drawn.random() < 0.3, "max_epochs": drawn.choice([1, 2])}
    if drawn.random() < 0.3:
        settings["recompute"] = "all"
    tier = drawn.choice(TIERS)
    if drawn.random() < 0.3 and tier != "three_tiers":  # whose device tier is too small
        options["precision"] = "64-true"
    if drawn.random() < 0.3:
        options["accumulate_grad_batches"], settings["reduce_gradients"] = 3, "each_step"
    if drawn.random() < 0.3:
        options["val_check_interval"] = 1
    return program, tier, settings, options


class Random(Sees):
    """Does what its program says."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.pairs: list[Any] = []
        for block in program.frozen:
            self.blocks[block].requires_grad_(False)

    def setup(self, stage: str) -> None:
        size = dist.get_world_size()
        self.pairs = [dist.new_group([first, (first + 1) % size]) for first in range(size if size > 2 else 1)]

    def order(self, rank: int, step: int) -> Iterable[int]:
        return self.program.orders[step % STEPS][rank]

    def loss(self, batch: Tensor, rank: int, step: int) -> Tensor | None:
        program, step = self.program, step % STEPS
        talks = program.talks[step] if self.trainer.training else ()
        x = self.embedding(batch[:, :-1])
        for place, block in enumerate((*program.orders[step][rank], None)):
            for kind, places in talks:
                if places[rank] == place:
                    x = self.talk(kind, x, rank)
            if self.trainer.training and program.raises == (rank, step, place):
                raise ValueError("this rank has had enough")
            if block is not None:
                x = self.blocks[block](x)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def talk(self, kind: str, x: Tensor, rank: int) -> Tensor:
        value = x.detach().mean(dim=(0, 1))
        if kind == "all_reduce":
            dist.all_reduce(value)
        elif kind == "barrier":
            dist.barrier()
        elif kind == "objects":
            told: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(told, value.sum().item())
            value = torch.tensor(told)
        elif kind == "later":
            work = dist.all_reduce(value, op=dist.ReduceOp.MAX, async_op=True)
            work.wait()
        elif kind == "gathered":
            value = self.all_gather(value).sum(dim=0)
        elif kind == "with_gradient":
            return x + 0.1 * torch.stack(list(dist.nn.functional.all_gather(x.mean(dim=(0, 1))))).sum(dim=0)
        else:
            for pair in self.pairs:
                if pair != dist.GroupMember.NON_GROUP_MEMBER:
                    dist.all_reduce(value, group=pair)
        self.note(value)
        return x * (1 + value.mean().to(x.dtype))

    @torch.no_grad()
    def hook(self, name: str) -> None:
        rank = self.trainer.global_rank
        if self.program.raises == (rank, name):
            raise ValueError("this rank has had enough")
        for hook, who in self.program.alone:
            if hook == name and who == rank:
                x = self.embedding(torch.arange(34).view(2, 17))
                for index in (2, 0):
                    x = self.blocks[index](x)
                self.note(self.head(self.norm(x)).sum())


for _name in ALONE:
    setattr(Random, _name, lambda self, *_, _name=_name, **__: self.hook(_name))


class Rows(IterableDataset[Tensor]):
    """So many batches on this rank."""

    def __init__(self, rows: Tensor, batches: tuple[int, ...]) -> None:
        self._rows = rows[: BATCH * batches[int(os.environ["RANK"])]]

    def __iter__(self) -> Any:
        return iter(self._rows)


class Fits:
    """Trains, and evaluates as many batches as each rank has."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def __call__(self, trainer: Any, module: Any, data: Any) -> None:
        rows = tokens(Training(Sees, batches=3), 1, seed=3)
        trainer.fit(module, data, DataLoader(Rows(rows, self.program.evaluations), batch_size=BATCH))


class Builds:
    """As a class without arguments."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def __call__(self) -> Random:
        return Random(self.program)

    def __repr__(self) -> str:
        return repr(self.program)


def case_of(seed: int, world_size: int, *, raising: bool = False) -> Case:
    program, tier, settings, options = draw(seed, world_size, raising=raising)
    # Three ranks add up in another order, and so do two whose gradients of several passes come in parts.
    exact = world_size == 2 and "accumulate_grad_batches" not in options
    tolerance = 0.0 if exact else 1e-3
    return Case(Builds(program), (tier,), settings, options, Fits(program), batches=STEPS, tolerance=tolerance)
