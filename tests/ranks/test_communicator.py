"""The collectives of pages against plain torch results, on 1, 2 and 3 ranks, and what a rank that has left looks like."""

from __future__ import annotations

import datetime
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.ranks.harness import End, run_ranks, watch_ranks
from torch import Tensor

from lightning_ptm.comm import Communicator, ProcessGroupCommunicator, SoloCommunicator, Work
from lightning_ptm.errors import CheckpointError, RankError, UsageError
from lightning_ptm.events import Events
from lightning_ptm.memory.backend import CpuBackend
from lightning_ptm.planning.layout import FlatLayout, ParameterSpec, UnitSpec, build_layout

PAGE = 64 * 1024
SIZES = {
    "tail_only": [(7, 13), (1,)],
    "one_stripe_and_tail": [(300, 301)],
    "several_stripes": [(500, 501), (), (65537,), (3, 5, 7)],
    "no_tail": [(PAGE // 2 * 6,)],  # 6 pages of two bytes or 12 of four: whole stripes on 1, 2 and 3 ranks
    "one_element": [()],
}
OWNED = {
    "owned": [(300, 301), (7, 13), (1,), (64, 64), ()],
    "owned_by_one": [(5, 5)],
}
"""Shapes of parameters that are updated whole."""
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def flat_of(
    sizes: list[tuple[int, ...]], dtype: torch.dtype, world_size: int, rank: int = 0, *, owned: bool = False
) -> FlatLayout:
    name = str(dtype).removeprefix("torch.")
    specs = tuple(
        ParameterSpec(
            f"p{index}",
            shape,
            name,
            dtype.itemsize,
            trainable=True,
            group=0,
            updated_whole=owned,
            states_bytes=math.prod(shape),
        )
        for index, shape in enumerate(sizes)
    )
    return build_layout([UnitSpec("", specs)], page_size=PAGE, world_size=world_size, rank=rank).flats[0]


def values(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def shard_of(full: Tensor, flat: FlatLayout, rank: int) -> Tensor:
    return torch.cat([full[piece.full_start : piece.full_start + piece.numel] for piece in flat.pieces(rank)])


def connect() -> ProcessGroupCommunicator:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    return ProcessGroupCommunicator(CpuBackend(), datetime.timedelta(seconds=60))


def gather_and_reduce() -> list[str]:
    """Names of the layouts whose collectives gave something else than plain torch does."""
    communicator = connect()
    rank, world_size = communicator.rank, communicator.world_size
    wrong = []
    for name, sizes in {**SIZES, **OWNED}.items():
        for dtype in DTYPES:
            flat = flat_of(sizes, dtype, world_size, rank, owned=name in OWNED)
            fulls = [values(flat.padded_numel, dtype, seed) for seed in range(world_size)]

            gathered = torch.full((flat.padded_numel,), torch.nan, dtype=dtype)
            communicator.all_gather(shard_of(fulls[0], flat, rank), gathered, flat).wait()
            if not torch.equal(gathered, fulls[0]):
                wrong.append(f"all_gather {name} {dtype}")

            precise = torch.promote_types(dtype, torch.float32)
            total = torch.zeros(flat.padded_numel, dtype=precise)
            for full in fulls:
                total += full
            mean = (total / world_size).to(dtype)
            shard = torch.full((flat.shard_numel,), torch.nan, dtype=dtype)
            work = communicator.reduce_scatter(fulls[rank].clone(), shard, flat, world_size)
            work.wait()
            work.wait()  # once is enough, twice is allowed
            if not (work.done() and torch.equal(shard, shard_of(mean, flat, rank))):
                wrong.append(f"reduce_scatter {name} {dtype}")

            # And plain torch's own, which adds in another order.
            theirs = fulls[rank].to(torch.float64)
            dist.all_reduce(theirs)
            bound = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float64: 1e-14}[dtype]
            if (shard.double() - shard_of(theirs / world_size, flat, rank)).abs().max() > bound:
                wrong.append(f"all_reduce {name} {dtype}")
    communicator.close()
    return wrong


@pytest.mark.parametrize("world_size", [2, 3])
def test_gather_and_reduce(world_size: int) -> None:
    assert run_ranks(gather_and_reduce, world_size) == [[]] * world_size


class Another(CpuBackend):
    """Backend whose collectives are treated as those of another library than gloo."""

    collectives = "another"


def reduce_to_owners() -> list[str]:
    """Dtypes in which owners got something else than the mean, where a library reduces."""
    communicator = connect()
    communicator._backend = Another()
    reduce, world_size, rank = dist.reduce, communicator.world_size, communicator.rank

    def averaged(tensor: Tensor, *, op: dist.ReduceOp, **given: Any) -> Any:
        assert op == dist.ReduceOp.AVG  # which gloo lacks
        return reduce(tensor.div_(world_size), op=dist.ReduceOp.SUM, **given)

    dist.reduce = averaged
    wrong = []
    for dtype in (torch.float32, torch.float64):
        flat = flat_of(OWNED["owned"], dtype, world_size, rank, owned=True)
        fulls = [values(flat.padded_numel, dtype, seed) for seed in range(world_size)]
        for losses in (world_size, 2 * world_size):
            shard = torch.full((flat.shard_numel,), torch.nan, dtype=dtype)
            communicator.reduce_scatter(fulls[rank].clone(), shard, flat, losses).wait()
            mean = shard_of(torch.stack(fulls).sum(0) / losses, flat, rank)
            if not torch.allclose(shard, mean, rtol=1e-5, atol=1e-6):
                wrong.append(f"{dtype} over {losses}")
    communicator.close()
    return wrong


@pytest.mark.slow
def test_a_library_reduces_to_owners() -> None:
    assert run_ranks(reduce_to_owners, 3) == [[]] * 3


def small_talk() -> None:
    communicator = connect()
    rank, world_size = communicator.rank, communicator.world_size

    total = torch.tensor([rank, 10], dtype=torch.int64)
    assert communicator.all_reduce(total) is total
    assert total.tolist() == [sum(range(world_size)), 10 * world_size]
    assert communicator.all_reduce(torch.tensor([float(rank)]), maximum=True).item() == world_size - 1
    assert communicator.all_reduce(torch.tensor(rank, dtype=torch.float64)).shape == ()

    told = values(100, torch.bfloat16, rank)
    communicator.broadcast(told)
    assert torch.equal(told, values(100, torch.bfloat16, 0))
    communicator.broadcast(told, source=1)
    assert torch.equal(told, values(100, torch.bfloat16, 0))
    assert communicator.broadcast_object({"from": rank}, source=world_size - 1) == {"from": world_size - 1}

    big = 1 << 60  # rows are exact integers, not floating-point numbers
    assert communicator._intra_node.rounds is not None
    for _ in ("ranks of one machine", "of several"):
        assert communicator.exchange((rank, big + rank, 1)) == [(other, big + other, 1) for other in range(world_size)]
        communicator._intra_node.rounds = None

    # The paper's Page.send and Page.receive: round the ring.
    page = values(PAGE // 4, torch.float32, rank)
    received = torch.empty_like(page)
    sending = communicator.send(page, (rank + 1) % world_size)
    receiving = communicator.receive(received, (rank - 1) % world_size)
    receiving.wait()
    sending.wait()
    assert torch.equal(received, values(PAGE // 4, torch.float32, (rank - 1) % world_size))
    communicator.close()


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_other_collectives(world_size: int) -> None:
    run_ranks(small_talk, world_size)


def parts_of_four() -> None:
    """Ranks 0 and 2 share some flats, ranks 1 and 3 others; neighbours exchange rows."""
    whole = connect()
    rank = whole.rank
    holders, group = whole.subgroup([(0, 2), (1, 3)]), whole.subgroup([(0, 1), (2, 3)])
    assert (holders.rank, holders.world_size) == (rank // 2, 2)
    assert (group.rank, group.world_size) == (rank % 2, 2)

    flat = flat_of(SIZES["several_stripes"], torch.float32, 2)
    fulls = [values(flat.padded_numel, torch.float32, seed) for seed in range(4)]
    gathered = torch.empty(flat.padded_numel)
    holders.all_gather(shard_of(fulls[rank % 2], flat, holders.rank), gathered, flat).wait()
    assert torch.equal(gathered, fulls[rank % 2])
    shard = torch.empty(flat.shard_numel)
    holders.reduce_scatter(fulls[rank].clone(), shard, flat, 4).wait()
    assert torch.equal(shard, shard_of((fulls[rank % 2] + fulls[rank % 2 + 2]) / 4, flat, holders.rank))
    holders.reduce_scatter(fulls[rank] / 8, shard, flat, 4 / 8).wait()
    assert torch.equal(shard, shard_of((fulls[rank % 2] + fulls[rank % 2 + 2]) / 4, flat, holders.rank))

    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64):
        for sent in ([[2, 3], [0, 1]], [[0, 0], [4, 0]], [[0, 0], [0, 0]]):  # by sender, to each receiver
            rows = torch.arange(sum(sent[group.rank]) * 3).view(-1, 3).to(dtype) + 100 * rank
            came = group.all_to_all(rows, sent[group.rank], [row[group.rank] for row in sent])
            first = rank - group.rank
            expected = [
                (torch.arange(sum(row) * 3).view(-1, 3).to(dtype) + 100 * (first + sender)).split(row)[group.rank]
                for sender, row in enumerate(sent)
            ]
            assert torch.equal(came, torch.cat(expected)), (dtype, sent)

    assert holders.broadcast_object(rank, source=1) == rank % 2 + 2
    behind = whole.background_group([(0, 1), (2, 3)])
    assert behind is not None and (behind.rank, behind.world_size) == (rank % 2, 2)
    came, arriving = behind.start_all_to_all(torch.full((2,), rank), [1, 1], [1, 1])
    arriving.wait()
    assert came.tolist() == [rank - rank % 2, rank - rank % 2 + 1]
    assert set(whole.group_names) > {behind.group_name}
    whole.close()
    whole.close()
    assert len(dist.distributed_c10d._world.pg_map) == 1  # torch's first, which is not ours
    with pytest.raises(CheckpointError, match="the run ended while ranks still exchanged data"):
        behind.start_all_to_all(torch.zeros(2), [1, 1], [1, 1])
    with pytest.raises(UsageError, match=f"rank {rank}: this run has ended"):
        group.all_to_all(torch.zeros(0, 3), [0, 0], [0, 0])


def test_parts_of_the_ranks() -> None:
    run_ranks(parts_of_four, 4)


def threads_of_gloo() -> int:
    return sum(
        Path(f"/proc/self/task/{each}/comm").read_text() == "gloo_tcp_loop\n" for each in os.listdir("/proc/self/task")
    )


def threads_by_parts() -> list[int]:
    """Threads of gloo that further groups bring: all ranks, parts of one rank, two links of stages; then none are left."""
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    before = threads_of_gloo()
    whole = ProcessGroupCommunicator(CpuBackend(), datetime.timedelta(seconds=60))
    counts = [threads_of_gloo() - before]
    alone = whole.subgroup([[0], [1]])
    counts.append(threads_of_gloo() - before)
    links = [whole.subgroup([[0, 1]], one_way=True) for _ in range(2)]
    counts.append(threads_of_gloo() - before)
    for link in links:  # each way, while the other group of the device waits
        value = torch.arange(3.0)
        if whole.rank:
            link.receive(value.zero_(), 0).wait()
        else:
            link.send(value, 1).wait()
        assert value.tolist() == [0.0, 1.0, 2.0]
    whole.close()
    del alone, links
    until = time.monotonic() + 10  # links close in a thread of their own
    while threads_of_gloo() != before and time.monotonic() < until:
        time.sleep(0.01)
    return [*counts, threads_of_gloo() - before]


def test_small_messages_of_all_groups_share_a_thread() -> None:
    assert run_ranks(threads_by_parts, 2) == [[3, 3, 3, 0]] * 2


def leave(how: str) -> str:
    """Rank 1 leaves while the others wait for it; what they are told."""
    communicator = connect()
    communicator.exchange((0, 0, 0))
    if communicator.rank == 1:
        if how == "exit":
            os._exit(7)
        communicator.fail("ValueError: no such luck")
        communicator.fail("RankError: a second failure, which is not the cause")
        dist.barrier()  # alive until the others have seen it: their message is no race
        with pytest.raises(UsageError, match="rank 1: this run has ended"):
            communicator.exchange((0, 0, 0))
        return ""
    try:
        if how == "in_gather":
            flat = flat_of(SIZES["several_stripes"], torch.float32, communicator.world_size)
            shard, full = torch.zeros(flat.shard_numel), torch.zeros(flat.padded_numel)
            communicator.all_gather(shard, full, flat).wait()
        else:
            communicator.exchange((0, 0, 0))
    except RankError as error:
        communicator.fail(f"RankError: {error}")
        if how != "exit":
            dist.barrier()
        return str(error)
    raise AssertionError("nobody was missed")


@pytest.mark.parametrize("how", ["in_exchange", "in_gather"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_others_are_told_who_failed_and_why(world_size: int, how: str) -> None:
    messages = run_ranks(leave, world_size, how)
    for rank in range(world_size):
        if rank != 1:
            assert messages[rank].startswith(
                f"rank 1 failed with ValueError: no such luck; a collective needs all ranks, so rank {rank} stops too"
            )


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_others_are_told_that_a_rank_is_gone(world_size: int) -> None:
    outcomes = watch_ranks(leave, world_size, "exit")
    assert outcomes[1].end is End.EXITED
    assert outcomes[1].exit_code == 7
    for rank in range(world_size):
        if rank != 1:
            assert outcomes[rank].value.startswith((f"a collective of rank {rank} failed (", "rank "))


def tell_of_a_gather() -> list[tuple[str, str, int]]:
    """Returns the events of collectives of this rank that listeners get, when the collectives have been waited for."""
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    events, heard = Events(), []
    communicator = ProcessGroupCommunicator(CpuBackend(), datetime.timedelta(seconds=60), events)
    flat = flat_of(SIZES["tail_only"], torch.float32, communicator.world_size)
    shard, full = torch.zeros(flat.shard_numel), torch.zeros(flat.padded_numel)
    communicator.all_gather(shard, full, flat).wait()  # nobody listens
    with events.subscribed(heard.append):
        work = communicator.all_gather(shard, full, flat)
        assert not heard
        work.wait()
    communicator.close()
    return [(each.kind.name, each.name, each.bytes == full.nbytes) for each in heard]


def test_listeners_hear_of_collectives_that_have_ended() -> None:
    assert run_ranks(tell_of_a_gather, 2) == [[("COLLECTIVE", "all_gather", True)]] * 2


def refuse(error: RuntimeError) -> None:
    raise error


def errors_of_ours() -> None:
    """Errors of this package inside of a collective are raised as they are; others as a collective that failed."""
    communicator = connect()
    for error in (RankError("rank 1 will not come"), UsageError("not now")):
        with pytest.raises(type(error), match=f"^{error}$"):
            communicator._groups.issue(lambda: refuse(error))  # noqa: B023
    with pytest.raises(RankError, match=r"a collective of rank \d failed \(no route\)"):
        communicator._groups.issue(lambda: refuse(RuntimeError("no route")))
    communicator.close()


def late_words() -> None:
    """Calls of a rank that has left: no other rank meets it, and it has not failed."""
    communicator = connect()
    lines = communicator._groups
    assert communicator.meet("in time", 30.0)
    communicator.close()
    assert not communicator.meet("too late", 0.1)
    communicator.fail("ValueError: too late")
    assert not lines._store.check([lines._failure_key])
    dist.barrier()  # the store is gone with the rank that hosts it


def wait_in_vain() -> int:
    """How often a rank looks whether others have come that do not."""
    communicator = connect()
    looks, lines = [], communicator._groups
    if communicator.rank == 0:
        store: Any = lines._store
        lines._store = SimpleNamespace(
            set=store.set,
            get=store.get,
            compare_set=store.compare_set,
            check=lambda keys: looks.append(0) or store.check(keys),
        )
        assert not communicator.meet("alone", 0.3)
    dist.barrier()
    communicator.close()
    return len(looks)


def test_who_waits_for_others_sleeps_between_two_looks() -> None:
    assert 6 <= run_ranks(wait_in_vain, 2)[0] < 60


def differ() -> str:
    """Ranks of one machine come to different exchanges of values in RAM."""
    communicator = connect()
    part = communicator.subgroup([(0, 1)], exchanging=True)
    assert part._intra_node.exchanges is not None
    part.deadlock_detector.ask(lambda: (0, ["a", f"b{part.rank}"]))

    def exchange() -> None:
        part.issue(refuse, torch.ones(3), lambda near, word: near.sum(torch.ones(3), word), part.rank)

    with pytest.raises(RankError) as caught:
        exchange()
    communicator.close()
    with pytest.raises(UsageError, match=f"rank {part.rank}: this run has ended"):
        exchange()
    return str(caught.value)


def test_ranks_of_one_machine_are_told_at_once_which_exchanges_differ() -> None:
    for rank, told in enumerate(run_ranks(differ, 2)):
        assert told.startswith(
            f"rank {rank} and another rank that computes its batch have come to different exchanges: "
        )
        assert "rank 0 has come to b0 where rank 1 has come to b1" in told


def test_errors_of_ours_are_told_as_they_are() -> None:
    run_ranks(errors_of_ours, 2)


def test_a_rank_that_has_left_meets_nobody_and_does_not_fail() -> None:
    run_ranks(late_words, 2)


def test_a_work_is_waited_for_once_and_then_it_is_over() -> None:
    seen: list[str] = []

    class Handle:
        def wait(self) -> None:
            seen.append("wait")

        def is_completed(self) -> bool:
            return bool(seen)

    def guard(call: Callable[[], Any]) -> Any:
        seen.append("guarded")
        return call()

    work = Work([Handle()], [torch.ones(1)], lambda: seen.append("finish"), guard, lambda: seen.append("done"))
    assert not work.done()
    for _ in range(2):
        work.wait()
    assert work.done() and work._buffers == []
    assert seen == ["guarded", "wait", "finish", "done"]


# -- one rank ---------------------------------------------------------------------------------------------------------


def test_one_rank_is_its_own_collective() -> None:
    communicator: Communicator = SoloCommunicator()
    flat = flat_of(SIZES["several_stripes"], torch.bfloat16, 1)
    assert flat.shard_numel == flat.padded_numel
    shard, full = values(flat.shard_numel, torch.bfloat16, 1), torch.zeros(flat.padded_numel, dtype=torch.bfloat16)
    communicator.all_gather(shard, full, flat).wait()
    assert torch.equal(full, shard)
    reduced = torch.zeros_like(shard)
    communicator.reduce_scatter(full, reduced, flat, 1).wait()
    assert torch.equal(reduced, shard)
    communicator.reduce_scatter(full, reduced, flat, 4).wait()
    assert torch.equal(reduced, shard / 4)
    communicator.gather_shares(shard, gathered := torch.zeros_like(full), [0, full.numel()]).wait()
    communicator.gather_shares(None, gathered, [0, 0]).wait()
    assert torch.equal(gathered, shard)
    # Where the shard is the full flat, there is nothing to copy and nothing changes.
    communicator.all_gather(full, full, flat).wait()
    communicator.reduce_scatter(full, full, flat, 1).wait()
    assert torch.equal(full, shard)
    assert communicator.all_reduce(torch.tensor([3.0]), maximum=True).item() == 3.0
    assert communicator.broadcast_object("x") == "x"
    assert communicator.exchange((1, 2, 3)) == [(1, 2, 3)]
    for act in (communicator.send, communicator.receive):
        with pytest.raises(RankError, match="one rank only; rank 1 does not exist"):
            act(full, 1)
    communicator.fail("nobody is there to hear it")
    communicator.close()
