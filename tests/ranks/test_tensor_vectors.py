"""Vectors of cut blocks, which are fetched with the root: used, frozen, edited and saved in every way, against one rank."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from kit.ranks.harness import run_ranks
from kit.ranks.tensor_blocks import WIDTH, Blocks, loader, trainer_of, weights_of
from safetensors.torch import load_file
from torch import Tensor, nn

from lightning_ptm.errors import CapacityError

SETTINGS: dict[str, dict[str, Any]] = {
    "in RAM": {},
    "on disk, recomputed": {"offload_parameters": "disk", "offload_optimizer": "disk", "recompute": "all"},
    "lock-free": {"lock_free": {"max_staleness": 0}, "offload_optimizer": "disk"},
    "beside compute": {"device_memory": "2MiB"},
}
QUICK = ("in RAM",)
"""On disk they are in files of checkpoints, below."""


def later(settings: str) -> Any:
    return pytest.param(settings, marks=pytest.mark.slow)


class Normed(nn.Module):
    """A block with norms, and a scale that is the block's own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.expand, self.project = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.project(torch.tanh(self.expand(self.norm(x))))


class Vectors(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Normed() for _ in range(3))
        self.shift = nn.Parameter(torch.randn(WIDTH))

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch + self.shift)


class CalledFromOutside(Vectors):
    """Norms of blocks are called where the blocks are not."""

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(self.blocks[2].norm(batch)) + self.blocks[0].norm(batch).square().mean()


class Penalised(Vectors):
    """A loss of vectors alone, beside."""

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) + sum(block.norm.weight.square().sum() for block in self.blocks)


class Frozen(Vectors):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].norm.requires_grad_(False)
        self.blocks[1].scale.requires_grad_(False)
        self.blocks[1].project.weight.requires_grad_(False)


class LeftOut(Vectors):
    """A block is not called in every second step."""

    def loss(self, batch: Tensor) -> Tensor:
        chosen = [block for place, block in enumerate(self.blocks) if place != 1 or self.global_step % 2]
        for block in chosen:
            batch = block(batch)
        return batch.square().mean()


class ByTurns(Vectors):
    """Vectors have an optimizer of their own, which steps more often."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        matrices, vectors = self.optimizers()
        loss = self.loss(batch)
        self.losses.append(float(loss))
        self.manual_backward(loss)
        vectors.step()
        vectors.zero_grad()
        if batch_idx % 2:
            matrices.step()
            matrices.zero_grad()

    def configure_optimizers(self) -> Any:
        of = {True: [], False: []}
        for each in self.parameters():
            of[each.dim() > 1].append(each)
        return torch.optim.Adam(of[True], lr=1e-2), torch.optim.SGD(of[False], lr=1e-2, momentum=0.9)


class ReadsItself(Normed):
    """A block that hands its norm's vectors to a function, so that no module tells that they are read; all are its norm's."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = self.project.bias = None  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        normed = nn.functional.layer_norm(x, (WIDTH,), self.norm.weight, self.norm.bias)
        return x + self.project(torch.tanh(self.expand(normed)))


class ReadThemselves(Vectors):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ReadsItself() for _ in range(3))


class Compiled(ReadThemselves):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.compile(backend="eager")


class CallsBlocks(L.Callback):
    """A block is called by itself where nothing computes, and behind weights in the user's hands."""

    def look(self, module: Any) -> None:
        with torch.no_grad():
            module.losses.append(float(module.blocks[1](loader(4).dataset[:]).square().mean()))

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        self.look(module)

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        self.look(module)
        with trainer.strategy.gathered(module.blocks[0]):  # type: ignore[attr-defined]
            pass
        self.look(module)

    def on_train_epoch_end(self, trainer: L.Trainer, module: Any) -> None:
        self.look(module)


class Edits(L.Callback):
    """A block's weights by hand, in the middle of the run."""

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            with trainer.strategy.gathered(module.blocks[1]), torch.no_grad():  # type: ignore[attr-defined]
                module.blocks[1].norm.weight.mul_(2.0)
                module.blocks[1].expand.weight.mul_(0.5)


Case = tuple[type[Vectors], Mapping[str, Any], type[L.Callback] | None]
CASES: dict[str, Case] = {
    "plain": (Vectors, {}, None),
    "accumulated and clipped": (Vectors, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}, None),
    "called from outside": (CalledFromOutside, {}, None),
    "penalised": (Penalised, {}, None),
    "frozen": (Frozen, {}, None),
    "left out": (LeftOut, {}, None),
    "two optimizers by turns": (ByTurns, {}, None),
    "edited": (Vectors, {}, Edits),
    "read by the block, called alone": (ReadThemselves, {}, CallsBlocks),
    "compiled, called alone": (Compiled, {}, CallsBlocks),
}


Trained = list[tuple[list[float], dict[str, Tensor]]]


def train(
    tensor: int, cases: Sequence[str], settings: Mapping[str, Any], disk: str, save: str | None = None
) -> Trained:
    found = []
    for name in cases:
        kind, options, callback = CASES[name]
        ranks = int(os.environ["WORLD_SIZE"])
        torch.manual_seed(0)
        module = kind()
        chosen = {**settings, "units": [type(module.blocks[0]).__name__], "disk_path": disk}
        trainer = trainer_of(ranks, tensor, chosen, callbacks=[callback()] if callback else [], **options)
        if save is not None:
            trainer.callbacks.append(Saves(Path(save) / name))  # type: ignore[attr-defined]
        trainer.fit(module, loader(12))
        found.append((module.losses, weights_of(module)))
    return found


class Saves(L.Callback):
    """A sharded checkpoint behind training, and what it was of."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            trainer.save_checkpoint(self.path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("settings", [each if each in QUICK else later(each) for each in SETTINGS])
def test_vectors_are_those_of_one_rank(settings: str, half: int, disk: Path) -> None:
    # Elsewhere one rank may not read a block's parameters while nothing computes with it.
    names = [name for name in [*CASES][half::2] if name != "penalised" or settings == "in RAM"]
    (whole,) = run_ranks(train, 1, 1, names, SETTINGS[settings], str(disk))
    for of_rank in run_ranks(train, 2, 2, names, SETTINGS[settings], str(disk)):
        for name, (losses, weights), (expected, values) in zip(names, of_rank, whole, strict=True):
            assert losses == pytest.approx(expected, rel=1e-12), name
            assert weights.keys() == values.keys()
            for key, value in values.items():
                assert (weights[key] - value).abs().max() <= 1e-9, (name, key)


class TwoPasses(Vectors):
    """Gradients of two losses, the second of which is computed when those of the first have been."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        for loss in (self.loss, lambda batch: self.blocks[1](batch + self.shift).square().mean()):
            found = loss(batch)
            self.losses.append(float(found))
            self.manual_backward(found)
        optimizer.step()
        optimizer.zero_grad()


def train_with_least(tensor: int, disk: str) -> tuple[list[float], dict[str, Tensor]]:
    """Trains with everything on disk, and the fewest pages of RAM that are enough."""
    for pages in range(8, 64):
        torch.manual_seed(0)
        module = TwoPasses()
        chosen = {**SETTINGS["on disk, recomputed"], "recompute": "none", "host_memory": f"{64 * pages}KiB"}
        trainer = trainer_of(tensor, tensor, {**chosen, "units": ["Normed"], "disk_path": disk})
        with suppress(CapacityError):
            trainer.fit(module, loader(8, 4))
            return module.losses, weights_of(module)
    raise AssertionError("64 pages are too few")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_root_comes_back_for_a_second_pass_where_gradients_had_no_room(ranks: int, disk: Path) -> None:
    torch.manual_seed(0)
    plain = TwoPasses()
    expected = plain_training(plain)
    for losses, weights in run_ranks(train_with_least, ranks, ranks, str(disk), limit_s=240):
        assert losses == pytest.approx(expected, rel=1e-12)
        for key, value in weights_of(plain).items():
            assert (weights[key] - value).abs().max() <= 1e-9, key


def plain_training(module: TwoPasses) -> list[float]:
    """The losses of the same in one plain loop."""
    module.double()
    optimizer = module.configure_optimizers()
    losses = []
    for batch in loader(8, 4):
        for loss in (module.loss, lambda batch: module.blocks[1](batch + module.shift).square().mean()):
            found = loss(batch)
            losses.append(float(found))
            found.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("settings", [later("in RAM"), "on disk, recomputed"])
def test_files_of_sharded_checkpoints_are_those_of_one_rank(settings: str, disk: Path, tmp_path: Path) -> None:
    """Files have the same names, at the same places; values are equal but for rounding."""
    names = ["plain", "frozen", "left out", "two optimizers by turns"]
    chosen = {**SETTINGS[settings], "checkpoints": {"state_dict_type": "sharded", "async_save": True}}
    for ranks in (1, 2):
        run_ranks(train, ranks, ranks, names, chosen, str(disk), str(tmp_path / str(ranks)))
    for name in names:
        one, two = (sorted((tmp_path / ranks / name).glob("*.safetensors")) for ranks in "12")
        assert [path.name for path in one] == [path.name for path in two] and one
        for first, second in zip(one, two, strict=True):
            assert header(first) == header(second), first.name
            values = load_file(second)
            for key, value in load_file(first).items():
                assert (values[key] - value).abs().max() <= 1e-9, (name, first.name, key)


def header(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(int.from_bytes(file.read(8), "little"))
