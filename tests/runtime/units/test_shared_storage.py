"""Which tensors of a module lie in the same memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_ptm.runtime.units.shared_storage import overlap


def holder(**tensors: Tensor) -> nn.Module:
    module = nn.Module()
    for name, each in tensors.items():
        module.register_parameter(name, each if isinstance(each, nn.Parameter) else nn.Parameter(each))
    return module


ROWS = torch.zeros(8, 4)


@pytest.mark.parametrize(
    ("build", "found"),
    [
        (lambda: holder(a=ROWS[:4], b=ROWS[4:]), None),
        (lambda: holder(a=ROWS[:5], b=ROWS[4:]), ("a", "b")),
        (lambda: holder(b=ROWS[4:], a=ROWS[:5]), ("a", "b")),
        (lambda: holder(a=ROWS, c=torch.zeros(2), b=ROWS[6:7]), ("a", "b")),
        (lambda: holder(a=ROWS.t(), b=ROWS[7:]), ("a", "b")),
        (lambda: holder(a=torch.empty(0), b=torch.empty(0)), None),
        (lambda: holder(a=torch.empty(4, device="meta"), b=torch.empty(4, device="meta")), None),
        (lambda: holder(a=(one := nn.Parameter(torch.zeros(3))), b=one), None),
    ],
)
def test_which_share_memory(build: Callable[[], nn.Module], found: tuple[str, str] | None) -> None:
    module = build()
    assert overlap(module, module.parameters()) == found
    assert overlap(module, ()) is None
