"""Makes the fake device one of a library that torch has not heard of: `FAKE_CUDA_NAME=other` is `device="other"`, with the
module `torch.other` that torch asks of such a library, Lightning's accelerator of that name, and collectives.

What the module lacks is what such a library need not have: streams and events are torch's own.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from fake_library import NAME, lib


def _index(device: Any = None) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return int(lib.fc_device()) if index is None else index


def _generator(device: Any) -> torch.Generator:
    return _GENERATORS[_index(device)]


_GENERATORS = [torch.Generator(device=f"{NAME}:{index}") for index in range(lib.fc_devices())]


class _Module(types.ModuleType):
    """Module of the device type, with what torch requires of it: autocast, checkpointing and seeds."""

    _initialized = True  # else checkpointing does not keep the device's random numbers

    class device:
        def __init__(self, device: Any) -> None:
            self._there = _index(device)

        def __enter__(self) -> None:
            self._before = int(lib.fc_device())
            lib.fc_set_device(self._there)

        def __exit__(self, *_: Any) -> None:
            lib.fc_set_device(self._before)

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def is_initialized() -> bool:
        return True

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def device_count() -> int:
        return int(lib.fc_devices())

    @staticmethod
    def current_device() -> int:
        return int(lib.fc_device())

    @staticmethod
    def set_device(device: Any) -> None:
        lib.fc_set_device(_index(device))

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    @staticmethod
    def get_rng_state(device: Any = None) -> torch.Tensor:
        return _generator(device).get_state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        _generator(device).set_state(state)

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        for generator in _GENERATORS:
            generator.manual_seed(seed)

    manual_seed = manual_seed_all


torch._register_device_module(NAME, _Module(f"torch.{NAME}"))
torch.utils.generate_methods_for_privateuse1_backend()
