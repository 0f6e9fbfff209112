"""Sets of pages for gradients that come and go: one user each, and whoever finds none waits for one."""

from __future__ import annotations

import threading
from time import monotonic

import pytest
import torch

from lightning_ptm import CapacityError
from lightning_ptm.memory.paged_tensor import PagedTensor
from lightning_ptm.runtime.gradients import store as gradient_store
from lightning_ptm.runtime.gradients.store import GradientPages
from lightning_ptm.terms import Tier


def pages(number: int, numel: int = 8) -> PagedTensor:
    return PagedTensor(number, f"pages {number}", numel, torch.bfloat16, Tier.DEVICE)


def test_a_set_has_one_user() -> None:
    supply = GradientPages([pages(1), pages(2), pages(3, numel=4)])
    taken = {supply.take(8, torch.bfloat16).id for _ in range(2)}
    assert taken == {1, 2}
    assert supply.take(4, torch.bfloat16).id == 3


def test_a_flat_is_supplied_with_sets_of_its_size() -> None:
    every = GradientPages([pages(1), pages(2, numel=4)])
    supply = every.supply(4, torch.bfloat16)
    taken = supply.take()
    assert taken.id == 2
    supply.give_back(taken)
    assert every.take(4, torch.bfloat16) is taken


def test_taking_waits_until_another_thread_gives_back() -> None:
    waited: list[int] = []
    supply = GradientPages([pages(1)], lambda: waited.append(1))
    first = supply.take(8, torch.bfloat16)
    timer = threading.Timer(0.1, supply.give_back, [first])
    timer.start()
    assert supply.take(8, torch.bfloat16) is first
    assert waited
    timer.join()


def test_who_waits_for_a_set_sleeps_between_two_looks() -> None:
    looks: list[int] = []
    supply = GradientPages([pages(1)], lambda: looks.append(1))
    first = supply.take(8, torch.bfloat16)
    timer = threading.Timer(0.3, supply.give_back, [first])
    begun_s = monotonic()
    timer.start()
    assert supply.take(8, torch.bfloat16) is first
    assert len(looks) <= (monotonic() - begun_s) / gradient_store._LOOK_S + 2
    timer.join()


def test_an_error_of_the_updates_ends_the_wait() -> None:
    def fails() -> None:
        raise RuntimeError("the disk is gone")

    supply = GradientPages([], fails)
    with pytest.raises(RuntimeError, match="the disk is gone"):
        supply.take(8, torch.bfloat16)


def test_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_store, "_TIMEOUT_S", 0.05)
    with pytest.raises(CapacityError, match="or the disk hangs; use a faster disk_path"):
        GradientPages([]).take(8, torch.bfloat16)
