"""The fake device's library, loaded before torch, and torch with it.

`lib` has the library's own functions: `fc_races()` counts accesses that nothing has ordered, `fc_used()` bytes on the device.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib.util
import os
import sys
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
    loaded = ctypes.CDLL(str(library(private=NAME != "cuda")), mode=ctypes.RTLD_GLOBAL)
    for name in ("fc_used", "fc_peak", "fc_capacity", "fc_locked", "fc_free"):
        getattr(loaded, name).restype = ctypes.c_size_t
    for name in ("fc_races", "fc_accesses", "fc_deferred", "fc_waits", "fc_devices_used"):
        getattr(loaded, name).restype = ctypes.c_long
    for name in ("fc_clock_host", "fc_clock_others", "fc_clock_device"):
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


class _Uncounted:
    """A real device reports no accesses without order."""

    def fc_races(self) -> int:
        return 0


REAL = "FAKE_CUDA_REAL" in os.environ
"""Whether programs that are written for the fake device run on a real one."""
NAME = os.environ.get("FAKE_CUDA_NAME", "cuda")
"""Name of the device: CUDA's, or one that torch uses for a device that it does not know."""
SAME_KERNELS = not REAL
"""Whether the device computes with the kernels of the CPU, to the same bits."""
if REAL:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # what torch asks for in order to promise the same bits
lib: Any = _Uncounted() if REAL else _load()

import torch  # noqa: E402

# Before anything is replaced: their tables are made of torch.cuda's own functions.
import torch._dynamo  # noqa: E402
import torch.optim  # noqa: E402
import torch.testing  # noqa: E402

if NAME != "cuda":
    torch.utils.rename_privateuse1_backend(NAME)
if not REAL:
    lib.fc_start()
atexit.register(lib.fc_interpreter_ends)  # registered first, so it runs last


def _of_any_device(clone: Callable[..., Any]) -> Callable[..., Any]:
    """Storages are copied, for copy.deepcopy, to a device by its name, and a build for the CPU has no such storages."""

    def of(storage: Any) -> Any:
        if storage.device.type == "cpu":
            return clone(storage)
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).clone().untyped_storage()

    return of


torch.storage._StorageBase.clone = _of_any_device(torch.storage._StorageBase.clone)
