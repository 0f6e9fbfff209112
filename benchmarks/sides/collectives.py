"""Two CPU ranks that do nothing but communicate: messages of 24 bytes, and sums of 512 KiB.

Options: `direct` true uses the sockets and the shared memory of lightning_ptm/comm, false gloo. A step is `ROUNDS`
messages and `SUMS` sums. A turn's extra numbers are rank 0's CPU milliseconds for one message and for one sum.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.race import Baton
from benchmarks.sides.devices import start_processes

ROUNDS, SUMS = 500, 100
SUM_NUMEL = 512 * 1024 // 4


def run(options: dict[str, Any], baton: Baton) -> None:
    """Takes part in the race until it is over."""
    torch.set_num_threads(1)
    start_processes("cpu")
    try:
        message, add_up = _direct() if options["direct"] else _gloo()
        baton.ready()
        while steps := baton.wait():
            round_ms, sum_ms = (1e3 * _cpu_s(act, steps * count) for act, count in ((message, ROUNDS), (add_up, SUMS)))
            baton.report(0.0, {"round_ms": round_ms, "sum_ms": sum_ms})
    finally:
        dist.destroy_process_group()


def _cpu_s(act: Callable[[], object], count: int) -> float:
    started_s = time.process_time()
    for _ in range(count):
        act()
    return (time.process_time() - started_s) / count


def _gloo() -> tuple[Callable[[], object], Callable[[], object]]:
    row, value = torch.zeros(3, dtype=torch.int64), torch.zeros(SUM_NUMEL)
    rows = [torch.zeros_like(row) for _ in range(dist.get_world_size())]
    return lambda: dist.all_gather(rows, row), lambda: dist.all_reduce(value)


def _direct() -> tuple[Callable[[], object], Callable[[], object]]:
    from lightning_ptm.comm.shm_collectives import shm_collectives
    from lightning_ptm.comm.uds import connected

    rank, size, limit = dist.get_rank(), dist.get_world_size(), timedelta(minutes=1)

    def gather(value: Any) -> list[Any]:
        values: list[Any] = [None] * size
        dist.all_gather_object(values, value)
        return values

    def wait(work: Any) -> None:
        work.wait()

    def differ(_: Any) -> None:
        raise RuntimeError("the ranks have come to different sums")

    found = connected(rank, size, limit, gather)
    sums = shm_collectives(rank, size, limit, gather, wait, differ)  # type: ignore[arg-type]
    assert found is not None and sums is not None, "sockets and shared memory need ranks of one machine"
    rounds, value = found[0], torch.zeros(SUM_NUMEL)
    return lambda: rounds.all_gather_row((0, 0, 0), wait), lambda: sums.sum(value, 0)
