"""Generators of random numbers that a unit's forward may draw from, for its recomputation: all but torch's global ones, whose
states torch's checkpoint restores.

I1: a recomputed forward draws the numbers of the first one, and what is drawn afterwards is as if it had not drawn any.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Access = tuple[Callable[[], Any], Callable[[Any], None]]
"""Functions that return and set the state of a generator."""

_python: Any = None
"""State of Python's generator that was read last: 20 KB, and most forwards draw nothing from it."""


@torch.compiler.disable
def is_generator(value: Any) -> bool:
    """Whether an object is a generator of random numbers: of torch, of Python's `random`, or of NumPy."""
    return isinstance(value, (torch.Generator, random.Random)) or _kind_of_numpy(value) is not None


class RandomStreams:
    """States of generators before a call.

    Args:
        generators: those that the call may draw from, in addition to Python's and NumPy's global ones.
    """

    @torch.compiler.disable
    def __init__(self, generators: Iterable[Any]) -> None:
        accesses: list[Access] = [(_python_state, random.setstate)]
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            accesses.append((numpy.random.get_state, numpy.random.set_state))
        accesses += map(_access, {id(each): each for each in generators}.values())
        self._before = [(access, access[0]()) for access in accesses]

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Context in which the generators have the states before the call; afterwards, those that they have now."""
        now = _put(self._before)
        try:
            yield
        finally:
            _put(now)


@torch.compiler.disable
def _put(states: Iterable[tuple[Access, Any]]) -> list[tuple[Access, Any]]:
    """Sets states; returns those that generators had."""
    before = []
    for access, state in states:
        get, put = access
        before.append((access, get()))
        if not _equal(before[-1][1], state):
            put(state)
    return before


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return all(_equal(value, other[name]) for name, value in one.items())
    if isinstance(one, tuple) and one and isinstance(one[0], str):  # of NumPy: it has an array
        return all(map(_equal, one, other))
    found = one == other
    return bool(found) if isinstance(found, bool) else bool(found.all())


def _python_state() -> Any:
    global _python
    state = random.getstate()
    if state != _python:
        _python = state
    return _python


def _kind_of_numpy(value: Any) -> str | None:
    kind = type(value)
    found = kind.__name__ if str(kind.__module__).startswith("numpy.random") else None
    return found if found in ("Generator", "RandomState") else None


def _access(generator: Any) -> Access:
    kind = _kind_of_numpy(generator)
    if kind == "Generator":
        bits = generator.bit_generator
        return lambda: bits.state, lambda state: setattr(bits, "state", state)
    if kind == "RandomState":
        return generator.get_state, generator.set_state
    if isinstance(generator, random.Random):
        return generator.getstate, generator.setstate
    return generator.get_state, generator.set_state
