"""Operators that refuse mixed dtypes: under mixed precision fp32 features beside 16-bit parameters compute in fp32, as the
features alone would make them elsewhere. The oracle casts the 16-bit parameters by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from kit.fits import quiet_trainer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_ptm.trainer.mixed_operators import promote_operators

SIZE = (4, 8, 8)
FIRST = torch.zeros(1, dtype=torch.long)


def tokens(count: int) -> list[Tensor]:
    return list(torch.randn(count, *SIZE, generator=torch.Generator().manual_seed(1)))


OPERATORS: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "layer_norm": (lambda x, w, b: functional.layer_norm(x, (8,), w, b), [(8,), (8,)]),
    "group_norm": (lambda x, w, b: functional.group_norm(x, 2, w, b), [(8,), (8,)]),
    "instance_norm": (lambda x, w, b: functional.instance_norm(x, weight=w, bias=b), [(8,), (8,)]),
    "bilinear": (lambda x, w, b: functional.bilinear(x, x, w, b), [(3, 8, 8), (3,)]),
    "mv": (lambda x, w, b: torch.mv(x[0], w) + b, [(8,), (8,)]),
    "addmv": (lambda x, w, b: torch.addmv(b, x[0], w), [(8,), (8,)]),
    "dot": (lambda x, w, b: torch.dot(x[0, 0], w) + torch.vdot(x[0, 1], b), [(8,), (8,)]),
    "addr": (lambda x, w, b: torch.addr(x[0], x[0, 0], w) + b, [(8,), (8,)]),
    "inner": (lambda x, w, b: torch.inner(x, w) + b.sum(), [(8,), (8,)]),
    "tensordot": (lambda x, w, b: torch.tensordot(x, w, 1) + b.float(), [(8, 8), (8,)]),
    "cross": (lambda x, w, b: torch.linalg.cross(x[..., :3], w) + b, [(1, 1, 3), (3,)]),
    "index_put": (lambda x, w, b: x.index_put((FIRST,), w) + b, [(1, 8, 8), (8,)]),
    "index_put_": (lambda x, w, b: x.clone().index_put_((FIRST,), w) + b, [(1, 8, 8), (8,)]),
    "index_add": (lambda x, w, b: x.index_add(0, FIRST, w) + b, [(1, 8, 8), (8,)]),
    "index_reduce": (lambda x, w, b: x.index_reduce(0, FIRST, w, "mean") + b, [(1, 8, 8), (8,)]),
    "put": (lambda x, w, b: x.put(FIRST, w) + b, [(1,), (8,)]),
    "scatter": (lambda x, w, b: x.scatter(0, FIRST.expand(1, 8, 8), w) + b, [(1, 8, 8), (8,)]),
    "scatter_add": (lambda x, w, b: x.scatter_add(0, FIRST.expand(1, 8, 8), w) + b, [(1, 8, 8), (8,)]),
    "scatter_reduce": (lambda x, w, b: x.scatter_reduce(0, FIRST.expand(1, 8, 8), w, "mean") + b, [(1, 8, 8), (8,)]),
    "masked_scatter": (lambda x, w, b: x.masked_scatter(x > 0, w) + b, [SIZE, (8,)]),
    "lerp_by": (lambda x, w, b: torch.lerp(x, w, 0.3) + b, [SIZE, (8,)]),
    "lerp": (lambda x, w, b: torch.lerp(x, x.sin(), w) + b, [(8,), (8,)]),
}


def values_of(name: str, dtypes: list[torch.dtype], cast: torch.dtype | None) -> list[Tensor]:
    """Output and gradients, under autocast to bf16."""
    call, shapes = OPERATORS[name]
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(shape, generator=generator).to(dtype).requires_grad_()
        for shape, dtype in zip([SIZE, *shapes], dtypes, strict=True)
    ]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = call(*(each if cast is None else each.to(cast) for each in inputs))
    output.float().pow(2).sum().backward()
    return [output.detach(), *(each.grad for each in inputs if each.grad is not None)]


@pytest.mark.parametrize("name", OPERATORS)
def test_the_widest_dtype_computes(name: str) -> None:
    promote_operators("cpu")
    ours = values_of(name, [torch.float32, torch.bfloat16, torch.bfloat16], None)
    expected = values_of(name, [torch.float32, torch.bfloat16, torch.bfloat16], torch.float32)
    assert len(ours) == 4 and [each.dtype for each in ours] == [each.dtype for each in expected]
    assert all(map(torch.equal, ours, expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPERATORS)
def test_equal_dtypes_are_computed_as_without_us(name: str, dtype: torch.dtype) -> None:
    library = promote_operators("cpu")
    ours = values_of(name, [dtype] * 3, None)
    promote_operators.cache_clear()
    library._destroy()
    try:
        assert all(map(torch.equal, ours, values_of(name, [dtype] * 3, None)))
    finally:
        promote_operators("cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_16_bits_give_no_numbers_for(dtype: torch.dtype) -> None:
    """As orthogonal parametrizations have it."""
    promote_operators("cpu")
    matrix = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = torch.matrix_exp(matrix - matrix.t())
        expected = torch.matrix_exp((matrix - matrix.t()).float())
    assert torch.equal(ours, expected) and expected.isfinite().all()
    (gradient,) = torch.autograd.grad(ours.sum(), matrix)
    assert gradient.isfinite().all()


class Residual(L.LightningModule):
    """Module whose features are fp32 and stay so: it adds to them what layers compute from their norms."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(8), nn.Linear(8, 8)
        self.groups, self.spectral = nn.GroupNorm(2, 8), nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        value = batch + self.layer(self.norm(batch))
        loss = self.spectral(self.groups(value)).float().pow(2).mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


@pytest.mark.slow_unless(
    "ram-none-False",
    "masters_on_disk-all-False",
    "all_on_disk-none-False",
    "three_tiers-all-True",
    "lock_free-all-True",
    "lock_free_three_tiers-none-False",
    "tight-none-True",
    "tight_recomputed-all-True",
)
@pytest.mark.parametrize("encoder", [False, True])
@pytest.mark.parametrize("recompute", ["none", "all"])
def test_fp32_features(strategy_at: Any, tier: str, recompute: str, encoder: bool) -> None:
    """Torch's own encoder too. Without the strategy parameters are not rounded, so the numbers are near, not equal."""

    class Encoder(Residual):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)  # type: ignore[assignment]

    def losses(strategy: Any) -> list[float]:
        torch.manual_seed(0)
        module = Encoder() if encoder else Residual()
        trainer = quiet_trainer(strategy, precision="bf16-mixed", max_epochs=1)
        trainer.fit(module, DataLoader(tokens(4), batch_size=None))  # type: ignore[arg-type]
        return module.losses

    ours = losses(strategy_at(tier, recompute=recompute))
    assert ours == pytest.approx(losses("auto"), rel=0.03) and len(ours) == 4
    assert ours == losses(strategy_at("ram"))
