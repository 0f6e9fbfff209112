"""The device that a run computes on: all that differs between kinds of devices, asked here and nowhere else.

Owns nothing: a backend names a device. A run's is made once, by the strategy from its root device; the engine, the
allocator (and through it the updater), the communicator and the blueprint's request are handed it. Commands make
theirs of this machine (`backend_here`).

I1: who asks what kind a device is asks here (a test). Devices apart from the host are accelerators.py's, whatever their name.
I2: a CPU takes the paths of a device, with stand-ins: its work has ended when the call returns, so that every stream is the
    current one, every mark is reached, and every wait is over.
"""

from __future__ import annotations

import contextlib
import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from time import perf_counter
from typing import ClassVar, Protocol

import torch

from lightning_ptm.errors import ConfigError
from lightning_ptm.memory.accelerators import AcceleratorBackend, CudaBackend
from lightning_ptm.memory.malloc import malloc_in_use_bytes
from lightning_ptm.memory.region import HostRegion, Region

_CUDA = "cuda"
"""What torch calls devices of CUDA and of ROCm."""


class Mark(Protocol):
    """A place in the queue of a stream, which the device comes to when it has done what was queued before."""

    def done(self) -> bool:
        """Whether it has come there; never blocks."""

    def synchronize(self) -> None:
        """Block this thread until it has."""

    def order(self) -> None:
        """Make this thread's current stream, not this thread, wait until it has."""

    def seconds_since(self, earlier: Mark) -> float:
        """From `earlier`, by the device's clock; both timed and done."""


class Stream(Protocol):
    """A queue of work beside the current stream of a thread. What is queued there uses memory that its caller keeps."""

    def follow(self, mark: Mark | None = None) -> None:
        """What is queued from now on starts behind `mark`, or behind all that this thread's current stream has queued."""

    def entered(self) -> AbstractContextManager[object]:
        """Inside, it is this thread's current stream."""

    def join(self) -> None:
        """This thread's current stream waits for all that has been queued here."""


class Backend(Protocol):
    """A device, and what can be asked of it. Safe for threads."""

    apart: ClassVar[bool]
    """The device has memory of its own and computes beside the host; else its memory is RAM."""

    @property
    def name(self) -> str:
        """Of the kind of device: in device strings, Lightning's accelerators, hardware files and checkpoints."""

    @property
    def collectives(self) -> str:
        """Name of the library that carries collectives between such devices, for torch.distributed.

        Raises:
            ConfigError: none is registered.
        """

    @property
    def device(self) -> torch.device: ...

    # Threads and streams.

    def make_current(self) -> None:
        """Make it this thread's device. A thread begins with the machine's first one, whatever its rank's is."""

    def synchronize(self) -> None:
        """Block until the device has done all that was queued."""

    def stream(self) -> Stream:
        """A new stream."""

    def current_stream(self) -> Stream:
        """This thread's current one; equal to another that stands for the same queue."""

    def mark(self, *, timed: bool = False) -> Mark:
        """The place that this thread's current stream has come to."""

    def used_here(self, tensor: torch.Tensor) -> None:
        """This thread's current stream uses a tensor that another one may have made: its memory is not handed out again
        before what is queued now has run."""

    def near_cores(self) -> frozenset[int] | None:
        """CPU cores beside the device, where this thread runs on others, too (memory/numa.py); None: all alike."""

    # Memory.

    def host_region(self, size_bytes: int, *, pin: bool) -> HostRegion:
        """RAM; page-locked, if `pin`, where the device copies from and to it by itself, and then near it. Raises as
        HostRegion does."""

    def room_in_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """RAM for a tensor's elements, where the device copies to it by itself: page-locked, and PyTorch's, which uses it
        again behind copies that are under way."""

    def device_region(self, size_bytes: int) -> Region:
        """Memory of the device.

        Raises:
            CapacityError, ConfigError: there is no room.
        """

    def free_bytes(self) -> int:
        """Memory of its own that is free now; 0 where it has none."""

    def bytes_beside(self, region_bytes: int) -> int:
        """Bytes of tensors beside a device region of so many bytes."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on such a device."""

    # Random numbers.

    def random_state(self) -> torch.Tensor | None:
        """Of its own generator; None: it draws from the CPU's."""

    def set_random_state(self, state: torch.Tensor) -> None: ...

    # This machine.

    def count(self) -> int:
        """Devices of this kind here."""

    def description(self) -> str:
        """For people."""


@dataclass(frozen=True, slots=True)
class CurrentStream:
    """The stand-in for a stream: what is queued keeps the order of the thread's current stream."""

    def follow(self, mark: Mark | None = None) -> None:
        if mark is not None:
            mark.order()

    def entered(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def join(self) -> None: ...


_CURRENT_STREAM = CurrentStream()


@dataclass(frozen=True, slots=True)
class _Reached:
    at_s: float

    def done(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def order(self) -> None: ...

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, _Reached)
        return self.at_s - earlier.at_s


@dataclass(frozen=True, slots=True)
class CpuBackend:
    """The host itself: the device tier is RAM."""

    name: ClassVar[str] = "cpu"
    apart: ClassVar[bool] = False
    collectives: ClassVar[str] = "gloo"

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def make_current(self) -> None: ...

    def near_cores(self) -> frozenset[int] | None:
        return None

    def synchronize(self) -> None: ...

    def stream(self) -> Stream:
        return CurrentStream()

    def current_stream(self) -> Stream:
        return _CURRENT_STREAM

    def mark(self, *, timed: bool = False) -> Mark:
        return _Reached(perf_counter())

    def used_here(self, tensor: torch.Tensor) -> None: ...

    def host_region(self, size_bytes: int, *, pin: bool) -> HostRegion:
        return HostRegion(size_bytes)

    def room_in_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype)

    def device_region(self, size_bytes: int) -> Region:
        return HostRegion(size_bytes)

    def free_bytes(self) -> int:
        return 0

    def bytes_beside(self, region_bytes: int) -> int:
        return malloc_in_use_bytes()  # which regions are no part of: they are mapped

    def holds(self, tensor: torch.Tensor) -> bool:
        return in_ram(tensor)

    def random_state(self) -> torch.Tensor | None:
        return None

    def set_random_state(self, state: torch.Tensor) -> None: ...

    def count(self) -> int:
        return 1

    def description(self) -> str:
        return f"{os.cpu_count()} CPU cores"


def backend_of(device: torch.device | str) -> Backend:
    """The backend of a device.

    Raises:
        ConfigError: torch computes on no such devices in this process, or they have no streams.
    """
    device = torch.device(device)
    if device.type == CpuBackend.name:
        return CpuBackend()
    there = torch.accelerator.current_accelerator()
    if there is None or there.type != device.type:
        kinds = CpuBackend.name if there is None else f"{CpuBackend.name} and {there.type}"
        raise ConfigError(
            f"pages cannot live on {device.type} devices, only on {kinds}, on which torch computes in this process; choose "
            f"one of these, or import the library that gives torch such devices"
        )
    if not _has_streams(device):
        raise ConfigError(
            f"pages cannot live on {device.type} devices: torch has no streams there, on which copies go beside compute; use "
            f"accelerator={CpuBackend.name!r}"
        )
    return _accelerated(device)


def backend_here(index: int | None = None) -> Backend:
    """What this machine computes on: its accelerator's device of that number, if there is one with streams, else its CPU.

    Args:
        index: None: the thread's current one.
    """
    there = torch.accelerator.current_accelerator(check_available=True)
    if there is None or not _has_streams(there):
        return CpuBackend()
    return _accelerated(there if index is None else torch.device(there.type, index))


def _accelerated(device: torch.device) -> AcceleratorBackend:
    return CudaBackend(device) if device.type == _CUDA else AcceleratorBackend(device)


def _has_streams(device: torch.device) -> bool:
    return device.type == _CUDA or _makes_streams(device.type)


@cache
def _makes_streams(kind: str) -> bool:
    """By trying, since torch has no question for it: where there are none it raises, or a new one is the old one (MPS)."""
    try:
        new = torch.Stream(kind)
        torch.Event(kind).record(new)
        return bool(new != torch.accelerator.current_stream())
    except (RuntimeError, ValueError):  # NotImplementedError is one
        return False


def apart(name: str) -> bool:
    """Whether devices of a kind, which this machine need not have, have memory of their own.

    Raises:
        ConfigError: torch knows no such kind.
    """
    try:
        return torch.device(f"{name}:0").type != CpuBackend.name
    except RuntimeError as error:
        raise ConfigError(f"torch knows no devices of the kind {name!r} ({error})") from error


def in_ram(tensor: torch.Tensor) -> bool:
    """Whether the host can read a tensor without asking a device for it."""
    return tensor.device.type == CpuBackend.name
