"""Measurement of collectives between ranks that were launched together (`torchrun ... lightning-ptm probe`).

Owns the process group of a probe, and buffers. Measures with a run's own communicator; knows no hardware file.

I1: all ranks call the same collectives: rank 0 determines what is measured (`measure`), the others follow (`follow`).
I2: a rank that fails ends the others, with its reason (`ProcessGroupCommunicator.fail`).
"""

from __future__ import annotations

import dataclasses
import datetime
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import perf_counter, process_time
from types import TracebackType
from typing import TypeVar

import torch
import torch.distributed as dist

from lightning_ptm.comm import ProcessGroupCommunicator
from lightning_ptm.comm.agreement import NO_TEAMS, Decision
from lightning_ptm.comm.work import Work
from lightning_ptm.commands.compute_rates import Effort
from lightning_ptm.commands.fixed_costs import PAIRS, block_s
from lightning_ptm.errors import ConfigError, InternalError, RankError
from lightning_ptm.memory.backend import backend_here
from lightning_ptm.parallel.exchange import RankGroup
from lightning_ptm.planning.layout import FlatLayout, ParameterSpec, UnitSpec, build_layout
from lightning_ptm.planning.mesh import Axis
from lightning_ptm.runtime.ranks.activation_exchange import ActivationExchange
from lightning_ptm.runtime.ranks.barriers import Barriers

_SETTINGS = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_OF_THE_LAUNCH = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID")
_TIMEOUT = datetime.timedelta(minutes=30)
"""Timeout of ranks that wait while one measures its node."""
_LEAST_CALLS = 3

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Launch:
    """Launch of the processes, from the environment that torchrun sets. All nodes have the same number of ranks."""

    rank: int
    local_rank: int
    world_size: int
    ranks_per_node: int

    @property
    def nodes(self) -> int:
        return self.world_size // self.ranks_per_node


def launched() -> Launch | None:
    """Returns how this process was launched; None if it is the only one.

    Raises:
        ConfigError: the environment says that there are other ranks, but not how to reach them.
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
    """Rates of collectives among `ranks` ranks, in pages of `page_bytes`.

    Attributes:
        gather_bytes_per_s: bytes that a rank receives in an all-gather.
        reduce_bytes_per_s: bytes that a rank sends in a reduce-scatter.
        least_s: seconds of an all-gather of a few bytes.
        bytes_per_core_s: bytes of a step for which a second of one core is enough.
    """

    ranks: int
    page_bytes: int
    gather_bytes_per_s: float
    reduce_bytes_per_s: float
    least_s: float
    bytes_per_core_s: float

    @property
    def bytes_per_s(self) -> float:
        """The mean rate in a step, which gathers parameters twice and reduces gradients once."""
        return 3 / (2 / self.gather_bytes_per_s + 1 / self.reduce_bytes_per_s)


@dataclass(frozen=True, slots=True)
class SumRate:
    """Rates of the sums of activations in a tensor group.

    Attributes:
        bytes_per_s: bytes that a rank of a ring sends.
        least_s: seconds of a sum apart from its bytes. On a CPU it is measured within a training step: ranks that come from
            computing arrive at different times, and with colder caches, than ranks that only exchange.
    """

    bytes_per_s: float
    least_s: float


@dataclass(frozen=True, slots=True)
class Rates:
    """The measured rates.

    Attributes:
        in_node: collectives among the ranks of a node, on all nodes at once; None with one rank per node.
        of_all: collectives among all ranks; None with one node.
        sums: sums of activations among the ranks of a node, as one tensor group.
        round_s: seconds of a round in which all ranks agree.
    """

    in_node: Rate | None = None
    of_all: Rate | None = None
    sums: SumRate | None = None
    round_s: float | None = None


@dataclass(frozen=True, slots=True)
class _Taken:
    """Seconds of a call, and of a processor in it, on the ranks where they are most."""

    seconds: float
    core_s: float


@dataclass(frozen=True, slots=True)
class _Occasions:
    """Stand-in for the executor of ranks that issue nothing else."""

    occasions: int = 0


@dataclass(frozen=True, slots=True)
class _Done:
    """Stand-in for the handle of work that was waited for already."""

    result: object

    def wait(self) -> None:
        return None


class Ranks:
    """The connected ranks of a launch, as a context manager; leaving it with an error makes the other ranks fail, too."""

    def __init__(self, launch: Launch) -> None:
        # Configuration.
        self.launch = launch
        self._backend = backend_here(launch.local_rank)
        # State: connected from entering to leaving.
        self._all: ProcessGroupCommunicator | None = None
        self._connects = not dist.is_initialized()
        """Whether ranks are connected here, and not by a run that begins."""

    def __enter__(self) -> Ranks:
        try:
            if self._connects:
                dist.init_process_group("gloo", timeout=_TIMEOUT)  # the communicator makes its own groups
        except RuntimeError as error:
            raise RankError(
                f"rank {self.launch.rank} could not connect to the other {self.launch.world_size - 1} ({error}), so nothing "
                f"was measured; check that all nodes can reach MASTER_ADDR and MASTER_PORT"
            ) from error
        count = self._backend.count()
        if self._backend.has_own_memory and count < self.launch.ranks_per_node:
            raise ConfigError(
                f"torch sees {count} device(s) on the node of rank {self.launch.rank}, and "
                f"{self.launch.ranks_per_node} ranks were launched there, which cannot share one; launch one rank per device"
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
                if self._connects:
                    dist.destroy_process_group()

    def at_once(self, measure: Callable[[Effort], T], effort: Effort) -> list[T]:
        """Measures on all ranks simultaneously; returns the results by rank. Collective, called on all ranks.

        Args:
            measure: calls `Effort.begins` at the beginning of each part, where all ranks synchronize.

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

    def measure(self, page_bytes: int, flat_bytes: int, seconds: float, steps: int) -> Rates:
        """Measures collectives, on rank 0, while the other ranks call `follow`.

        Args:
            page_bytes: size of a page, which is a rank's piece of each collective.
            flat_bytes: size of the flat that is gathered and reduced, at least a page of each rank.
            seconds: minimal duration of each measurement.
            steps: number of training steps of tiny models.

        Raises:
            RankError: another rank has failed.
        """
        return self._measure((page_bytes, flat_bytes, seconds, steps))

    def follow(self) -> None:
        """Takes part in rank 0's measurements, on the other ranks. Raises as `measure`."""
        self._measure(None)

    def _measure(self, given: tuple[int, int, float, int] | None) -> Rates:
        assert self._all is not None
        launch = self.launch
        page_bytes, flat_bytes, seconds, steps = self._all.broadcast_object(given)
        alike = self._slowest(launch.ranks_per_node), -self._slowest(-launch.ranks_per_node)
        if alike[0] != alike[1] or launch.world_size % launch.ranks_per_node:
            raise ConfigError(
                f"nodes were launched with {alike[1]:.0f} to {alike[0]:.0f} ranks, {launch.world_size} in all, and a "
                f"hardware file describes equal nodes; launch the same number on each"
            )
        barriers = Barriers(self._all, _nothing_else, NO_TEAMS)
        in_node = of_all = sums = None
        if launch.ranks_per_node > 1:
            firsts = range(0, launch.world_size, launch.ranks_per_node)
            nodes = [range(first, first + launch.ranks_per_node) for first in firsts]
            of_node = self._all if launch.nodes == 1 else self._all.subgroup(nodes)
            in_node = self._rate(of_node, page_bytes, flat_bytes, seconds)
            exchanging = self._all.subgroup(nodes, exchanging=True)
            sums = self._sums(exchanging, nodes, barriers, page_bytes, seconds)
        if launch.nodes > 1:
            of_all = self._rate(self._all, page_bytes, flat_bytes, seconds)

        def meet() -> _Done:
            barriers.meet_group(0, launch.world_size, "a round")
            return _Done(None)

        round_s = self._typical_s(meet, seconds)
        if sums is not None and launch.nodes == 1 and not self._backend.has_own_memory:
            sums = dataclasses.replace(sums, least_s=max(sums.least_s, self._in_a_step_s(steps, round_s)))
        return Rates(in_node, of_all, sums, round_s)

    def _rate(self, among: ProcessGroupCommunicator, page_bytes: int, flat_bytes: int, seconds: float) -> Rate:
        ranks = among.world_size
        pages = max(1, flat_bytes // (ranks * page_bytes)) * ranks
        large, small = (self._flat(size, page_bytes, ranks) for size in (pages * page_bytes, 1))
        device = self._backend.device

        def gather(flat: FlatLayout) -> _Taken:
            shard, full = (torch.zeros(numel, dtype=torch.bfloat16, device=device) for numel in _numels(flat))
            return self._typical(lambda: among.all_gather(shard, full, flat), seconds)

        def reduce(flat: FlatLayout) -> _Taken:
            shard, full = (torch.zeros(numel, dtype=torch.bfloat16, device=device) for numel in _numels(flat))
            return self._typical(lambda: among.reduce_scatter(full, shard, flat, ranks), seconds)

        moved = large.shard_bytes * (ranks - 1)
        gathered, reduced = gather(large), reduce(large)
        least_s = min(gather(small).seconds, gathered.seconds / 2)
        core_s = max(2 * gathered.core_s + reduced.core_s, 1e-9)
        return Rate(
            ranks,
            page_bytes,
            moved / (gathered.seconds - least_s),
            moved / reduced.seconds,
            least_s,
            3 * moved / core_s,
        )

    def _flat(self, size: int, page_bytes: int, ranks: int) -> FlatLayout:
        shape = (-(-size // torch.bfloat16.itemsize),)
        parameter = ParameterSpec("", shape, "bfloat16", torch.bfloat16.itemsize, trainable=True, group=0)
        return build_layout([UnitSpec("", (parameter,))], page_size=page_bytes, world_size=ranks).flats[0]

    def _sums(
        self,
        of_node: ProcessGroupCommunicator,
        nodes: Sequence[range],
        barriers: Barriers,
        size: int,
        seconds: float,
    ) -> SumRate:
        """Measures sums with the exchange of a run's tensor groups, after a round of agreement."""
        groups = [dist.new_group(list(ranks), backend=self._backend.collectives) for ranks in nodes]
        node = self.launch.rank // self.launch.ranks_per_node
        group = RankGroup(groups[node], self._backend)
        group.connect(ActivationExchange({Axis.TENSOR: of_node}, node, barriers, _Occasions()))
        large, small = (
            torch.zeros(numel, dtype=torch.bfloat16, device=self._backend.device)
            for numel in (size // torch.bfloat16.itemsize, 1)
        )
        took_s = self._typical_s(lambda: _Done(group.sum(large)), seconds)
        # On a machine with other load, a sum of few bytes may take as long.
        least_s = min(self._typical_s(lambda: _Done(group.sum(small)), seconds), took_s / 2)
        return SumRate(2 * large.nbytes * (group.size - 1) / group.size / (took_s - least_s), least_s)

    def _in_a_step_s(self, steps: int, round_s: float) -> float:
        """Seconds of an exchange within a step, apart from its bytes and its round: there is one for each pair of layers in
        each direction, and one round per block."""
        with as_if_alone():
            whole_s = block_s(self._backend, steps)
        whole_s = self._slowest(whole_s)  # synchronizes the ranks
        divided_s = self._slowest(block_s(self._backend, steps, self.launch.world_size))
        return (divided_s - whole_s - 2 * round_s) / (2 * PAIRS)

    def _typical_s(self, start: Callable[[], Work | _Done], seconds: float) -> float:
        """The median duration, on the slowest rank, of as many calls as take `seconds`; the first is a warm-up."""
        return self._typical(start, seconds).seconds

    def _typical(self, start: Callable[[], Work | _Done], seconds: float) -> _Taken:
        """The median duration and processor time, likewise."""
        found: list[float] = []
        core_s: list[float] = []
        while len(found) <= _LEAST_CALLS or sum(found[1:]) < seconds:
            began, began_core = perf_counter(), process_time()
            start().wait()
            self._backend.synchronize()
            core_s.append(process_time() - began_core)
            found.append(self._slowest(perf_counter() - began))  # synchronizes the ranks before the next call
        return _Taken(median(found[1:]), self._slowest(median(core_s[1:])))

    def _slowest(self, value: float) -> float:
        assert self._all is not None
        return float(self._all.all_reduce(torch.tensor([value], dtype=torch.float64), maximum=True))


def _numels(flat: FlatLayout) -> Sequence[int]:
    """Elements of a shard, and of the whole flat."""
    return flat.shard_numel, flat.padded_numel


def _nothing_else(decision: Decision) -> None:
    raise InternalError(f"a probe gathers and reduces no units, and another rank has asked for {decision}")


@contextmanager
def as_if_alone() -> Iterator[None]:
    """Hides the launch's environment variables inside the block, so that a Trainer of this process runs with one rank."""
    hidden = {name: os.environ.pop(name) for name in _OF_THE_LAUNCH if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)
