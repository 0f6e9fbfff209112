"""Choice of a checkpoint format by a setting, and by a path."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from lightning_ptm import CheckpointError, Checkpoints
from lightning_ptm.checkpoints import formats
from lightning_ptm.storage.index import INDEX, PARTIAL


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder of a sharded checkpoint, by its name and kind."""
    path = tmp_path / "step=1.ckpt"
    path.mkdir()
    (path / INDEX).touch()
    return path


def test_the_setting_names_each_format_that_runs_write() -> None:
    names = get_args(get_type_hints(Checkpoints)["state_dict_type"])
    assert list(formats.BY_STATE_DICT_TYPE) == list(names)
    for name, each in formats.BY_STATE_DICT_TYPE.items():
        assert Checkpoints(state_dict_type=name).from_pages is each.from_pages


def test_a_folder_with_an_index_is_a_sharded_checkpoint_of_any_writer(folder: Path) -> None:
    for plugin in (False, True):
        assert formats.of_checkpoint(folder, may_be_of_plugin=plugin) is formats.SHARDED
    assert formats.of_weights(folder) is formats.SHARDED


@pytest.mark.parametrize("path", ["there.ckpt", "not_there.ckpt", "s3://bucket/step=1.ckpt"])
def test_everything_but_a_folder_is_full(tmp_path: Path, path: str) -> None:
    (tmp_path / "there.ckpt").touch()
    assert formats.of_checkpoint(tmp_path / path) is formats.FULL
    assert formats.of_weights(tmp_path / path) is formats.PRETRAINED


@pytest.mark.parametrize("damage", ["no index", "unfinished"])
def test_another_folder_is_a_damaged_checkpoint_unless_a_plugin_may_have_written_it(folder: Path, damage: str) -> None:
    if damage == "no index":
        (folder / INDEX).unlink()
    else:
        folder = folder.rename(folder.with_name(f"{PARTIAL}0123456789ab"))
    assert formats.of_checkpoint(folder) is formats.SHARDED
    assert formats.of_checkpoint(folder, may_be_of_plugin=True) is formats.FULL
    assert formats.of_weights(folder) is formats.PRETRAINED
    with pytest.raises(CheckpointError, match=INDEX if damage == "no index" else "incomplete"):
        formats.open_checkpoint(folder)


def test_files_and_folders_are_complete_when_their_last_file_is_there(folder: Path) -> None:
    assert formats.SHARDED.completed_file(folder) == folder / INDEX
    assert formats.FULL.completed_file(folder.parent / "full.ckpt") == folder.parent / "full.ckpt"


def test_reading_needs_no_lightning() -> None:
    """`lightning-ptm inspect` and `export` answer in half of the time without it."""
    import subprocess
    import sys

    script = "import sys; import lightning_ptm.checkpoints.formats; print('lightning' in sys.modules)"
    done: Any = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
