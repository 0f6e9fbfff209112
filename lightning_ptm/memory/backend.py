"""The device that a run computes on: all that differs between kinds of devices, asked here and nowhere else.

Owns nothing: a backend names a device. A run's is made once, by the strategy from its root device; the engine, the
allocator (and through it the updater), the communicator and the blueprint's request are handed it. Commands make
theirs of this machine (`backend_here`).

I1: `torch.cuda` is named in this file only (a test). A new kind of device is one more class, and a row of `KINDS`.
I2: a CPU takes the paths of a device, with stand-ins: its work has ended when the call returns, so that every stream is the
    current one, every mark is reached, and every wait is over.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from time import perf_counter
from typing import ClassVar, Protocol

import torch

from lightning_ptm.errors import ConfigError
from lightning_ptm.memory.malloc import malloc_in_use_bytes
from lightning_ptm.memory.region import DeviceRegion, HostRegion, Region


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

    name: ClassVar[str]
    """Of the kind of device: in device strings, Lightning's accelerators, hardware files and checkpoints."""
    apart: ClassVar[bool]
    """The device has memory of its own and computes beside the host; else its memory is RAM."""
    collectives: ClassVar[str]
    """Name of the library that carries collectives between such devices, for torch.distributed."""

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

    # Memory.

    def host_region(self, size_bytes: int, *, pin: bool) -> HostRegion:
        """RAM; page-locked, if `pin`, where the device copies from and to it by itself. Raises as HostRegion does."""

    def in_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor's elements in RAM, contiguous where they are copied; the host waits for them, and for what the current
        stream has queued before. What they are copied through is page-locked, and PyTorch's, which uses it again."""

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

    @classmethod
    def count(cls) -> int:
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

    def synchronize(self) -> None: ...

    def stream(self) -> Stream:
        return CurrentStream()

    def current_stream(self) -> Stream:
        return CurrentStream()

    def mark(self, *, timed: bool = False) -> Mark:
        return _Reached(perf_counter())

    def used_here(self, tensor: torch.Tensor) -> None: ...

    def host_region(self, size_bytes: int, *, pin: bool) -> HostRegion:
        return HostRegion(size_bytes)

    def in_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

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

    @classmethod
    def count(cls) -> int:
        return 1

    def description(self) -> str:
        return f"{os.cpu_count()} CPU cores"


@dataclass(frozen=True, slots=True)
class _CudaMark:
    device: torch.device
    event: torch.cuda.Event

    def done(self) -> bool:
        return self.event.query()

    def synchronize(self) -> None:
        self.event.synchronize()

    def order(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.event)

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, _CudaMark)
        return earlier.event.elapsed_time(self.event) / 1000.0


@dataclass(frozen=True, slots=True)
class _CudaStream:
    device: torch.device
    stream: torch.cuda.Stream

    def follow(self, mark: Mark | None = None) -> None:
        if mark is None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        else:
            assert isinstance(mark, _CudaMark)
            self.stream.wait_event(mark.event)

    def entered(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.stream)

    def join(self) -> None:
        torch.cuda.current_stream(self.device).wait_stream(self.stream)


@dataclass(frozen=True, slots=True)
class CudaBackend:
    """A CUDA device.

    Args:
        device: without an index it is whatever is current where it is used.
    """

    device: torch.device

    name: ClassVar[str] = "cuda"
    apart: ClassVar[bool] = True
    collectives: ClassVar[str] = "nccl"

    def make_current(self) -> None:
        if self.device.index is not None:
            torch.cuda.set_device(self.device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def stream(self) -> Stream:
        return _CudaStream(self.device, torch.cuda.Stream(self.device))

    def current_stream(self) -> Stream:
        return _CudaStream(self.device, torch.cuda.current_stream(self.device))

    def mark(self, *, timed: bool = False) -> Mark:
        # Blocking: else the host spins while it waits, on a core that the CPU's updates need.
        event = torch.cuda.Event(enable_timing=timed, blocking=True)
        event.record(torch.cuda.current_stream(self.device))
        return _CudaMark(self.device, event)

    def used_here(self, tensor: torch.Tensor) -> None:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))

    def host_region(self, size_bytes: int, *, pin: bool) -> HostRegion:
        return HostRegion(size_bytes, lock=self if pin else None)

    def lock_pages(self, address: int, size_bytes: int) -> None:
        """For the contexts of all devices, and through that of the current one: a thread of its own comes to `make_current`
        first, or it makes a context on the machine's first device."""
        status = torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0)
        self._check(status, f"page-lock {size_bytes} bytes")

    def unlock_pages(self, address: int) -> None:
        self._check(torch.cuda.cudart().cudaHostUnregister(address), "unlock host memory")

    def _check(self, status: object, doing: str) -> None:
        if int(status) == 0:  # type: ignore[call-overload]
            return
        # The runtime keeps the error for whoever asks next, which is the launch of any kernel. This one asks, and clears it.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self.device)
        raise ConfigError(
            f"CUDA could not {doing} (error {status}); lower host_memory, or raise the limit of locked memory "
            "(ulimit -l)"
        )

    def in_host(self, tensor: torch.Tensor) -> torch.Tensor:
        if in_ram(tensor):
            return tensor
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)

    def device_region(self, size_bytes: int) -> Region:
        return DeviceRegion(size_bytes, self.device)

    def free_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.device)
        return int(free)

    def bytes_beside(self, region_bytes: int) -> int:
        return torch.cuda.memory_allocated(self.device) - region_bytes

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda

    def random_state(self) -> torch.Tensor | None:
        return torch.cuda.get_rng_state(self.device)

    def set_random_state(self, state: torch.Tensor) -> None:
        torch.cuda.set_rng_state(state.cpu(), self.device)

    @classmethod
    def count(cls) -> int:
        return torch.cuda.device_count()

    def description(self) -> str:
        return torch.cuda.get_device_name(self.device)


KINDS: Mapping[str, type[Backend]] = {each.name: each for each in (CpuBackend, CudaBackend)}
"""Every kind of device, by name."""


def backend_of(device: torch.device | str) -> Backend:
    """The backend of a device.

    Raises:
        ConfigError: no kind of ours.
    """
    device = torch.device(device)
    match device.type:
        case CpuBackend.name:
            return CpuBackend()
        case CudaBackend.name:
            return CudaBackend(device)
        case other:
            raise ConfigError(
                f"pages cannot live on {other} devices, only on {' and '.join(KINDS)}; choose one of these"
            )


def backend_here(index: int | None = None) -> Backend:
    """What this machine computes on: its CUDA device of that number, if it has any, else its CPU.

    Args:
        index: None: the thread's current one.
    """
    if not torch.cuda.is_available():
        return CpuBackend()
    return CudaBackend(torch.device(CudaBackend.name) if index is None else torch.device(CudaBackend.name, index))


def in_ram(tensor: torch.Tensor) -> bool:
    """Whether the host can read a tensor without asking a device for it."""
    return tensor.device.type == CpuBackend.name
