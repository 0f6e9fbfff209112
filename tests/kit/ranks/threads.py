"""A tensor group whose ranks are threads of this process: exchanges without processes or sockets, for tests of arithmetic."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_ptm.parallel.exchange import TensorGroup
from lightning_ptm.parallel.grid import Grid
from lightning_ptm.planning.mesh import Axis, GridAxis, GridShape, Mesh

Result = TypeVar("Result")


class _Meeting:
    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self.values: list[tuple[str, Tensor]] = [("", torch.empty(0))] * size

    def exchange(self, rank: int, name: str, value: Tensor) -> list[Tensor]:
        self.values[rank] = (f"{name} {tuple(value.shape)} {value.dtype}", value.detach())
        self.barrier.wait()
        found = list(self.values)
        self.barrier.wait()
        assert len({name for name, _ in found}) == 1, [name for name, _ in found]
        return [value for _, value in found]


class ThreadGroup(TensorGroup):
    """One rank of a group of threads; notes the exchanges, with the elements that a rank sends by ring collectives."""

    def __init__(self, meeting: _Meeting, size: int, index: int) -> None:
        super().__init__(size, index)
        self._meeting = meeting
        self.sent: list[tuple[str, int]] = []

    def _exchange(self, name: str, value: Tensor, sent: int) -> list[Tensor]:
        self.sent.append((name, sent))
        return self._meeting.exchange(self.index, name, value)

    @override
    def sum(self, value: Tensor) -> Tensor:
        return torch.stack(self._exchange("sum", value, 2 * value.numel() * (self.size - 1) // self.size)).sum(0)

    @override
    def gather(self, value: Tensor) -> Tensor:
        return torch.stack(self._exchange("gather", value, value.numel() * (self.size - 1)))

    @override
    def sum_of_piece(self, pieces: Tensor) -> Tensor:
        found = self._exchange("sum of pieces", pieces, pieces[0].numel() * (self.size - 1))
        return torch.stack([each[self.index] for each in found]).sum(0)

    def swap(self, pieces: Tensor) -> Tensor:
        found = self._exchange("swap", pieces, pieces[0].numel() * (self.size - 1))
        return torch.stack([each[self.index] for each in found])

    def shift(self, value: Tensor) -> Tensor:
        return self._exchange("shift", value, value.numel())[self.index - 1].clone()


def thread_groups(grid: Grid) -> dict[GridAxis, ThreadGroup]:
    """Returns the groups of a grid of threads, which note what was sent."""
    return {axis: group for axis, group in grid.groups.items() if isinstance(group, ThreadGroup)}


def on_grid(shape: GridShape, work: Callable[[Grid], Result]) -> list[Result]:
    """Returns what `work` returns for each rank of a grid."""
    mesh = Mesh({Axis.TENSOR: shape.size})
    groups: list[dict[GridAxis, TensorGroup]] = [{} for _ in range(shape.size)]
    for axis in shape.axes:
        for ranks in shape.groups(mesh, axis):
            meeting = _Meeting(shape.side)
            for index, rank in enumerate(ranks):
                groups[rank][axis] = ThreadGroup(meeting, shape.side, index)
    with ThreadPoolExecutor(shape.size) as threads:
        return list(threads.map(lambda rank: work(Grid(shape, rank, groups[rank])), range(shape.size)))


def on_threads(size: int, work: Callable[[ThreadGroup], Result]) -> list[Result]:
    """Returns what `work` returns for each rank of a group."""
    meeting = _Meeting(size)
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(lambda rank: work(ThreadGroup(meeting, size, rank)), range(size)))
