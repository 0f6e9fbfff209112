"""Full checkpoints as files: complete or not there at all, and a clear error for what is no checkpoint."""

from __future__ import annotations

import io
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from checkpoint_runs import BATCHES, Full, fit, names_in, small_files
from plain_loop import make_trainer

from lightning_ptm.checkpoint import FileCheckpointIO
from lightning_ptm.errors import CheckpointError
from lightning_ptm.storage.folder import PARTIAL, file_draft

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
    with pytest.raises(CheckpointError, match=r"x\.ckpt (is no checkpoint, or is|holds .* or is) damaged"):
        fit(strategy_at("ram"), tmp_path / "run", tmp_path / "x.ckpt")
