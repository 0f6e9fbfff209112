"""Backends (backend.py) of devices that have memory and streams of their own: any accelerator of torch, and CUDA.

Owns nothing: a backend names a device. What every accelerator can do goes through `torch.accelerator`, `torch.Stream`,
`torch.Event` and the device's module (`torch.get_device_module`), whatever the device's name: `xpu`, or a name that an
out-of-tree library registers.

I1: what differs for CUDA (and for ROCm, which torch also calls cuda) is in `CudaBackend`; `torch.cuda` is named in this
    file only (a test checks it).
I2: the streams and events of a backend belong to one family. torch's generic events have treated streams of
    `torch.cuda` as streams of their own, and the other way round, so neither family is ever given objects of the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.distributed import get_default_backend_for_device

from lightning_ptm.errors import ConfigError
from lightning_ptm.memory.numa import cores_near, kept_to
from lightning_ptm.memory.region import DeviceRegion, HostRegion, PageLocks, Region, TorchLockedRegion

if TYPE_CHECKING:
    from lightning_ptm.memory.device_work import DeviceEvent, Stream


@dataclass(frozen=True, slots=True)
class _EventMark:
    backend: AcceleratorBackend
    event: torch.Event

    def done(self) -> bool:
        return self.event.query()

    def synchronize(self) -> None:
        self.event.synchronize()

    def order(self) -> None:
        self.backend._current().wait_event(self.event)

    def seconds_since(self, earlier: DeviceEvent) -> float:
        assert isinstance(earlier, _EventMark)
        return earlier.event.elapsed_time(self.event) / 1000.0


@dataclass(frozen=True, slots=True)
class _DeviceStream:
    backend: AcceleratorBackend
    stream: torch.Stream

    def follow(self, mark: DeviceEvent | None = None) -> None:
        if mark is None:
            self.stream.wait_stream(self.backend._current())
        else:
            assert isinstance(mark, _EventMark)
            self.stream.wait_event(mark.event)

    # torch.Stream is a context manager too, but a second thread cannot enter it while the first is inside.
    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        with torch.accelerator.device_index(self.stream.device_index):
            before = self.backend._current()
            torch.accelerator.set_stream(self.stream)
            try:
                yield
            finally:
                torch.accelerator.set_stream(before)

    def join(self) -> None:
        self.backend._current().wait_stream(self.stream)


@dataclass(frozen=True, slots=True)
class AcceleratorBackend:
    """A device of the accelerator that torch uses in this process.

    Args:
        device: the device; without an index, the device that is current at each call.
    """

    device: torch.device

    has_own_memory: ClassVar[bool] = True
    has_bytes: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return self.device.type

    @property
    def collectives(self) -> str:
        try:
            return get_default_backend_for_device(self.device)
        except ValueError as error:
            raise ConfigError(
                f"torch.distributed knows no library of collectives between {self.name} devices, so several ranks cannot "
                f"train on them; use devices=1, or import the library that registers one (Backend.register_backend)"
            ) from error

    # Generic streams and events of torch. CudaBackend replaces all three (I2).

    def _current(self) -> torch.Stream:
        return torch.accelerator.current_stream(self.device)

    def _new_stream(self) -> torch.Stream:
        return torch.Stream(self.device)

    def _new_event(self, timed: bool) -> torch.Event:
        return torch.Event(self.device, enable_timing=timed)

    def _module(self) -> Any:
        return torch.get_device_module(self.device)

    def make_current(self) -> None:
        if self.device.index is not None:
            torch.accelerator.set_device_index(self.device.index)

    def numa_cores(self) -> frozenset[int] | None:
        properties_of = getattr(self._module(), "get_device_properties", None)
        properties = None if properties_of is None else properties_of(self.device)
        address: list[Any] = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
        if None in address:
            return None
        return cores_near("{:04x}:{:02x}:{:02x}.0".format(*address))

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.device)

    def stream(self) -> Stream:
        return _DeviceStream(self, self._new_stream())

    def current_stream(self) -> Stream:
        return _DeviceStream(self, self._current())

    def mark(self, *, timed: bool = False) -> DeviceEvent:
        event = self._new_event(timed)
        event.record(self._current())
        return _EventMark(self, event)

    def record_use(self, tensor: torch.Tensor) -> None:
        if self.holds(tensor):
            tensor.record_stream(torch.accelerator.current_stream(tensor.device))

    def host_region(self, size_bytes: int, *, pin: bool) -> HostRegion:
        if not pin:
            return HostRegion(size_bytes)
        with kept_to(self.numa_cores()):  # page-locking commits the memory, on the NUMA node of the committing core
            return TorchLockedRegion(size_bytes)

    @property
    def page_locks(self) -> PageLocks | None:
        return None

    def empty_in_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)

    def device_region(self, size_bytes: int) -> Region:
        return DeviceRegion(size_bytes, self.device)

    def _empty_cache(self) -> None:
        empty_cache = getattr(self._module(), "empty_cache", None)
        if empty_cache is not None:
            empty_cache()

    def free_bytes(self) -> int:
        self._empty_cache()  # pages of an engine that has ended may be in torch's cache, which would count them as used
        free, _ = torch.accelerator.get_memory_info(self.device)
        return int(free)

    def bytes_outside_region(self, region_bytes: int) -> int:
        return torch.accelerator.memory_allocated(self.device) - region_bytes

    def begin_peak(self) -> None:
        self._empty_cache()
        self.next_peak()

    def next_peak(self) -> None:
        torch.accelerator.reset_peak_memory_stats(self.device)

    def peak_outside_region(self, region_bytes: int) -> int:
        allocated = torch.accelerator.max_memory_allocated(self.device) - region_bytes
        # Torch's blocks are rounded up and do not fill its segments. What it caches in addition while there is plenty of
        # memory, it frees when memory is short.
        unused = torch.accelerator.max_memory_reserved(self.device) - region_bytes - allocated
        return allocated + min(max(unused, 0), allocated // 8)

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self.device.type

    def random_state(self) -> torch.Tensor | None:
        state: torch.Tensor = self._module().get_rng_state(self.device)
        return state

    def set_random_state(self, state: torch.Tensor) -> None:
        self._module().set_rng_state(state.cpu(), self.device)

    def count(self) -> int:
        return torch.accelerator.device_count()

    def description(self) -> str:
        name_of = getattr(self._module(), "get_device_name", None)
        return f"a device of the kind {self.name}" if name_of is None else str(name_of(self.device))


class CudaBackend(AcceleratorBackend):
    """A CUDA device, or a ROCm device, which torch calls cuda as well."""

    __slots__ = ()

    def _current(self) -> torch.Stream:
        return torch.cuda.current_stream(self.device)

    def _new_stream(self) -> torch.Stream:
        return torch.cuda.Stream(self.device)

    def _new_event(self, timed: bool) -> torch.Event:
        # blocking=True: otherwise the host spins while it waits, on a core that the CPU optimizer needs. torch.Event
        # accepts `blocking` and ignores it (pytorch/pytorch, torch/csrc/Event.cpp).
        return torch.cuda.Event(enable_timing=timed, blocking=True)

    def host_region(self, size_bytes: int, *, pin: bool) -> HostRegion:
        if not pin:
            return HostRegion(size_bytes)
        with kept_to(self.numa_cores()):  # page-locking commits the memory, on the NUMA node of the committing core
            return HostRegion(size_bytes, lock=self)

    @property
    def page_locks(self) -> PageLocks | None:
        return self

    def lock_pages(self, address: int, size_bytes: int) -> None:
        """Page-locks memory for the CUDA contexts of all devices.

        The call goes through the context of the current device. A thread of ours must call `make_current` first,
        otherwise CUDA creates a context on the machine's first device.
        """
        status = torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0)
        self._check(status, f"page-lock {size_bytes} bytes")

    def unlock_pages(self, address: int) -> None:
        self._check(torch.cuda.cudart().cudaHostUnregister(address), "unlock host memory")

    def _check(self, status: object, doing: str) -> None:
        if int(status) == 0:  # type: ignore[call-overload]
            return
        # The CUDA runtime keeps the error and reports it at the next kernel launch. This launch takes the report and
        # clears it.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self.device)
        raise ConfigError(
            f"CUDA could not {doing} (error {status}); lower host_memory, or raise the limit of locked memory "
            "(ulimit -l)"
        )
