"""Sequence parallelism: what autograd keeps of a forward on a rank, and how often ranks exchange, recomputed or not."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from kit.fits import quiet_trainer
from kit.ranks.harness import run_ranks
from kit.ranks.tensor_models import Run, batches, build
from torch import Tensor

from lightning_ptm import AngelPTMStrategy
from lightning_ptm.memory.backend import backend_of
from lightning_ptm.models import GPT
from lightning_ptm.parallel.cutting import CutModule
from lightning_ptm.parallel.exchange import RankGroup
from lightning_ptm.parallel.rules import plan_of

BAR = 0.55
SIZES: dict[str, Any] = {"vocab_size": 512, "width": 64, "layers": 4, "heads": 4, "sequence_length": 64}
BATCH, LENGTH = 4, 64


def of_blocks(model: GPT) -> Tensor:
    x = torch.randn(BATCH, LENGTH, SIZES["width"], requires_grad=True)
    for block in model.blocks:
        x = block(x)
    return x


def of_loss(model: GPT) -> Tensor:
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    return model.loss((tokens, tokens))


PARTS: dict[str, Callable[[GPT], Tensor]] = {"blocks": of_blocks, "head and loss, too": of_loss}


def kept_bytes(model: GPT, compute: Callable[[GPT], Tensor]) -> int:
    """Returns the bytes that autograd keeps of a forward, storages counted once, parameters left out."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = tensor  # so that no other storage comes to lie there
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        compute(model).sum().backward()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def kept_by_a_rank() -> dict[tuple[str, float, str], int]:
    """By what is computed, dropout, and how ranks divide the model."""
    dist.init_process_group("gloo")
    group = RankGroup(dist.group.WORLD, backend_of(torch.device("cpu")))
    found = {}
    for dropout in (0.0, 0.1):
        for how in ("one rank", "tensor", "sequence"):
            torch.manual_seed(0)
            model = GPT(**SIZES, dropout=dropout)
            model.configure_model()
            if how != "one rank":
                sequence = how == "sequence"
                CutModule(
                    model,
                    plan_of(model, "auto"),
                    group,
                    strict=False,
                    sequence_parallel=sequence,
                    proven=False,
                )
            for name, compute in PARTS.items():
                found[name, dropout, how] = kept_bytes(model, compute)
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def kept() -> list[dict[tuple[str, float, str], int]]:
    return run_ranks(kept_by_a_rank, 2)


@pytest.mark.diagonal
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("part", PARTS)
def test_half_is_kept_of_what_one_rank_keeps(
    kept: list[dict[tuple[str, float, str], int]], part: str, dropout: float
) -> None:
    for of_rank in kept:
        whole, divided = of_rank[part, dropout, "one rank"], of_rank[part, dropout, "sequence"]
        assert 0.5 * whole <= divided <= BAR * whole
        assert of_rank[part, dropout, "tensor"] > BAR * whole  # where what is between layers is whole


# -- exchanges --------------------------------------------------------------------------------------------------------


class Exchanges(L.Callback):
    """Collectives of the tensor group in each step."""

    def __init__(self) -> None:
        self.of_steps: list[int] = []
        self._before = 0

    def on_train_batch_start(self, trainer: L.Trainer, *rest: Any) -> None:
        self._before = trainer.strategy._groups.tensor.exchanges  # type: ignore[attr-defined]

    def on_train_batch_end(self, trainer: L.Trainer, *rest: Any) -> None:
        self.of_steps.append(trainer.strategy._groups.tensor.exchanges - self._before)  # type: ignore[attr-defined]


class Kept(L.Callback):
    """Bytes of hidden states that autograd keeps of the last step's forward, storages counted once."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.kept: dict[int, Tensor] = {}
        self._hooks: Any = None

    def on_train_batch_start(self, *rest: Any) -> None:
        self.kept.clear()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor)
        self._hooks.__enter__()

    def on_before_backward(self, *rest: Any) -> None:
        self._hooks.__exit__()

    def _keep(self, tensor: Tensor) -> Tensor:
        if tensor.dim() == 3 and tensor.shape[-1] == self.width:
            self.kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    @property
    def bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self.kept.values())


def kept_when_recomputed(disk: Path) -> dict[bool, int]:
    """By whether ranks divide the sequence."""
    found = {}
    for sequence in (False, True):
        watch = Kept(SIZES["width"])
        how = Run("gpt", 2, 2, sizes=SIZES, steps=2)
        train(how, disk, watch, recompute="all", tensor_parallel={"sequence_parallel": sequence})
        found[sequence] = watch.bytes
    return found


def test_of_a_recomputed_block_its_part_of_the_input_is_kept(disk: Path) -> None:
    for kept in run_ranks(kept_when_recomputed, 2, disk):
        # Of one block more than there are the input is whole: that of the norm behind the last.
        blocks = SIZES["layers"]
        assert kept[True] == kept[False] * (blocks / 2 + 1) / (blocks + 1)


def train(how: Run, disk: Path, watch: L.Callback, **settings: Any) -> None:
    torch.manual_seed(0)
    strategy = AngelPTMStrategy(page_size="64KiB", disk_path=str(disk), tensor_parallel_size=2, **settings)
    trainer = quiet_trainer(
        strategy,
        devices=int(os.environ["WORLD_SIZE"]),
        max_steps=how.steps,
        use_distributed_sampler=False,
        callbacks=[watch],
    )
    trainer.fit(build(how.model, how.sizes), batches(how))


def exchanges(disk: Path) -> dict[str, list[int]]:
    """By what is recomputed, of each step behind the first, which proves the plan."""
    found = {}
    for recompute in ("none", "all", "every 2nd"):
        watch = Exchanges()
        train(Run("gpt", 2, 2, steps=3), disk, watch, recompute=recompute, tensor_parallel={"sequence_parallel": True})
        found[recompute] = watch.of_steps[1:]
    return found


def test_recomputing_exchanges_nothing_again(disk: Path) -> None:
    # Of each block: two gathers and reduce-scatters in the forward, the same and two gathers for weights in the backward,
    # and what it gives. Of the first block its input's gradient, of the model the embedding, the head's input and the loss.
    step = 2 * (4 + 6 + 1) + 1 + 3
    for of_rank in run_ranks(exchanges, 2, disk):
        assert of_rank == {recompute: [step, step] for recompute in ("none", "all", "every 2nd")}
