"""Checkpoints of divided experts: what is in them does not tell how ranks divided these, and they load whatever way.

One run is saved in both formats; each other run loads one of them and saves again, before it has trained, in the other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from kit.outcomes import Outcome
from kit.ranks.harness import run_ranks
from kit.ranks.training import Training, loader, make_strategy, make_trainer, outcome_of, tokens
from test_rank_experts import MoETower, idle_experts
from torch import Tensor

from lightning_ptm.sharded import load

TRAINING = Training(MoETower, "64-true", batches=3)
SAVED_AFTER = 2
KIND = {"full": "sharded", "sharded": "full"}


class SaveTo(L.Callback):
    """At once, or after so many batches."""

    def __init__(self, path: Path, after: int) -> None:
        self._path, self._after = path, after

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        if self._after == 0:
            trainer.save_checkpoint(self._path)

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if index + 1 == self._after:
            trainer.save_checkpoint(self._path)


def run(
    world_size: int,
    size: int,
    disk: Path,
    tier: str,
    kind: str,
    saved: Path,
    loaded: Path | None = None,
    weights: Path | None = None,
) -> Outcome:
    """One rank's part. What is loaded must count: the module itself begins with other values."""
    begins = loaded is None and weights is None
    torch.manual_seed(0 if begins else 1)
    module = MoETower()
    settings = {
        "units": ["Expert"],
        "expert_parallel_size": size,
        "checkpoints": {"state_dict_type": kind, "async_save": kind == "sharded"},
        "weights": weights,
    }
    strategy = make_strategy(disk, tier, **settings)
    callback = SaveTo(saved, SAVED_AFTER if begins else 0)
    trainer = make_trainer(TRAINING, strategy, world_size, callbacks=[callback])
    trainer.fit(module, loader(tokens(TRAINING, world_size), world_size), ckpt_path=loaded)
    return outcome_of(module)


def read(path: Path) -> dict[str, Any]:
    return load(path) if path.is_dir() else torch.load(path, weights_only=True)


def assert_same_states(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    def flat(value: Any, name: str = "") -> dict[str, Any]:
        if isinstance(value, dict):
            return {key: leaf for k, v in value.items() for key, leaf in flat(v, f"{name}.{k}").items()}
        return {name: value}

    for part in ("state_dict", "optimizer_states"):
        one, other = ours[part], theirs[part]
        found = flat(dict(enumerate(one)) if isinstance(one, list) else dict(one))
        expected = flat(dict(enumerate(other)) if isinstance(other, list) else dict(other))
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            same = torch.equal(found[name], value) if isinstance(value, Tensor) else found[name] == value
            assert same, name


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of two ranks that divide experts, by format."""
    folder = tmp_path_factory.mktemp("first")
    (folder / "disk").mkdir()
    saved = {kind: folder / f"{kind}.ckpt" for kind in KIND}
    for kind, path in saved.items():
        run_ranks(run, 2, 2, 2, folder / "disk", "ram", kind, path)
    return saved


def test_names_and_states_are_those_of_the_whole_model(first: dict[str, Path]) -> None:
    full = read(first["full"])
    assert_same_states(read(first["sharded"]), full)
    torch.manual_seed(0)
    module = MoETower()
    assert list(full["state_dict"]) == list(module.state_dict())
    names = [name for name, _ in module.named_parameters()]
    updated = {names[place] for place in full["optimizer_states"][0]["state"]}
    idle = {name for name in names for expert in idle_experts(0) & idle_experts(1) if name.startswith(f"{expert}.")}
    assert idle
    assert updated & idle < idle  # what never had a token has no state
    assert set(names) - idle <= updated


@pytest.mark.parametrize(
    ("world_size", "size", "tier", "kind"),
    [
        pytest.param(1, 1, "ram", "sharded", marks=pytest.mark.slow),
        pytest.param(2, 1, "ram", "full", marks=pytest.mark.slow),
        pytest.param(2, 2, "all_on_disk", "full", marks=pytest.mark.slow),
        pytest.param(3, 3, "lock_free", "full", marks=pytest.mark.slow),
        (4, 2, "masters_on_disk", "sharded"),
        pytest.param(4, 4, "all_on_disk", "full", marks=pytest.mark.slow),
    ],
)
def test_any_division_loads_it(
    first: dict[str, Path], world_size: int, size: int, tier: str, kind: str, disk: Path, tmp_path: Path
) -> None:
    again = tmp_path / "again.ckpt"
    run_ranks(run, world_size, world_size, size, disk, tier, KIND[kind], again, first[kind])
    assert_same_states(read(again), read(first[kind]))


def test_division_ends_and_begins_in_mid_training(first: dict[str, Path], disk: Path, tmp_path: Path) -> None:
    """1 -> 2 and 2 -> 1: what follows is the same step."""
    alone = tmp_path / "alone.ckpt"
    per_size = [
        run_ranks(run, 2, 2, 1, disk, "ram", "full", alone, first["sharded"]),
        run_ranks(run, 2, 2, 2, disk, "ram", "sharded", tmp_path / "again.ckpt", alone),
    ]
    for undivided, divided in zip(*per_size, strict=True):
        torch.testing.assert_close(divided.losses, undivided.losses, rtol=0, atol=1e-9)
        torch.testing.assert_close(divided.weights, undivided.weights, rtol=0, atol=1e-9)
    assert_same_states(read(tmp_path / "again.ckpt"), read(first["full"]))


def test_a_run_starts_from_its_weights(first: dict[str, Path], disk: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.ckpt"
    run_ranks(run, 2, 2, 2, disk, "masters_on_disk", "full", again, None, first["sharded"])
    ours, theirs = read(again)["state_dict"], read(first["full"])["state_dict"]
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
