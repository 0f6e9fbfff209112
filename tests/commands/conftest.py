"""A small model inside a LightningModule, trained for two steps and saved both ways; and sharded folders made by hand."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ptm import AngelPTMStrategy
from lightning_ptm.commands.question import Question
from lightning_ptm.storage.index import LIGHTNING, Index, Seal, StateFile, write_ranges
from lightning_ptm.storage.tensors import lay_out
from lightning_ptm.storage.writer import RangeWriter

WORDS, WIDTH = 97, 64


class Inner(nn.Module):
    """Model with tied weights and two buffers, one of them of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.tensor([0.1, 0.3]))

    def forward(self, words: Tensor) -> Tensor:
        self.calls += 1
        x = self.embedding(words)
        for block in self.blocks:
            x = x + block(x).relu() * self.scale[0]
        return self.head(x)


class Outer(L.LightningModule):
    """Module that users write around a model: `model`, and a layer of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Inner()
        self.extra = nn.Linear(WIDTH, 1)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        words = batch.long()
        loss = nn.functional.cross_entropy(self.model(words[:, :-1]).flatten(0, 1).float(), words[:, 1:].flatten())
        return loss + self.extra(self.model.embedding(words)).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


Train = Callable[[L.LightningModule, Path, str], Path]


def train(module: L.LightningModule, folder: Path, state_dict_type: str) -> Path:
    """Trains two steps; returns the checkpoint of the second."""
    level = logging.getLogger("lightning.pytorch").level
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    environment = dict(os.environ)
    batches = list(torch.randint(0, WORDS, (2, 4, 17), generator=torch.Generator().manual_seed(1)))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        precision="bf16-mixed",
        strategy=AngelPTMStrategy(
            page_size="64KiB", debug={"poison": True}, checkpoints={"state_dict_type": state_dict_type}
        ),
        max_steps=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(folder, filename="two", every_n_train_steps=2)],
        default_root_dir=folder,
    )
    trainer.fit(module, DataLoader(batches, batch_size=1, collate_fn=lambda items: items[0]))
    os.environ.clear()
    os.environ.update(environment)
    logging.getLogger("lightning.pytorch").setLevel(level)
    return folder / "two.ckpt"


@dataclasses.dataclass(frozen=True)
class Trained:
    """Weights in two checkpoints, and as the run left them."""

    sharded: Path
    full: Path
    weights: Mapping[str, Tensor]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Not to be written to: `sharded_copy` is."""
    folder = tmp_path_factory.mktemp("trained")
    saved: list[Path] = []
    states: list[dict[str, Tensor]] = []
    for kind in ("sharded", "full"):
        torch.manual_seed(0)
        module = Outer()
        saved.append(train(module, folder / kind, kind))
        states.append({name: value.detach().clone() for name, value in module.state_dict().items()})
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    return Trained(saved[0], saved[1], states[0])


@pytest.fixture(autouse=True)
def empty_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing may be written where the user happens to stand."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    yield
    assert list(folder.iterdir()) == []


@pytest.fixture
def proposes() -> None:
    """For tests that read what a refused plan proposes."""


@pytest.fixture(autouse=True)
def refusals_without_proposals(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves the search for what would fit, seconds of a processor for each refusal, to the tests that read it."""
    if "proposes" not in request.fixturenames:
        monkeypatch.setattr(Question, "_with_proposals", lambda question, found: found)


def flip(path: Path, offset: int) -> None:
    """Flips a bit."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))


@pytest.fixture
def flip_bit() -> Callable[[Path, int], None]:
    return flip


@pytest.fixture
def train_module() -> Train:
    return train


MakeFolder = Callable[..., Path]


@pytest.fixture
def make_sharded() -> MakeFolder:
    return sharded_by_hand


def sharded_by_hand(path: Path, units: Sequence[Mapping[str, Tensor]], ranks: int = 1, cut: int = 1000) -> Path:
    """A sharded checkpoint of these tensors, of which `ranks` ranks wrote every `cut` elements in turn."""
    path.mkdir()
    files: list[StateFile] = []
    seals: dict[str, Seal] = {}
    writers = [RangeWriter(path) for _ in range(ranks)]
    for number, tensors in enumerate(units):
        layout = lay_out([(name, value.dtype, tuple(value.shape)) for name, value in tensors.items()], {"format": "pt"})
        file = StateFile(f"{number:04d}.parameters.safetensors", f"unit{number}", "parameters", layout.size_bytes)
        files.append(file)
        seals[file.name] = Seal.of(layout.header)
        writers[0].create(file.name, layout.header, layout.size_bytes)
        for stored in layout.tensors:
            flat = tensors[stored.name].reshape(-1)
            for turn, first in enumerate(range(0, flat.numel(), cut)):
                part = flat[first : first + cut]
                writers[turn % ranks].put(file.name, stored.start + first * part.itemsize, part)
    for rank, writer in enumerate(writers):
        write_ranges(path, rank, writer.finish())
    names = [name for tensors in units for name in tensors]
    torch.save({"state_dict": {}, "global_step": 7, "epoch": 1}, path / LIGHTNING)
    seals[LIGHTNING] = Seal.of_file(path / LIGHTNING)
    Index(7, ranks, 65536, "a test", tuple(files), {name: name for name in names}, tuple(names), seals=seals).write(
        path
    )
    return path
