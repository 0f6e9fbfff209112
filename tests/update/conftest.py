"""Tests of the update."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def one_compute_thread() -> Iterator[None]:
    """Tiny tensors: a second thread only spins. Tests that want two say so."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
