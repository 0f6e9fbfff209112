"""On several ranks, where RAM has no room for all weights at the end: what was trained comes back on each, or is on disk."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.ranks.harness import run_ranks
from kit.ranks.training import Training, loader, make_strategy, make_trainer, tokens
from test_rank_frozen_codes import Frozen
from torch import Tensor

from lightning_ptm import sharded
from lightning_ptm.checkpoints import restore
from lightning_ptm.runtime.units.parameter_guard import GuardedParameter

Ending = tuple[dict[str, Tensor], int, str]
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "ram": ("ram", {}),
    "nf4 on disk": ("all_on_disk", {"frozen_dtype": "nf4"}),
    "three tiers": ("three_tiers", {}),
}


def ended(world_size: int, folder: Path, name: str, free_for: str) -> Ending:
    """Returns what this rank's module has, how many of its parameters have nothing, and the messages."""
    tier, settings = SETTINGS[name]
    torch.manual_seed(0)
    training, own = Training(Frozen), restore.free_host_bytes
    module = training.build()
    size = sum(each.numel() * 4 + 4096 for each in module.parameters() if each.requires_grad) * world_size
    strategy = make_strategy(folder / "pages", tier, **settings)
    trainer = make_trainer(training, strategy, world_size, default_root_dir=folder / "root")
    if free_for != "all":
        restore.free_host_bytes = lambda: size if free_for == "trained" else 0  # type: ignore[assignment]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(module, loader(tokens(training, world_size), world_size))
        finally:
            restore.free_host_bytes = own
    if free_for == "trained":
        trainer.save_checkpoint(folder / "after.ckpt", weights_only=True)
    parameters = dict(module.named_parameters())
    absent = {key for key, each in parameters.items() if isinstance(each, GuardedParameter)}
    values = {key: each.detach().clone() for key, each in parameters.items() if key not in absent}
    return values, len(absent), "\n".join(str(each.message) for each in caught)


@pytest.mark.diagonal
@pytest.mark.parametrize("free_for", ["trained", "nothing"])
@pytest.mark.parametrize("name", SETTINGS)
def test_what_was_trained_is_kept(name: str, free_for: str, tmp_path: Path) -> None:
    (tmp_path / "pages").mkdir()
    expected, _, _ = run_ranks(ended, 2, 2, tmp_path, name, "all")[0]
    trained = {key for key, each in Frozen().named_parameters() if each.requires_grad}
    for values, absent, _ in (endings := run_ranks(ended, 2, 2, tmp_path, name, free_for)):
        assert values.keys() == (trained if free_for == "trained" else set())
        assert absent == len(expected) - len(values)
        assert all(torch.equal(value, expected[key]) for key, value in values.items())
    if free_for == "trained":
        assert "have no room" in endings[0][2]
        saved = torch.load(tmp_path / "after.ckpt")["state_dict"]
        assert saved.keys() == trained
    else:
        saved = sharded.load(tmp_path / "root" / "end-of-run-step=4.ckpt")["state_dict"]
        assert saved.keys() == expected.keys()
        assert "written to" in endings[0][2]
    assert all(torch.equal(value, expected[key]) for key, value in saved.items())
