"""Parameters that are parts of larger ones: a run on ranks that have parts saves what one rank with the whole ones saves,
byte for byte, and any number of ranks, with parts or without, goes on from it.

The module computes nothing that needs an exchange: its loss is linear in each element, with a gradient that is exact in 16
bits, so every rank's part has the gradient of its elements in the whole.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from kit.fits import quiet_trainer
from kit.ranks.harness import run_ranks
from kit.ranks.training import TIERS
from test_expert_parallel_checkpoints import SaveTo, assert_same_states, read
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_ptm import AngelPTMStrategy
from lightning_ptm.errors import UsageError
from lightning_ptm.planning.tensor_slices import TensorSlice
from lightning_ptm.runtime.tensors.parts import cut

WHOLE = {
    "rows": ((256, 96), TensorSlice((256, 96), 0, 4, 0)),
    "columns": ((96, 256), TensorSlice((96, 256), 1, 4, 0)),
    "packed": ((96, 3, 64), TensorSlice((96, 3, 64), 0, 4, 0, sections=3)),
    "middle": ((4, 16, 64), TensorSlice((4, 16, 64), 1, 4, 0)),
    "scale": ((64,), None),
}
"""The whole shape of a block's parameters and how it is cut, by name. Parts end at multiples of 64 elements."""
BATCHES, BATCH, SAVED_AFTER = 4, 4, 2


class Block(nn.Module):
    def __init__(self, boxes: Mapping[str, TensorSlice | None], seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, (shape, _) in WHOLE.items():
            self.register_parameter(
                name, nn.Parameter(cut(torch.randn(shape, generator=generator), boxes[name]).clone())
            )
        self.boxes = boxes

    def forward(self, rows: Tensor) -> Tensor:
        return sum(
            (parameter * cut(slopes(WHOLE[name][0], rows), self.boxes[name]).to(parameter)).sum()
            for name, parameter in self.named_parameters()
        )


def slopes(shape: tuple[int, ...], rows: Tensor) -> Tensor:
    """The gradient of a whole parameter: quarters of small integers."""
    places = torch.arange(torch.Size(shape).numel()).view(shape)
    return sum(((places * 7 + int(row) * 13) % 11 - 5.0 for row in rows), torch.zeros(shape)) / len(rows)


class Model(L.LightningModule):
    """Blocks of which each of `parts` ranks has a part."""

    def __init__(self, parts: int, rank: int, seed: int = 0) -> None:
        super().__init__()
        self.cuts = {
            name: None
            if box is None or parts == 1
            else TensorSlice(shape, box.dimension, parts, rank % parts, box.sections)
            for name, (shape, box) in WHOLE.items()
        }
        self.blocks = nn.ModuleList(Block(self.cuts, seed + place) for place in range(2))
        self.bias = nn.Parameter(torch.full((64,), float(seed)))
        self.norms: list[float] = []

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = (self.bias * slopes((64,), batch).to(self.bias)).sum()
        return loss + sum(block(batch) for block in self.blocks)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.norms.append(float(self.trainer.strategy.gradient_norm(optimizer)))


class InParts(AngelPTMStrategy):
    def boxes(self) -> dict[str, TensorSlice]:
        module = self.lightning_module
        assert isinstance(module, Model)
        return {
            f"blocks.{block}.{name}": box
            for block in range(len(module.blocks))
            for name, box in module.cuts.items()
            if box is not None
        }


@dataclasses.dataclass(frozen=True)
class Run:
    """How ranks train and what they save, by format: after some batches of a run that begins, at once of one that goes on."""

    ranks: int
    parts: int
    saved: Mapping[str, Path]
    tier: str = "ram"
    precision: str = "32-true"
    clip: float | None = None
    loaded: Path | None = None
    weights: Path | None = None


def run(how: Run, disk: Path) -> tuple[list[float], dict[str, Tensor]]:
    """One rank's part.

    Returns:
        The norms of gradients, and the weights of this rank's module afterwards.
    """
    rank = int(os.environ["RANK"])
    begins = how.loaded is None and how.weights is None
    for kind, path in how.saved.items():
        module = Model(how.parts, rank, 0 if begins else 10)
        strategy = InParts(
            page_size="64KiB",
            debug={"poison": True},
            disk_path=str(disk),
            units=["Block"],
            timeout=timedelta(seconds=60),
            checkpoints={"state_dict_type": kind, "async_save": kind == "sharded"},
            weights=how.weights,
            **TIERS[how.tier],
        )
        data_ranks = how.ranks // how.parts
        rows = torch.arange(float(BATCHES * BATCH))
        sampler = DistributedSampler(rows, data_ranks, rank // how.parts, shuffle=False)  # type: ignore[arg-type]
        trainer = quiet_trainer(
            strategy,
            devices=how.ranks,
            precision=how.precision,
            max_epochs=1,
            use_distributed_sampler=False,
            gradient_clip_val=how.clip,
            callbacks=[SaveTo(path, SAVED_AFTER if begins else 0)],
        )
        loader = DataLoader(rows, BATCH // data_ranks, sampler=sampler)  # type: ignore[arg-type]
        trainer.fit(module, loader, ckpt_path=how.loaded)
    return module.norms, {name: each.detach().clone() for name, each in module.named_parameters()}


def state_files(folder: Path) -> dict[str, bytes]:
    found = {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}
    assert found
    return found


def assert_same_files(ours: Path, theirs: Path) -> None:
    found, expected = state_files(ours), state_files(theirs)
    assert found.keys() == expected.keys()
    assert [name for name in found if found[name] != expected[name]] == []


def paths(folder: Path) -> dict[str, Path]:
    return {"full": folder / "full.ckpt", "sharded": folder / "sharded.ckpt"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By precision, what one rank with whole parameters has saved, and what it has at its end."""
    found = {}
    for precision in ("32-true", "bf16-mixed"):
        folder = tmp_path_factory.mktemp(precision)
        (folder / "disk").mkdir()
        saved = paths(folder)
        (end,) = run_ranks(run, 1, Run(1, 1, saved, precision=precision), folder / "disk")
        found[precision] = saved, end
    return found


def assert_parts_of(ends: Sequence[dict[str, Tensor]], whole: dict[str, Tensor], parts: int) -> None:
    for rank, end in enumerate(ends):
        cuts = Model(parts, rank).cuts
        for name, value in whole.items():
            box = cuts.get(name.rpartition(".")[2])
            assert torch.equal(end[name], cut(value, box)), (rank, name)


@pytest.mark.parametrize(
    ("ranks", "parts", "tier", "precision"),
    [
        pytest.param(2, 2, "ram", "32-true", marks=pytest.mark.slow),
        pytest.param(2, 2, "masters_on_disk", "bf16-mixed", marks=pytest.mark.slow),
        pytest.param(2, 2, "lock_free", "bf16-mixed", marks=pytest.mark.slow),
        pytest.param(2, 2, "three_tiers", "bf16-mixed", marks=pytest.mark.slow),
        (4, 2, "all_on_disk", "32-true"),
        pytest.param(4, 4, "ram", "bf16-mixed", marks=pytest.mark.slow),
    ],
)
def test_what_is_saved_is_one_ranks(
    whole: dict[str, Any], ranks: int, parts: int, tier: str, precision: str, disk: Path, tmp_path: Path
) -> None:
    theirs, (_, end) = whole[precision]
    ours = paths(tmp_path)
    ends = run_ranks(run, ranks, Run(ranks, parts, ours, tier, precision), disk)
    assert_same_files(ours["sharded"], theirs["sharded"])
    assert_same_states(read(ours["full"]), read(theirs["full"]))
    assert_parts_of([weights for _, weights in ends], end, parts)


@pytest.mark.slow_unless("2-1-all_on_disk-sharded", "4-2-ram-sharded")
@pytest.mark.parametrize("kind", ["full", "sharded"])
@pytest.mark.parametrize(
    ("ranks", "parts", "tier"),
    [(1, 1, "ram"), (2, 1, "all_on_disk"), (2, 2, "masters_on_disk"), (4, 2, "ram"), (4, 4, "all_on_disk")],
)
def test_any_number_of_ranks_goes_on_from_it(
    whole: dict[str, Any], ranks: int, parts: int, tier: str, kind: str, disk: Path, tmp_path: Path
) -> None:
    """The loaded state is saved again, and trained with."""
    theirs, _ = whole["bf16-mixed"]
    ours = paths(tmp_path)
    run_ranks(run, ranks, Run(ranks, parts, ours, tier, "bf16-mixed", loaded=theirs[kind]), disk)
    assert_same_files(ours["sharded"], theirs["sharded"])
    assert_same_states(read(ours["full"]), read(theirs["full"]))


@pytest.mark.parametrize(("ranks", "parts"), [pytest.param(2, 2, marks=pytest.mark.slow), (4, 2)])
def test_a_run_begins_with_weights_of_files(
    whole: dict[str, Any], ranks: int, parts: int, disk: Path, tmp_path: Path
) -> None:
    theirs, _ = whole["bf16-mixed"]
    ours = {"full": tmp_path / "full.ckpt"}
    run_ranks(run, ranks, Run(ranks, parts, ours, precision="bf16-mixed", weights=theirs["sharded"]), disk)
    found, expected = read(ours["full"])["state_dict"], read(theirs["full"])["state_dict"]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_the_clipped_norm_is_one_ranks(disk: Path, tmp_path: Path) -> None:
    """The norm and the weights are those of one rank."""
    how = Run(1, 1, {"full": tmp_path / "whole.ckpt"}, precision="64-true", clip=1.0)
    ((norms, end),) = run_ranks(run, 1, how, disk)
    for ranks, parts in ((2, 2), (4, 2)):
        how = Run(ranks, parts, {"full": tmp_path / "parts.ckpt"}, precision="64-true", clip=1.0)
        for rank, (ours, weights) in enumerate(run_ranks(run, ranks, how, disk)):
            assert ours == pytest.approx(norms, rel=1e-12) and min(norms) > 1
            cuts = Model(parts, rank).cuts
            for name, value in end.items():
                expected = cut(value, cuts.get(name.rpartition(".")[2]))
                torch.testing.assert_close(weights[name], expected, rtol=0, atol=1e-12)


def gathered_and_ended(disk: Path, path: Path) -> tuple[bool, list[bool], str]:
    """Returns what `gathered` shows, whether edits in it stay, and how a save after the run ends."""
    rank = int(os.environ["RANK"])
    model = Model(2, rank)
    cuts = model.cuts

    class Edits(L.Callback):
        def on_train_start(self, trainer: L.Trainer, module: Model) -> None:
            with trainer.strategy.gathered(module):
                self.shapes = all(
                    tuple(getattr(module.blocks[0], name).shape)
                    == (shape if cuts[name] is None else cuts[name].part_shape)
                    for name, (shape, _) in WHOLE.items()
                )
                with torch.no_grad():
                    module.blocks[0].columns.fill_(1.0 + rank)
                    module.blocks[0].scale.fill_(1.0 + rank)
            with trainer.strategy.gathered(module, write=False):
                block = module.blocks[0]
                self.edited = [bool((block.columns == 1 + rank).all()), bool((block.scale == 1).all())]

    edits = Edits()
    strategy = InParts(page_size="64KiB", disk_path=str(disk), units=["Block"], timeout=timedelta(seconds=60))
    trainer = quiet_trainer(strategy, devices=2, max_steps=1, use_distributed_sampler=False, callbacks=[edits])
    trainer.fit(model, DataLoader(torch.arange(4.0), 4))
    with pytest.raises(UsageError) as refused:
        trainer.save_checkpoint(path)
    return edits.shapes, edits.edited, str(refused.value)


def test_the_module_has_its_part(disk: Path, tmp_path: Path) -> None:
    for shapes, edited, refused in run_ranks(gathered_and_ended, 2, disk, tmp_path / "after.ckpt"):
        assert shapes and edited == [True, True]
        assert "only its slices of parameters (tensor parallelism)" in refused
    assert not (tmp_path / "after.ckpt").exists()
