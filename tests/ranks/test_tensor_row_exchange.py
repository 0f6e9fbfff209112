"""Sharded saves of what ranks cut by columns: ranks of a tensor group exchange columns, and each writes whole rows."""

from __future__ import annotations

import errno
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from kit.ranks.harness import End, run_ranks, watch_ranks
from kit.ranks.tensor_blocks import WIDTH, rows, trainer_of
from kit.settings import merged
from test_communicator import connect
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ptm import sharded
from lightning_ptm.checkpoints.row_exchange import PagedFlat, RowExchange, Table
from lightning_ptm.comm import Communicator
from lightning_ptm.errors import CheckpointError, InternalError
from lightning_ptm.events import Event
from lightning_ptm.planning.layout import ParameterSpec
from lightning_ptm.planning.tensor_slices import TensorSlice
from lightning_ptm.runtime.full_params.sharded_states import ShardedFlat
from lightning_ptm.runtime.full_params.snapshot import stretches
from lightning_ptm.storage.writer import SaveOps
from lightning_ptm.update.flat_states import Segment


class Wide(nn.Module):
    """Module whose second weight is cut into rows of 384 elements, so that pages of 8192 begin and end within some."""

    def __init__(self) -> None:
        super().__init__()
        self.expand, self.project = nn.Linear(WIDTH, 768), nn.Linear(768, 96)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(torch.tanh(self.expand(x)))  # type: ignore[no-any-return]


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Wide()])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.blocks[0](batch).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Failing(SaveOps):
    """A disk that takes no more."""

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


class Saves(L.Callback):
    """After the first step; with `culprit`, before it where that rank cannot write."""

    def __init__(self, target: Path, culprit: int | None) -> None:
        self.target, self.culprit = target, culprit
        self.seen = ""
        self.exchanges = 0

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step != 1:
            return
        strategy: Any = trainer.strategy
        if self.culprit is not None:
            strategy.save_ops = Failing() if trainer.global_rank == self.culprit else None
            with pytest.raises(CheckpointError) as caught:
                trainer.save_checkpoint(self.target.with_name("never"))
                strategy.wait_for_checkpoint()
            self.seen, strategy.save_ops = str(caught.value), None
        with strategy.trace_events(self.hear):
            trainer.save_checkpoint(self.target)

    def hear(self, event: Event) -> None:
        self.exchanges += event.name == "all_to_all"


def save(ranks: int, tensor: int, target: Path, settings: dict[str, Any], culprit: int | None = None) -> str:
    return saved(ranks, tensor, target, settings, culprit).seen


def count(target: Path, settings: dict[str, Any]) -> int:
    """Exchanges of a save."""
    return saved(2, 2, target, settings, None).exchanges


def saved(ranks: int, tensor: int, target: Path, settings: dict[str, Any], culprit: int | None) -> Saves:
    saves = Saves(target, culprit)
    given = merged({"checkpoints": {"state_dict_type": "sharded"}, "units": ["Wide"]}, settings)
    trainer = trainer_of(ranks, tensor, given, max_steps=2, callbacks=[saves], use_distributed_sampler=False)
    trainer.fit(Module(), DataLoader(rows(2), 1))  # type: ignore[arg-type]
    return saves


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}


@pytest.mark.parametrize("home", [{}, {"offload_parameters": "disk", "offload_optimizer": "disk"}])
@pytest.mark.parametrize(("ranks", "tensor"), [(2, 2), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_each_rank_writes_whole_rows_and_files_are_as_without_an_exchange(
    ranks: int, tensor: int, home: dict[str, Any], tmp_path: Path, disk: Path
) -> None:
    home = {**home, "disk_path": str(disk)}
    run_ranks(save, ranks, ranks, tensor, tmp_path / "now", home)
    run_ranks(save, ranks, ranks, tensor, tmp_path / "behind", merged(home, checkpoints={"async_save": True}))
    now, behind = files_of(tmp_path / "now"), files_of(tmp_path / "behind")
    assert len(now) == 3 and now == behind
    for rank, when in itertools.product(range(ranks), ("now", "behind")):
        written = json.loads((tmp_path / when / f"ranges-{rank:05d}.json").read_text())
        assert len(written) < 96, f"rank {rank} wrote {len(written)} stretches {when}, of 3 kinds of 96 rows"
    saved = sharded.load(tmp_path / "now")["state_dict"]["blocks.0.project.weight"]
    assert saved.shape == (96, 768)


def save_in_fewer_bits(target: Path, settings: dict[str, Any]) -> None:
    """Optimizer states of 8 bits, which are decoded chunk by chunk, beside fp32 weights, which are exchanged as they lie."""
    given = {
        "checkpoints": {"state_dict_type": "sharded"},
        "units": ["Wide"],
        "optimizer_state_dtype": "int8",
        **settings,
    }
    options = {"max_steps": 2, "callbacks": [Saves(target, None)], "use_distributed_sampler": False}
    trainer = trainer_of(2, 2, given, precision="32-true", **options)
    trainer.fit(Module(), DataLoader([row.float() for row in rows(2)], 1))  # type: ignore[arg-type]


def test_states_that_are_decoded_are_exchanged_beside_weights_that_are_not(tmp_path: Path) -> None:
    run_ranks(save_in_fewer_bits, 2, tmp_path / "now", {})
    run_ranks(
        save_in_fewer_bits, 2, tmp_path / "behind", {"checkpoints": {"state_dict_type": "sharded", "async_save": True}}
    )
    now = files_of(tmp_path / "now")
    assert len(now) == 3 and now == files_of(tmp_path / "behind")


def test_what_lies_in_ram_is_exchanged_in_fewer_pieces_than_it_has_pages(tmp_path: Path) -> None:
    """A weight of 36864 elements on each rank, and the optimizer's two states of it, in pages of 8192."""
    assert run_ranks(count, 2, tmp_path / "x", {}) == [3, 3]


@pytest.mark.diagonal
@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_of_the_group_that_cannot_write_is_an_error_on_both_and_the_next_save_is_whole(
    culprit: int, behind: bool, tmp_path: Path
) -> None:
    seen = run_ranks(save, 2, 2, 2, tmp_path / "x", {"checkpoints": {"async_save": behind}}, culprit)
    assert all(os.strerror(errno.EIO) in each for each in seen), seen
    assert f"rank {culprit}: writing" in seen[1 - culprit]
    assert not (tmp_path / "never").exists()
    assert sharded.load(tmp_path / "x")["global_step"] == 1


class Deadly(SaveOps):
    """A disk whose process is killed at a write of states."""

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if threading.current_thread() is not threading.main_thread():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().pwritev(fd, buffers, offset)


class Dies(L.Callback):
    """One of two ranks, in its second save."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        strategy.wait_for_checkpoint()
        if trainer.global_step == 2:
            strategy.save_ops = Deadly() if trainer.global_rank else None
        trainer.save_checkpoint(self.target.with_name(f"step{trainer.global_step}"))


def save_and_die(target: Path, settings: dict[str, Any]) -> str:
    given = {"checkpoints": {"state_dict_type": "sharded", "async_save": True}, "units": ["Wide"], **settings}
    trainer = trainer_of(2, 2, given, max_steps=4, callbacks=[Dies(target)], use_distributed_sampler=False)
    with pytest.raises(Exception) as caught:  # whichever the survivor meets first
        trainer.fit(Module(), DataLoader(rows(4), 1))  # type: ignore[arg-type]
    return str(caught.value)


def test_a_rank_that_is_killed_while_rows_are_exchanged_ends_the_other_and_leaves_the_checkpoint_before(
    tmp_path: Path,
) -> None:
    began_s = time.monotonic()
    survivor, killed = watch_ranks(save_and_die, 2, tmp_path / "x", {})
    assert killed.exit_code == -signal.SIGKILL, killed
    assert survivor.end is End.RETURNED and survivor.value, survivor
    assert time.monotonic() - began_s < 50, "waited until the time limit of collectives"
    assert sharded.load(tmp_path / "step1")["global_step"] == 1
    assert not (tmp_path / "step2").exists()


class Held(SaveOps):
    """A disk that takes states when it is told to."""

    def __init__(self) -> None:
        self.freed = threading.Event()

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if threading.current_thread() is not threading.main_thread():
            assert self.freed.wait(50)
        return super().pwritev(fd, buffers, offset)


class FailsBehindASave(L.Callback):
    """One rank, while nothing of the checkpoint is on the disk yet; that goes on when the run has failed on the rank."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        held = strategy.save_ops = Held()
        fail = strategy.on_exception

        def failed(exception: BaseException) -> None:
            fail(exception)
            held.freed.set()

        strategy.on_exception = failed
        trainer.save_checkpoint(self.target)
        if trainer.global_rank:
            raise ValueError("this rank has had enough")


def save_and_fail(target: Path) -> str:
    given = {"checkpoints": {"state_dict_type": "sharded", "async_save": True}, "units": ["Wide"]}
    trainer = trainer_of(2, 2, given, max_steps=4, callbacks=[FailsBehindASave(target)], use_distributed_sampler=False)
    with pytest.raises(Exception, match="this rank has had enough") as caught:
        trainer.fit(Module(), DataLoader(rows(4), 1))  # type: ignore[arg-type]
    return type(caught.value).__name__


def test_a_checkpoint_in_progress_is_finished_where_the_run_fails_on_one_rank(tmp_path: Path) -> None:
    assert run_ranks(save_and_fail, 2, tmp_path / "x") == ["RankError", "ValueError"]
    saved = sharded.load(tmp_path / "x")
    assert saved["global_step"] == 1
    assert saved["state_dict"]["blocks.0.project.weight"].shape == (96, 768)


# -- the protocol -----------------------------------------------------------------------------------------------------

ROWS, RUN, PARTS, PAGE_NUMEL = 50, 30, 2, 448


@dataclass
class Paged:
    numel: int
    dtype: torch.dtype


def flat_of(part: int, dtype: torch.dtype, first: int = 0) -> ShardedFlat:
    """A shard with elements of one parameter, from its element `first` on, behind 64 of another."""
    box = TensorSlice((ROWS, PARTS * RUN), 1, PARTS, part)
    specs = [
        ParameterSpec("before", (64,), str(dtype), dtype.itemsize, trainable=True, group=0),
        ParameterSpec("cut", box.part_shape, str(dtype), dtype.itemsize, trainable=True, group=0, box=box),
    ]
    numel = box.numel - first
    segments = [Segment(0, 0, 0, 64, ragged=False), Segment(1, 64, first, numel, ragged=False)]
    return ShardedFlat(Paged(64 + numel, dtype), specs, segments, [])  # type: ignore[arg-type]


def paged(flat: ShardedFlat, numel: int) -> PagedFlat:
    """In pages of that many elements."""
    return PagedFlat(flat, list(stretches(flat.paged.numel, None, numel)))


class Found:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.written: list[tuple[str, int, Tensor]] = []

    def __call__(self, name: str, first: int, rows: Table) -> None:
        elements = torch.empty(rows.nbytes, dtype=torch.uint8)
        rows.fill(elements, 0)
        self.written.append((name, first, elements))


def exchange_all() -> list[str]:
    """Returns the errors of exchanging pages that begin in the middle of rows, with several dtypes."""
    group, wrong = connect(), []
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.uint8):
        whole = torch.arange(ROWS * PARTS * RUN).remainder(251).to(dtype).view(ROWS, PARTS, RUN)
        for first in (0, 100):
            flat = flat_of(group.rank, dtype, first)
            part = whole[:, group.rank].reshape(-1)[first:]
            shard = torch.cat([torch.zeros(64, dtype=dtype), part])
            for stays in (True, False):
                found = Found()
                exchange = RowExchange(group, [paged(flat, PAGE_NUMEL)])
                for start in range(0, shard.numel(), PAGE_NUMEL):
                    page = shard[start : start + PAGE_NUMEL].clone()
                    exchange.begin(flat, start, page, found, stays=stays)
                    if not stays:
                        page.zero_()
                exchange.finish()
                for name, at, elements in found.written:
                    mine = elements.view(dtype)
                    if name != "cut" or not torch.equal(whole.view(-1)[at : at + mine.numel()], mine):
                        wrong.append(f"{dtype} from {first}, elements from {at} on")
                count = sum(elements.numel() for _, _, elements in found.written) // dtype.itemsize
                counts = group.all_reduce(torch.tensor([count]))
                if counts.item() < 0.8 * (whole.numel() - PARTS * first):
                    wrong.append(f"{dtype} from {first}: only {counts.item()} were exchanged")
    return wrong


def test_whole_rows_come_out_of_pages_that_cut_them() -> None:
    assert run_ranks(exchange_all, 2) == [[], []]


def fail_after(pages: int) -> str:
    """Rank 1 gives up after so many pages."""
    group = connect()
    seen = write_until(pages, group)
    group.all_reduce(torch.zeros(1))  # nobody leaves while the other listens
    return seen


def write_until(pages: int, group: Communicator) -> str:
    flat = flat_of(group.rank, torch.float32)
    shard = torch.zeros(flat.paged.numel)
    exchange = RowExchange(group, [paged(flat, PAGE_NUMEL)])
    starts = list(range(0, shard.numel(), PAGE_NUMEL))
    for page, start in enumerate(starts):
        if group.rank == 1 and page == pages:
            exchange.give_up()
            exchange.give_up()  # tells once
            return "gave up"
        try:
            exchange.begin(flat, start, shard[start : start + PAGE_NUMEL], Found(), stays=True)
        except CheckpointError as error:
            exchange.give_up()  # everybody knows: nothing to tell
            return f"page {page}: {error}"
    try:
        exchange.finish()
    except CheckpointError as error:
        return f"at the end: {error}"
    return f"{len(starts)} pages"


@pytest.mark.parametrize(("pages", "heard"), [(0, "page 1"), (2, "page 3"), (3, "at the end")])
def test_who_fails_is_heard_of_behind_the_next_exchange(pages: int, heard: str) -> None:
    seen = run_ranks(fail_after, 2, pages)
    assert seen == [
        f"{heard}: the tensor-parallel rank 1 of this rank's group could not write its checkpoint part, "
        "so the checkpoint was not completed; its own error says why",
        "gave up",
    ]


def begin_before_the_other() -> int:
    """Rank 1 begins to exchange when rank 0 has gone on."""
    group = connect()
    others = group.subgroup([[0, 1]])
    flat, found = flat_of(group.rank, torch.float32), Found()
    exchange = RowExchange(group, [paged(flat, flat.paged.numel)])
    if group.rank == 1:
        others.all_reduce(torch.zeros(1))
    exchange.begin(flat, 0, torch.zeros(flat.paged.numel), found, stays=True)
    if group.rank == 0:
        others.all_reduce(torch.zeros(1))
    exchange.finish()
    return len(found.written)


def test_a_rank_goes_on_while_its_page_is_on_its_way() -> None:
    assert run_ranks(begin_before_the_other, 2) == [1, 1]


@pytest.mark.parametrize("first", range(0, 24, 3))
def test_a_table_fills_from_any_byte_to_any_other(first: int) -> None:
    whole = torch.arange(24, dtype=torch.uint8).view(3, 2, 4)
    table = Table([whole[:, 0], whole[:, 1]])
    assert table.nbytes == 24
    for stop in range(first, 25):
        into = torch.full((stop - first,), 99, dtype=torch.uint8)
        table.fill(into, first)
        assert torch.equal(into, whole.view(-1)[first:stop])


def differ() -> str:
    group = connect()
    with pytest.raises(InternalError) as caught:
        RowExchange(group, [paged(flat_of(group.rank, torch.float32, 200 * group.rank), PAGE_NUMEL)])
    return str(caught.value)


def test_ranks_that_would_exchange_other_rows_are_told_before_the_first() -> None:
    assert all("would exchange different rows" in text for text in run_ranks(differ, 2))
