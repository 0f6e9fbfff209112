"""Blocks called in drawn orders, which change between batches, in the least device memory that the plan accepts: as a plain
loop, to the bit. The plan is for the order that is assumed, or for an earlier one, so most units are fetched on use."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from kit.memory import LEAST, strategy_with
from kit.plain_loop import PlainLoop, TrainModule, fit, vectors
from torch import Tensor, nn

from lightning_ptm.planning.fetch_policy import FetchPolicy

ROWS = vectors(5, 4, 300)


class Wide(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.inner = nn.Linear(64, inner)
        self.outer = nn.Linear(inner, 64)

    def forward(self, value: Tensor) -> Tensor:
        return value + self.outer(self.inner(value).tanh())


@dataclasses.dataclass(frozen=True)
class Case:
    """Args:
    widths: of the blocks.
    orders: blocks that a batch calls, by batch.
    frozen: blocks that are not trained.
    root: inputs of the root's first layer; 300 of them are two pages.
    manual: whether optimization is manual.
    """

    widths: tuple[int, ...]
    orders: tuple[tuple[int, ...], ...]
    clip: float | None = None
    accumulate: int = 1
    parameters: str = "host"
    optimizer: str = "host"
    recompute: str = "none"
    frozen: tuple[int, ...] = ()
    root: int = 8
    manual: bool = False

    @property
    def batches(self) -> tuple[tuple[int, ...], ...]:
        """The orders of five batches."""
        return (self.orders * 5)[:5]

    def module(self) -> TrainModule:
        return Ordered(self)


class Ordered(TrainModule):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.first, self.last = nn.Linear(case.root, 64), nn.Linear(64, 3)
        self.blocks = nn.ModuleList(map(Wide, case.widths))
        for block in case.frozen:
            self.blocks[block].requires_grad_(False)
        self.automatic_optimization = not case.manual

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=1e-2, fused=True)

    def loss(self, batch: Tensor, index: int) -> Tensor:
        value = self.first(batch[:, : self.case.root])
        for block in self.case.batches[index]:
            value = self.blocks[block](value)
        return self.last(value).square().mean()  # type: ignore[no-any-return]

    def training_step(self, batch: Tensor, index: int) -> Tensor | None:
        if not self.case.manual:
            return super().training_step(batch, index)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, index)
        assert loss is not None
        self.manual_backward(loss)
        optimizer.step()
        return None


def drawn(seed: int) -> Case:
    random = Random(f"odd order {seed}")
    count = random.randint(3, 5)
    recompute = random.choice(["none", "none", "all"])

    def order() -> tuple[int, ...]:
        if recompute == "all":  # a unit that is called twice stays until the end of its last recomputed call
            return tuple(random.sample(range(count), random.randint(1, count)))
        return tuple(random.randrange(count) for _ in range(random.randint(1, 6)))

    orders = [order() for _ in range(random.choice([1, 2, 5, 5]))]
    if random.random() < 0.5:
        orders[0] = tuple(range(count))
    return Case(
        widths=tuple(random.choice([40, 130, 200, 260, 400, 600, 900]) for _ in range(count)),
        orders=tuple(orders),
        clip=random.choice([None, 0.1]),
        accumulate=random.choice([1, 1, 2]),
        parameters=random.choice(["host", "disk"]),
        optimizer=random.choice(["host", "disk"]),
        recompute=recompute,
        frozen=random.choice([(), (), (random.randrange(count),)]),
        root=random.choice([8, 300]),
    )


def assert_as_plain(case: Case, disk: Path) -> None:
    strategy = strategy_with(
        device_memory=LEAST,
        page_size="64KiB",
        units=["Wide"],
        offload_parameters=case.parameters,
        offload_optimizer=case.optimizer,
        disk_path=disk,
        recompute=case.recompute,
    )
    options: dict[str, Any] = {} if case.clip is None else {"gradient_clip_val": case.clip}
    ours = fit(case.module, ROWS, strategy, "32-true", accumulate_grad_batches=case.accumulate, **options)
    ours.assert_equal(PlainLoop(case.module, "32-true", case.accumulate, case.clip).fresh(ROWS))


FOUND = {
    # Gradients found scattered pages around a block that the plan, or a fetch on use, had put into the middle.
    "gradients": Case((400, 40, 600, 400), ((0, 1, 2, 3), (1, 2, 1), (3,), (3, 0, 2), (1,)), clip=0.1, root=300),
    "gradients after passes": Case(
        (600, 900, 900, 130, 200),
        ((4, 1, 0), (3, 0, 0, 1), (3, 4, 3), (1, 1, 2, 2), (3, 0, 4)),
        clip=0.1,
        accumulate=2,
        parameters="disk",
    ),
    # So did a block, around a root in the middle.
    "block": Case(
        (200, 130, 400, 600, 400), ((0, 1, 2, 3, 4), (1, 1, 4, 4), (1, 3, 1, 1, 0)), 0.1, parameters="disk", root=300
    ),
    "block in each batch": Case(
        (900, 900, 400, 200, 40), ((0, 1, 2, 3, 4), (1, 2, 1, 0, 4, 1), (1, 2, 1, 0, 4, 1)), root=300
    ),
    # Blocks that were called twice stayed while others computed.
    "called twice": Case((400, 400, 400, 400), ((0, 1, 2, 3), (0,), (0, 3, 1, 0, 2, 0)), root=300),
    "in turns": Case(
        (400, 600, 260), ((2, 1, 1, 0, 2, 1), (1, 0), (0, 2, 1, 2), (2, 0, 2, 0, 2)), 0.1, optimizer="disk"
    ),
    "with sums": Case(
        (400, 400, 130, 400), ((0, 1, 2, 3), (0, 1, 3, 0, 1), (1, 0, 1, 2), (0, 3, 1)), 0.1, 2, parameters="disk"
    ),
    "palindrome": Case((400, 260, 600), ((2, 0, 2, 1, 0), (0, 1, 2)), parameters="disk", optimizer="disk"),
    # Clipped gradients come to pages among those of others that are leaving.
    "clipped on disk": Case((260, 200, 900, 600, 600), ((3, 0, 2, 1, 4, 2),), 0.1, parameters="disk", optimizer="disk"),
    # The root came to the middle while its gradient had its pages.
    "manual": Case((130, 900, 900, 130, 900), ((3, 1),), optimizer="disk", manual=True),
    "manual in turns": Case(
        (40, 600, 400, 600),
        ((2, 3, 1, 2, 0, 1), (1,), (0, 3), (3, 1, 2, 2, 0, 3), (2, 0, 1, 3, 1)),
        optimizer="disk",
        manual=True,
    ),
}


FOLLOWED = {
    "frozen, called twice": Case((900, 900, 400, 900), ((0, 2, 0),), frozen=(0,)),
    "frozen, called three times": Case((130, 130, 900, 900), ((3, 3, 0, 3, 0),), 0.1, optimizer="disk", frozen=(3,)),
    "called twice": Case((200, 260, 40, 400, 400), ((3, 1, 0, 2, 1),)),
    "called three times": Case(
        (600, 260, 400, 200), ((2, 3, 1, 2, 1, 2),), 0.1, 2, optimizer="disk", frozen=(1,), root=300
    ),
    # The iteration before, which had no plan, has left blocks in the frames of others.
    "left over": Case((200, 900, 40, 900, 200), ((3, 1),), 0.1, optimizer="disk", frozen=(3,)),
    "left over, three late": Case(
        (260, 600, 900, 130, 260), ((0, 1, 2, 3, 4),), accumulate=2, parameters="disk", frozen=(4,)
    ),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_no_fetch_is_late_where_each_batch_has_the_same_order(
    disk: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    late: list[int] = []
    begin, end = FetchPolicy.begin, FetchPolicy.end

    def begun(self: FetchPolicy, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self.lookups.late = 0

    def ended(self: FetchPolicy) -> None:
        if self.plan_cursor.followed:
            late.append(self.lookups.late)
        end(self)

    monkeypatch.setattr(FetchPolicy, "begin", begun)
    monkeypatch.setattr(FetchPolicy, "end", ended)
    assert_as_plain(FOLLOWED[name], disk)
    assert len(late) >= 2 and not any(late), late


@pytest.mark.parametrize("name", FOUND)
def test_in_the_least_device_memory(disk: Path, name: str) -> None:
    assert_as_plain(FOUND[name], disk)


@pytest.mark.parametrize("first", [0, 12, *(pytest.param(at, marks=pytest.mark.slow) for at in range(24, 240, 24))])
def test_drawn_orders_in_the_least_device_memory(disk: Path, first: int) -> None:
    for seed in range(first, first + (12 if first < 24 else 24)):
        case = drawn(seed)
        try:
            assert_as_plain(case, disk)
        except BaseException as error:
            error.add_note(f"seed {seed}: {case}")
            raise
