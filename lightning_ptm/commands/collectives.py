"""How fast collectives of pages are between ranks that were launched together (`torchrun ... lightning-ptm probe`).

Owns the process group of a probe, and buffers. Measures with a run's own communicator; knows no hardware file.

I1: all ranks come to the same collectives: rank 0 says what is measured (`measure`), the others do likewise (`follow`).
I2: a rank that fails ends the others, with its reason (`ProcessGroupCommunicator.fail`).
"""

from __future__ import annotations

import dataclasses
import datetime
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from types import TracebackType
from typing import TypeVar

import torch
import torch.distributed as dist

from lightning_ptm.comm import ProcessGroupCommunicator
from lightning_ptm.comm.communicator import Work
from lightning_ptm.commands.compute_rates import Effort
from lightning_ptm.errors import ConfigError, RankError
from lightning_ptm.memory.backend import backend_here
from lightning_ptm.parallel.exchange import RankGroup
from lightning_ptm.planning.layout import ParameterSpec, UnitSpec, build_layout

_SETTINGS = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_OF_THE_LAUNCH = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID")
_TIMEOUT = datetime.timedelta(minutes=30)
"""For ranks that wait while one measures its node."""
_LEAST_CALLS = 3

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Launch:
    """How processes were launched, as torchrun tells each in its environment. Nodes have equally many ranks."""

    rank: int
    local_rank: int
    world_size: int
    ranks_per_node: int

    @property
    def nodes(self) -> int:
        return self.world_size // self.ranks_per_node


def launched() -> Launch | None:
    """How this process was launched; None: it is the only one.

    Raises:
        ConfigError: the environment says that there are others, and not how to find them.
    """
    world_size = int(os.environ.get("WORLD_SIZE") or 1)
    if world_size == 1:
        return None
    missing = [name for name in _SETTINGS if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE is {world_size}, and {', '.join(missing)} is not set in the environment, so this process cannot "
            f"find the other ranks; launch with torchrun, or unset WORLD_SIZE to measure without them"
        )
    rank, local_rank, ranks_per_node = (int(os.environ[name]) for name in _SETTINGS[:3])
    return Launch(rank, local_rank, world_size, ranks_per_node)


@dataclass(frozen=True, slots=True)
class Rate:
    """Of collectives among so many ranks: bytes that one of them receives (gather) or sends (reduce) a second, in pages of
    one size."""

    ranks: int
    page_bytes: int
    gather_bytes_per_s: float
    reduce_bytes_per_s: float

    @property
    def bytes_per_s(self) -> float:
        """Of a step, which gathers parameters twice and reduces gradients once."""
        return 3 / (2 / self.gather_bytes_per_s + 1 / self.reduce_bytes_per_s)


@dataclass(frozen=True, slots=True)
class Rates:
    """What was measured: `in_node` among the ranks of a node, on all nodes at once, None with one rank on each; `of_all`
    among all ranks, None with one node; `sums` what a rank of a node's ring sends a second where all of them add up
    activations, as a tensor group does."""

    in_node: Rate | None
    of_all: Rate | None
    sums_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class _Done:
    """Of an exchange that was waited for."""

    result: torch.Tensor

    def wait(self) -> None:
        return None


class Ranks:
    """The ranks of a launch, connected; a context that one leaves with an error only if something failed on some rank."""

    def __init__(self, launch: Launch) -> None:
        # Configuration.
        self.launch = launch
        self._backend = backend_here(launch.local_rank)
        # State: connected from entering to leaving.
        self._all: ProcessGroupCommunicator | None = None

    def __enter__(self) -> Ranks:
        try:
            dist.init_process_group("gloo", timeout=_TIMEOUT)  # the communicator makes groups of its own
        except RuntimeError as error:
            raise RankError(
                f"rank {self.launch.rank} found no way to the other {self.launch.world_size - 1} ({error}), so nothing was "
                f"measured; see that MASTER_ADDR and MASTER_PORT can be reached from all nodes"
            ) from error
        count = self._backend.count()
        if self._backend.apart and count < self.launch.ranks_per_node:
            raise ConfigError(
                f"torch sees {count} device(s) on the node of rank {self.launch.rank}, and "
                f"{self.launch.ranks_per_node} ranks were launched there, which cannot share one; launch as many as there "
                f"are devices"
            )
        self._backend.make_current()
        self._all = ProcessGroupCommunicator(self._backend, _TIMEOUT)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._all is not None:
            if error is not None:
                self._all.fail(f"{type(error).__name__}: {error}")
            else:
                self._all.close()
                dist.destroy_process_group()

    def at_once(self, measure: Callable[[Effort], T], effort: Effort) -> list[T]:
        """On all ranks: what each of them measures while the others measure the same, by rank.

        Args:
            measure: begins its parts as `Effort.begins` is told, and all ranks begin each together.

        Raises:
            RankError: another rank has failed.
        """
        assert self._all is not None
        everybody = self._all

        def begins(part: str) -> None:
            effort.begins(part)
            self._slowest(0.0)

        found = measure(dataclasses.replace(effort, begins=begins))
        ranks = range(self.launch.world_size)
        return [everybody.broadcast_object(found if rank == self.launch.rank else None, rank) for rank in ranks]

    def measure(self, page_bytes: int, flat_bytes: int, seconds: float) -> Rates:
        """On rank 0, while the others `follow`.

        Args:
            page_bytes: of a page, which is a rank's piece of each collective.
            flat_bytes: of the flat that is gathered and reduced, or a page of each rank if that is more.
            seconds: that each measurement takes at least.

        Raises:
            RankError: another rank has failed.
        """
        return self._measure((page_bytes, flat_bytes, seconds))

    def follow(self) -> None:
        """On the other ranks, until rank 0 has measured. Raises as `measure`."""
        self._measure(None)

    def _measure(self, given: tuple[int, int, float] | None) -> Rates:
        assert self._all is not None
        launch = self.launch
        page_bytes, flat_bytes, seconds = self._all.broadcast_object(given)
        alike = self._slowest(launch.ranks_per_node), -self._slowest(-launch.ranks_per_node)
        if alike[0] != alike[1] or launch.world_size % launch.ranks_per_node:
            raise ConfigError(
                f"nodes have {alike[1]:.0f} to {alike[0]:.0f} ranks, and a hardware file describes nodes that are alike; "
                f"launch as many on each"
            )
        in_node = of_all = sums = None
        if launch.ranks_per_node > 1:
            firsts = range(0, launch.world_size, launch.ranks_per_node)
            nodes = [range(first, first + launch.ranks_per_node) for first in firsts]
            of_node = self._all if launch.nodes == 1 else self._all.part(nodes)
            in_node = self._rate(of_node, page_bytes, flat_bytes, seconds)
            sums = self._sums_bytes_per_s(nodes, page_bytes, seconds)
        if launch.nodes > 1:
            of_all = self._rate(self._all, page_bytes, flat_bytes, seconds)
        return Rates(in_node, of_all, sums)

    def _rate(self, among: ProcessGroupCommunicator, page_bytes: int, flat_bytes: int, seconds: float) -> Rate:
        pages = max(1, flat_bytes // (among.world_size * page_bytes)) * among.world_size
        shape = (pages * page_bytes // torch.bfloat16.itemsize,)
        parameter = ParameterSpec("", shape, "bfloat16", torch.bfloat16.itemsize, trainable=True, group=0)
        layout = build_layout([UnitSpec("", (parameter,))], page_size=page_bytes, world_size=among.world_size)
        flat = layout.flats[0]
        shard = torch.zeros(flat.shard_numel, dtype=torch.bfloat16, device=self._backend.device)
        full = torch.zeros(flat.padded_numel, dtype=torch.bfloat16, device=self._backend.device)
        ranks = among.world_size
        moved = flat.shard_bytes * (ranks - 1)
        return Rate(
            ranks,
            page_bytes,
            gather_bytes_per_s=moved / self._fastest_s(lambda: among.all_gather(shard, full, flat), seconds),
            reduce_bytes_per_s=moved / self._fastest_s(lambda: among.reduce_scatter(full, shard, flat, ranks), seconds),
        )

    def _sums_bytes_per_s(self, nodes: Sequence[range], size: int, seconds: float) -> float:
        groups = [dist.new_group(list(ranks), backend=self._backend.collectives) for ranks in nodes]
        (own,) = [group for group, ranks in zip(groups, nodes, strict=True) if self.launch.rank in ranks]
        group = RankGroup(own, self._backend)
        value = torch.zeros(size // torch.bfloat16.itemsize, dtype=torch.bfloat16, device=self._backend.device)
        took = self._fastest_s(lambda: _Done(group.sum(value)), seconds)
        return 2 * value.nbytes * (group.size - 1) / group.size / took

    def _fastest_s(self, start: Callable[[], Work | _Done], seconds: float) -> float:
        """Of the calls that take `seconds` together, the fastest as its slowest rank saw it; the first one warms up."""
        best, spent, count = float("inf"), 0.0, -1
        while count < _LEAST_CALLS or spent < seconds:
            began = perf_counter()
            start().wait()
            self._backend.synchronize()
            took = self._slowest(perf_counter() - began)  # and here all ranks meet before the next call
            count += 1
            if count:
                best, spent = min(best, took), spent + took
        return best

    def _slowest(self, value: float) -> float:
        assert self._all is not None
        return float(self._all.all_reduce(torch.tensor([value], dtype=torch.float64), maximum=True))


@contextmanager
def as_if_alone() -> Iterator[None]:
    """Inside, the environment does not tell of other ranks: a Trainer of this process counts itself alone."""
    hidden = {name: os.environ.pop(name) for name in _OF_THE_LAUNCH if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)
