"""The fixtures of tests/ranks, whose modules, and those beside them, the ranks' processes import by name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

for folder in (Path(__file__).parents[2] / "ranks", Path(__file__).parents[1]):
    sys.path.insert(0, str(folder))


@pytest.fixture(autouse=True, scope="module")
def one_compute_thread() -> Iterator[None]:
    """As the ranks have: what is computed here is compared with theirs, bit for bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
