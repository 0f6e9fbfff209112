"""Layers of a square and a cube of ranks, on threads: they compute what GPT computes, in blocks, and send what is derived."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kit.ranks.grid_models import example
from kit.ranks.threads import on_grid
from torch import Tensor

from lightning_ptm.models import GPT
from lightning_ptm.parallel.grid import Grid, whole
from lightning_ptm.planning.mesh import GridShape

GridGPT: Any = example().GridGPT
SQUARE, CUBE = GridShape(2), GridShape(2, cube=True)
SIZES = {"vocab_size": 64, "width": 32, "layers": 2, "heads": 4, "sequence_length": 16}
BATCH = 8


@pytest.fixture(autouse=True)
def double() -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def built(kind: type[GPT], grid: Grid | None = None, **sizes: Any) -> GPT:
    """Returns a model with the same whole weights for all kinds."""
    if grid is not None:
        kind = type("OnThreads", (kind,), {"grid": grid})
    model = kind(**{**SIZES, **sizes})
    model.configure_model()
    return model


def batch() -> tuple[Tensor, Tensor]:
    texts = torch.randint(0, 64, (BATCH, 17), generator=torch.Generator().manual_seed(5))
    targets = texts[:, 1:].clone()
    targets[1, 3:] = -100
    return texts[:, :-1], targets


@pytest.mark.parametrize("shape", [SQUARE, CUBE], ids=["2d", "3d"])
def test_loss_and_gradients_are_those_of_one_rank(shape: GridShape) -> None:
    torch.manual_seed(0)
    one = built(GPT)
    one.init_weights(one)
    with torch.no_grad():
        for each in one.parameters():
            each.normal_(std=0.2)
    tokens, targets = batch()
    loss = F.cross_entropy(one(tokens).flatten(0, 1), targets.flatten())
    loss.backward()

    def work(grid: Grid) -> tuple[float, dict[str, Tensor]]:
        model = built(GridGPT, grid)
        for name, each in model.named_modules():
            for key in getattr(each, "divided", {}):
                each.set_whole(key, one.get_parameter(f"{name}.{key}").detach())
        found = model.loss((tokens, targets))
        found.backward()
        return found.item(), {name: each.grad for name, each in model.named_parameters()}

    outcomes = on_grid(shape, work)
    plan = built(GridGPT, Grid(shape, 0, {}))
    for found, _ in outcomes:
        assert abs(found - loss.item()) < 1e-13
    gradients = {name: torch.cat([each[name] for _, each in outcomes]) for name in outcomes[0][1]}
    assert gradients.keys() == dict(one.named_parameters()).keys()
    for name, each in whole(plan, gradients).items():
        torch.testing.assert_close(each, one.get_parameter(name).grad, rtol=0, atol=1e-14, msg=name)
