"""Makes `torch.cuda` the fake device."""

from __future__ import annotations

import types
from typing import Any

import torch
from fake_library import lib


def _index(device: Any = None) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return int(lib.fc_device()) if index is None else index


class Stream(torch.Stream):
    """Stand-in of torch.cuda.Stream."""

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
    """Stand-in of torch.cuda.Event."""

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
    """Stand-in of torch.cuda.stream."""

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
    """Stand-in of torch.cuda.device."""

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
    """Stand-in of torch.cuda.cudart()."""

    class cudaError:
        success = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        return int(lib.fc_host_register(address, size))

    def cudaHostUnregister(self, address: int) -> int:
        return int(lib.fc_host_unregister(address))


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
    "mem_get_info": lambda device=None: (lib.fc_free(), lib.fc_capacity()),
    "memory_allocated": lambda device=None: lib.fc_used(),
    "max_memory_allocated": lambda device=None: lib.fc_peak(),
    "memory_reserved": lambda device=None: lib.fc_used(),
    "max_memory_reserved": lambda device=None: lib.fc_peak(),
    "reset_peak_memory_stats": lambda device=None: lib.fc_reset_peak(),
    "memory_stats": _stats,
    "empty_cache": lib.fc_empty_cache,
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


torch._C._cuda_getDeviceCount = lib.fc_devices
torch._C._cuda_getCurrentRawStream = lambda index: torch._C._accelerator_getStream(index).stream_id
torch.backends.cuda.is_built = lambda: True
