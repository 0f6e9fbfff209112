"""Refusals of a step of a module that is not the one whose pages were laid out. Between two batches:
tests/adversarial."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_by_hand import (
    HOMES,
    Block,
    Chain,
    run,
)
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from lightning_ptm.errors import UsageError


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
