"""Ranks of a strategy, of the Trainer's and of Fabric's: the rank and device of this process, how the other processes are
started and connected, barriers and broadcasts.

A single rank is rank 0 whatever the cluster environment says; no process is launched, and barriers return at once, as with a
single device.
"""

from __future__ import annotations

import datetime
import sys
from typing import Any

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities import rank_zero_only

from lightning_ptm.errors import ConfigError, UsageError
from lightning_ptm.memory.backend import Backend, backend_of
from lightning_ptm.trainer.internals import ScriptLauncher, connect_ranks


class LaunchedRanks:
    """Mixin for a strategy, before Lightning's ParallelStrategy."""

    cluster_environment: ClusterEnvironment | None
    parallel_devices: list[torch.device] | None
    num_nodes: int
    _timeout: datetime.timedelta
    _unused: str
    """Why it has no devices, and what to do."""

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        if self.parallel_devices is None:
            raise UsageError(self._unused)
        return self.parallel_devices[self.local_rank]

    @property
    def _backend(self) -> Backend:
        """The backend of this rank's device. Backends of the same device are equal."""
        return backend_of(self.root_device)

    @property
    def num_processes(self) -> int:
        """Ranks of this machine."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def _ranks(self) -> int:
        return self.num_nodes * self.num_processes

    @property
    def _has_ranks(self) -> bool:
        return self._ranks > 1

    @property
    def _environment(self) -> ClusterEnvironment | None:
        """The cluster, if it has a say in this process's rank."""
        return self.cluster_environment if self._has_ranks else None

    @property
    def global_rank(self) -> int:
        """This process's rank among all."""
        return 0 if self._environment is None else self._environment.global_rank()

    @property
    def local_rank(self) -> int:
        """This process's rank among those of its machine."""
        return 0 if self._environment is None else self._environment.local_rank()

    @property
    def node_rank(self) -> int:
        """The number of this machine."""
        return 0 if self._environment is None else self._environment.node_rank()

    @property
    def world_size(self) -> int:
        """The number of ranks that the cluster knows of."""
        return 1 if self._environment is None else self._environment.world_size()

    def _configure_launcher(self) -> None:
        # A single rank is this process: as with a single device, nothing is launched, so it works in a notebook.
        if self._environment is None:
            return
        if self._environment.creates_processes_externally:
            self._environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
            return
        if hasattr(sys, "ps1") or sys.flags.interactive:
            raise ConfigError(
                f"{self._ranks} ranks cannot be started from a notebook or an interactive Python: each is a process that "
                f"runs the same script again, and there is no script; use devices=1 here, or put the run into a script"
            )
        self._launcher = ScriptLauncher(self._environment, self.num_processes, self.num_nodes)

    def _number_ranks(self) -> None:
        """Tells the cluster, and what logs on rank 0 only, which rank this is."""
        if self._environment is not None:
            self._environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self._environment.set_world_size(self._ranks)
            rank_zero_only.rank = self._environment.global_rank()  # type: ignore[attr-defined]

    def _connect(self) -> None:
        """Numbers the ranks, and connects them unless they are connected already. Collective."""
        self._number_ranks()
        if self._environment is not None and not torch.distributed.is_initialized():
            connect_ranks(self._environment, self._backend.collectives, timeout=self._timeout)

    def _is_alone(self) -> bool:
        """Returns whether there are no other ranks, or none that can be waited for."""
        # A single rank is alone even if other code in its process is connected to ranks (`lightning-ptm probe`).
        return not self._has_ranks or not torch.distributed.is_initialized()

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Waits for all ranks."""
        if self._is_alone():
            return
        if torch.distributed.get_backend() == "nccl":
            torch.distributed.barrier(device_ids=[self.root_device.index])
        else:
            torch.distributed.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Returns the object of rank `src`. Collective."""
        if self._is_alone():
            return obj
        box = [obj]
        torch.distributed.broadcast_object_list(box, src)
        return box[0]
