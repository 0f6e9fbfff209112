"""Ranks before a run has pages: this process's rank, its machine, and its process groups.

`SetUp` is the set-up in progress: it owns its barrier, and the checkpoint that Lightning loads before pages exist.
"""

from __future__ import annotations

import dataclasses
import datetime
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_ptm.checkpoints import module_states
from lightning_ptm.comm import (
    Communicator,
    ProcessGroupCommunicator,
    SetupBarrier,
    SoloCommunicator,
    raise_on_all_ranks,
)
from lightning_ptm.config import Settings
from lightning_ptm.errors import RankError
from lightning_ptm.events import Events
from lightning_ptm.memory.backend import Backend
from lightning_ptm.parallel.exchange import RankGroup
from lightning_ptm.planning.mesh import OTHER_LOSS, SAME_BATCH, Axis, GridAxis, GridShape, Mesh, mesh_of
from lightning_ptm.progress import Progress, Seen
from lightning_ptm.runtime.tensors.parts import Boxes
from lightning_ptm.torch_internals import TorchDispatchMode
from lightning_ptm.trainer import randomness
from lightning_ptm.trainer.device_mesh import MeshGroups, groups_of, last_groups
from lightning_ptm.trainer.same_batches import SameBatches
from lightning_ptm.trainer.same_settings import decisive, refuse_other_settings


@dataclasses.dataclass(frozen=True, slots=True)
class RankPlace:
    """Rank of this process, the number of ranks, and its device.

    Args:
        backend: of this rank's device.
        alone: whether this is the only rank, regardless of other process groups in the process.
        ranks_here: number of ranks on this machine.
        nodes: number of machines.
        timeout: how long a collective waits for the other ranks.
    """

    backend: Backend
    rank: int
    world_size: int
    alone: bool
    ranks_here: int
    nodes: int
    timeout: datetime.timedelta

    def communicator(self, events: Events) -> Communicator:
        """A new communicator of all ranks. Collective."""
        return SoloCommunicator() if self.alone else ProcessGroupCommunicator(self.backend, self.timeout, events)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class GridGroups:
    """Process groups along the axes of the grid of this rank's tensor group (`trainer.grid.GridStrategy`)."""

    shape: GridShape
    by_axis: Mapping[GridAxis, RankGroup]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RankGroups:
    """Process groups along axes of the mesh; none with a single rank.

    Args:
        made: all of them; None after a run with them has failed, so that the next run makes others.
        by_axis: groups that exchange activations.
        data: the ranks that compute other losses with the same slices; logged values are reduced over them. None: all ranks.
        batches: the ranks that compute other batches with the same slices; values of an evaluation, which computes whole
            batches, are reduced over them. None: `data`.
        same_batches: compares the batches of the ranks that compute the same.
        grid: groups that exchange activations in place of the tensor group; None without grid modes.
    """

    made: MeshGroups | None = None
    by_axis: Mapping[Axis, RankGroup] = dataclasses.field(default_factory=dict)
    data: ProcessGroup | None = None
    batches: ProcessGroup | None = None
    same_batches: SameBatches | None = None
    grid: GridGroups | None = None

    @property
    def tensor(self) -> RankGroup | None:
        """The ranks that compute the same batches with slices of parameters; None if parameters are whole."""
        return self.by_axis.get(Axis.TENSOR)

    @property
    def exchanging(self) -> tuple[RankGroup, ...]:
        """All groups that exchange activations, or compare what they compute."""
        return (*self.by_axis.values(), *(() if self.grid is None else self.grid.by_axis.values()))

    def partitions(self, mesh: Mesh) -> dict[Axis | GridAxis, tuple[tuple[int, ...], ...]]:
        """Returns all ranks in groups, by the axes along which they exchange activations."""
        if self.grid is not None:
            return {axis: self.grid.shape.groups(mesh, axis) for axis in self.grid.by_axis}
        return {axis: mesh.groups((axis,)) for axis in self.by_axis}

    def counted(self, group: Any, *, evaluates: bool = False) -> Any:
        """The group to reduce over: `data`, or `batches` in an evaluation, in place of all ranks, which is Lightning's
        default."""
        if group is not None and group is not torch.distributed.group.WORLD:
            return group
        return self.batches if evaluates and self.batches is not None else self.data

    def has_one_batch(self, group: ProcessGroup | None) -> bool:
        """Whether all ranks of a group compute the same, so that no reduction is needed."""
        return bool(group is not None and (group is self.data or group is self.batches) and group.size() == 1)


class SetUp:
    """A run that is being set up, from Lightning's `setup_environment` to the end of its `setup`."""

    def __init__(self, place: RankPlace) -> None:
        self._place = place
        # State.
        self._setup_barrier: SetupBarrier | None = None
        self.restored: module_states.DeferredState | None = None
        """State of a checkpoint that Lightning loaded before pages existed; `random_states` are from it, too."""
        self.random_states: Sequence[Any] = ()

    def compare(self, settings: Settings, precision: str) -> None:
        """Compares the settings of several ranks, before collectives that only some settings lead to. Collective.

        Raises:
            RankError: ranks have settings that would make them wait for each other, or a rank is gone.
        """
        self._compare(settings, precision, has_groups=False)

    def connect(self, settings: Settings, precision: str, known: MeshGroups | None) -> RankGroups:
        """Makes or reuses the process groups of several ranks. Collective.

        Args:
            known: the groups of an earlier run of the same strategy.

        Raises:
            RankError: as `compare`.
        """
        place = self._place
        mesh, device = mesh_of(settings, place.world_size), place.backend.device.type
        made = known or last_groups(mesh, device)
        all_have = self._compare(settings, precision, has_groups=made is not None)
        # Groups are reused between runs, unless one has failed on some rank.
        if made is None or not all_have:
            made = groups_of(mesh, device)
        axes = [axis for axis in mesh.axes if axis.exchanges]
        by_axis = {axis: RankGroup(made.along((axis,)), place.backend, axis) for axis in axes}
        shared = mesh.settings(SAME_BATCH)
        return self._with_same_batches(made, shared, by_axis) if shared else RankGroups(made)

    def _compare(self, settings: Settings, precision: str, *, has_groups: bool) -> bool:
        """Compares settings; returns whether all ranks have groups. All ranks call this first, with any settings."""
        place = self._place
        of_ranks: list[Any] = [None] * place.world_size
        try:
            torch.distributed.all_gather_object(of_ranks, (decisive(settings, precision), has_groups, uuid.uuid4().hex))
        except RuntimeError as error:
            first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise RankError(
                f"rank {place.rank} waited for the other ranks at the start of a run, and one did not arrive "
                f"({first_line}); look for the first error in the other ranks' output; after Ctrl-C, when Lightning "
                "ends the processes that it has started, start the script again"
            ) from error
        self._setup_barrier = SetupBarrier(of_ranks[0][2], place.rank, place.world_size)
        refuse_other_settings([words for words, _, _ in of_ranks])
        return all(has for _, has, _ in of_ranks)

    def _with_same_batches(self, made: MeshGroups, settings: str, by_axis: Mapping[Axis, RankGroup]) -> RankGroups:
        group, backend = made.along(SAME_BATCH), self._place.backend
        # Without a seed processes draw different numbers, but dropout must be the same where batches are.
        box = [randomness.as_message(randomness.states(backend))]
        torch.distributed.broadcast_object_list(box, group=group, group_src=0)
        randomness.restore(randomness.from_message(box[0]), backend)
        set_batch = next((each.computes for each in by_axis.values()), _no_exchanges)
        same_batches = SameBatches(group, settings, backend, set_batch)
        other_batches = [axis for axis in OTHER_LOSS if not axis.same_batch]
        return RankGroups(made, by_axis, made.along(OTHER_LOSS), made.along(other_batches), same_batches)

    def wait(self) -> None:
        """Waits for the other ranks before a collective of set-up.

        Raises:
            RankError: another rank has failed before it.
        """
        if self._setup_barrier is not None:
            self._setup_barrier.wait()

    @contextmanager
    def on_all_ranks(self) -> Iterator[None]:
        """Raises an exception of one rank on all ranks, before the run has a communicator. Collective."""
        self.wait()
        communicator = self._place.communicator(Events())
        try:
            with raise_on_all_ranks(communicator):
                yield
        finally:
            communicator.close()

    def load(
        self,
        module: LightningModule,
        checkpoint: Mapping[str, Any],
        boxes: Boxes,
        progress: Progress,
        *,
        strict: bool,
    ) -> None:
        """Loads a checkpoint into the module; `restored` has the rest, for the pages."""
        total_bytes = sum(each.nbytes for each in checkpoint["state_dict"].values() if isinstance(each, Tensor))
        with progress.bar("loading weights", total_bytes) as seen, CopiesSeen(seen):
            self.restored = module_states.load_before_pages(module, checkpoint["state_dict"], boxes, strict=strict)
        self.random_states = randomness.found(checkpoint)

    def check_restored(self, module: LightningModule, boxes: Boxes) -> None:
        """Checks the loaded state before pages are filled from it.

        Raises:
            UsageError: parameters without storage were written to meanwhile.
        """
        if self.restored is not None:
            self.restored.refuse_written(module)
            self.restored = self.restored.with_precise_values(module, boxes)

    def fail(self, reason: str) -> None:
        """Reports a failure to the other ranks, which raise at the barrier."""
        if self._setup_barrier is not None:
            self._setup_barrier.fail(reason)


def _no_exchanges(_batch: str) -> None:
    """Does nothing: pipeline stages exchange nothing whose errors would name the batch."""


class CopiesSeen(TorchDispatchMode):
    """Dispatch mode that passes the bytes written by each `copy_` to `seen`."""

    supports_higher_order_operators = True  # their inner copies are not counted

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            self._seen(args[0].nbytes)
        return result
