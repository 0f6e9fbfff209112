"""Generators that a recomputed forward finds as the first one did."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lightning_ptm.runtime.autograd.random_streams import RandomStreams, is_generator

Draw = Callable[[Any], float]

GENERATORS: dict[str, tuple[Callable[[], Any], Draw]] = {
    "torch": (torch.Generator, lambda own: float(torch.rand((), generator=own))),
    "python": (lambda: random.Random(1), lambda own: own.random()),
    "numpy": (lambda: np.random.default_rng(1), lambda own: own.normal()),
    "numpy, legacy": (lambda: np.random.RandomState(1), lambda own: own.normal()),
    "global of python": (lambda: None, lambda _: random.gauss(0, 1)),
    "global of numpy": (lambda: None, lambda _: np.random.normal()),
}


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("drawn_before", [0, 1])
def test_numbers_come_again_and_the_next_ones_are_as_if_they_had_not(name: str, drawn_before: int) -> None:
    """A normal distribution draws two numbers at once, and keeps one."""
    make, draw = GENERATORS[name]
    own = make()
    assert own is None or is_generator(own)
    for _ in range(drawn_before):
        draw(own)
    streams = RandomStreams([] if own is None else [own, own])
    first = [draw(own) for _ in range(3)]
    later = draw(own)
    with streams.as_before():
        assert [draw(own) for _ in range(3)] == first
    with pytest.raises(KeyError), streams.as_before():  # a recomputation that ends early
        draw(own)
        raise KeyError
    after = draw(own)
    again = RandomStreams([] if own is None else [own])
    with streams.as_before():
        assert [draw(own) for _ in range(5)] == [*first, later, after]
    with again.as_before():
        assert draw(own) not in (*first, later, after)


@pytest.mark.parametrize("value", [None, 1, "numpy", torch.zeros(1), np.zeros(1), random, np.random, random.random])
def test_other_objects_are_none(value: Any) -> None:
    assert not is_generator(value)
