"""Additions to sums in RAM: once, when their bytes have come, in whatever thread."""

from __future__ import annotations

import threading

import pytest
import torch

from lightning_ptm.memory.backend import CpuBackend
from lightning_ptm.runtime.gradients.store import Addition, HostAccumulator


class Arriving:
    """The end of a copy, by hand: what arrives is seven."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value
        self.waits = 0
        self.there = threading.Event()

    def arrive(self) -> None:
        self.value.fill_(7.0)
        self.there.set()

    def done(self) -> bool:
        return self.there.is_set()

    def synchronize(self) -> None:
        self.waits += 1
        if not self.there.wait(10):
            raise TimeoutError

    def order(self) -> None:
        raise AssertionError("the CPU adds")

    def seconds(self) -> float:
        raise NotImplementedError

    def timer(self) -> None:
        raise NotImplementedError


@pytest.fixture
def value() -> torch.Tensor:
    return torch.zeros(3, dtype=torch.bfloat16)


@pytest.mark.parametrize("adds", [True, False])
def test_it_is_added_once_when_it_has_come(value: torch.Tensor, adds: bool) -> None:
    sum_, arriving = torch.ones(3), Arriving(value)
    addition = Addition(arriving, value, sum_, adds=adds)
    assert not addition.done()
    assert sum_.tolist() == [1.0] * 3
    arriving.arrive()
    for _ in range(2):
        assert addition.done()
        addition.wait()
    assert sum_.tolist() == [8.0 if adds else 7.0] * 3


def test_who_waits_gets_it(value: torch.Tensor) -> None:
    sum_, arriving = torch.ones(3), Arriving(value)
    addition = Addition(arriving, value, sum_, adds=True)
    waiting = [threading.Thread(target=addition.wait) for _ in range(4)]
    for thread in waiting:
        thread.start()
    arriving.arrive()
    for thread in waiting:
        thread.join()
    assert sum_.tolist() == [8.0] * 3
    assert arriving.waits == 1


def test_a_sum_of_wider_elements_rounds_nothing() -> None:
    """A step of 2 ** -12 beside 1 is lost in 16 bits."""
    sum_, part = torch.ones(5), torch.full((5,), 2.0**-12, dtype=torch.bfloat16)
    in_ram = HostAccumulator(CpuBackend())
    for _ in range(3):
        in_ram.start(part, sum_, adds=True).wait()
    assert sum_.tolist() == [1 + 3 * 2.0**-12] * 5
