"""Fixtures of the folders whose tests compare with ranks; their conftest imports them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def one_compute_thread() -> Iterator[None]:
    """Limits compute to one thread, as in the ranks, whose results are compared with those here, bit for bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
