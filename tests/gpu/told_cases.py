"""How programs that go through cases on the fake device do so: a line for each, and no access without order."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import fake_device  # before torch
import torch

from lightning_ptm.runtime.autograd import offload


def prepare(least_bytes: int) -> None:
    """This process; smaller activations stay on the device."""
    fake_device.watch_files()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    offload.LEAST_BYTES = least_bytes


@contextmanager
def in_order() -> Iterator[None]:
    """Fails behind an access that no wait has ordered."""
    before = fake_device.lib.fc_races()
    yield
    races = fake_device.lib.fc_races() - before
    assert not races, f"{races} accesses that no wait has ordered behind an earlier one"


def go_through(cases: Iterable[tuple[str, str, Callable[[], None]]]) -> None:
    """Prints `NAME: ok` or `NAME: failed`, with what the case is and why, for each name, description and check."""
    for name, what, check in cases:
        try:
            check()
            print(f"{name}: ok", flush=True)
        except Exception:
            print(f"{name}: failed\n{what}\n{traceback.format_exc()}", flush=True)
