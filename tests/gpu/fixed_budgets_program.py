"""Simulated seconds of a step with `device_memory="auto"` and with fixed numbers of bytes, on the fake device with its clock:
`python fixed_budgets_program.py SEQUENCES CLIP` (CLIP: a number or `none`) prints a JSON object with those of "auto" and,
by KiB, those of BUDGETS numbers from the least to the largest with which steps find room."""

from __future__ import annotations

import itertools
import json
import sys
from statistics import median
from typing import Any

import fake_device  # before torch
import lightning as L
import torch
from unused_memory_program import fit

from lightning_ptm.errors import CapacityError
from lightning_ptm.terms import Tier

PAGE = 64 << 10
BUDGETS = 20
ELEMENTS_PER_S = 3.3e6
"""Elements that the CPU updates a second: those of the model in the time of compute with three sequences."""
TRIES = 7
"""Sizes of device memory that the search for the largest accepted one tries."""


class Seconds(L.Callback):
    """Simulated seconds of each step, and device memory of pages in it."""

    def __init__(self) -> None:
        self.steps_s: list[float] = []
        self.pool_bytes: list[int] = []

    def now_s(self) -> float:
        return max(fake_device.lib.fc_clock_host(), fake_device.lib.fc_clock_device(0))

    def on_train_batch_start(self, *_: Any) -> None:
        self.began_s = self.now_s()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.steps_s.append(self.now_s() - self.began_s)
        self.pool_bytes.append(trainer.strategy.engine.blueprint.pool_bytes[Tier.DEVICE])  # type: ignore[attr-defined]


def timed(sequences: int, clip: float | None, **settings: Any) -> Seconds:
    seconds = Seconds()
    fit(seconds, sequences, clip, **settings)
    return seconds


def step_s(seconds: Seconds) -> float:
    """The median of the steps after the second."""
    return median(seconds.steps_s[2:])


def main(sequences: int, clip: float | None) -> None:
    fake_device.watch_update_thread(ELEMENTS_PER_S)
    auto = timed(sequences, clip)
    found: dict[int, float] = {}

    def accepted(pages: int) -> bool:
        if pages not in found:
            try:
                found[pages] = step_s(timed(sequences, clip, device_memory=pages * PAGE))
            except (CapacityError, torch.OutOfMemoryError):
                return False
        return True

    least, largest, refused = (
        auto.pool_bytes[0] // PAGE,
        auto.pool_bytes[-1] // PAGE,
        fake_device.lib.fc_capacity() // PAGE,
    )
    accepted(largest)
    for _ in range(TRIES):
        middle = (largest + refused) // 2
        if accepted(middle):
            largest = middle
        else:
            refused = middle
    # Of those between the least and the largest, the last was measured in the search.
    even = BUDGETS - len(found)
    for at in range(even):
        accepted(least + (largest - least) * at // even)
    while len(found) < BUDGETS:  # some had been measured before
        known = sorted(found)
        _, low, high = max((high - low, low, high) for low, high in itertools.pairwise(known))
        if not accepted((low + high) // 2):
            raise SystemExit(f"{low + high >> 1} pages are refused between accepted numbers: {known}")
    fixed = {pages * PAGE >> 10: found[pages] for pages in sorted(found)}
    print(json.dumps({"auto": step_s(auto), "auto_kib": auto.pool_bytes[-1] >> 10, "fixed": fixed}))


if __name__ == "__main__":
    main(int(sys.argv[1]), None if sys.argv[2] == "none" else float(sys.argv[2]))
