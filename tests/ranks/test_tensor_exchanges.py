"""Exchanges of tensor parallelism: no rank waits in one for a rank that waits elsewhere, and few rounds are held for them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.ranks import tensor_models
from kit.ranks.harness import End, run_ranks, watch_ranks
from kit.ranks.tensor_models import WAYS, Outcome, PreciseGPT, Run, assert_same_learning, train
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ptm.comm import ProcessGroupCommunicator, deadlock_detector
from lightning_ptm.comm.agreement import Row
from lightning_ptm.models.gpt import Block

STEPS = 4
PROMPT_S = 30.0
"""Less than the collectives' time limit of 60 s."""


def rounds_and_outcome(how: Run, disk: Path) -> tuple[int, Outcome]:
    """How many rounds this rank has come to."""
    rows: list[Row] = []
    exchange = ProcessGroupCommunicator.exchange

    def counted(self: ProcessGroupCommunicator, row: Row) -> object:
        rows.append(row)
        return exchange(self, row)

    ProcessGroupCommunicator.exchange = counted  # type: ignore[method-assign, assignment]
    try:
        outcome = train(how, disk)
    finally:
        ProcessGroupCommunicator.exchange = exchange  # type: ignore[method-assign]
    return len(rows), outcome


def test_a_unit_holds_one_round_for_its_exchanges(disk: Path) -> None:
    """A block more has four exchanges more, two each way, and two rounds for them; nothing of it is gathered or reduced."""
    few, many = (
        run_ranks(rounds_and_outcome, 2, Run("gpt", 2, 2, steps=STEPS, sizes={"layers": layers}), disk, limit_s=240)[0]
        for layers in (2, 6)
    )
    assert many[0] - few[0] == STEPS * 4 * 2


@pytest.mark.parametrize(("ranks", "seeds"), [(2, range(2)), pytest.param(4, range(2), marks=pytest.mark.slow)])
def test_ranks_that_give_up_different_units_do_not_hang(ranks: int, seeds: range, disk: Path) -> None:
    (whole,) = run_ranks(train, 1, Run("gpt", steps=STEPS), disk)
    for seed in seeds:
        how = Run("gpt", ranks, 2, "all_on_disk", steps=STEPS, evictions=seed)
        assert_same_learning(run_ranks(train, ranks, how, disk, limit_s=240), whole)


class Stops(nn.Module):
    """Between the exchanges of a block: no round is held there. A block is proven by copies in evaluation mode."""

    def __init__(self, *, in_training: bool) -> None:
        super().__init__()
        self.in_training = in_training

    def forward(self, x: Tensor) -> Tensor:
        if self.training is self.in_training and os.environ["RANK"] == "1":
            raise ValueError("this rank has had enough")
        return x


class FailsInTheProof(PreciseGPT):
    def build(self) -> None:
        super().build()
        for block in self.blocks:
            block.dropout = Stops(in_training=False)


class FailsInTheForward(PreciseGPT):
    def build(self) -> None:
        super().build()
        for block in self.blocks:
            block.dropout = Stops(in_training=True)


class AsksAlone(PreciseGPT):
    """For logits of which each rank has a part, behind exchanges of a loss and before those of a backward."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        logits = self(batch[:, :-1])
        if os.environ["RANK"] == "1":
            logits.argmax(-1)
        return loss


class AsksInItsForward(PreciseGPT):
    """As the above; what follows on the other rank is an exchange of the same call."""

    def forward(self, ids: Tensor) -> Tensor:
        logits = super().forward(ids)
        if os.environ["RANK"] == "1":
            logits.argmax(-1)
        return super().forward(ids) + logits


class AsksInTheBackward(PreciseGPT):
    def forward(self, ids: Tensor) -> Tensor:
        logits = super().forward(ids)
        if os.environ["RANK"] == "1" and logits.requires_grad:
            logits.register_hook(lambda gradient: gradient.argmax(-1) and None)
        return logits


class AsksBetweenUnits(PreciseGPT):
    """For logits of an earlier step; what follows is an exchange of the root's own. Nothing of the root is whole, so its
    parameters are never fetched, and may be read without being asked for."""

    def build(self) -> None:
        super().build()
        self.position_embedding, self.norm = nn.Identity(), nn.Identity()  # type: ignore[assignment]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token_embedding(tokens)
        for block in self.blocks:
            x = block(x)
        earlier = self.__dict__.get("earlier")
        if os.environ["RANK"] == "1" and earlier is not None:
            earlier.argmax(-1)
        logits: Tensor = self.head(x + self.token_embedding(tokens))
        self.__dict__["earlier"] = logits.detach()
        return logits


class AsksBetweenBackwards(PreciseGPT):
    automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        logits = self(batch[:, :-1]).detach()
        losses = [self.loss(batch), self.loss(batch)]
        for loss in losses:
            loss.backward()
            if os.environ["RANK"] == "1":
                logits.argmax(-1)


class CallsAlone(PreciseGPT):
    """The module once more than the other rank, with the same exchanges as before."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if os.environ["RANK"] == "1":
            self(batch[:, :-1])
        return loss


class EvaluatesAlone(PreciseGPT):
    """Another rank has ended the batch, which is the first of its kind, so that a plan is made behind it."""

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.full((4, 17), 3), 2)  # type: ignore[arg-type]

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if os.environ["RANK"] == "1":
            self(batch[:, :-1])


class InParallel(Block):
    """Block whose parts take the same input and exchange tensors of one shape. From its third call on, one rank does
    otherwise, after the first exchange."""

    def forward(self, x: Tensor) -> Tensor:
        attention, feed_forward = self.attention, self.feed_forward
        parts: list[nn.Module] = [attention, feed_forward, attention]
        self.calls = getattr(self, "calls", 0) + self.training
        if self.calls > 2 and os.environ["RANK"] == "1":
            parts = self.otherwise(parts)
        x = self.attention_norm(x)
        return x + torch.stack([part(x) for part in parts]).sum(0)

    def otherwise(self, parts: list[nn.Module]) -> list[nn.Module]:
        return parts


class Swaps(InParallel):
    def otherwise(self, parts: list[nn.Module]) -> list[nn.Module]:
        return [parts[0], parts[2], parts[1]]


class LeavesOut(InParallel):
    def otherwise(self, parts: list[nn.Module]) -> list[nn.Module]:
        return parts[:2]


class SwapsLayers(PreciseGPT):
    block: type[Block] = Swaps

    def build(self) -> None:
        super().build()
        for block in self.blocks:
            block.__class__ = self.block


class LeavesALayerOut(SwapsLayers):
    block = LeavesOut


class Halves(InParallel):
    """Gives its second part half of the tokens on one rank, after its first exchange."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + self.training
        other = self.calls > 2 and os.environ["RANK"] == "1"
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(x[:, :8] if other else x).mean(1, keepdim=True)


class OtherShapes(SwapsLayers):
    block = Halves


class SwapsInEvaluation(SwapsLayers):
    """In its last exchanges, behind which ranks exchange nothing that would tell."""

    block = InParallel

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.full((4, 17), 3), 2)  # type: ignore[arg-type]

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        block: Any = self.blocks[-1]
        if batch_idx == 1 and os.environ["RANK"] == "1":
            block.__class__ = Swaps
            block.calls, block.training = 3, True
        block(self.token_embedding(batch))


class SwapsInEvaluationAndGoesOn(SwapsInEvaluation):
    """The next thing that all ranks do is to end the run."""

    def on_validation_end(self) -> None:
        raise AssertionError("a batch of which ranks have computed different things has ended")


def fail_together(
    kind: type[PreciseGPT], disk: Path, long_s: float = 5.0, way: str = "neighbours"
) -> tuple[str, float]:
    """Type and text of this rank's error, and the seconds until it.

    Args:
        long_s: after which a rank says what it waits for, and asks what others do.
        way: of WAYS.
    """
    deadlock_detector._LONG_S = long_s  # of this rank's process
    tensor_models.MODELS["fails"] = kind
    began_s = time.monotonic()
    try:
        train(Run("fails", 2, 2, steps=STEPS, way=way), disk)
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began_s
    raise AssertionError("fit ended without an error")


@pytest.mark.parametrize("kind", [FailsInTheProof, FailsInTheForward])
def test_a_rank_that_fails_alone_takes_its_group_along(kind: type[PreciseGPT], disk: Path) -> None:
    outcomes = watch_ranks(fail_together, 2, kind, disk)
    assert [outcome.end for outcome in outcomes] == [End.RETURNED, End.RETURNED], outcomes
    (other, other_s), (culprit, culprit_s) = (outcome.value for outcome in outcomes)
    assert "this rank has had enough" in culprit
    assert other.startswith("RankError: rank 1 failed with"), other
    assert max(other_s, culprit_s) < PROMPT_S


ASKING = [AsksAlone, AsksInItsForward, AsksInTheBackward, AsksBetweenUnits, AsksBetweenBackwards]


@pytest.mark.slow_unless("AsksAlone", "AsksInItsForward", "AsksInTheBackward")
@pytest.mark.parametrize("kind", ASKING)
def test_a_rank_that_asks_alone_for_divided_logits_is_an_error_on_all(kind: type[PreciseGPT], disk: Path) -> None:
    outcomes = watch_ranks(fail_together, 2, kind, disk)
    assert [outcome.end for outcome in outcomes] == [End.RETURNED, End.RETURNED], outcomes
    for text, took_s in (outcome.value for outcome in outcomes):
        assert text.startswith("RankError: rank"), text
        assert took_s < PROMPT_S
    assert "Logits of a cut head were used for something other than F.cross_entropy" in outcomes[1].value[0]
    assert "rank 1 at test_tensor_exchanges.py:" in outcomes[1].value[0], outcomes[1].value


@pytest.mark.slow_unless("gloo")
@pytest.mark.parametrize("kind", [SwapsLayers, SwapsInEvaluationAndGoesOn])
@pytest.mark.parametrize("way", WAYS)
def test_layers_in_another_order_on_one_rank_are_an_error_that_names_both(
    way: str, kind: type[PreciseGPT], disk: Path
) -> None:
    """The layers' sums have one shape: without the error, each rank would continue with the sum of two layers'
    parts."""
    outcomes = watch_ranks(fail_together, 2, kind, disk, 5.0, way)
    assert [outcome.end for outcome in outcomes] == [End.RETURNED, End.RETURNED], outcomes
    for text, took_s in (outcome.value for outcome in outcomes):
        assert text.startswith("RankError: rank"), text
        number = 0 if kind is SwapsLayers else 1
        assert f"rank 0 has come to the sum of blocks.{number}.feed_forward.project (forward" in text, text
        assert f"where rank 1 has come to the sum of blocks.{number}.attention.project (forward" in text, text
        assert took_s < PROMPT_S


def test_other_shapes_on_one_rank_are_an_error_that_names_both(disk: Path) -> None:
    """gloo ends the process of one of them."""
    outcomes = watch_ranks(fail_together, 2, OtherShapes, disk)
    assert [outcome.end for outcome in outcomes] == [End.RETURNED, End.RETURNED], outcomes
    for text, took_s in (outcome.value for outcome in outcomes):
        assert text.startswith("RankError: rank"), text
        assert "(4, 16, 32)" in text and "(4, 8, 32)" in text, text
        assert took_s < PROMPT_S


def test_a_layer_that_one_rank_leaves_out_is_an_error_that_names_it(disk: Path) -> None:
    """At the last layer of a unit, the other rank waits for the sum, while this one continues with the next unit."""
    outcomes = watch_ranks(fail_together, 2, LeavesALayerOut, disk, 1.0)
    assert [outcome.end for outcome in outcomes] == [End.RETURNED, End.RETURNED], outcomes
    for text, took_s in (outcome.value for outcome in outcomes):
        assert text.startswith("RankError: rank 0"), text
        assert "waits for rank 1 in an exchange of activations" in text, text
        assert "rank 0 has come to the sum of blocks.0.attention.project (forward" in text, text
        assert took_s < PROMPT_S


@pytest.mark.parametrize("kind", [CallsAlone, EvaluatesAlone])
def test_a_rank_that_calls_the_module_alone_is_an_error_on_all(kind: type[PreciseGPT], disk: Path) -> None:
    outcomes = watch_ranks(fail_together, 2, kind, disk)
    assert [outcome.end for outcome in outcomes] == [End.RETURNED, End.RETURNED], outcomes
    for text, took_s in (outcome.value for outcome in outcomes):
        assert text.startswith("RankError: rank"), text
        assert "rank 1 at test_tensor_exchanges.py:" in text, text
        assert took_s < PROMPT_S
