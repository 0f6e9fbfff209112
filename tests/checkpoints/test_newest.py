"""Choice of the newest complete checkpoint of a folder, and removals during the search."""

from __future__ import annotations

import os
from pathlib import Path

from lightning_ptm.checkpoints.auto_resume import newest_first
from lightning_ptm.storage.folder import Draft
from lightning_ptm.storage.index import INDEX, PARTIAL


def file_of(path: Path, second: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"full")
    os.utime(path, (second, second))
    return path


def folder_of(path: Path, second: int) -> Path:
    file_of(path / INDEX, second)
    return path


def test_the_one_that_was_completed_last_comes_first_whatever_its_kind_and_name(tmp_path: Path) -> None:
    first, second, third = (
        folder_of(tmp_path / "z.ckpt", 10),
        file_of(tmp_path / "deeper/m.ckpt", 20),
        folder_of(tmp_path / "a.ckpt", 30),
    )
    os.utime(first, (40, 40))  # somebody has put something into the folder: that completes nothing
    assert newest_first([tmp_path]) == [third, second, first]
    assert newest_first([tmp_path / "deeper", tmp_path, tmp_path / "none"]) == [third, second, first]


def test_names_decide_between_those_of_one_moment(tmp_path: Path) -> None:
    for name in ("b", "c", "a"):
        file_of(tmp_path / f"{name}.ckpt", 10)
    assert [path.stem for path in newest_first([tmp_path])] == ["c", "b", "a"]


def test_a_link_is_what_it_names_and_a_link_to_nothing_is_none(tmp_path: Path) -> None:
    kept = folder_of(tmp_path / "step=2.ckpt", 10)
    (tmp_path / "last.ckpt").symlink_to("step=2.ckpt")
    (tmp_path / "lost.ckpt").symlink_to("step=9.ckpt")
    assert newest_first([tmp_path]) == [kept]


def test_other_things_are_no_checkpoints_and_stay(tmp_path: Path) -> None:
    file_of(tmp_path / "config.yaml", 10)
    file_of(tmp_path / "exported.ckpt" / "model.safetensors", 10)  # a folder that is no sharded checkpoint
    (tmp_path / f"{PARTIAL}mine").mkdir()  # no name that a writer of ours gives
    before = sorted(tmp_path.rglob("*"))
    assert newest_first([tmp_path]) == []
    assert sorted(tmp_path.rglob("*")) == before


def test_what_a_dead_writer_has_left_is_removed_and_what_a_living_one_writes_is_not(tmp_path: Path) -> None:
    dead, living = Draft(tmp_path / "one.ckpt"), Draft(tmp_path / "two.ckpt")
    for draft in (dead, living):
        file_of(draft.folder / INDEX, 10)
    dead._unlock()  # as its end would
    assert newest_first([tmp_path]) == []
    assert not dead.folder.exists() and living.folder.exists()
    living.commit()
    assert newest_first([tmp_path]) == [tmp_path / "two.ckpt"]


def test_pipes_and_links_in_a_circle_are_no_checkpoints(tmp_path: Path) -> None:
    kept = file_of(tmp_path / "step=2.ckpt", 10)
    os.mkfifo(tmp_path / "pipe.ckpt")  # whoever opens it waits for ever
    for name, other in (("this", "that"), ("that", "this")):
        (tmp_path / f"{name}.ckpt").symlink_to(f"{other}.ckpt")
    (tmp_path / "odd.ckpt" / INDEX).mkdir(parents=True)
    assert newest_first([tmp_path]) == [kept]


def test_names_may_end_otherwise(tmp_path: Path) -> None:
    first, second = file_of(tmp_path / "a.ckpt", 10), folder_of(tmp_path / "b.pt", 20)
    assert newest_first([tmp_path]) == [first]
    assert newest_first([tmp_path], {".ckpt", ".pt"}) == [second, first]
