"""Answers of a blueprint."""

from __future__ import annotations

import torch
from decided_by_hand import Net, decided

from lightning_ptm.terms import Tier

D, H, K = Tier.DEVICE, Tier.HOST, Tier.DISK
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def test_which_updates_are_late() -> None:
    module = Net(2)
    module.blocks[1].requires_grad_(False)
    in_ram, on_disk = decided(module), decided(module, disk_path="/d", offload_optimizer="disk")
    lock_free = decided(module, disk_path="/d", lock_free=True)
    for unit, trained in enumerate((True, True, False)):
        assert not in_ram.updates_late(unit, has_own_memory=False)
        assert {each.updates_late(unit, has_own_memory=False) for each in (on_disk, lock_free)} == {trained}
        assert in_ram.updates_late(unit, has_own_memory=True) is trained
