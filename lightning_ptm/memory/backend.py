"""The device that a run computes on: every difference between kinds of devices is behind the protocol `Backend`.

Owns nothing: a backend names a device. The strategy makes one for a run, from its root device, and passes it to the
engine, the allocator (and through it the updater), the communicator and the planner's request. Commands make one for
this machine (`backend_here`).

I1: code that depends on the kind of device is here and in accelerators.py only (a test checks it). Devices with memory
    of their own are in accelerators.py, whatever their name.
I2: a CPU takes the same code path as a device, with stand-ins. Its work has ended when a call returns, so every stream
    is the current stream, every mark is reached and every wait returns at once.
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
from lightning_ptm.memory.device_work import DeviceEvent, Stream
from lightning_ptm.memory.malloc import malloc_in_use_bytes
from lightning_ptm.memory.region import HostRegion, PageLocks, Region

_CUDA = "cuda"
"""torch's name for CUDA and ROCm devices."""


class Backend(Protocol):
    """A device and its operations. Safe for threads."""

    has_own_memory: ClassVar[bool]
    """Whether the device has memory of its own and computes concurrently with the host; otherwise its memory is RAM."""
    has_bytes: ClassVar[bool]
    """Whether memory holds values; False in a virtual run (virtual_backend.py), which has no disk either."""

    @property
    def name(self) -> str:
        """Kind of device, as in device strings, Lightning's accelerators, hardware files and checkpoints."""

    @property
    def collectives(self) -> str:
        """Name of the torch.distributed backend for collectives between such devices.

        Raises:
            ConfigError: none is registered.
        """

    @property
    def device(self) -> torch.device: ...

    # Threads and streams.

    def make_current(self) -> None:
        """Makes it this thread's device. A new thread starts with the machine's first device."""

    def synchronize(self) -> None:
        """Blocks until the device has done everything queued on it."""

    def stream(self) -> Stream:
        """Returns a new stream."""

    def current_stream(self) -> Stream:
        """Returns this thread's current stream; equal to other objects that stand for the same queue."""

    def mark(self, *, timed: bool = False) -> DeviceEvent:
        """Returns the present position in this thread's current stream."""

    def record_use(self, tensor: torch.Tensor) -> None:
        """Records this thread's current stream as a user of a tensor that another stream may have allocated.

        The tensor's memory is not handed out again before the work queued so far has run (`Tensor.record_stream`).
        """

    def numa_cores(self) -> frozenset[int] | None:
        """Returns the CPU cores on the device's NUMA node if this thread may run on others too (numa.py), else None."""

    # Memory.

    def host_region(self, size_bytes: int, *, pin: bool) -> HostRegion:
        """Returns RAM. With `pin`, page-locked and on the device's NUMA node, if the device copies by DMA.

        Raises as HostRegion.
        """

    @property
    def page_locks(self) -> PageLocks | None:
        """Page-locks RAM that is mapped already; None if the device needs no locks, or its driver locks its own only."""

    def empty_in_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor in RAM of the same shape and dtype, as target of asynchronous copies from the device.

        It is page-locked memory of PyTorch's host allocator, which reuses it only after copies in flight have ended.
        """

    def device_region(self, size_bytes: int) -> Region:
        """Returns memory of the device.

        Raises:
            CapacityError, ConfigError: there is no room.
        """

    def free_bytes(self) -> int:
        """Returns the free bytes of the device's own memory, after torch has given back what it caches; 0 if its memory
        is RAM."""

    def bytes_outside_region(self, region_bytes: int) -> int:
        """Returns the bytes of tensors allocated outside a device region of `region_bytes` bytes."""

    def begin_peak(self) -> None:
        """Begins a new peak of the bytes that torch allocates on a device with its own memory, without what it caches."""

    def next_peak(self) -> None:
        """Begins a new peak as `begin_peak` does, within a step: what torch caches stays."""

    def peak_outside_region(self, region_bytes: int) -> int:
        """Returns the peak of the bytes outside a device region of `region_bytes` bytes since `begin_peak`, with an eighth
        more at most where torch's allocator has reserved more than it gave out; 0 if the device's memory is RAM."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on a device of this kind."""

    # Random numbers.

    def random_state(self) -> torch.Tensor | None:
        """Returns the state of the device's random generator; None if the device draws from the CPU's generator."""

    def set_random_state(self, state: torch.Tensor) -> None: ...

    # This machine.

    def count(self) -> int:
        """Returns the number of devices of this kind on this machine."""

    def description(self) -> str:
        """Returns a description of the device for logs and reports."""


@dataclass(frozen=True, slots=True)
class CurrentStream:
    """Stand-in for a stream: work keeps the order of the thread's current stream."""

    def follow(self, mark: DeviceEvent | None = None) -> None:
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

    def seconds_since(self, earlier: DeviceEvent) -> float:
        assert isinstance(earlier, _Reached)
        return self.at_s - earlier.at_s


@dataclass(frozen=True, slots=True)
class CpuBackend:
    """The host itself as compute device: the device tier is RAM."""

    name: ClassVar[str] = "cpu"
    has_own_memory: ClassVar[bool] = False
    has_bytes: ClassVar[bool] = True
    collectives: ClassVar[str] = "gloo"

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def make_current(self) -> None: ...

    def numa_cores(self) -> frozenset[int] | None:
        return None

    def synchronize(self) -> None: ...

    def stream(self) -> Stream:
        return CurrentStream()

    def current_stream(self) -> Stream:
        return _CURRENT_STREAM

    def mark(self, *, timed: bool = False) -> DeviceEvent:
        return _Reached(perf_counter())

    def record_use(self, tensor: torch.Tensor) -> None: ...

    def host_region(self, size_bytes: int, *, pin: bool) -> HostRegion:
        return HostRegion(size_bytes)

    @property
    def page_locks(self) -> PageLocks | None:
        return None

    def empty_in_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype)

    def device_region(self, size_bytes: int) -> Region:
        return HostRegion(size_bytes)

    def free_bytes(self) -> int:
        return 0

    def bytes_outside_region(self, region_bytes: int) -> int:
        return malloc_in_use_bytes()  # does not count regions, which are mapped and not malloc'ed

    def begin_peak(self) -> None: ...

    def next_peak(self) -> None: ...

    def peak_outside_region(self, region_bytes: int) -> int:
        return 0

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
    """Returns the backend of a device.

    Raises:
        ConfigError: torch does not compute on such devices in this process, or they have no streams.
    """
    device = torch.device(device)
    if device.type == CpuBackend.name:
        return CpuBackend()
    there = torch.accelerator.current_accelerator()
    if there is None or there.type != device.type:
        kinds = CpuBackend.name if there is None else f"{CpuBackend.name} and {there.type}"
        raise ConfigError(
            f"pages cannot be on {device.type} devices: torch computes on {kinds} in this process; choose one of these, or "
            f"import the library that registers {device.type} devices with torch"
        )
    if not _has_streams(device):
        raise ConfigError(
            f"pages cannot be on {device.type} devices: torch has no streams for them, so copies cannot overlap with "
            f"compute; use accelerator={CpuBackend.name!r}"
        )
    return _accelerated(device)


def backend_here(index: int | None = None) -> Backend:
    """Returns the backend of this machine: its accelerator if there is one with streams, else its CPU.

    Args:
        index: index of the accelerator's device; None: the thread's current device.
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
    """Whether devices of a kind have streams, found by making one, since torch has no query for it.

    Without streams torch raises, or returns the current stream as a new one (MPS).
    """
    try:
        new = torch.Stream(kind)
        torch.Event(kind).record(new)
        return bool(new != torch.accelerator.current_stream())
    except (RuntimeError, ValueError):  # NotImplementedError is one
        return False


def device_has_own_memory(name: str) -> bool:
    """Whether devices of a kind have memory of their own. This machine need not have such a device.

    Raises:
        ConfigError: torch knows no such kind.
    """
    try:
        return torch.device(f"{name}:0").type != CpuBackend.name
    except RuntimeError as error:
        raise ConfigError(f"torch knows no devices of the kind {name!r} ({error})") from error


def in_ram(tensor: torch.Tensor) -> bool:
    """Whether a tensor is in RAM, so that the host can read it directly."""
    return tensor.device.type == CpuBackend.name
