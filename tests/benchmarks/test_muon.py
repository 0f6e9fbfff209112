"""benchmarks/muon.py: its sides train the same model by the same arithmetic, and its floor is what a run has at home."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from kit.fits import quiet_trainer

from lightning_ptm import AngelPTMStrategy
from lightning_ptm.terms import BLOCK_BYTES

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The script, and the modules that its sides are made of."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    names = ("muon", "gpt", "sides.plain", "sides.trainer", "sides.optimizers")
    yield SimpleNamespace(**{name.rpartition(".")[2]: importlib.import_module(name) for name in names})
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(ROOT / "benchmarks")):
            del sys.modules[name]


class AtHome(L.Callback):
    """Bytes on disk."""

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(trainer.strategy, AngelPTMStrategy)
        self.bytes = sum(row.bytes for row in trainer.strategy.states_at_home() if row.tier == "disk")


@pytest.mark.parametrize("way", ["one", "two"])
def test_the_sides_take_the_same_steps(scripts: Any, way: str, disk: Path) -> None:
    kind, shape, seed = scripts.muon.WAYS[way], scripts.gpt.SHAPES["tiny"], 3
    plain = scripts.gpt.build(shape, dtype=torch.bfloat16, seed=seed)
    step = scripts.plain.updating(plain, scripts.gpt.batches(shape, batch=1, seed=seed), kind)
    losses = [step() for _ in range(3)]

    seen: list[float] = []

    class Watched(scripts.trainer.GPTModule):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
            seen.append(float(outputs["loss"]))

    module, home = Watched(shape, seed=seed, meta=False, optimizer=kind), AtHome()
    # The masters are those of the loop: made of weights in 16 bits.
    module.model.load_state_dict(scripts.gpt.build(shape, dtype=torch.bfloat16, seed=seed).state_dict())
    trainer = quiet_trainer(
        AngelPTMStrategy(page_size="64KiB", disk_path=str(disk), offload_optimizer="disk"),
        precision="bf16-mixed",
        max_epochs=1,
        limit_train_batches=3,
        callbacks=[home],
    )
    data = scripts.trainer.Batches(shape, batch=1, seed=seed)
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=None))
    assert seen == losses
    count = len(list(plain.parameters()))
    assert 0 <= home.bytes - scripts.muon.state_bytes(shape) <= 3 * count * 4 * BLOCK_BYTES  # a block of elements each
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.bfloat16(), theirs)


def test_one_class_does_what_two_optimizers_do(scripts: Any) -> None:
    shape = scripts.gpt.SHAPES["tiny"]
    models = [scripts.gpt.build(shape, dtype=torch.float32, seed=0) for _ in range(2)]
    for model, kind in zip(models, ("muon", "muon_and_adamw"), strict=True):
        made = scripts.optimizers.optimizers(kind, model.named_parameters())
        data = scripts.gpt.batches(shape, batch=1, seed=0)
        for _ in range(3):
            model.zero_grad()
            model(*next(data)).backward()
            for optimizer in made:
                optimizer.step()
    first, second = (dict(model.named_parameters()) for model in models)
    assert all(torch.equal(first[name], second[name]) for name in first)
    start = dict(scripts.gpt.build(shape, dtype=torch.float32, seed=0).named_parameters())
    assert not any(torch.equal(first[name], start[name]) for name in first)


def test_the_disk_moves_what_the_states_take(scripts: Any) -> None:
    shape = scripts.gpt.SHAPES["124M"]
    matrices = shape.layers * 12 * shape.width**2
    assert scripts.muon.state_bytes(shape) == 12 * shape.numel - 4 * matrices


@pytest.mark.slow
def test_it_runs_and_has_its_bars(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "muon.py"), "--quick", "--threads=1", f"--json={out}"]
    subprocess.run([*command, f"--disk-path={tmp_path}"], check=True, timeout=300)
    found = json.loads(out.read_text())
    assert len(found["bars"]) == 2 and all(bar["value"] > 0 for bar in found["bars"])
    assert set(found["sides"]) == {f"{way} {side}" for way in ("one", "two") for side in ("ours", "loop", "disk")}
    for way in ("one", "two"):
        ours, loop = (found["sides"][f"{way} {side}"]["turns"] for side in ("ours", "loop"))
        assert [turn["loss"] for turn in ours] == pytest.approx([turn["loss"] for turn in loop], rel=1e-3)
