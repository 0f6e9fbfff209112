"""What a step leaves in its module: undone, and compared."""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from types import SimpleNamespace
from typing import Any

import lightning as L
import torch
from torch import nn

from lightning_ptm.trainer.module_state import left_in, same, undone


class Slotted:
    __slots__ = ("count", "mean")

    def __init__(self) -> None:
        self.count = 0


@dataclasses.dataclass
class Average:
    total: float = 0.0
    parts: list[float] = dataclasses.field(default_factory=list)
    state: torch.Tensor = dataclasses.field(default_factory=lambda: torch.zeros(2))


class Background:
    """Another thread may change it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.slotted = Slotted()
        self.average = Average()
        self.named = SimpleNamespace(count=0, next=self.average)
        self.background = Background()
        self.recent: deque[Any] = deque([Average()])
        self.pair = (torch.zeros(2), Slotted())
        self.average_of_self = self.average

    def change(self) -> None:
        self.slotted.count += 1
        self.slotted.mean = 2.0
        self.average.total += 1.0
        self.average.parts.append(1.0)
        self.average.state += 1
        self.named.count += 1
        self.named.more = 1
        self.recent[0].total = 5.0
        self.pair[0].add_(1)
        self.pair[1].count = 7
        self.background.count += 1


def test_objects_are_as_before() -> None:
    module = Module()
    before = left_in(module)
    with undone(module):
        module.change()
        changed = left_in(module)
    after = left_in(module)
    assert not hasattr(module.slotted, "mean") and not hasattr(module.named, "more")
    assert (module.slotted.count, module.named.count, module.pair[1].count) == (0, 0, 0)
    assert (module.average.total, module.average.parts, module.recent[0].total) == (0.0, [], 0.0)
    assert not module.average.state.any() and not module.pair[0].any()
    assert module.background.count == 1
    assert after.keys() == before.keys() and all(same(each, before[name]) for name, each in after.items())
    found = {name for name, each in changed.items() if not same(each, before.get(name))}
    assert {"slotted.count", "slotted.mean", "average.total", "average.parts", "average.state"} <= found
    assert {"named.count", "named.more"} <= found and not any(name.startswith("background") for name in found)


def test_integers_are_compared_exactly() -> None:
    module = Module()
    module.slotted.count = 10**9
    before = left_in(module)
    module.slotted.count += 1
    assert not same(left_in(module)["slotted.count"], before["slotted.count"])


def test_modules_may_be_left_out() -> None:
    module = Module()
    module.inner.calls = 3  # type: ignore[assignment]
    assert "inner.calls" in left_in(module) and "inner.calls" not in left_in(module, [module.inner])
