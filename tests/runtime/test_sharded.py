"""Sharded checkpoints of one rank: what is in them, going on from them, and what is wrong with some."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
import zlib
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import lightning as L
import pytest
import torch
from kit.checkpoint_runs import BATCHES, HALF, Full, FullDisk, fit, names_in, sharded
from kit.outcomes import Outcome
from kit.plain_loop import make_trainer
from kit.stacks import Stack
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file
from torch import Tensor, nn

from lightning_ptm import AngelPTMStrategy
from lightning_ptm.errors import CheckpointError, ConfigError
from lightning_ptm.sharded import load
from lightning_ptm.storage import folder
from lightning_ptm.storage.folder import Draft, link, remove, remove_stale
from lightning_ptm.storage.index import FORMAT, INDEX, PARTIAL, read_index


def test_going_on_equals_never_having_stopped(strategy_at, tier: str, tmp_path: Path) -> None:
    never, _ = fit(sharded(strategy_at, tier), tmp_path / "never")
    again, _ = fit(sharded(strategy_at, tier), tmp_path / "again", tmp_path / "never" / "epoch=0.ckpt")
    again.assert_equal(Outcome(never.losses[HALF:], never.weights))


@pytest.mark.slow_unless("bf16-true")
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_going_on_in_other_precisions(strategy_at, precision: str, tmp_path: Path) -> None:
    never, _ = fit(sharded(strategy_at, "masters_on_disk"), tmp_path / "never", precision=precision)
    resume = tmp_path / "never" / "epoch=0.ckpt"
    again, _ = fit(sharded(strategy_at, "ram"), tmp_path / "again", resume, precision=precision)
    again.assert_equal(Outcome(never.losses[HALF:], never.weights))


@pytest.mark.slow_unless("ram-all_on_disk")
@pytest.mark.parametrize(("first", "second"), [("ram", "all_on_disk"), ("three_tiers", "ram"), ("lock_free", "ram")])
def test_going_on_elsewhere_and_with_other_pages(strategy_at, first: str, second: str, tmp_path: Path) -> None:
    never, _ = fit(sharded(strategy_at, first), tmp_path / "never")
    resume = tmp_path / "never" / "epoch=0.ckpt"
    again, _ = fit(sharded(strategy_at, second, page_size="128KiB"), tmp_path / "again", resume)
    again.assert_equal(Outcome(never.losses[HALF:], never.weights))


def test_full_and_sharded_hold_the_same(strategy_at, tmp_path: Path) -> None:
    fit(sharded(strategy_at, "masters_on_disk"), tmp_path / "sharded")
    never, _ = fit(strategy_at("masters_on_disk"), tmp_path / "full")
    mapped = load(tmp_path / "sharded" / "last.ckpt")
    full = torch.load(tmp_path / "full" / "last.ckpt", weights_only=True)
    assert list(mapped["state_dict"]) == list(full["state_dict"])
    for name, value in full["state_dict"].items():
        assert torch.equal(mapped["state_dict"][name], value), name
    (ours,), (theirs,) = mapped["optimizer_states"], full["optimizer_states"]
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for place, state in theirs["state"].items():
        assert ours["state"][place].keys() == state.keys()
        assert all(torch.equal(ours["state"][place][key], value) for key, value in state.items())
    # What was saved by one way is gone on with by the other.
    again, _ = fit(strategy_at("ram"), tmp_path / "again", tmp_path / "sharded" / "epoch=0.ckpt")
    again.assert_equal(Outcome(never.losses[HALF:], never.weights))
    again, _ = fit(sharded(strategy_at, "ram"), tmp_path / "once more", tmp_path / "full" / "epoch=0.ckpt")
    again.assert_equal(Outcome(never.losses[HALF:], never.weights))


def test_any_reader_of_safetensors_opens_the_files(strategy_at, tmp_path: Path) -> None:
    never, _ = fit(sharded(strategy_at, "all_on_disk"), tmp_path)
    index = read_index(tmp_path / "last.ckpt")
    assert (index.step, index.world_size) == (2 * HALF, 1)
    weights: dict[str, Tensor] = {}
    kinds = set()
    for file in index.files:
        tensors = load_file(tmp_path / "last.ckpt" / file.name)
        kinds.add(file.kind)
        if file.kind == "parameters":
            weights |= tensors
        else:
            assert all(value.dtype is torch.float32 and value.any() for value in tensors.values())
    assert kinds == {"parameters", "exp_avg", "exp_avg_sq"}
    for name, value in weights.items():
        assert torch.equal(value.float(), never.weights[name].float()), name
    assert weights.keys() | {"seen"} == never.weights.keys()


class Validated(Full):
    def validation_step(self, batch: Tensor, index: int) -> None:
        self.loss(batch, index)


def test_weights_only(strategy_at, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Full()
    keep = ModelCheckpoint(tmp_path, filename="w", save_weights_only=True)
    strategy = sharded(strategy_at, "masters_on_disk")
    trainer = make_trainer(strategy, max_epochs=1, enable_checkpointing=True, callbacks=[keep])
    trainer.fit(module, BATCHES.loader())
    index = read_index(tmp_path / "w.ckpt")
    assert {file.kind for file in index.files} == {"parameters"} and not index.optimizers
    trained = [value.clone() for value in module.parameters()]
    other = Validated()
    tester = make_trainer(strategy_at("ram"))
    tester.validate(other, BATCHES.loader(), ckpt_path=str(tmp_path / "w.ckpt"), verbose=False)
    assert all(torch.equal(one, two) for one, two in zip(trained, other.parameters(), strict=True))


class Tied(Stack):
    """Two names for one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.blocks[0]


def test_tied_weights_have_all_their_names(strategy_at, tmp_path: Path) -> None:
    never, _ = fit(sharded(strategy_at, "masters_on_disk"), tmp_path / "never", build=Tied)
    mapped = load(tmp_path / "never" / "last.ckpt")["state_dict"]
    assert torch.equal(mapped["again.up.weight"], mapped["blocks.0.up.weight"])
    again, _ = fit(sharded(strategy_at, "ram"), tmp_path / "again", tmp_path / "never" / "epoch=0.ckpt", build=Tied)
    again.assert_equal(Outcome(never.losses[HALF:], never.weights))


def test_last_finds_the_newest_and_old_ones_are_removed(strategy_at, tmp_path: Path) -> None:
    torch.manual_seed(0)
    keep = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=1, monitor="step", mode="max", every_n_train_steps=2)
    keep.save_last = True
    module = Full()
    trainer = make_trainer(
        sharded(strategy_at, "ram"), max_epochs=1, enable_checkpointing=True, callbacks=[keep], log_every_n_steps=1
    )
    trainer.fit(module, BATCHES.loader())
    assert sorted(entry.name for entry in tmp_path.iterdir() if entry.suffix == ".ckpt") == ["last.ckpt", "step=8.ckpt"]
    assert not list(tmp_path.glob(f"{PARTIAL}*"))
    other = make_trainer(sharded(strategy_at, "ram"), max_epochs=2, enable_checkpointing=True, callbacks=[keep])
    other.fit(Full(), BATCHES.loader(), ckpt_path="last")
    assert other.global_step == 16


# -- damage ---------------------------------------------------------------------------------------------------------------


@cache
def undamaged(base: Path) -> Path:
    place = Path(mkdtemp(dir=base))
    strategy = AngelPTMStrategy(page_size="64KiB", debug={"poison": True}, checkpoints={"state_dict_type": "sharded"})
    fit(strategy, place)
    return place / "last.ckpt"


@pytest.fixture
def saved(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint to damage."""
    return Path(shutil.copytree(undamaged(tmp_path_factory.getbasetemp()), tmp_path / "saved.ckpt"))


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))


def test_a_flipped_bit_is_named(strategy_at, saved: Path, tmp_path: Path) -> None:
    index = read_index(saved)
    file = next(file for file in index.files if file.kind == "exp_avg")
    tensors = list(load_file(saved / file.name))
    flip(saved / file.name, file.size_bytes - 1)
    with pytest.raises(CheckpointError, match="checksum differs") as caught:
        fit(sharded(strategy_at, "ram"), tmp_path / "again", saved)
    assert file.name in str(caught.value) and any(name in str(caught.value) for name in tensors)


def edit_index(saved: Path, **values: Any) -> None:
    """Makes an index of the second format of it, with these values."""
    content = json.loads((saved / INDEX).read_bytes())
    content.pop("checksum", None)
    content.pop("seals", None)
    (saved / INDEX).write_text(json.dumps({**content, "version": 2, **values}))


def test_damage_of_every_kind_has_a_clear_error(strategy_at, saved: Path, tmp_path: Path) -> None:
    file = read_index(saved).files[0]
    original = (saved / file.name).read_bytes()
    (saved / file.name).write_bytes(original[:-5])
    with pytest.raises(CheckpointError, match="cut short or damaged"):
        load(saved)
    (saved / file.name).write_bytes(original)
    load(saved)
    ranges = (saved / "ranges-00000.json").read_bytes()
    (saved / "ranges-00000.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"ranges-00000\.json is damaged, or of another save than index\.json"):
        load(saved)
    edit_index(saved)
    (saved / "ranges-00000.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"no rank's list has bytes|of .* that were written"):
        load(saved)
    (saved / "ranges-00000.json").unlink()
    with pytest.raises(CheckpointError, match=r"ranges-00000\.json cannot be read: No such file"):
        load(saved)
    (saved / "ranges-00000.json").write_bytes(ranges)
    edit_index(saved, version=4)
    with pytest.raises(CheckpointError, match=r"format version 4 .* update lightning_ptm"):
        load(saved)
    edit_index(saved, version=3)
    with pytest.raises(CheckpointError, match="its format version 3 has no checksum"):
        load(saved)
    edit_index(saved, files=[{"name": "x"}])
    with pytest.raises(CheckpointError, match="damaged"):
        load(saved)
    (saved / INDEX).write_text("{")
    with pytest.raises(CheckpointError, match="damaged"):
        load(saved)
    (saved / INDEX).unlink()
    with pytest.raises(CheckpointError, match="is not a sharded checkpoint of lightning_ptm"):
        fit(sharded(strategy_at, "ram"), tmp_path / "again", saved)


def test_the_first_formats_checksums_are_known(saved: Path) -> None:
    rows = json.loads((saved / "ranges-00000.json").read_bytes())
    for row in rows:
        row[3] = zlib.crc32((saved / row[0]).read_bytes()[row[1] : row[2]])
    (saved / "ranges-00000.json").write_text(json.dumps(rows))
    edit_index(saved)
    with pytest.raises(CheckpointError, match="checksum differs"):
        load(saved)
    edit_index(saved, version=1)
    load(saved)
    file = read_index(saved).files[0]
    flip(saved / file.name, file.size_bytes - 1)
    with pytest.raises(CheckpointError, match="checksum differs"):
        load(saved)


def test_lightnings_dictionary_runs_no_code(saved: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "evil"),)

    torch.save({"state_dict": {}, "x": Evil()}, saved / "lightning.pt")
    edit_index(saved)  # a checkpoint without seals: those who can write the folder can write seals, too
    with pytest.raises(CheckpointError, match="weights_only=False"):
        load(saved)
    assert not (tmp_path / "evil").exists()


class Wider(Full):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(64, 32).requires_grad_(False)


class Longer(Full):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(64, 32)


def test_another_models_checkpoint(strategy_at, saved: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"size mismatch for frozen\.weight"):  # in torch's words, as without pages
        fit(sharded(strategy_at, "ram"), tmp_path / "again", saved, build=Wider)
    with pytest.raises(RuntimeError, match=r"Missing key.*more\.weight"):
        fit(sharded(strategy_at, "ram"), tmp_path / "again", saved, build=Longer)


# -- saving where it cannot work --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("writes", "number"), [(0, errno.ENOSPC), (20, errno.EIO)])
def test_a_disk_that_fails_leaves_the_earlier_checkpoint(strategy_at, tmp_path, writes: int, number: int) -> None:
    class FailsLater(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 2:
                trainer.save_checkpoint(tmp_path / "x.ckpt")
            if trainer.global_step == 3:
                trainer.strategy.save_ops = FullDisk(writes, number)
                trainer.save_checkpoint(tmp_path / "x.ckpt")

    trainer = make_trainer(sharded(strategy_at, "masters_on_disk"), max_epochs=1, callbacks=[FailsLater()])
    with pytest.raises(CheckpointError, match=os.strerror(number)):
        trainer.fit(Full(), BATCHES.loader())
    assert load(tmp_path / "x.ckpt")["global_step"] == 2
    assert names_in(tmp_path) == ["disk", "x.ckpt"]


def test_places_where_no_checkpoint_can_be(strategy_at, tmp_path: Path) -> None:
    (tmp_path / "file.ckpt").write_text("mine")
    (tmp_path / "file").write_text("mine")

    class Saves(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            with pytest.raises(CheckpointError, match="is a file, and a sharded checkpoint is a folder"):
                trainer.save_checkpoint(tmp_path / "file.ckpt")
            with pytest.raises(CheckpointError, match="a file is where a folder has to be"):
                trainer.save_checkpoint(tmp_path / "file" / "x.ckpt")

    trainer = make_trainer(sharded(strategy_at, "ram"), max_epochs=1, limit_train_batches=1, callbacks=[Saves()])
    trainer.fit(Full(), BATCHES.loader())
    assert (tmp_path / "file.ckpt").read_text() == "mine"


def test_a_setting_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match="use 'full' or 'sharded'"):
        AngelPTMStrategy(checkpoints={"state_dict_type": "shared"})


# -- folders ----------------------------------------------------------------------------------------------------------------


def test_a_draft_is_no_checkpoint_until_it_is_committed(tmp_path: Path) -> None:
    draft = Draft(tmp_path / "a.ckpt")
    (draft.folder / INDEX).write_text("{}")
    with pytest.raises(CheckpointError, match="is incomplete: the process that wrote it ended"):
        read_index(draft.folder)
    remove_stale(tmp_path)  # its writer lives
    assert draft.folder.exists() and not (tmp_path / "a.ckpt").exists()
    draft.commit()
    assert names_in(tmp_path) == ["a.ckpt"]
    (tmp_path / "a.ckpt" / INDEX).write_text(FORMAT)
    second = Draft(tmp_path / "a.ckpt")
    (second.folder / "new").write_text("")
    second.commit()
    assert names_in(tmp_path) == ["a.ckpt"]
    assert [entry.name for entry in (tmp_path / "a.ckpt").iterdir()] == ["new"]
    remove(tmp_path / "a.ckpt")
    assert names_in(tmp_path) == []


def test_a_link_of_that_name_is_replaced_and_what_it_names_stays(tmp_path: Path) -> None:
    def save(name: str, content: str) -> None:
        draft = Draft(tmp_path / name)
        (draft.folder / INDEX).write_text(FORMAT)
        (draft.folder / "content").write_text(content)
        draft.commit()

    save("a", "a")
    link(tmp_path / "a", tmp_path / "last")
    link(tmp_path / "gone", tmp_path / "dangling")
    save("last", "b")
    save("dangling", "c")
    found = {entry.name: (entry / "content").read_text() for entry in tmp_path.iterdir() if entry.name != "here"}
    assert found == {"a": "a", "last": "b", "dangling": "c"}
    link(tmp_path / "a", tmp_path / "last")
    assert (tmp_path / "last").is_symlink() and names_in(tmp_path) == ["a", "dangling", "last"]


def test_without_an_exchange_of_names_a_crash_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "_RENAME_EXCHANGE", 1 << 20)  # what no file system has
    for content in ("old", "new"):
        draft = Draft(tmp_path / "a.ckpt")
        (draft.folder / INDEX).write_text(FORMAT)
        (draft.folder / "content").write_text(content)
        if content == "old":
            draft.commit()
    real = os.rename

    def crash(source: Path, target: Path) -> None:
        if Path(source).name.startswith(PARTIAL):
            raise KeyboardInterrupt
        real(source, target)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(os, "rename", crash)
        draft.commit()
    assert not (tmp_path / "a.ckpt").exists()
    remove_stale(tmp_path)
    assert (tmp_path / "a.ckpt" / "content").read_text() == "old"
    draft = Draft(tmp_path / "a.ckpt")
    (draft.folder / "content").write_text("new")
    draft.commit()
    assert (tmp_path / "a.ckpt" / "content").read_text() == "new"
    assert [name for name in names_in(tmp_path) if not name.startswith(PARTIAL)] == ["a.ckpt"]


def test_what_dead_writers_leave_is_removed(tmp_path: Path) -> None:
    script = f"""
        from pathlib import Path
        from lightning_ptm.storage.folder import Draft
        draft = Draft(Path({str(tmp_path)!r}) / "a.ckpt")
        (draft.folder / "data").write_bytes(bytes(1000))
        print("ready", flush=True)
        import time; time.sleep(60)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    remove_stale(tmp_path)
    assert len(list(tmp_path.glob(f"{PARTIAL}*"))) == 1
    process.kill()
    process.wait()
    process.stdout.close()
    # Without a lock it may be one that was only just made.
    young, old = (tmp_path / f"{PARTIAL}{letter * 12}" for letter in "ab")
    young.mkdir()
    old.mkdir()
    long_ago = time.time() - 3600
    os.utime(old, (long_ago, long_ago))
    remove_stale(tmp_path)
    assert names_in(tmp_path) == [young.name]
