"""Matrix products of updates are counted, by dtype, wherever they are computed."""

from __future__ import annotations

import pytest
import torch

from lightning_ptm.update.trial.probe import probe
from lightning_ptm.update.trial.state_tensors import MatmulFlops


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_all_kinds_count(device: str, dtype: torch.dtype) -> None:
    left, right = torch.zeros(3, 4, dtype=dtype, device=device), torch.zeros(4, 5, dtype=dtype, device=device)
    total = torch.zeros(3, 5, dtype=dtype, device=device)
    with MatmulFlops() as counted:
        left @ right
        torch.addmm(total, left, right)
        total.addmm_(left, right)
        torch.bmm(left.expand(2, 3, 4), right.expand(2, 4, 5))
        total.mul_(2).add_(1)
    assert counted.flops == {dtype: (3 + 2) * 2 * 3 * 4 * 5}


def newton_schulz(rows: int, columns: int, steps: int = 5) -> int:
    """Operations of Muon's iteration: X X', its square, and their product with X."""
    small, large = sorted((rows, columns))
    return steps * (2 * small * small * large + 2 * small**3 + 2 * small * small * large)


def test_muon_multiplies_what_its_iteration_says() -> None:
    shapes = [(48, 80), (96, 32), (300, 300)]
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    (group,) = probe(torch.optim.Muon(parameters)).groups
    for shape in shapes:
        assert group.matmul_flops[shape] == {torch.bfloat16: newton_schulz(*shape)}


def test_an_optimizer_of_whole_parameters_need_not_multiply() -> None:
    parameter = torch.nn.Parameter(torch.zeros(40, 24))
    (group,) = probe(torch.optim.Adafactor([parameter])).groups
    # Its factors' outer product is a product of a column and a row.
    assert sum(group.matmul_flops[40, 24].values()) <= 2 * 40 * 24
