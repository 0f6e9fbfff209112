"""Exchanges among ranks of one machine: the same to the bit on all, in any number of pieces, and never of two things."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from typing import Any

import pytest
import torch
from test_uds import Table, all_ranks
from torch import Tensor

from lightning_ptm.comm import shm_collectives as module
from lightning_ptm.comm import uds
from lightning_ptm.comm.shm_collectives import ShmCollectives, shm_collectives
from lightning_ptm.comm.uds import UdsConnections

HALF = 4096
SHAPES = [(), (0,), (1,), (7, 3), (64, 33), (3, 5, 1000)]
"""Shapes of sums, of which the largest takes several pieces."""


def differ(uds: UdsConnections) -> Any:
    raise RuntimeError(json.dumps(uds.all_gather_text(f"rank {uds.rank} is here")))


def made(size: int) -> list[ShmCollectives]:
    table = Table(size)

    def make(rank: int) -> ShmCollectives | None:
        return shm_collectives(rank, size, timedelta(seconds=5), table.gather(rank), lambda work: work.wait(), differ)

    found = all_ranks(size, make)
    assert all(isinstance(each, ShmCollectives) for each in found), found
    return found


@pytest.fixture(params=[2, 3, 4])
def ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(module, "HALF_BYTES", HALF)
    found = made(request.param)
    yield found
    for each in found:
        each.close()


def value(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_rounded_once_and_the_same_to_the_bit(ranks: list[ShmCollectives], dtype: torch.dtype) -> None:
    for seed, shape in enumerate(SHAPES):
        given = [value(rank, shape, dtype, seed) for rank in range(len(ranks))]
        wide = torch.promote_types(dtype, torch.float32)
        total = given[0].to(wide)
        for each in given[1:]:
            total = total + each.to(wide)
        for found in all_ranks(len(ranks), lambda rank: ranks[rank].sum(given[rank], seed)):  # noqa: B023
            assert isinstance(found, Tensor), found
            assert found.shape == shape
            assert torch.equal(found, total.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_all_have_what_each_gives(ranks: list[ShmCollectives], dtype: torch.dtype) -> None:
    for seed, shape in enumerate(SHAPES):
        given = [value(rank, shape, dtype, seed) for rank in range(len(ranks))]
        for found in all_ranks(len(ranks), lambda rank: ranks[rank].gathered(given[rank], seed)):  # noqa: B023
            assert isinstance(found, Tensor), found
            assert found.shape == (len(ranks), *shape)
            assert torch.equal(found.float(), torch.stack([each.float() for each in given]))


def test_each_has_its_piece_of_all(ranks: list[ShmCollectives]) -> None:
    size = len(ranks)
    for seed, shape in enumerate(SHAPES):
        given = [value(rank, (size, *shape), torch.float32, seed) for rank in range(size)]
        found = all_ranks(size, lambda rank: ranks[rank].pieces(given[rank], seed))  # noqa: B023
        for rank, each in enumerate(found):
            assert isinstance(each, Tensor), each
            assert torch.equal(each, torch.stack([theirs[rank] for theirs in given]))


def test_each_has_what_the_rank_before_gives(ranks: list[ShmCollectives]) -> None:
    for seed, shape in enumerate(SHAPES):
        given = [value(rank, shape, torch.float32, seed) for rank in range(len(ranks))]
        found = all_ranks(len(ranks), lambda rank: ranks[rank].shifted(given[rank], seed))  # noqa: B023
        for rank, each in enumerate(found):
            assert isinstance(each, Tensor), each
            assert torch.equal(each, given[rank - 1])


def test_what_does_not_lie_in_a_row_is_exchanged_in_the_order_of_its_shape(ranks: list[ShmCollectives]) -> None:
    given = [value(rank, (5, 700), torch.float32).t() for rank in range(len(ranks))]
    for found in all_ranks(len(ranks), lambda rank: ranks[rank].sum(given[rank], 0)):
        assert torch.allclose(found, torch.stack(given).sum(0))
        assert found.is_contiguous()


def test_windows_are_in_no_graph_nor_is_what_comes_from_them(ranks: list[ShmCollectives]) -> None:
    """Else each would keep the graphs of all that was ever exchanged."""
    size = len(ranks)
    given = [torch.ones(size, 3, requires_grad=True) for _ in ranks]
    for act in ("sum", "gathered", "pieces", "shifted"):
        for found in all_ranks(size, lambda rank: getattr(ranks[rank], act)(given[rank], 0)):  # noqa: B023
            assert isinstance(found, Tensor) and not found.requires_grad, found
    assert not any(window.requires_grad for each in ranks for window in each._windows)


def test_exchanges_one_behind_the_other_do_not_overwrite_what_others_still_read(ranks: list[ShmCollectives]) -> None:
    """I2: no rank waits for another to have read."""
    numbers = range(300)

    def run(rank: int) -> list[float]:
        return [float(ranks[rank].sum(torch.full((HALF // 4,), float(rank + n)), n).max()) for n in numbers]

    size = len(ranks)
    assert all_ranks(size, run) == [[float(sum(range(size)) + size * n) for n in numbers]] * size


@pytest.mark.parametrize("what", ["another word", "another size", "another kind", "nothing", "pieces of nothing"])
def test_of_different_exchanges_nothing_is_read_and_all_are_told(ranks: list[ShmCollectives], what: str) -> None:
    def run(rank: int) -> Any:
        each, last = ranks[rank], rank == len(ranks) - 1
        each.sum(torch.ones(3), 7)
        if last and what == "another kind":
            return each.gathered(torch.ones(3), 9)
        if last and what == "pieces of nothing":
            return each.pieces(torch.ones(len(ranks), 0), 8)
        if last and what == "nothing":
            return each.sum(torch.ones(0), 8)
        return each.sum(torch.ones(5 if last and what == "another size" else 3), 9 if last and "word" in what else 8)

    for found in all_ranks(len(ranks), run):
        assert isinstance(found, RuntimeError), found
        assert json.loads(str(found)) == [f"rank {rank} is here" for rank in range(len(ranks))]


def test_a_rank_that_has_left_ends_the_exchanges_of_the_others(ranks: list[ShmCollectives]) -> None:
    def run(rank: int) -> Any:
        return ranks[rank].close() if rank == 0 else ranks[rank].sum(torch.ones(3), 1)

    for found in all_ranks(len(ranks), run)[1:]:
        assert isinstance(found, RuntimeError) and "the connection to rank 0 has ended" in str(found)


@pytest.mark.parametrize("lacks", ["room", "address space", "a file", "a file of another's", "a folder"])
def test_a_rank_without_memory_to_share_is_one_for_all(lacks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever only one of them lacks, and no file stays open."""
    owner, name = {
        "room": (module.os, "posix_fallocate"),
        "address space": (module.mmap, "mmap"),
        "a file": (module.os, "memfd_create"),
        "a file of another's": (uds.socket, "recv_fds"),
        "a folder": (uds.tempfile, "mkdtemp"),
    }[lacks]
    kept, calls = getattr(owner, name), []

    def lacking(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) > 1:
            return kept(*args, **kwargs)
        if lacks != "a file of another's":
            raise OSError("no room")
        told, files, *more = kept(*args)
        for file in files:
            os.close(file)
        return told, [], *more  # as the kernel does at the limit of open files

    monkeypatch.setattr(owner, name, lacking)
    table = Table(2)
    before = len(os.listdir("/proc/self/fd"))

    def make(rank: int) -> ShmCollectives | None:
        return shm_collectives(rank, 2, timedelta(seconds=5), table.gather(rank), lambda work: work.wait(), differ)

    assert all_ranks(2, make) == [None, None]
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_system_without_such_memory_has_none_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(module.os, "memfd_create")
    assert module._shared_file() is None
