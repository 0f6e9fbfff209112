"""Layers of a square and a cube of ranks, on threads: they compute what GPT computes, in blocks, and send what is derived."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kit.ranks.grid_models import example
from kit.ranks.threads import on_grid
from torch import Tensor, nn

from lightning_ptm.errors import ConfigError
from lightning_ptm.models import GPT
from lightning_ptm.parallel.grid import Grid, GridLinear, GridNorm, blocks, load_whole, whole
from lightning_ptm.parallel.grid.layers import slices_of
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


@contextmanager
def saved_bytes() -> Iterator[list[int]]:
    """Context in which bytes that autograd saves are added to a list, each storage once, without parameters."""
    seen, found = set(), [0]

    def pack(value: Tensor) -> Tensor:
        if not value.is_leaf or not value.requires_grad:
            storage = value.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                alive.append(value)
                found[0] += value.nbytes
        return value

    alive: list[Tensor] = []  # so that no storage is freed, and counted as another one
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        yield found


KINDS = pytest.mark.parametrize("shape", [SQUARE, CUBE], ids=["2d", "3d"])


@KINDS
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
        load_whole(model, one.state_dict())
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


@KINDS
def test_autocast_computes_in_16_bits_as_on_one_rank(shape: GridShape) -> None:
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    one, (tokens, targets) = built(GPT), batch()

    def outcome(model: GPT) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(tokens)
            loss = model.loss((tokens, targets))
        loss.backward()
        return logits, loss

    logits, loss = outcome(one)

    def work(grid: Grid) -> tuple[Tensor, Tensor]:
        model = built(GridGPT, grid)
        load_whole(model, one.state_dict())
        return outcome(model)

    for found in on_grid(shape, work):
        assert found[0].dtype is logits.dtype is torch.bfloat16 and found[1].dtype is loss.dtype
        torch.testing.assert_close(found[1], loss, rtol=0, atol=2e-4)


@pytest.mark.parametrize(("shape", "most"), [(SQUARE, 0.30), (CUBE, 0.16)], ids=["2d", "3d"])
def test_a_rank_has_its_share_of_weights_and_activations(shape: GridShape, most: float) -> None:
    tokens, targets = batch()

    def sizes(model: GPT) -> tuple[int, int]:
        with saved_bytes() as saved:
            model.loss((tokens, targets))
        return sum(each.numel() for each in model.parameters()), saved[0]

    weights, activations = sizes(built(GPT))
    for own_weights, own_activations in on_grid(shape, lambda grid: sizes(built(GridGPT, grid))):
        assert own_weights == weights / shape.size
        assert own_activations <= most * activations


@KINDS
def test_blocks_become_whole_again(shape: GridShape) -> None:
    one = built(GPT)
    state = one.state_dict()
    model = built(GridGPT, Grid(shape, 0, {}))
    divided = blocks(model, state)
    assert divided["head.weight"].shape != state["head.weight"].shape
    found = whole(model, divided)
    assert all(torch.equal(found[name], value) for name, value in state.items())


def test_what_a_grid_does_not_divide_is_refused() -> None:
    grid = Grid(CUBE, 0, {})
    with pytest.raises(
        ConfigError,
        match=r"^a parameter of shape \(12, 10\) is divided into 4 parts along dimension 1 .* 4 does not divide 10;",
    ):
        GridLinear(10, 12, grid)
    with pytest.raises(ConfigError, match=r"^a batch has 6 samples, and a grid of 8 ranks divides them into 4 parts;"):
        grid.cross_entropy(torch.zeros(2, 8), torch.zeros(6, dtype=torch.long))
    with pytest.raises(ConfigError, match=r"^position is no parameter of a grid layer"):
        slices_of(WithAnother(grid))


class WithAnother(nn.Module):
    """Has a parameter outside of grid layers."""

    def __init__(self, grid: Grid) -> None:
        super().__init__()
        self.norm = GridNorm(32, grid)
        self.position = nn.Parameter(torch.zeros(2))
