"""Collectives of pages on the fake device: `python collectives_program.py`, as one rank of several, which torchrun's
variables tell. For each it prints a line, `NAME: ok` or `NAME: failed`, with why.

I1: each is behind what the current stream has queued, as late as that is, and what that queues behind the wait finds its
    result.
I2: no access is without order.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import fake_device  # noqa: F401 before torch
import fake_nccl  # noqa: F401 in place of NCCL
import told_cases
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ptm.comm import ProcessGroupCommunicator
from lightning_ptm.memory.backend import backend_here

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("", "ranks"))
from test_communicator import OWNED, SIZES, flat_of, shard_of

LIMIT = datetime.timedelta(seconds=60)
NAMES = ("gather", "gather owned", "gather shares", "reduce", "reduce owned", "all to all", "sum")


def late(values: Tensor) -> Tensor:
    """On the device, when the current stream comes to it."""
    there = torch.empty(values.shape, dtype=values.dtype, device=backend_here().device)
    return there.copy_(values.pin_memory(), non_blocking=True)


def numbers(numel: int, rank: int) -> Tensor:
    """Small ones, of which sums are exact."""
    return (torch.arange(numel) % 61 + 100 * rank).float()


class Cases:
    """Collectives that this rank runs."""

    def __init__(self, communicator: ProcessGroupCommunicator) -> None:
        self.it = communicator
        self.rank, self.size = communicator.rank, communicator.world_size

    def gather(self, *, owned: bool) -> None:
        flat = flat_of(
            OWNED["owned"] if owned else SIZES["several_stripes"], torch.float32, self.size, self.rank, owned=owned
        )
        whole = numbers(flat.padded_numel, 7)
        full = late(torch.zeros(flat.padded_numel))
        self.it.all_gather(late(shard_of(whole, flat, self.rank)), full, flat).wait()
        assert torch.equal((full + 1).cpu(), whole + 1)

    def gather_shares(self) -> None:
        """All-gathers a flat of which rank 0 owns every element."""
        shares = [0, *(5 for _ in range(self.size))]
        whole, full = numbers(5, 3), late(torch.zeros(5))
        self.it.gather_shares(late(whole) if self.rank == 0 else None, full, shares).wait()
        assert torch.equal((full + 1).cpu(), whole + 1)

    def reduce(self, *, owned: bool) -> None:
        flat = flat_of(
            OWNED["owned"] if owned else SIZES["several_stripes"], torch.float32, self.size, self.rank, owned=owned
        )
        total = torch.stack([numbers(flat.padded_numel, rank) for rank in range(self.size)]).sum(0)
        for divisor in (self.size, 2 * self.size):
            shard = late(torch.zeros(flat.shard_numel))
            self.it.reduce_scatter(late(numbers(flat.padded_numel, self.rank)), shard, flat, divisor).wait()
            assert torch.equal((shard + 1).cpu(), shard_of(total / divisor, flat, self.rank) + 1), divisor

    def all_to_all(self) -> None:
        rows = late(torch.full((self.size, 3), float(self.rank)))
        out = self.it.all_to_all(rows, self.size * [1], self.size * [1])
        assert (out + 1).cpu()[:, 0].tolist() == [rank + 1.0 for rank in range(self.size)]

    def sum(self) -> None:
        """Sums a few values, which the host needs."""
        values = late(torch.tensor([1.0, self.rank]))
        assert self.it.all_reduce(values) is values
        assert (values + 1).cpu().tolist() == [self.size + 1, self.size * (self.size - 1) / 2 + 1]


def checks() -> Iterator[tuple[str, str, Callable[[], None]]]:
    """Name, description, and check of each, of ranks that are connected meanwhile."""
    told_cases.prepare(least_bytes=1024)
    dist.init_process_group("gloo", timeout=LIMIT)
    communicator = ProcessGroupCommunicator(backend_here(), LIMIT)
    cases = Cases(communicator)
    acts: list[Callable[[], None]] = [
        *(partial(cases.gather, owned=owned) for owned in (False, True)),
        cases.gather_shares,
        *(partial(cases.reduce, owned=owned) for owned in (False, True)),
        cases.all_to_all,
        cases.sum,
    ]

    def check(act: Callable[[], None]) -> None:
        with told_cases.in_order():
            act()

    for name, act in zip(NAMES, acts, strict=True):
        yield name, name, partial(check, act)
    communicator.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    told_cases.go_through(checks())
