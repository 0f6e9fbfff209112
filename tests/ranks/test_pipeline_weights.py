"""Pipeline stages: a run starts from files, shows its weights, and is exported, as one on one rank."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from kit.ranks.harness import End, run_ranks, watch_ranks
from kit.ranks.pipeline_models import StagedGPT, StagedOutcome, StagedRun, assert_same, train
from safetensors.torch import load_file, save_file
from torch import Tensor

from lightning_ptm.checkpoints.pretrained import SINGLE
from lightning_ptm.cli import export

SHARDED = {"checkpoints": {"state_dict_type": "sharded"}}


def save(folder: Path, *absent: str, **sizes: Any) -> tuple[Path, dict[str, Tensor]]:
    """Writes weights that no seed gives, without those of the names `absent`; returns the file, and all of them."""
    numbers = torch.Generator().manual_seed(7)
    module = StagedGPT(**sizes, meta=False)
    module.configure_model()
    of_model = module.double().state_dict()
    held = {name: 0.1 * torch.randn(each.shape, generator=numbers, dtype=each.dtype) for name, each in of_model.items()}
    if sizes.get("tie_head"):
        held["head.weight"] = held["token_embedding.weight"]
    path = folder / SINGLE
    tied = {"head.weight"} if sizes.get("tie_head") else set()
    save_file({name: each for name, each in held.items() if name not in {*absent, *tied}}, path)
    return path, held


class Looks(L.Callback):
    """Takes down the weights where training starts, in each way in which a run shows them."""

    def __init__(self) -> None:
        self.seen: dict[str, dict[str, Tensor]] = {}

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        strategy: Any = trainer.strategy
        self.seen["state_dict"] = copied(module.state_dict())
        self.seen["of a part"] = copied(
            {f"blocks.0.{name}": each for name, each in module.blocks[0].state_dict().items()}
        )  # type: ignore[index, union-attr]
        with strategy.gathered(write=False):
            self.seen["gathered"] = copied(dict(module.named_parameters()))
        self.seen["stream"] = copied(dict(strategy.stream_weights()))


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in tensors.items()}


def look_and_train(how: StagedRun, disk: Path) -> tuple[StagedOutcome, dict[str, dict[str, Tensor]]]:
    looks = Looks()
    return train(how, disk, looks), looks.seen


@pytest.mark.parametrize(
    ("ranks", "tier", "schedule", "sizes"),
    [
        (2, "tight", "1f1b", {"tie_head": True}),
        (2, "ram", "interleaved", {}),
        pytest.param(4, "three_tiers", "1f1b", {"tie_head": True}, marks=pytest.mark.slow),
    ],
)
def test_a_run_starts_from_the_weights_of_a_file(
    ranks: int, tier: str, schedule: str, sizes: dict[str, Any], disk: Path, tmp_path: Path
) -> None:
    path, held = save(tmp_path, **sizes)
    one = StagedRun(steps=2, sizes=sizes, settings={"weights": path})
    ((whole, _),) = run_ranks(look_and_train, 1, one, disk)
    several = StagedRun(ranks, 2, tier=tier, schedule=schedule, steps=2, sizes=sizes, settings={"weights": path})
    found = run_ranks(look_and_train, ranks, several, disk)
    assert_same([outcome for outcome, _ in found], whole)
    for _, seen in found:
        for way, weights in seen.items():
            names = [name for name in held if way != "of a part" or name.startswith("blocks.0.")]
            tied = {"head.weight"} if sizes and way in ("gathered", "stream") else set()
            assert weights.keys() == {*names} - tied, way
            for name, value in weights.items():
                assert torch.equal(value, held[name]), (way, name)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_name_that_a_file_lacks_is_an_error_on_all_ranks(stages: int, disk: Path, tmp_path: Path) -> None:
    path, _ = save(tmp_path, "blocks.3.feed_forward.expand.weight")  # of the last stage
    how = StagedRun(stages, stages, steps=1, settings={"weights": path})
    for outcome in watch_ranks(train, stages, how, disk):
        assert outcome.end is End.RAISED and outcome.error.startswith("ConfigError: "), outcome
        assert "does not fit the module: the files lack blocks.3.feed_forward.expand.weight" in outcome.error


def exported(checkpoint: Path) -> bytes:
    folder = checkpoint.with_name(f"exported {checkpoint.name}")
    with contextlib.redirect_stdout(io.StringIO()):
        export(checkpoint, folder)
    return (folder / SINGLE).read_bytes()


class Untrained(StagedGPT):
    """Has losses of no steps."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.losses: list[float] = []


@pytest.mark.parametrize(("ranks", "kind"), [(2, SHARDED), pytest.param(4, {}, marks=pytest.mark.slow)])
def test_an_export_has_the_bytes_of_one_ranks(ranks: int, kind: dict[str, Any], tmp_path: Path) -> None:
    how = StagedRun(ranks, 2, tier="tight", steps=2, settings=kind, saved_to="stages.ckpt", precision="bf16-mixed")
    weights = run_ranks(train, ranks, how, tmp_path)[0].weights
    resumed = str(tmp_path / "stages.ckpt")
    one = StagedRun(steps=2, settings=kind, saved_to="one.ckpt", resumed_from=resumed, precision="bf16-mixed")
    run_ranks(partial(train, model=Untrained), 1, one, tmp_path)
    ours = exported(tmp_path / "stages.ckpt")
    assert ours == exported(tmp_path / "one.ckpt")
    held = load_file(tmp_path / "exported stages.ckpt" / SINGLE)
    assert held.keys() == weights.keys()
    assert all(torch.equal(held[name], value) for name, value in weights.items())
