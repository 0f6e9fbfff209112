"""Makes `torch.cuda` the fake device. Imported before torch.

`lib` has the library's own functions: `fc_races()` counts accesses that nothing has ordered, `fc_used()` bytes on the device.
"""

from __future__ import annotations

import atexit
import ctypes
import dataclasses
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fake_build import library

if "torch" in sys.modules:
    raise ImportError("import fake_device before torch: the device is registered while torch is loaded")


def _load() -> Any:
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0]) / "lib"
    for name in ("libtorch_global_deps.so", "libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
    loaded = ctypes.CDLL(str(library()), mode=ctypes.RTLD_GLOBAL)
    for name in ("fc_used", "fc_peak", "fc_capacity", "fc_locked"):
        getattr(loaded, name).restype = ctypes.c_size_t
    for name in ("fc_races", "fc_accesses", "fc_deferred", "fc_waits", "fc_devices_used"):
        getattr(loaded, name).restype = ctypes.c_long
    for name in ("fc_clock_host", "fc_clock_device"):
        getattr(loaded, name).restype = ctypes.c_double
    loaded.fc_clock_waits.restype = ctypes.c_char_p
    loaded.fc_clock_come_to.argtypes = loaded.fc_clock_has_come.argtypes = [ctypes.c_double]
    for name, kind in (("thread", ctypes.c_ulong), ("what", ctypes.c_char_p), ("where", ctypes.c_char_p)):
        told = getattr(loaded, f"fc_wait_{name}")
        told.argtypes, told.restype = [ctypes.c_long], kind
    loaded.fc_host_register.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
    loaded.fc_host_unregister.argtypes = [ctypes.c_size_t]
    loaded.fc_host_access.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_char_p]
    return loaded


lib = _load()

import torch  # noqa: E402

# Before anything is replaced: their tables are made of torch.cuda's own functions.
import torch._dynamo  # noqa: E402
import torch.optim  # noqa: E402
import torch.testing  # noqa: E402

lib.fc_start()
atexit.register(lib.fc_interpreter_ends)  # registered first, so it runs last


def _index(device: Any = None) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return int(lib.fc_device()) if index is None else index


class Stream(torch.Stream):
    """As torch.cuda.Stream."""

    def __new__(cls, device: Any = None, priority: int = 0, **known: Any) -> Any:
        if known:
            return super().__new__(
                cls,
                stream_id=known["stream_id"],
                device_index=known["device_index"],
                device_type=known["device_type"],
            )
        return super().__new__(cls, torch.device("cuda", _index(device)), priority=0)

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    def record_event(self, event: Any = None) -> Any:
        event = event or Event()
        event.record(self)
        return event

    def wait_stream(self, other: Any) -> None:
        self.wait_event(other.record_event())

    def __repr__(self) -> str:
        return f"<fake cuda stream {self.device_index}:{self.stream_id}>"


class _IsEvent(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch.Event)


class Event(metaclass=_IsEvent):
    """As torch.cuda.Event."""

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> Any:
        return torch.Event(torch.device("cuda", lib.fc_device()), enable_timing=enable_timing, blocking=blocking)


def _current_stream(device: Any = None) -> Stream:
    found = torch._C._accelerator_getStream(_index(device))
    return Stream(stream_id=found.stream_id, device_index=found.device_index, device_type=found.device_type)


def _default_stream(device: Any = None) -> Stream:
    return Stream(stream_id=0, device_index=_index(device), device_type=1)


def _set_stream(stream: Any) -> None:
    if stream is not None:
        torch._C._accelerator_setStream(stream)


class StreamContext:
    """As torch.cuda.stream."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is None:
            return
        self._device = lib.fc_device()
        self._before = _current_stream()
        index = self.stream.device_index
        self._there = None if self._before.device_index == index else _current_stream(index)
        _set_stream(self.stream)
        lib.fc_set_device(index)

    def __exit__(self, *_: Any) -> None:
        if self.stream is None:
            return
        _set_stream(self._there)
        _set_stream(self._before)
        lib.fc_set_device(self._device)


class _Device:
    """As torch.cuda.device."""

    def __init__(self, device: Any) -> None:
        self.idx = -1 if device is None else _index(device)

    def __enter__(self) -> None:
        self._before = _exchange_device(self.idx)

    def __exit__(self, *_: Any) -> None:
        lib.fc_set_device(self._before)


def _exchange_device(index: int) -> int:
    before = int(lib.fc_device())
    if index >= 0:
        lib.fc_set_device(index)
    return before


class _Runtime:
    """As torch.cuda.cudart()."""

    class cudaError:
        success = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        return int(lib.fc_host_register(address, size))

    def cudaHostUnregister(self, address: int) -> int:
        return int(lib.fc_host_unregister(address))


class _Cache:
    """What the caching allocator would keep: the most that was used since it was emptied."""

    def __init__(self) -> None:
        self._kept = 0

    def reserved(self) -> int:
        self._kept = max(self._kept, lib.fc_used())
        return self._kept

    def empty(self) -> None:
        self._kept = lib.fc_used()


_cache = _Cache()


def _stats(device: Any = None) -> dict[str, int]:
    used, peak = lib.fc_used(), lib.fc_peak()
    return {
        "allocated_bytes.all.current": used,
        "allocated_bytes.all.peak": peak,
        "reserved_bytes.all.current": used,
        "reserved_bytes.all.peak": peak,
        "num_alloc_retries": 0,
        "num_ooms": 0,
    }


_MEMORY: dict[str, Any] = {
    "mem_get_info": lambda device=None: (lib.fc_capacity() - _cache.reserved(), lib.fc_capacity()),
    "memory_allocated": lambda device=None: lib.fc_used(),
    "max_memory_allocated": lambda device=None: lib.fc_peak(),
    "memory_reserved": lambda device=None: lib.fc_used(),
    "max_memory_reserved": lambda device=None: lib.fc_peak(),
    "reset_peak_memory_stats": lambda device=None: lib.fc_reset_peak(),
    "memory_stats": _stats,
    "empty_cache": _cache.empty,
}
_RANDOM: dict[str, Any] = {
    "current_device": lambda: int(lib.fc_device()),
    "device_count": lib.fc_devices,
    "_lazy_init": lambda: None,
    "_lazy_call": lambda call, **_: call(),
    "is_initialized": lambda: True,
}
_CUDA: dict[str, Any] = {
    **_MEMORY,
    **_RANDOM,
    "is_available": lambda: True,
    "_is_compiled": lambda: True,
    "init": lambda: None,
    "set_device": lambda device: lib.fc_set_device(_index(device)),
    "device": _Device,
    "_exchange_device": _exchange_device,
    "_maybe_exchange_device": _exchange_device,
    "get_device_name": lambda device=None: "Fake CUDA",
    "get_device_capability": lambda device=None: (8, 0),
    "get_device_properties": lambda device=None: types.SimpleNamespace(
        name="Fake CUDA", total_memory=lib.fc_capacity(), major=8, minor=0, multi_processor_count=1
    ),
    "ipc_collect": lambda: None,
    "synchronize": lambda device=None: torch._C._accelerator_synchronizeDevice(_index(device)),
    "Stream": Stream,
    "Event": Event,
    "current_stream": _current_stream,
    "default_stream": _default_stream,
    "set_stream": _set_stream,
    "stream": StreamContext,
    "StreamContext": StreamContext,
    "cudart": _Runtime,
    "_sleep": lambda cycles: None,
    "is_bf16_supported": lambda including_emulation=True: True,
    "is_current_stream_capturing": lambda: False,
    "memory_summary": lambda *_, **__: "",
    "_CudaDeviceProperties": types.SimpleNamespace,
    "default_generators": tuple(torch.Generator(device=f"cuda:{index}") for index in range(lib.fc_devices())),
    # Else checkpointing does not keep the device's random numbers.
    "_initialized": True,
}
for _module, _names in ((torch.cuda, _CUDA), (torch.cuda.memory, _MEMORY), (torch.cuda.random, _RANDOM)):
    for _name, _value in _names.items():
        if _module is torch.cuda or hasattr(_module, _name):
            setattr(_module, _name, _value)


def _of_any_device(clone: Callable[..., Any]) -> Callable[..., Any]:
    """Storages are copied, for copy.deepcopy, to a device by its name, and a build for the CPU has no such storages."""

    def of(storage: Any) -> Any:
        if storage.device.type == "cpu":
            return clone(storage)
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).clone().untyped_storage()

    return of


torch.storage._StorageBase.clone = _of_any_device(torch.storage._StorageBase.clone)
torch._C._cuda_getDeviceCount = lib.fc_devices
torch._C._cuda_getCurrentRawStream = lambda index: torch._C._accelerator_getStream(index).stream_id
torch.backends.cuda.is_built = lambda: True


@dataclasses.dataclass(frozen=True)
class HostWait:
    """The host has waited for the device: in which thread, for what, and on which lines."""

    thread: int
    what: str
    where: str


def host_waits(since: int = 0) -> list[HostWait]:
    """All waits of the host for the device from the number `since` on, whether or not there was anything to wait for."""
    return [
        HostWait(lib.fc_wait_thread(at), lib.fc_wait_what(at).decode(), lib.fc_wait_where(at).decode())
        for at in range(since, lib.fc_waits())
    ]


def watch_files() -> None:
    """Tells the race detector what files read and write of page-locked memory, which no operator does."""
    from lightning_ptm.memory import disk

    def tell(buffer: memoryview, *, writes: bool, what: bytes) -> None:
        if len(buffer) and not buffer.readonly:
            address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
            lib.fc_host_access(address, len(buffer), int(writes), what)

    def preadv(self: Any, file: int, buffers: Any, offset: int) -> int:
        for buffer in buffers:
            tell(buffer, writes=True, what=b"preadv")
        return os.preadv(file, buffers, offset)

    def pwritev(self: Any, file: int, buffers: Any, offset: int) -> int:
        for buffer in buffers:
            tell(buffer, writes=False, what=b"pwritev")
        return os.pwritev(file, buffers, offset)

    disk.FileOps.preadv, disk.FileOps.pwritev = preadv, pwritev  # type: ignore[method-assign]


def watch_update_thread(elements_per_s: float) -> None:
    """Gives the thread that updates a time of its own (FAKE_CUDA_CLOCK), which it and others come to where one waits for the
    other.

    Args:
        elements_per_s: of its arithmetic.
    """
    from lightning_ptm.memory.transfer import StreamTransfer
    from lightning_ptm.update.arithmetic import Arithmetic
    from lightning_ptm.update.job import JobHandle
    from lightning_ptm.update.stats import Wait
    from lightning_ptm.update.updater import _GRADIENT_WATCH_S, Updater

    work, command, arithmetic, look = Updater._work, Updater._command, Arithmetic.update, Updater._wait_or_command
    mark_done, done, block = JobHandle.mark_done, JobHandle.done, JobHandle.block
    transfer_done, transfer_wait = StreamTransfer.done, StreamTransfer.wait
    ended_s: dict[JobHandle, float] = {}

    def in_own_time(self: Any, cores: Any) -> None:
        lib.fc_clock_own(1)
        try:
            work(self, cores)
        finally:
            lib.fc_clock_own(0)

    def told(self: Any, what: Any) -> None:
        told_s = lib.fc_clock_host()
        command(self, lambda: (lib.fc_clock_come_to(told_s), what()))

    def looks(self: Any, blocker: Any) -> None:
        looked_s = lib.fc_clock_host()
        look(self, blocker)
        if blocker.cause is Wait.GRADIENT:
            lib.fc_clock_come_to(looked_s + _GRADIENT_WATCH_S)

    def takes_time(self: Any, progress: Any, start: int, numel: int, *args: Any, **known: Any) -> None:
        arithmetic(self, progress, start, numel, *args, **known)
        lib.fc_clock_come_to(lib.fc_clock_host() + numel / elements_per_s)

    def ended(self: Any) -> None:
        ended_s[self] = lib.fc_clock_host()
        mark_done(self)

    def is_done(self: Any) -> bool:
        return done(self) and bool(lib.fc_clock_has_come(ended_s[self]))

    def blocks(self: Any, timeout_s: float | None = None) -> bool:
        has_ended = block(self, timeout_s)
        if has_ended:
            lib.fc_clock_come_to(ended_s[self])
        return has_ended

    # Whoever looks first ends a transfer for all, at a time that is not that of others.
    def has_landed(self: Any) -> bool:
        return transfer_done(self) and self._completion.done()

    def lands(self: Any, host: bool = True) -> None:
        if host:
            self._completion.synchronize()
        transfer_wait(self, host)

    Updater._work, Updater._command, Arithmetic.update = in_own_time, told, takes_time  # type: ignore[method-assign]
    Updater._wait_or_command = looks  # type: ignore[method-assign]
    JobHandle.mark_done, JobHandle.done, JobHandle.block = ended, is_done, blocks  # type: ignore[method-assign]
    StreamTransfer.done, StreamTransfer.wait = has_landed, lands  # type: ignore[method-assign]
