"""`resume="auto"` on several ranks: all go on from the one that rank 0 has found, whatever each of them would find itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from kit.ranks.harness import run_ranks
from kit.ranks.models import Tower
from kit.ranks.training import Training, loader, make_strategy, make_trainer, tokens
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_ptm import CheckpointError
from lightning_ptm.checkpoints import auto_resume, file_io, full

TRAINING = Training(Tower, "32-true", batches=2)


class Began(L.Callback):
    """At which step."""

    at = -1

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.at = trainer.global_step


def go_on(world_size: int, folder: Path, kept: Path, kind: str, epochs: int, save_top_k: int = 1) -> int:
    torch.manual_seed(0)
    module, began = TRAINING.build(), Began()
    strategy = make_strategy(folder, checkpoints={"state_dict_type": kind, "resume": "auto"})
    keep = ModelCheckpoint(kept, filename="{step}", save_last="link", save_top_k=save_top_k)
    options: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [keep, began], "max_epochs": epochs}
    trainer = make_trainer(TRAINING, strategy, world_size, **options)
    trainer.fit(module, loader(tokens(TRAINING, world_size), world_size))
    return began.at


def twice(world_size: int, folder: Path, root: Path) -> tuple[int, int, str]:
    """Begins, goes on; then what one rank cannot look for ends the run on all."""
    began = go_on(world_size, folder, root / "kept", "sharded", 1)
    rank = int(torch.distributed.get_rank())
    look = auto_resume._in

    def finds(*given: Any) -> Any:
        assert rank == 0, "only rank 0 looks"
        return look(*given)

    auto_resume._in = finds
    resumed = go_on(world_size, folder, root / "kept", "sharded", 2)

    def fails(place: Path, suffixes: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(place))

    auto_resume._in = fails
    try:
        go_on(world_size, folder, root / "kept", "sharded", 3)
    except (PermissionError, CheckpointError) as error:
        return began, resumed, str(error)
    return began, resumed, ""


@pytest.mark.timeout(200)
def test_ranks_go_on_together_and_another_number_of_them_does(disk: Path, tmp_path: Path) -> None:
    outcomes = run_ranks(twice, 2, 2, disk, tmp_path)
    assert [each[:2] for each in outcomes] == [(0, 2), (0, 2)]
    assert all("Permission denied" in each[2] for each in outcomes)
    assert go_on(1, disk, tmp_path / "kept", "full", 3) == 4  # fewer, and the other format from then on
    assert run_ranks(go_on, 3, 3, disk, tmp_path / "kept", "sharded", 4) == [6, 6, 6]
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["last.ckpt", "step=8.ckpt"]


def with_one_rank_that_cannot_read(world_size: int, folder: Path, kept: Path, kind: str, how: str) -> int:
    """Rank 1 alone is refused the newest checkpoint, or has none of that name."""
    go_on(world_size, folder, kept, kind, 2, save_top_k=-1)
    if torch.distributed.get_rank() == 1:
        is_folder, load = full.is_folder, file_io.FileCheckpointIO.load_checkpoint

        def sees(path: Path) -> bool:
            if path.name != "step=4.ckpt":
                return is_folder(path)
            if how == "refused":
                raise CheckpointError(f"{path} cannot be read: Permission denied")
            return False

        def loads(self: Any, path: str, *args: Any, **settings: Any) -> Any:
            if Path(path).name == "step=4.ckpt":
                raise FileNotFoundError(2, "No such file or directory", path)
            return load(self, path, *args, **settings)

        full.is_folder = sees
        file_io.FileCheckpointIO.load_checkpoint = loads
    return go_on(world_size, folder, kept, kind, 3, save_top_k=-1)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("kind", [pytest.param("full", marks=pytest.mark.slow), "sharded"])
@pytest.mark.parametrize("how", ["refused", pytest.param("missing", marks=pytest.mark.slow)])
def test_what_one_rank_cannot_read_all_pass_over(how: str, kind: str, disk: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    assert run_ranks(with_one_rank_that_cannot_read, 2, 2, disk, kept, kind, how) == [2, 2]
