"""Lightning's accelerator of the fake device where its name is not CUDA's: `Trainer(accelerator=NAME)`."""

from __future__ import annotations

from typing import Any

import torch
from fake_library import NAME, lib
from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry


class FakeAccelerator(Accelerator):
    """The least that Lightning asks of one."""

    def setup_device(self, device: torch.device) -> None:
        torch.accelerator.set_device_index(device.index)

    def teardown(self) -> None: ...

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        return list(range(int(devices)))

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device(NAME, index) for index in devices]

    @staticmethod
    def auto_device_count() -> int:
        return int(lib.fc_devices())

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return NAME


if NAME != "cuda":
    AcceleratorRegistry.register(NAME, FakeAccelerator)
