"""Random states of this process: saving, restoring, and seeding for a part of a step.

Covers the generators of torch, of the device, of Python and of NumPy, if it was imported. Owns nothing.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import torch

from lightning_ptm.memory.backend import Backend


def seed(number: int, backend: Backend) -> None:
    """Seeds all generators."""
    torch.default_generator.manual_seed(number)
    if backend.random_state() is not None:
        backend.set_random_state(torch.Generator(backend.device).manual_seed(number).get_state())
    random.seed(number)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(number % (1 << 32))


@contextmanager
def restored(backend: Backend) -> Iterator[None]:
    """Context that restores the states of all generators at its end."""
    of_torch, of_device, of_python = torch.get_rng_state(), backend.random_state(), random.getstate()
    numpy: Any = sys.modules.get("numpy")
    of_numpy = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(of_torch)
        if of_device is not None:
            backend.set_random_state(of_device)
        random.setstate(of_python)
        if numpy is not None and of_numpy is not None:
            numpy.random.set_state(of_numpy)


@contextmanager
def derived(number: int, backend: Backend) -> Iterator[None]:
    """Context with random numbers derived from torch's state and `number`; restores all states at its end."""
    state = blake2b(torch.get_rng_state().numpy().data, digest_size=6, salt=number.to_bytes(16, "little"))
    with restored(backend):
        seed(int.from_bytes(state.digest(), "little"), backend)
        yield
