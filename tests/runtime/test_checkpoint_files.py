"""Full checkpoints as files: complete or not there at all, and a clear error for what is no checkpoint."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from kit.checkpoint_runs import BATCHES, Full, fit, names_in, same, small_files
from kit.plain_loop import make_trainer
from torch import Tensor

from lightning_ptm.checkpoints import gathering
from lightning_ptm.checkpoints.file_io import FileCheckpointIO
from lightning_ptm.checkpoints.gathering import Scratch
from lightning_ptm.errors import CheckpointError
from lightning_ptm.storage.folder import file_draft
from lightning_ptm.storage.index import PARTIAL

BIG = {"state_dict": {"weight": torch.arange(100_000.0)}}
SMALL = {"state_dict": {"weight": torch.arange(3.0)}}


def test_a_disk_without_room_leaves_the_earlier_file(tmp_path: Path) -> None:
    checkpoints = FileCheckpointIO()
    checkpoints.save_checkpoint(SMALL, tmp_path / "x.ckpt")
    with small_files(100_000), pytest.raises(CheckpointError, match=r"x\.ckpt failed: File too large.*untouched"):
        checkpoints.save_checkpoint(BIG, tmp_path / "x.ckpt")
    assert names_in(tmp_path) == ["x.ckpt"]
    assert torch.equal(checkpoints.load_checkpoint(tmp_path / "x.ckpt")["state_dict"]["weight"], torch.arange(3.0))


def test_a_run_that_cannot_save_ends_with_the_reason(strategy_at, tmp_path: Path) -> None:
    class Saves(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            with small_files(10_000):
                trainer.save_checkpoint(tmp_path / "x.ckpt")

    trainer = make_trainer(strategy_at("ram"), max_epochs=1, callbacks=[Saves()])
    with pytest.raises(CheckpointError, match="File too large"):
        trainer.fit(Full(), BATCHES.loader())
    assert names_in(tmp_path) == ["disk"]


def test_the_earlier_file_is_there_until_the_new_one_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "x.ckpt"
    target.write_text("earlier")
    with file_draft(target) as draft:
        draft.write_text("half")
        assert target.read_text() == "earlier"
        draft.write_text("whole")
    assert target.read_text() == "whole" and names_in(tmp_path) == ["x.ckpt"]
    with pytest.raises(KeyboardInterrupt), file_draft(target) as draft:
        draft.write_text("half")
        raise KeyboardInterrupt
    assert target.read_text() == "whole" and names_in(tmp_path) == ["x.ckpt"]


def test_what_a_killed_writer_has_left_is_removed(tmp_path: Path) -> None:
    script = f"""
        import os, signal
        from pathlib import Path
        from lightning_ptm.storage.folder import file_draft
        with file_draft(Path({str(tmp_path)!r}) / "x.ckpt") as draft:
            draft.write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False)
    assert [name for name in names_in(tmp_path) if name.startswith(PARTIAL)]
    FileCheckpointIO().save_checkpoint(SMALL, tmp_path / "y.ckpt")
    assert names_in(tmp_path) == ["y.ckpt"]


def test_a_folder_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "x.ckpt").mkdir()
    with pytest.raises(CheckpointError, match="is a folder, and a full checkpoint is a file"):
        FileCheckpointIO().save_checkpoint(SMALL, tmp_path / "x.ckpt")
    assert names_in(tmp_path) == ["x.ckpt"]


def test_tensors_are_mapped(tmp_path: Path) -> None:
    FileCheckpointIO().save_checkpoint(BIG, tmp_path / "x.ckpt")
    loaded = FileCheckpointIO().load_checkpoint(tmp_path / "x.ckpt")["state_dict"]["weight"]
    address = loaded.data_ptr()
    ranges = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "x.ckpt" in line]
    borders = [tuple(int(each, 16) for each in line[0].split("-")) for line in ranges]
    assert any(start <= address < stop for start, stop in borders)
    # It may be replaced while it is mapped.
    FileCheckpointIO().save_checkpoint(SMALL, tmp_path / "x.ckpt")
    assert torch.equal(loaded, torch.arange(100_000.0))


def test_a_place_to_load_to(tmp_path: Path) -> None:
    FileCheckpointIO().save_checkpoint(SMALL, tmp_path / "x.ckpt")
    assert FileCheckpointIO().load_checkpoint(tmp_path / "x.ckpt", "meta")["state_dict"]["weight"].is_meta


def test_a_file_of_the_old_format_is_read(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(SMALL, tmp_path / "old.ckpt", _use_new_zipfile_serialization=False)
    loaded = FileCheckpointIO().load_checkpoint(tmp_path / "old.ckpt")
    assert torch.equal(loaded["state_dict"]["weight"], torch.arange(3.0))


def _saved(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "content", [b"", b"no checkpoint at all", _saved(BIG)[:-5000], _saved(BIG)[:300], _saved([1, 2])], ids=list("abcde")
)
def test_what_is_no_checkpoint(strategy_at, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.ckpt").write_bytes(content)
    with pytest.raises(
        CheckpointError,
        match=r"x\.ckpt (was not written by torch\.save: |(is no checkpoint, or is|holds .* or is) damaged)",
    ):
        fit(strategy_at("ram"), tmp_path / "run", tmp_path / "x.ckpt")


# -- where RAM is short ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["masters_on_disk", "lock_free_three_tiers"])
def test_what_ram_should_not_hold_is_put_together_on_the_disk(
    strategy_at, tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(strategy_at(tier), tmp_path / "expected")
    elsewhere: list[int] = []

    class Looks(FileCheckpointIO):
        def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
            lines = Path("/proc/self/maps").read_text().splitlines()
            ranges = [line.split()[0].split("-") for line in lines if str(tmp_path / "disk") in line and "rw-s" in line]
            borders = [(int(start, 16), int(stop, 16)) for start, stop in ranges]
            states = checkpoint["optimizer_states"][0]["state"].values()
            tensors = [checkpoint["state_dict"][name] for name, _ in self.module.named_parameters()]
            tensors += [state[key] for state in states for key in state if key != "step"]
            elsewhere.append(sum(not any(a <= each.data_ptr() < b for a, b in borders) for each in tensors))
            super().save_checkpoint(checkpoint, path, storage_options)

    monkeypatch.setattr(gathering, "_RAM_SHARE", 0.0)
    files = Looks()
    strategy = strategy_at(tier, checkpoint_io=files)

    class Tells(L.Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            files.module = pl_module

    fit(strategy, tmp_path / "it", callbacks=[Tells()])
    assert elsewhere and not any(elsewhere)
    for name in ("epoch=0.ckpt", "epoch=1.ckpt"):
        ours, theirs = (torch.load(tmp_path / run / name, weights_only=False) for run in ("it", "expected"))
        assert same(ours, theirs)


def test_no_room_to_put_it_together(strategy_at, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Saves(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.strategy.engine.drain()  # its own files are longer
            with small_files(10_000):
                trainer.save_checkpoint(tmp_path / "x.ckpt")

    monkeypatch.setattr(gathering, "free_host_bytes", lambda: 0)
    trainer = make_trainer(strategy_at("masters_on_disk"), max_epochs=1, callbacks=[Saves()])
    with pytest.raises(
        CheckpointError,
        match=r"disk, where it was to be assembled, has no room for .*Checkpoints\(state_dict_type='sharded'\)",
    ):
        trainer.fit(Full(), BATCHES.loader())
    assert names_in(tmp_path) == ["disk"]


def test_ram_is_used_where_the_disk_has_no_room(strategy_at, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(scratch: Scratch, value: Tensor) -> Tensor:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(gathering, "_RAM_SHARE", 0.0)
    monkeypatch.setattr(Scratch, "copy", full)
    with pytest.warns(UserWarning, match="is assembled in RAM all the same, since .*disk has no room"):
        fit(strategy_at("masters_on_disk"), tmp_path / "it")
    monkeypatch.undo()
    fit(strategy_at("masters_on_disk"), tmp_path / "expected")
    ours, theirs = (torch.load(tmp_path / run / "epoch=1.ckpt", weights_only=False) for run in ("it", "expected"))
    assert same(ours, theirs)


class Sparse(Full):
    """Model with a buffer that has no plain storage."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sparse", torch.eye(3).to_sparse())


def test_buffers_without_plain_storage(tmp_path: Path, strategy_at) -> None:
    trainer = make_trainer(strategy_at("ram"), max_epochs=1, limit_train_batches=1)
    trainer.fit(Sparse(), BATCHES.loader())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    found = torch.load(tmp_path / "x.ckpt", weights_only=True)["state_dict"]["sparse"]
    assert torch.equal(found.to_dense(), torch.eye(3))
