"""Checkpoints under tensor parallelism have whole tensors: any number of ranks writes the same, and goes on from it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from kit.ranks.harness import run_ranks
from kit.ranks.tensor_blocks import Blocks, is_whole, module_of, rows, trainer_of, weights_of
from test_expert_parallel_checkpoints import assert_same_states, read
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

pytestmark = pytest.mark.slow  # some thirty fits of one to four ranks

KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "sharded": {"checkpoints": {"state_dict_type": "sharded"}},
    "behind": {"checkpoints": {"state_dict_type": "sharded", "async_save": True}, "offload_optimizer": "disk"},
}
LAYOUTS = ((1, 1), (2, 1), (2, 2), (4, 2))
"""Ranks, and among how many of them layers are cut."""
STEPS, BATCH = 3, 4


class SaveIn(L.Callback):
    """At the start, and after one epoch."""

    def __init__(self, start: Path, later: Path) -> None:
        self.start, self.later = start, later

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        trainer.save_checkpoint(self.start)

    def on_train_epoch_end(self, trainer: L.Trainer, module: Any) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.later)


def batches(ranks: int, tensor: int) -> DataLoader[Tensor]:
    """Returns the same rows for every layout."""
    data, found = ranks // tensor, rows(STEPS * BATCH)
    sampler = DistributedSampler(found, data, int(os.environ.get("RANK", 0)) // tensor, shuffle=False)  # type: ignore[arg-type, var-annotated]
    return DataLoader(found, BATCH // data, sampler=sampler)  # type: ignore[arg-type]


def path_of(folder: Path, kind: str, layout: tuple[int, int], when: str) -> Path:
    return folder / f"{kind}-{layout[0]}x{layout[1]}-{when}"


def save_all(ranks: int, tensor: int, folder: Path) -> dict[str, dict[str, Tensor]]:
    """Returns the weights after two epochs, by kind of checkpoint."""
    found = {}
    for kind, settings in KINDS.items():
        module = module_of()
        saves = SaveIn(*(path_of(folder, kind, (ranks, tensor), when) for when in ("start", "later")))
        given = {**settings, "disk_path": str(folder / "disk")}
        trainer_of(ranks, tensor, given, max_epochs=2, callbacks=[saves]).fit(module, batches(ranks, tensor))
        assert is_whole(module)
        found[kind] = weights_of(module)
    return found


Learnt = dict[tuple[int, int], list[dict[str, dict[str, Tensor]]]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Learnt]:
    folder = tmp_path_factory.mktemp("saved")
    (folder / "disk").mkdir()
    return folder, {layout: run_ranks(save_all, layout[0], *layout, folder) for layout in LAYOUTS}


def tensors_in(state: Any, name: str = "") -> dict[str, Tensor]:
    if isinstance(state, Tensor):
        return {name: state}
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    return {key: leaf for at, each in items for key, leaf in tensors_in(each, f"{name}.{at}").items()}


@pytest.mark.parametrize("kind", KINDS)
def test_any_layout_saves_what_one_rank_saves(kind: str, saved: tuple[Path, Learnt]) -> None:
    folder, _ = saved
    start, later = (read(path_of(folder, "full", (1, 1), when)) for when in ("start", "later"))
    for layout in LAYOUTS:
        assert_same_states(read(path_of(folder, kind, layout, "start")), start)
        ours = read(path_of(folder, kind, layout, "later"))
        for part in ("state_dict", "optimizer_states"):
            found, expected = tensors_in(ours[part]), tensors_in(later[part])
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12, msg=f"{layout} {name}")


def go_on(ranks: int, tensor: int, sources: dict[str, tuple[str, Path]]) -> dict[str, dict[str, Tensor]]:
    """Returns the weights that are learnt from each of some checkpoints."""
    found = {}
    for name, (kind, path) in sources.items():
        module = module_of(seed=1)
        given = {**KINDS[kind], "disk_path": str(path.parent / "disk")}
        trainer_of(ranks, tensor, given, max_epochs=2).fit(module, batches(ranks, tensor), ckpt_path=path)
        assert is_whole(module) and len(module.losses) == STEPS
        found[name] = weights_of(module)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_goes_on_from_any(layout: tuple[int, int], saved: tuple[Path, Learnt]) -> None:
    folder, learnt = saved
    sources = {f"{each[0]}x{each[1]} full": ("full", path_of(folder, "full", each, "later")) for each in LAYOUTS}
    own = f"{layout[0]}x{layout[1]}"
    for kind in ("sharded", "behind"):
        sources[f"{own} {kind}"] = (kind, path_of(folder, kind, layout, "later"))
    sources["4x2 sharded"] = ("sharded", path_of(folder, "sharded", (4, 2), "later"))
    for rank, found in enumerate(run_ranks(go_on, layout[0], *layout, sources)):
        for name, weights in found.items():
            for key, value in learnt[1, 1][0]["full"].items():
                torch.testing.assert_close(weights[key], value, rtol=0, atol=1e-11, msg=f"{name} {key}")
        for kind in KINDS:  # from its own, as if it had never stopped
            for key, value in learnt[layout][rank][kind].items():
                assert torch.equal(found[f"{own} {kind}"][key], value), (kind, key)


# -- from files, and back ---------------------------------------------------------------------------------------------


def from_weights(ranks: int, tensor: int, path: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns the first values of a run that takes them from a file, and those of `load_from_checkpoint` afterwards."""
    module = module_of(seed=1)
    strategy_saw: dict[str, Tensor] = {}

    class Look(L.Callback):
        def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
            with trainer.strategy.gathered(pl_module, write=False):  # type: ignore[attr-defined]
                strategy_saw.update(weights_of(pl_module))

    trainer = trainer_of(ranks, tensor, {"weights": str(path)}, callbacks=[Look()])
    trainer.fit(module, batches(ranks, tensor))
    trainer.save_checkpoint(path.parent / f"again-{tensor}.ckpt")
    loaded = Blocks.load_from_checkpoint(path.parent / f"again-{tensor}.ckpt", map_location="cpu", weights_only=False)
    assert all(torch.equal(weights_of(loaded)[name], each.float()) for name, each in weights_of(module).items())
    return strategy_saw, weights_of(module)


def test_first_values_come_from_files_and_gathered_shows_this_ranks_parts(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    from safetensors.torch import save_file

    given = {name: value.double() for name, value in module_of(seed=5).state_dict().items()}
    save_file(given, path)
    ((_, expected),) = run_ranks(from_weights, 1, 1, 1, path)
    for rank, (began, ended) in enumerate(run_ranks(from_weights, 2, 2, 2, path)):
        for name, value in given.items():
            part = value
            if name.endswith(("expand.weight", "expand.bias")):
                part = value.chunk(2, 0)[rank]
            elif name.endswith("project.weight"):
                part = value.chunk(2, 1)[rank]
            assert torch.equal(began[name], part), name
            torch.testing.assert_close(ended[name], expected[name], rtol=0, atol=1e-12, msg=name)
