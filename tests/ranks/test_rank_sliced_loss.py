"""The loss in slices on several ranks: the numbers of whole batches, and one gather of the head in each pass."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from kit.ranks.harness import run_ranks
from kit.ranks.tensor_models import MODELS, Losses, Outcome, Run, assert_same_learning, train
from torch import Tensor

from lightning_ptm.comm import ProcessGroupCommunicator
from lightning_ptm.models import GPT
from lightning_ptm.parallel.sliced_loss import sliced_cross_entropy

STEPS = 3


class SlicedGPT(Losses, GPT):
    def __init__(self, **sizes: Any) -> None:
        super().__init__(**{"vocab_size": 64, "width": 32, "layers": 2, "heads": 4, "sequence_length": 16, **sizes})

    def loss(self, batch: Tensor) -> Tensor:
        return sliced_cross_entropy(self.head, self.hidden(batch[:, :-1]), batch[:, 1:], tokens=self.loss_tokens)


MODELS["sliced_gpt"] = SlicedGPT


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
    MODELS["sliced_gpt"] = SlicedGPT  # in this process, too
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
