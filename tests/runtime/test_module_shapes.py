"""Modules of many shapes: whatever a module does in its forward, losses and weights are a plain loop's.

Each case is a module; each runs with model states in RAM, on disk and over three tiers, with and without recomputation
(five of the combinations, so that every tier and both settings come with every case; quickly each module with one of them).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from kit.outcomes import Outcome
from kit.plain_loop import PlainLoop, TrainModule, fit, tokens
from kit.stacks import VOCABULARY, WIDTH, Block, Stack
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

BATCHES = tokens(5)
CASES: dict[str, Callable[[], TrainModule]] = {}


def case(build: Any) -> Any:
    """Registers a module class under its own name."""
    CASES[build.__name__] = build
    return build


@case
class EmbeddingTiedToHead(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight


@case
class WeightTiedAcrossBlocks(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight


@case
class BlockSharedByTwoPlaces(Stack):
    """The very same block is two elements of the list."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([*self.blocks, self.blocks[1]])


@case
class BlockCalledTwice(Stack):
    def middle(self, x: Tensor, index: int) -> Tensor:
        for block in self.blocks:
            x = block(block(x))
        return x


@case
class BlockCalledTwiceWithTheSameInput(Stack):
    def middle(self, x: Tensor, index: int) -> Tensor:
        for block in self.blocks:
            x = block(x) + block(x) * 0.5
        return x


class _IdleBlock(Block):
    """Has a layer that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(WIDTH, WIDTH)


@case
class UnusedParametersInABlock(Stack):
    def __init__(self) -> None:
        super().__init__(make_block=_IdleBlock)


@case
class UnitUnusedNowAndThen(Stack):
    """Layer drop: a block sits out of some iterations, another never takes part."""

    def middle(self, x: Tensor, index: int) -> Tensor:
        for place, block in enumerate(self.blocks[:3]):
            if place != index % 3:
                x = block(x)
        return x


@case
class OrderThatChanges(Stack):
    def middle(self, x: Tensor, index: int) -> Tensor:
        for block in list(self.blocks) if index % 2 else reversed(list(self.blocks)):
            x = block(x)
        return x


class _DictBlock(Block):
    def forward(self, x: Tensor) -> Any:
        return {"out": super().forward(x), "sizes": [x.shape], "more": (x.detach(), None)}


@case
class OutputsInDicts(Stack):
    def __init__(self) -> None:
        super().__init__(make_block=_DictBlock)

    def middle(self, x: Tensor, index: int) -> Tensor:
        for block in self.blocks:
            x = block(x)["out"]
        return x


@dataclasses.dataclass
class _State:
    x: Tensor
    extra: list[Tensor]


class _DataclassBlock(Block):
    def forward(self, state: _State) -> Any:  # type: ignore[override]
        x = super().forward(state.x)
        return _State(x, [*state.extra, x.mean()])


@case
class InputsAndOutputsInDataclasses(Stack):
    def __init__(self) -> None:
        super().__init__(make_block=_DataclassBlock)

    def middle(self, x: Tensor, index: int) -> Tensor:
        state = _State(x, [])
        for block in self.blocks:
            state = block(state)
        return state.x + sum(state.extra)


class _OpaqueState:
    """No list, mapping or dataclass: nobody sees the tensor inside."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class _OpaqueBlock(Block):
    def forward(self, state: Any) -> Any:
        return _OpaqueState(super().forward(state.x))


@case
class InputsAndOutputsInOpaqueObjects(Stack):
    def __init__(self) -> None:
        super().__init__(make_block=_OpaqueBlock)

    def middle(self, x: Tensor, index: int) -> Tensor:
        state = _OpaqueState(x)
        for block in self.blocks:
            state = block(state)
        return state.x


@case
class KeywordArguments(Stack):
    def middle(self, x: Tensor, index: int) -> Tensor:
        for block in self.blocks:
            x = block(x=x)
        return x


@case
class InPlaceOnOutputs(Stack):
    def middle(self, x: Tensor, index: int) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x += 1.0
            x.mul_(0.9)
        return x


@case
class BlockWhoseResultIsNotUsed(Stack):
    """Block whose forward runs and which no gradient ever reaches."""

    def middle(self, x: Tensor, index: int) -> Tensor:
        for block in self.blocks:
            block(x)
            x = block(x) if index % 2 or block is not self.blocks[1] else x
        return x


@case
class ForwardWithoutGradientsInTheStep(Stack):
    """A look-ahead under no_grad before the real forward, as a teacher or a target network does."""

    def middle(self, x: Tensor, index: int) -> Tensor:
        with torch.no_grad():
            target = super().middle(x, index)
        return super().middle(x, index) + 0.1 * target


@case
class Dropout(Stack):
    def __init__(self) -> None:
        super().__init__(make_block=lambda: Block(dropout=0.3))


@case
class CheckpointAroundBlocks(Stack):
    def middle(self, x: Tensor, index: int) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


@case
class CheckpointAroundSeveralBlocks(Stack):
    def middle(self, x: Tensor, index: int) -> Tensor:
        def pair(x: Tensor, start: int) -> Tensor:
            return self.blocks[start + 1](self.blocks[start](x))

        for start in (0, 2):
            x = checkpoint(pair, x, start, use_reentrant=False)
        return x


@case
class ReentrantCheckpointAroundBlocks(Stack):
    def middle(self, x: Tensor, index: int) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x


@case
class ReentrantCheckpointAroundSeveralBlocks(Stack):
    def middle(self, x: Tensor, index: int) -> Tensor:
        def pair(x: Tensor, start: int) -> Tensor:
            return self.blocks[start + 1](self.blocks[start](x))

        for start in (0, 2):
            x = checkpoint(pair, x, start, use_reentrant=True)
        return x


@case
class ReentrantCheckpointAroundABlockCalledTwice(Stack):
    def middle(self, x: Tensor, index: int) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, checkpoint(block, x, use_reentrant=True), use_reentrant=True)
        return x


@case
class ReentrantCheckpointAroundFrozenAndTrainedLayers(Stack):
    """The first layer of a block, frozen, is read after the block's last gradient has arrived."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.up.requires_grad_(False)
            block.norm.requires_grad_(False)

    def middle(self, x: Tensor, index: int) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x


class _CheckpointingBlock(Block):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]


class _ReentrantBlock(_CheckpointingBlock):
    reentrant = True


@case
class CheckpointInsideBlocks(Stack):
    def __init__(self) -> None:
        super().__init__(make_block=_CheckpointingBlock)


@case
class ReentrantCheckpointInsideBlocks(Stack):
    def __init__(self) -> None:
        super().__init__(make_block=_ReentrantBlock)


@case
class SubmodulesOfAUnitCalledFromOutside(Stack):
    """The step uses layers of blocks without ever calling the blocks themselves."""

    def middle(self, x: Tensor, index: int) -> Tensor:
        for block in self.blocks:
            x = x + block.down(nn.functional.gelu(block.up(block.norm(x))))
        return x


@case
class SubmoduleOfAUnitBorrowedByTheStep(Stack):
    """Blocks are called, and one of their layers once more on the way out."""

    def middle(self, x: Tensor, index: int) -> Tensor:
        x = super().middle(x, index)
        return x + self.blocks[0].norm(x)


@case
class FrozenSubmoduleBorrowedByKeyword(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].norm.requires_grad_(False)

    def middle(self, x: Tensor, index: int) -> Tensor:
        x = super().middle(x, index)
        return x + self.blocks[0].norm(input=x)


@case
class BorrowedCallThatFails(Stack):
    """The step catches the error and goes on."""

    def middle(self, x: Tensor, index: int) -> Tensor:
        try:
            self.blocks[1].up(x[..., :-1])
        except RuntimeError:
            x = x + 1
        return super().middle(x, index)


@case
class SubmoduleOfAUnitBorrowedByAnotherUnit(Stack):
    def __init__(self) -> None:
        super().__init__()
        norm = self.blocks[0].norm
        self.blocks[2].register_forward_pre_hook(lambda module, args: (norm(args[0]),))
        self.blocks[3].up.register_forward_pre_hook(lambda module, args: (norm(args[0]),))


@case
class SomeParametersFrozenInAUnit(Stack):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.up.weight.requires_grad_(False)
            block.norm.requires_grad_(False)
        self.embedding.requires_grad_(False)


@case
class AWholeUnitFrozen(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)
        self.blocks[2].requires_grad_(False)


class _LowRank(nn.Module):
    """A frozen linear map and a trained one of rank 4 beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))  # type: ignore[no-any-return]


@case
class AdaptersOnAFrozenBase(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for block in self.blocks:
            block.up, block.down = _LowRank(block.up), _LowRank(block.down)

    def make_optimizer(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-2, fused=True)


@case
class ParameterOfTheStepItself(Stack):
    """A parameter that belongs to no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(16, WIDTH))
        self.temperature = nn.Parameter(torch.ones(()))

    def middle(self, x: Tensor, index: int) -> Tensor:
        return super().middle(x + self.position, index) * self.temperature


@case
class StepsWithoutALoss(Stack):
    """training_step returns None now and then."""

    def loss(self, batch: Tensor, index: int) -> Tensor | None:
        loss = super().loss(batch, index)
        return None if index in (0, 2) else loss


@cache
def plain(name: str) -> Outcome:
    return PlainLoop(CASES[name]).run(BATCHES)


@pytest.mark.diagonal
@pytest.mark.parametrize(
    ("where", "recompute"),
    [
        ("ram", "all"),
        ("masters_on_disk", "none"),
        ("all_on_disk", "none"),
        ("three_tiers", "none"),
        ("three_tiers", "all"),
    ],
)
@pytest.mark.parametrize("name", list(CASES))
def test_case(strategy_at, name, where, recompute) -> None:
    settings = {"device_memory": "1MiB"} if where == "three_tiers" else {}
    fit(CASES[name], BATCHES, strategy_at(where, recompute=recompute, **settings)).assert_equal(plain(name))
