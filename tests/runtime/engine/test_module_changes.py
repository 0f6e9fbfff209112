"""Refusals of a step of a module that is not the one whose pages were laid out. Between two batches:
tests/adversarial."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_by_hand import (
    HOMES,
    Block,
    Chain,
    run,
)
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.optim import SGD, Adam, Optimizer

from lightning_ptm.errors import UsageError
from lightning_ptm.runtime.engine.module_changes import KnownParameters


def test_a_frozen_parameter_that_is_unfrozen_in_mid_run_is_refused(disk: Path) -> None:
    module = Chain()
    module.blocks[1].weight.requires_grad_(False)

    def of_the_first(module: Chain) -> list[Optimizer]:
        return [SGD([module.head, module.blocks[0].weight], lr=0.1)]

    with run(disk, of_the_first, module, **HOMES["masters on disk"]) as it:
        it.train()
        module.blocks[1].weight.requires_grad_()
        with pytest.raises(UsageError, match=r"blocks\.1\.weight was frozen when its pages were laid out and requires"):
            it.forward()


@pytest.mark.parametrize("home", HOMES)
def test_what_has_outgrown_its_pages(disk: Path, home: str) -> None:
    module = Chain()
    module.blocks[1].weight.requires_grad_(False)

    def of_the_first(module: Chain) -> list[Optimizer]:
        return [Adam([module.head, module.blocks[0].weight], lr=0.1)]

    with run(disk, of_the_first, module, **HOMES[home]) as it:
        changes = it.engine.changes
        it.train()
        assert not changes.outgrown() and not changes.other_parameters()
        module.blocks[1].weight.requires_grad_()
        assert changes.outgrown() and not changes.other_parameters()
        module.blocks[1].weight.requires_grad_(False)
        assert not changes.outgrown()
        module.blocks.append(Block(4.0))
        assert changes.outgrown() and changes.other_parameters()
        del module.blocks[2]
        assert not changes.outgrown()


def test_units_whose_gradients_wait_for_a_step(disk: Path) -> None:
    with run(disk, **HOMES["all on disk"], keep_gradients=True) as it:
        assert it.engine.changes.waiting_gradients() == ()
        it.backward()
        assert it.engine.changes.waiting_gradients() == ("the root", "blocks.0", "blocks.1")
        it.step()
        assert it.engine.changes.waiting_gradients() == ()


def test_a_gradient_of_what_no_module_has_is_no_silent_loss(disk: Path) -> None:
    stranger = nn.Parameter(torch.ones(3))
    with run(disk, lambda module: [Adam([*module.parameters(), stranger], lr=0.1)], **HOMES["all on disk"]) as it:
        it.train()
        (optimizer,) = it.optimizers
        assert [each is stranger for each in it.engine.changes.outside_module(optimizer)] == [True]
        stranger.grad = torch.ones(3)
        it.backward()
        with pytest.raises(
            UsageError, match=r"a parameter of shape \(3,\) is in a group of Adam and has a gradient, and no"
        ):
            it.step()


def tied() -> Any:
    built = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Embedding(2, 2))
    built[2].weight = built[0].weight
    return built


def put(module: Any, name: str, value: Any) -> None:
    setattr(module, name, value)


CHANGES: dict[str, Callable[[Any], object]] = {
    "replaced": lambda built: put(built[1], "weight", nn.Parameter(torch.ones(2, 2))),
    "added": lambda built: put(built, "more", nn.Parameter(torch.ones(2))),
    "removed": lambda built: put(built[1], "bias", None),
    "a module more": lambda built: built.append(nn.Linear(2, 2)),
    "a module less": lambda built: built.pop(1),
    "tied": lambda built: put(built[1], "weight", built[0].weight),
    "untied": lambda built: put(built[2], "weight", nn.Parameter(torch.ones(2, 2))),
    "parametrized": lambda built: parametrize.register_parametrization(built[1], "weight", nn.Identity()),
}

SAME: dict[str, Callable[[Any], object]] = {
    "nothing": lambda built: None,
    "pruned": lambda built: prune.l1_unstructured(built[1], "weight", 1),
    "frozen": lambda built: built.requires_grad_(False),
    "written to": lambda built: built[1].weight.data.mul_(2),
    "a module without parameters": lambda built: built.append(nn.Tanh()),
    "in another order": lambda built: built.append(built.pop(0)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_other_parameters(name: str) -> None:
    built = tied()
    known = KnownParameters(built)
    assert not known.changed()
    CHANGES[name](built)
    assert known.changed()


@pytest.mark.parametrize("name", SAME)
def test_the_same_ones(name: str) -> None:
    built = tied()
    known = KnownParameters(built)
    SAME[name](built)
    assert not known.changed()


def test_what_optimizers_have_and_no_module() -> None:
    built, other = tied(), nn.Parameter(torch.ones(2))
    optimizers = [torch.optim.SGD(built.parameters()), torch.optim.SGD([built[1].bias, other])]
    (found,) = KnownParameters(built, optimizers).outside_module
    assert found is other
