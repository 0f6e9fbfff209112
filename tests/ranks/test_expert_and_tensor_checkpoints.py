"""Checkpoints of ranks that divide experts and cut layers at the same time: one rank goes on from them, and they from its."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from kit.fits import quiet_trainer
from kit.ranks.harness import run_ranks
from kit.ranks.tensor_models import Run, batches, build
from test_expert_parallel_checkpoints import assert_same_states, read
from test_tensor_checkpoints import KINDS, SaveIn, tensors_in
from torch import Tensor

from lightning_ptm import AngelPTMStrategy

pytestmark = pytest.mark.slow  # a dozen fits of one and four ranks

FOUR = Run("t5_moe", 4, 2, steps=3, settings={"expert_parallel_size": 2})
LAYOUTS = {"one": FOUR.on_one_by_batches(), "four": FOUR}


def path_of(folder: Path, kind: str, layout: str, when: str) -> Path:
    return folder / f"{kind}-{layout}-{when}"


def fit(how: Run, kind: str, seed: int, folder: Path, saves: L.Callback | None, loaded: Path | None) -> Any:
    torch.manual_seed(seed)
    module = build(how.model, how.sizes)
    settings = {
        "units": ["Block", "Expert"],
        "page_size": "64KiB",
        "debug": {"poison": True},
        "disk_path": str(folder / "disk"),
    }
    trainer = quiet_trainer(
        AngelPTMStrategy(tensor_parallel_size=how.tensor, **settings, **KINDS[kind], **how.settings),
        devices=how.ranks,
        precision="64-true",
        use_distributed_sampler=False,
        callbacks=[] if saves is None else [saves],
        max_epochs=2,
        **how.trainer,
    )
    trainer.fit(module, batches(how), ckpt_path=loaded)
    return module


def weights_of(module: L.LightningModule) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in module.named_parameters()}


def save_all(layout: str, folder: Path) -> dict[str, dict[str, Tensor]]:
    """Returns the weights after two epochs, by kind of checkpoint."""
    found = {}
    for kind in KINDS:
        saves = SaveIn(*(path_of(folder, kind, layout, when) for when in ("start", "later")))
        found[kind] = weights_of(fit(LAYOUTS[layout], kind, 0, folder, saves, None))
    return found


Learnt = dict[str, list[dict[str, dict[str, Tensor]]]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Learnt]:
    folder = tmp_path_factory.mktemp("saved")
    (folder / "disk").mkdir()
    return folder, {name: run_ranks(save_all, how.ranks, name, folder, limit_s=240) for name, how in LAYOUTS.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_four_ranks_save_what_one_saves(kind: str, saved: tuple[Path, Learnt]) -> None:
    folder, _ = saved
    start, later = (read(path_of(folder, "full", "one", when)) for when in ("start", "later"))
    assert_same_states(read(path_of(folder, kind, "four", "start")), start)
    ours = read(path_of(folder, kind, "four", "later"))
    for part in ("state_dict", "optimizer_states"):
        found, expected = tensors_in(ours[part]), tensors_in(later[part])
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-10, msg=name)


def go_on(layout: str, sources: dict[str, tuple[str, Path]]) -> dict[str, dict[str, Tensor]]:
    """Returns the weights that are learnt from each of some checkpoints."""
    found = {}
    for name, (kind, path) in sources.items():
        module = fit(LAYOUTS[layout], kind, 1, path.parent, None, path)
        assert len(module.losses) == LAYOUTS[layout].steps * LAYOUTS[layout].micro_batches
        found[name] = weights_of(module)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_either_goes_on_from_the_others(layout: str, saved: tuple[Path, Learnt]) -> None:
    folder, learnt = saved
    sources = {f"{each} {kind}": (kind, path_of(folder, kind, each, "later")) for each in LAYOUTS for kind in KINDS}
    for rank, found in enumerate(run_ranks(go_on, LAYOUTS[layout].ranks, layout, sources, limit_s=240)):
        for name, weights in found.items():
            for key, value in learnt["one"][0]["full"].items():
                torch.testing.assert_close(weights[key], value, rtol=0, atol=1e-9, msg=f"{name} {key}")
        for kind in KINDS:  # from its own, as if it had never stopped
            for key, value in learnt[layout][rank][kind].items():
                assert torch.equal(found[f"{layout} {kind}"][key], value), (kind, key)
