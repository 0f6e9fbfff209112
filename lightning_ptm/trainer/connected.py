"""What Lightning asks of any strategy: which rank this is, its plug-ins, how ranks are launched, collectives.

Knows no pages: what a run in progress changes in the answers is running.py's.
"""

from __future__ import annotations

import datetime
import uuid
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.data import _auto_add_worker_init_fn
from lightning.fabric.utilities.distributed import (
    _distributed_is_initialized,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import LightningModule
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from lightning_ptm.checkpoints.file_io import FileCheckpointIO
from lightning_ptm.comm import Communicator, ProcessGroupCommunicator, SetupBarrier, SoloCommunicator
from lightning_ptm.config import Settings
from lightning_ptm.errors import ConfigError, RankError, UsageError
from lightning_ptm.events import Events
from lightning_ptm.memory.backend import Backend, backend_of
from lightning_ptm.parallel.exchange import RankGroup
from lightning_ptm.trainer import randomness
from lightning_ptm.trainer.device_mesh import MeshOfOne, last_mesh, mesh_of
from lightning_ptm.trainer.other_front_ends import check_front_end, refuse_fabric
from lightning_ptm.trainer.precision import AngelPTMPrecision
from lightning_ptm.trainer.same_batches import SameBatches
from lightning_ptm.trainer.same_settings import decisive, refuse_other_settings

_LONGEST = datetime.timedelta(days=3650)
"""torch counts nanoseconds in 64 bits."""
_UNUSED = "this strategy is no Trainer's yet, so it has neither devices nor a module; give it to one, and call fit"


class ConnectedStrategy(ParallelStrategy):
    """Of several ranks as DDP, of one as a single device. Long because Lightning asks so much."""

    strategy_name = "angel_ptm"

    def __init__(self, *, settings: Settings, timeout: datetime.timedelta, **given: Any) -> None:
        if not isinstance(timeout, datetime.timedelta) or not datetime.timedelta(0) < timeout <= _LONGEST:
            raise ConfigError(
                f"timeout={timeout!r} is no time that ranks could wait for each other; write datetime.timedelta(minutes=30), "
                f"or whatever is above zero and at most {_LONGEST.days} days"
            )
        self.settings = settings
        self._connected: LightningModule | None = None
        super().__init__(**given)
        self.num_nodes = 1
        self._timeout = timeout
        self._device_mesh: DeviceMesh | None = None
        self._setup_barrier: SetupBarrier | None = None
        """While a run of several ranks is set up."""
        self._tensor_group: RankGroup | None = None
        """The ranks that compute the same batches with parts of parameters; None where they are whole."""
        self._data_group: ProcessGroup | None = None
        """The ranks that compute other batches with the same parts as this one: what is logged is theirs; None: all ranks."""
        self._same_batches: SameBatches | None = None

    @property
    @override
    def root_device(self) -> torch.device:
        if self.parallel_devices is None:
            raise UsageError(_UNUSED)
        return self.parallel_devices[self.local_rank]

    @property
    def _backend(self) -> Backend:
        """Of this rank's device. Whatever a run is made of is handed it; two of one device are equal."""
        return backend_of(self.root_device)

    @property
    def num_processes(self) -> int:
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def _has_ranks(self) -> bool:
        return self.num_nodes * self.num_processes > 1

    @property
    def is_distributed(self) -> bool:
        """Tells Lightning's connector to give each rank its own part of the data. Where all compute the same batches, as one
        rank, the user's own sampler stays: Lightning would put one that shuffles in its place, whatever the loader says."""
        return bool(self.distributed_sampler_kwargs["num_replicas"] > 1)

    # One rank is rank 0 whatever the cluster says of this process, as with one device.

    @property
    @override
    def global_rank(self) -> int:
        return super().global_rank if self._has_ranks else 0

    @property
    @override
    def local_rank(self) -> int:
        return super().local_rank if self._has_ranks else 0

    @property
    @override
    def node_rank(self) -> int:
        return super().node_rank if self._has_ranks else 0

    @property
    @override
    def world_size(self) -> int:
        return super().world_size if self._has_ranks else 1

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        size = self.settings.tensor_parallel_size
        return {"num_replicas": self.num_nodes * self.num_processes // size, "rank": self.global_rank // size}

    @property
    def device_mesh(self) -> DeviceMesh:
        """Of all ranks, by the names "data_parallel" and "tensor_parallel", as Lightning's ModelParallelStrategy has it;
        `LightningModule.device_mesh` is the same, from `configure_model` on.

        Raises:
            UsageError: there is none, of one rank or before any run was set up.
        """
        if self._device_mesh is None:
            raise UsageError("there is a device mesh in runs of several ranks, from their set-up on")
        return self._device_mesh

    @property
    @override
    def precision_plugin(self) -> AngelPTMPrecision:
        if not isinstance(self._precision_plugin, AngelPTMPrecision):
            self._precision_plugin = AngelPTMPrecision()
        return self._precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        # Lightning's connector assigns the plugin that it made from the precision string: ours takes its place here.
        # None must stay None: the connector takes any other for the user's choice and ignores the string.
        self._precision_plugin = None if precision_plugin is None else AngelPTMPrecision.replacing(precision_plugin)

    @property
    @override
    def accelerator(self) -> Accelerator | None:  # type: ignore[override, unused-ignore]
        return self._accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Accelerator | None) -> None:
        check_front_end(accelerator, self.strategy_name)  # the first thing that a Trainer gives
        self._accelerator = accelerator

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        # Made when it is asked for: one that is there from the start is taken for the user's, and plugins=[...] refused.
        if self._checkpoint_io is None:
            self._checkpoint_io = FileCheckpointIO()
        elif isinstance(self._checkpoint_io, _WrappingCheckpointIO):
            self._checkpoint_io.checkpoint_io = FileCheckpointIO()  # which one that has its own ignores
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @property
    def _precision(self) -> Any:
        refuse_fabric(self.strategy_name)  # which alone has such an attribute in its strategies

    @property
    def _lightning_module(self) -> LightningModule | None:
        return self._connected

    @_lightning_module.setter
    def _lightning_module(self, module: LightningModule | None) -> None:
        # Lightning assigns it before it refuses a compiled module for every strategy but three, without a remedy.
        if module is not None and module._compiler_ctx is not None:
            raise ConfigError(
                f"the {type(module).__name__} was compiled as a whole with torch.compile, so its training_step would be, "
                f"too, and weights are fetched in the middle of it; give the Trainer the module as it is, and compile its "
                f"parts in configure_model: `for block in self.blocks: block.compile()`, or "
                f"`self.model = torch.compile(self.model)`"
            )
        self._connected = module

    @property
    def _module(self) -> LightningModule:
        """What the Trainer trains, or evaluates."""
        if self.lightning_module is None:
            raise UsageError(_UNUSED)
        return self.lightning_module

    @override
    def _configure_launcher(self) -> None:
        ranks = self.num_processes * self.num_nodes
        # One rank is this process: as with one device, nothing is launched, and so a notebook will do.
        if not self._has_ranks:
            return
        assert self.cluster_environment is not None
        if self.cluster_environment.creates_processes_externally:
            return
        if _IS_INTERACTIVE:
            raise ConfigError(
                f"{ranks} ranks cannot be started from a notebook or an interactive Python: each is a process that runs the "
                f"same script again, and there is no script; use devices=1 here, or put the run into a script"
            )
        self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        size = self.settings.tensor_parallel_size
        ranks = self.num_nodes * self.num_processes
        if ranks % size:
            raise ConfigError(
                f"tensor_parallel_size={size} and {ranks} ranks (devices x num_nodes), which make no groups of {size}; use a "
                f"multiple of {size} ranks"
            )
        if not self._has_ranks:
            if self.lightning_module is not None:
                self.lightning_module._device_mesh = MeshOfOne()  # type: ignore[assignment]
            return  # a single device leaves the random numbers and the cluster as they are
        reset_seed()  # as DDP
        assert self.cluster_environment is not None
        self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.cluster_environment.global_rank()  # type: ignore[attr-defined]
        if not _distributed_is_initialized():
            _init_dist_connection(self.cluster_environment, self._backend.collectives, timeout=self._timeout)
        self._make_mesh()

    def _make_mesh(self) -> None:
        """Process groups of the ranks that differ along one axis; collective.

        Raises:
            RankError: ranks have settings by which they would wait for each other, or one is gone.
        """
        size = self.settings.tensor_parallel_size
        made_of = (self.world_size, size, self.root_device.type)
        mesh = self._device_mesh or last_mesh(*made_of)
        told: list[Any] = [None] * self.world_size
        ours = decisive(self.settings, str(self.precision_plugin.precision))
        try:
            torch.distributed.all_gather_object(told, (ours, mesh is not None, uuid.uuid4().hex))
        except RuntimeError as error:
            first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise RankError(
                f"rank {self.global_rank} begins a run, and another rank is gone, or does not come ({first_line}); at Ctrl-C "
                f"Lightning ends all processes that it has started: start the script again"
            ) from error
        self._setup_barrier = SetupBarrier(told[0][2], self.global_rank, self.world_size)
        refuse_other_settings([words for words, _, _ in told])
        # Groups are not made anew for each run, unless one has failed on some rank.
        if mesh is None or not all(has for _, has, _ in told):
            mesh = mesh_of(*made_of)
        self._device_mesh = mesh
        self._module._device_mesh = mesh
        if size == 1:
            return
        group = mesh["tensor_parallel"].get_group()
        self._tensor_group = RankGroup(group, self._backend)
        self._data_group = mesh["data_parallel"].get_group()
        self._same_batches = SameBatches(group, self._backend, self._tensor_group.computes)
        # Without a seed each process draws other numbers; of the ranks of a group, dropout needs the same.
        box = [randomness.sent(randomness.states(self._backend))]
        torch.distributed.broadcast_object_list(box, group=group, group_src=0)
        randomness.restore(randomness.received(box[0]), self._backend)

    def __getstate__(self) -> dict[str, Any]:
        # Process groups cannot be copied; a copy makes its own.
        groups = ("_setup_barrier", "_device_mesh", "_tensor_group", "_data_group", "_same_batches")
        return {**super().__getstate__(), **dict.fromkeys(groups)}

    def _make_communicator(self, events: Events) -> Communicator:
        if not self._has_ranks:
            return SoloCommunicator()
        self._await_others()
        return ProcessGroupCommunicator(self._backend, self._timeout, events)

    def _await_others(self) -> None:
        """In front of a collective of set-up.

        Raises:
            RankError: another rank has failed on its way to it.
        """
        if self._setup_barrier is not None:
            self._setup_barrier.wait()

    def _is_alone(self) -> bool:
        """Whether there is no other rank, or none that could be waited for."""
        # One rank is alone even where somebody else in its process is connected to others (`lightning-ptm probe`).
        return not self._has_ranks or not _distributed_is_initialized()

    @override
    def barrier(self, name: str | None = None) -> None:
        if self._is_alone():
            return
        self._await_others()
        if torch.distributed.get_backend() == "nccl":
            torch.distributed.barrier(device_ids=[self.root_device.index])
        else:
            torch.distributed.barrier()

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if self._is_alone():
            return obj
        box = [obj]
        torch.distributed.broadcast_object_list(box, src)
        return box[0]

    @override
    def reduce(self, tensor: Tensor | Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        group = self._counted(group)
        if not isinstance(tensor, Tensor) or self._is_alone() or self._has_one_batch(group):
            return tensor
        return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        # Of all ranks: those of a tensor group, too, have to do the same.
        votes = torch.tensor(int(decision), device=self.root_device)
        if not self._is_alone():
            votes = _sync_ddp_if_available(votes, reduce_op="sum")
        return bool(votes == self.world_size) if all else bool(votes)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        group = self._counted(group)
        if self._is_alone() or self._has_one_batch(group):
            return tensor
        return super().all_gather(tensor, group, sync_grads)

    def _counted(self, group: Any) -> Any:
        """The ranks with different batches in place of all ranks, which is what Lightning names where a user names none."""
        return self._data_group if group is None or group is torch.distributed.group.WORLD else group

    def _has_one_batch(self, group: ProcessGroup | None) -> bool:
        """Whether all ranks compute the same batch, so that what one has is what all have, as on one rank."""
        return bool(group is not None and group is self._data_group and group.size() == 1)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        # Before Lightning does it with this rank's number, by which workers would draw other numbers in a tensor group.
        _auto_add_worker_init_fn(dataloader, self.distributed_sampler_kwargs["rank"])
        return dataloader
