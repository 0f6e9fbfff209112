"""A node as its hardware file describes it.

It has two views: `Machine`, from which a run decides (runtime/machine/machine.py), and `Hardware`, with which a plan is timed
(rates.py).
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Collection
from pathlib import Path

from lightning_ptm.errors import ConfigError
from lightning_ptm.forecasting.counting import UnitWork
from lightning_ptm.forecasting.rates import Hardware
from lightning_ptm.memory.backend import device_has_own_memory
from lightning_ptm.planning.mesh import Axis, Mesh
from lightning_ptm.planning.sharding import ModelSharding
from lightning_ptm.runtime.machine.machine import Machine
from lightning_ptm.terms import Link

_LAUNCH_S = 10e-6
"""Seconds in which a CPU launches one kernel of torch's eager mode: Python, autograd, dispatch and driver. Assumed: published
figures are between 5 and 25 microseconds, and none was measured here."""
_NEVER = 1e-9
"""Bytes per second of a link that does not exist; plans for that machine do not use it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """One node, with the fields of its hardware file: sizes in bytes, rates per second.

    Attributes:
        source: path of the hardware file.
        name: name of the node.
        device: torch's device type, such as `cuda`; with `cpu`, device memory is RAM.
        ranks_per_node: ranks on the node, one for each device.
        device_memory: memory of one device; 0 on a CPU.
        host_memory, disk_memory, cpu_cores: RAM, disk and cores of the node.
        compute_flops_per_s: rate of matrix multiplications of one rank, by dtype.
        compute_efficiency: the share of the compute rate, and of the rates of attention, exponential functions and memory if
            given, that a model's forward and backward reach.
        device_memory_bytes_per_s: memory rate of one device, reads and writes alike.
        host_memory_bytes_per_s: memory rate of the node's RAM, reads and writes alike.
        host_to_device_bytes_per_s, device_to_host_bytes_per_s: copy rates of one device; None on a CPU.
        disk_read_bytes_per_s, disk_write_bytes_per_s: rates of the node's disk; None without a disk.
        intra_node_bytes_per_s: rate of one rank in a collective within the node; None with one rank.
        inter_node_bytes_per_s: network rate of a node; None for a single node.
        tensor_exchange_bytes_per_s: rate of one rank in an all-reduce of activations within a node; None: as in other
            collectives.
        collective_s, tensor_exchange_s: seconds of a collective of pages, and of an all-reduce of activations, in addition to
            those for their bytes; None: 0. The latter include the layers' code for it, and the wait for the last rank.
        round_s: seconds of a round in which all ranks agree on what they do next; None: 0.
        attention_flops_per_s: rate of attention of one rank, by dtype. A forward and a backward count as three forwards, also
            for the two fields below. None if compute_efficiency covers everything that is not matrix multiplication.
        curved_numel_per_s: elements of exponential functions (GELU, softmax) per second of one rank, by dtype; None likewise.
        update_bytes_per_s: rate of one rank's optimizer arithmetic; None: the rate of the memory where it runs.
        disk_update_bytes_per_s: the same on a CPU that computes, while the disk is read and written; None: the same.
        beside_update_bytes_per_s: the same in its own thread, while all cores of a CPU compute; None: half of it.
        chunk_s: seconds that a CPU needs for each chunk of an update that streams from disk (a page of fp32 elements), in
            addition to arithmetic and transfers; None: 0.
        beside_loss: seconds by which compute gets longer for each second of such arithmetic in its own thread; None: 1, as
            cores that compute in lockstep wait for the slowest of them.
        learn_numel_per_s: elements per second for which an update learns a weight prediction, in addition to its arithmetic;
            None: it takes no time.
        prediction_numel_per_s: elements per second to which a weight prediction is added; None: it takes no time.
        states_numel_per_s: by value of `optimizer_state_dtype`, elements of states per second that an update on a CPU decodes
            and encodes; None, or without the value: it takes no time.
        update_flops_per_s: rate of matrix products in updates on the CPU (Muon) of one rank, by dtype; None: on a CPU as in
            training, else they take no time.
        disk_both_bytes_per_s: rate of concurrent reads and writes of the node's disk; None: they do not slow each other.
        disk_bytes_per_core_s: bytes per second that one core can read and write, if the disk is fast enough; None: no limit.
        collective_bytes_per_core_s: bytes of collectives of pages for which a second of one core is enough, counted as in
            intra_node_bytes_per_s; None: they take no time of the cores that compute.
        unit_s, step_s: seconds of one rank for each forward or backward of a unit, and for each step, in addition to all
            other fields.
        cpu_threads: threads with which one rank reaches its rates on a CPU; None: all its cores.
        page_size: bytes of the smallest page that saturates the links; None: not measured.
    """

    source: Path
    name: str
    device: str
    ranks_per_node: int
    device_memory: int
    host_memory: int
    disk_memory: int
    cpu_cores: int
    compute_flops_per_s: dict[str, float]
    compute_efficiency: float
    device_memory_bytes_per_s: float | None
    host_memory_bytes_per_s: float
    host_to_device_bytes_per_s: float | None
    device_to_host_bytes_per_s: float | None
    disk_read_bytes_per_s: float | None = None
    disk_write_bytes_per_s: float | None = None
    intra_node_bytes_per_s: float | None = None
    inter_node_bytes_per_s: float | None = None
    tensor_exchange_bytes_per_s: float | None = None
    collective_s: float | None = None
    tensor_exchange_s: float | None = None
    round_s: float | None = None
    attention_flops_per_s: dict[str, float] | None = None
    curved_numel_per_s: dict[str, float] | None = None
    update_bytes_per_s: float | None = None
    disk_update_bytes_per_s: float | None = None
    chunk_s: float | None = None
    beside_update_bytes_per_s: float | None = None
    beside_loss: float | None = None
    learn_numel_per_s: float | None = None
    prediction_numel_per_s: float | None = None
    states_numel_per_s: dict[str, float] | None = None
    update_flops_per_s: dict[str, float] | None = None
    disk_both_bytes_per_s: float | None = None
    disk_bytes_per_core_s: float | None = None
    collective_bytes_per_core_s: float | None = None
    unit_s: float | None = None
    step_s: float | None = None
    cpu_threads: int | None = None
    page_size: int | None = None

    @property
    def has_own_memory(self) -> bool:
        """Whether the devices have their own memory."""
        return device_has_own_memory(self.device)

    @property
    def cores_per_rank(self) -> float:
        """CPU cores of one rank."""
        return self.cpu_cores / self.ranks_per_node

    @property
    def threads(self) -> float:
        """Cores that one rank's compute, or its update, keeps busy on a CPU."""
        return min(self.cpu_threads or math.inf, self.cores_per_rank)

    def machine(self) -> Machine:
        """Returns the machine that a run would find, if nothing else ran there."""
        return Machine(
            device_has_own_memory=self.has_own_memory,
            free_device_bytes=self.device_memory,
            free_host_bytes=self.host_memory,
            free_disk_bytes=self.disk_memory,
            cores=self.cpu_cores,
            ranks=self.ranks_per_node,
        )

    def rates(self, nodes: int, holders: ModelSharding | None = None) -> Hardware:
        """Returns one rank's share of the rates.

        A ring over all ranks is as fast as its slowest link; one ring has the network between nodes for itself. Ranks that
        divide experts send tokens at the same time, and those of a node share its network. Ranks that share parts or experts
        form rings of their own, which share the network, too.

        Args:
            nodes: number of nodes.
            holders: which ranks share which flats; None: all ranks share all flats.

        Raises:
            ConfigError: there are several ranks or nodes, and the rate of the link between them is missing.
        """
        ranks = self.ranks_per_node
        exchanging = () if holders is None else tuple(axis for axis in holders.mesh.axes if axis.exchanges)
        rings = (
            self._ring_bytes_per_s(nodes, _along(holders, axis), self.tensor_exchange_bytes_per_s)
            for axis in exchanging
        )
        together = () if holders is None or not exchanging else holders.mesh.groups(exchanging)
        between = [
            self._inside() if ranks > 1 else math.inf,
            self._between(nodes) if nodes > 1 else math.inf,
        ]
        ram = self.host_memory_bytes_per_s / ranks
        return Hardware(
            name=self.name,
            host_to_device_bytes_per_s=self.host_to_device_bytes_per_s or ram,
            device_to_host_bytes_per_s=self.device_to_host_bytes_per_s or ram,
            disk_read_bytes_per_s=(self.disk_read_bytes_per_s or _NEVER) / ranks,
            disk_write_bytes_per_s=(self.disk_write_bytes_per_s or _NEVER) / ranks,
            collective_bytes_per_s=min(between),
            update_host_bytes_per_s=ram if self.update_bytes_per_s is None else self.update_bytes_per_s,
            update_device_bytes_per_s=self.device_memory_bytes_per_s or self.update_bytes_per_s or ram,
            disk_both_bytes_per_s=None if self.disk_both_bytes_per_s is None else self.disk_both_bytes_per_s / ranks,
            shared_cores=not self.has_own_memory,
            exchange_bytes_per_s=self._exchange_bytes_per_s(nodes, _along(holders, Axis.EXPERT)),
            tensor_exchange_bytes_per_s=min((rate for rate in rings if rate is not None), default=None),
            shared_bytes_per_s=self._shared_bytes_per_s(nodes, holders) if holders is not None else {},
            disk_update_bytes_per_s=self.disk_update_bytes_per_s,
            collective_s={
                Link.COLLECTIVE: self.collective_s or 0.0,
                Link.TENSOR_EXCHANGE: self.tensor_exchange_s or 0.0,
            },
            round_s=self.round_s or 0.0,
            chunk_s=self.chunk_s or 0.0,
            disk_bytes_per_core_s=self.disk_bytes_per_core_s,
            collective_bytes_per_core_s=self.collective_bytes_per_core_s,
            lockstep_ranks=max(map(len, together), default=1),
            states_numel_per_s=self.states_numel_per_s,
            update_flops_per_s=self.update_flops_per_s or (None if self.has_own_memory else self.compute_flops_per_s),
            device_flops_per_s=self.compute_flops_per_s,
        )

    def stage_send_s(self, nodes: int, mesh: Mesh, size: int) -> float:
        """Returns the seconds in which one rank of a pipeline stage sends so many bytes to a neighbouring stage.

        Stages send at the same time, and the ranks of a node that have a neighbour on another one share its network.

        Raises:
            ConfigError: the rate of a link between ranks is missing.
        """
        inside = False
        leaving: Counter[int] = Counter()
        for ranks in mesh.groups((Axis.STAGE,)):
            on = [rank // self.ranks_per_node for rank in ranks]
            for at, node in enumerate(on):
                neighbours = {on[other] for other in (at - 1, at + 1) if 0 <= other < len(on)}
                inside |= node in neighbours
                leaving[node] += bool(neighbours - {node})
        rates = [self._inside()] if inside else []
        if most := max(leaving.values(), default=0):
            rates.append(self._between(nodes) / most)
        return size / min(rates) + (self.collective_s or 0.0)

    def _exchange_bytes_per_s(self, nodes: int, groups: Collection[tuple[int, ...]]) -> float | None:
        """Bytes per second that one rank sends to the others of its group in an all-to-all, in the slowest group.

        Links inside a node and the network work at the same time.
        """
        slowest_s = 0.0  # seconds for one byte to each other member
        network: Counter[int] = Counter()  # such bytes that leave each node
        for group in groups:
            on_node = self._on_nodes(group)
            for node, members in on_node.items():
                if members > 1:
                    slowest_s = max(slowest_s, (members - 1) / self._inside())
                network[node] += members * (len(group) - members)
        if most := max(network.values(), default=0):
            slowest_s = max(slowest_s, most / self._between(nodes))
        return (max(map(len, groups)) - 1) / slowest_s if slowest_s else None

    def _ring_bytes_per_s(
        self, nodes: int, groups: Collection[tuple[int, ...]], inside_bytes_per_s: float | None = None
    ) -> float | None:
        """Bytes per second that one rank sends, if each group has its own ring and rings that leave a node share its network.

        None if no group has several ranks.

        Args:
            inside_bytes_per_s: rate within a node; None: that of all collectives.
        """
        rates = []
        leave: Counter[int] = Counter()  # by node, rings that leave it
        for group in groups:
            on_node = self._on_nodes(group)
            if any(members > 1 for members in on_node.values()):
                rates.append(inside_bytes_per_s or self._inside())
            if len(on_node) > 1:
                leave.update(on_node.keys())
        if leave:
            rates.append(self._between(nodes) / max(leave.values()))
        return min(rates, default=None)

    def _shared_bytes_per_s(self, nodes: int, holders: ModelSharding) -> dict[tuple[Axis, ...], float]:
        """`Hardware.shared_bytes_per_s`: rates of the rings of ranks that share flats, by axes."""
        classes = [holders.common, *holders.by_unit.values()]
        along = {sharing.axes for each in classes for sharing in (each.whole, each.parts, each.partial)}
        found = {axes: self._ring_bytes_per_s(nodes, holders.mesh.groups(axes)) for axes in along}
        return {axes: rate for axes, rate in found.items() if rate is not None}

    def _on_nodes(self, group: tuple[int, ...]) -> Counter[int]:
        """Returns the number of ranks of a group on each node."""
        return Counter(rank // self.ranks_per_node for rank in group)

    def _inside(self) -> float:
        return self._needed("intra_node_bytes_per_s", f"there are {self.ranks_per_node} ranks on a node")

    def _between(self, nodes: int) -> float:
        return self._needed("inter_node_bytes_per_s", f"there are {nodes} nodes")

    def seconds(self, work: UnitWork, dtype: str, calls: int = 1) -> float:
        """Returns the seconds of a unit's forward on one rank, without waits: those of its arithmetic, or on a GPU those in
        which the CPU launches its kernels if that takes longer.

        Args:
            calls: number of calls among which the work is divided.

        Raises:
            ConfigError: the file has no rate for the dtype.
        """
        return max(self._arithmetic_s(work, dtype), calls * self._launch_s(work))

    def launches_slowly(self, work: UnitWork, dtype: str, calls: int = 1) -> bool:
        """Whether a unit's kernels are launched for longer than they compute."""
        return calls * self._launch_s(work) > self._arithmetic_s(work, dtype)

    def _launch_s(self, work: UnitWork) -> float:
        return work.kernels * _LAUNCH_S if self.has_own_memory else 0.0

    def _arithmetic_s(self, work: UnitWork, dtype: str) -> float:
        flops_per_s = self.flops_per_s(dtype)
        if self.attention_flops_per_s is None or self.curved_numel_per_s is None:
            return work.flops / flops_per_s
        memory = self.device_memory_bytes_per_s or self.host_memory_bytes_per_s / self.ranks_per_node
        matrix, attention = self.compute_flops_per_s[dtype], self.attention_flops_per_s[dtype]
        return forward_s(work, matrix, attention, self.curved_numel_per_s[dtype], memory) / self.compute_efficiency

    def flops_per_s(self, dtype: str) -> float:
        """Returns the operations per second of one rank in training.

        Raises:
            ConfigError: the file has no rate for the dtype.
        """
        if dtype not in self.compute_flops_per_s:
            raise ConfigError(
                f"{self.source}: compute_flops_per_s has no {dtype}, which this config computes in; it has "
                f"{', '.join(self.compute_flops_per_s)}; set another trainer.precision in a copy of the config (16-mixed, "
                f"say), or add the rate to the hardware file"
            )
        return self.compute_flops_per_s[dtype] * self.compute_efficiency

    def _needed(self, field: str, reason: str) -> float:
        value: float | None = getattr(self, field)
        if value is None:
            raise ConfigError(f"{self.source}: {field} is missing, and {reason}; add it, or plan for fewer")
        return value


def _along(holders: ModelSharding | None, axis: Axis) -> tuple[tuple[int, ...], ...]:
    """Groups of ranks that differ only along an axis; empty if the axis has size 1."""
    return () if holders is None or axis not in holders.mesh.axes else holders.mesh.groups((axis,))


def forward_s(
    work: UnitWork,
    matrix_flops_per_s: float,
    attention_flops_per_s: float,
    curved_per_s: float,
    memory_bytes_per_s: float,
) -> float:
    """Returns the seconds of a unit's forward from the rates of its parts; a third of its forward and backward."""
    return (
        (work.flops - work.attention_flops) / matrix_flops_per_s
        + work.attention_flops / attention_flops_per_s
        + work.curved_numel / curved_per_s
        + work.moved_bytes / memory_bytes_per_s
    )
