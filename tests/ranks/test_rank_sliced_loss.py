"""The loss in slices on several ranks: numbers of one rank, one gather of the head in each pass, cut heads."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from kit.ranks.harness import run_ranks
from kit.ranks.tensor_models import MODELS, Held, Losses, Outcome, Run, assert_same_learning, train
from torch import Tensor, nn

from lightning_ptm.comm import ProcessGroupCommunicator
from lightning_ptm.memory.backend import backend_of
from lightning_ptm.models import GPT, slice_loss, sliced_cross_entropy
from lightning_ptm.parallel.between_layers import BetweenLayers
from lightning_ptm.parallel.exchange import RankGroup
from lightning_ptm.parallel.logits import head_logits

STEPS = 3


class SlicedGPT(Losses, GPT):
    def __init__(self, **sizes: Any) -> None:
        super().__init__(**{"vocab_size": 64, "width": 32, "layers": 2, "heads": 4, "sequence_length": 16, **sizes})

    def loss(self, batch: Tensor) -> Tensor:
        return sliced_cross_entropy(self.head, self.hidden(batch[:, :-1]), batch[:, 1:], tokens=self.loss_tokens)


class Gathers(L.Callback):
    """Counts gathers of each of the root's flats, during training."""

    def __init__(self) -> None:
        self.of_flats: Counter[int] = Counter()
        self._own: Any = None

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        communicator: Any = ProcessGroupCommunicator
        self._own = own = communicator.all_gather

        def call(itself: Any, shard: Tensor, full: Tensor, flat: Any) -> Any:
            self.of_flats.update([flat.index] if flat.unit == 0 else [])
            return own(itself, shard, full, flat)

        communicator.all_gather = call

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        ProcessGroupCommunicator.all_gather = self._own  # type: ignore[method-assign]


def counted(how: Run, folder: Path) -> tuple[Outcome, Counter[int]]:
    # In this process, too.
    MODELS.update(
        {"sliced_gpt": SlicedGPT, "sliced": partial(SlicedHeld, "llama"), "whole": partial(WholeHeld, "llama")}
    )
    gathers = Gathers()
    return train(how, folder, gathers), gathers.of_flats


@pytest.mark.parametrize("tie_head", [False, True])
def test_the_head_is_gathered_once_a_pass_and_numbers_are_those_of_one_rank(tie_head: bool, disk: Path) -> None:
    per_rank = {}
    for tokens in (5, None):
        sizes = {"tie_head": tie_head, "loss_tokens": tokens}
        how = Run("sliced_gpt", 2, tier="three_tiers", steps=STEPS, sizes=sizes)
        per_rank[tokens] = run_ranks(counted, 2, how, disk)
    for sliced, whole in zip(per_rank[5], per_rank[None], strict=True):
        assert set(sliced[1].values()) == {STEPS}  # one gather for a forward and its backward
        assert sliced[1] == whole[1]
        assert_same_learning([sliced[0]], whole[0])


class SlicedHeld(Held):
    """A model of Transformers that computes its loss in slices."""

    def configure_model(self) -> None:
        if "model" not in self._modules:
            super().configure_model()
            slice_loss(self.model, 5)

    def loss(self, batch: Tensor) -> Tensor:
        return self.model(input_ids=batch, labels=batch).loss  # type: ignore[no-any-return]


class WholeHeld(SlicedHeld):
    def configure_model(self) -> None:
        Held.configure_model(self)


@pytest.mark.parametrize("tier", ["ram", "three_tiers"])
def test_a_cut_head_computes_slices_of_its_part(tier: str, disk: Path) -> None:
    how = Run("sliced_gpt", 2, tensor=2, tier=tier, steps=STEPS, sizes={"loss_tokens": 5})
    sliced = [outcome for outcome, _ in run_ranks(counted, 2, how, disk)]
    [(whole, _)] = run_ranks(counted, 1, dataclasses.replace(how.on_one(), sizes={}), disk)
    assert_same_learning(sliced, whole)
    # One for each slice of 64 tokens instead of one for the loss.
    other = [outcome for outcome, _ in run_ranks(counted, 2, dataclasses.replace(how, sizes={}), disk)]
    assert sliced[0].exchanges - other[0].exchanges == STEPS * (13 - 1)


def test_a_cut_head_of_transformers(disk: Path) -> None:
    how = Run("sliced", 2, tensor=2, tier="three_tiers", steps=STEPS, precision="32-true")
    sliced, whole = (
        [outcome for outcome, _ in run_ranks(counted, 2, dataclasses.replace(how, model=model), disk)]
        for model in ("sliced", "whole")
    )
    assert sliced[0].exchanges - whole[0].exchanges == STEPS * (14 - 1)  # slices of 68 tokens
    assert_same_learning(sliced, whole[0], losses=1e-6, weights=1e-3)


def in_parts(dtype: torch.dtype, autocast: bool) -> list[float]:
    """The largest differences between a cut head's loss and gradients and a whole one's, for all options."""
    dist.init_process_group("gloo")
    assert dist.group.WORLD is not None
    group = RankGroup(dist.group.WORLD, backend_of(torch.device("cpu")))
    torch.manual_seed(0)
    whole, x = nn.Linear(8, 24).to(dtype), (3 * torch.randn(2, 15, 8)).to(dtype)
    targets = torch.randint(0, 24, (2, 15)).masked_fill(torch.rand(2, 15) < 0.3, -100)
    part = nn.Linear(8, 24).to(dtype)
    part.weight, part.bias = (nn.Parameter(each.chunk(2)[group.index].clone()) for each in whole.parameters())
    between = BetweenLayers(group)
    part.forward = lambda x: head_logits(x, part.weight, part.bias, between)  # type: ignore[method-assign]
    found = []
    for reduction, smoothing, z_loss in itertools.product(("mean", "sum", "none"), (0.0, 0.1), (0.0, 0.01)):
        options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing, "z_loss": z_loss}
        learnt = []
        for head, tokens in ((whole, 30), (part, 7)):
            head.zero_grad()
            mine = x.clone().requires_grad_()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                loss = sliced_cross_entropy(head, mine, targets, tokens=tokens, **options)
            loss.square().sum().backward()
            assert mine.grad is not None and head.weight.grad is not None and head.bias.grad is not None
            rows = (head.weight.grad, head.bias.grad)
            rows = rows if head is part else tuple(each.chunk(2)[group.index] for each in rows)
            learnt.append((loss.detach(), mine.grad, *rows))
        pairs = zip(*learnt, strict=True)
        found.append(max(float((one - other).abs().max() / one.abs().max()) for one, other in pairs))
    return found


@pytest.mark.parametrize(
    ("dtype", "autocast", "rounding"),
    [(torch.float64, False, 1e-13), (torch.float32, True, 0.03), (torch.float16, False, 0.01)],
)
def test_a_cut_head_has_the_loss_and_gradients_of_a_whole_one(dtype: Any, autocast: bool, rounding: float) -> None:
    for differences in run_ranks(in_parts, 2, dtype, autocast):
        assert max(differences) < rounding
