"""Random states: seeded, derived, and restored."""

from __future__ import annotations

import random

import numpy as np
import torch

from lightning_ptm.memory.backend import backend_of
from lightning_ptm.runtime.tensors.random_states import derived, restored, seed

CPU = backend_of("cpu")


def draw() -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), float(np.random.rand())


def test_all_generators_follow_a_seed() -> None:
    with restored(CPU):
        seed(1, CPU)
        first = draw()
        assert draw() != first
        seed(1, CPU)
        assert draw() == first
        seed(2, CPU)
        assert all(one != other for one, other in zip(draw(), first, strict=True))


def test_derived_numbers_follow_from_torchs_state_and_a_number_and_change_neither() -> None:
    def drawn(number: int) -> tuple[float, float, float]:
        with derived(number, CPU):
            return draw()

    with restored(CPU):
        seed(1, CPU)
        one, other = drawn(1), drawn(2)
        assert drawn(1) == one and one[0] != other[0]
        outside = draw()
        assert drawn(1) != one
        seed(1, CPU)
        assert draw() == outside
