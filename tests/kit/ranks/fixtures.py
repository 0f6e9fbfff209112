"""Fixtures of the folders whose tests compare with ranks; their conftest imports them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def one_compute_thread() -> Iterator[None]:
    """As the ranks have: what is computed here is compared with theirs, bit for bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
