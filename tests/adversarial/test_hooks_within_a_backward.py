"""Hooks of gradients that do something with the model in the middle of a backward pass in which units are updated: as with a
plain Trainer, which updates nothing before the pass is over, or refused."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from kit.judged import MakeStrategy
from kit.twins import WIDTH, Twin, compare, trained
from torch import Tensor, nn

from lightning_ptm.errors import UsageError


class Hooked(Twin):
    """Does something when the gradient of the first block comes: those behind it have theirs."""

    def on_fit_start(self) -> None:
        self.blocks[0].weight.register_hook(lambda _: self.act())

    def gathered(self, module: nn.Module) -> Any:
        gather = getattr(self.trainer.strategy, "gathered", None)
        return nullcontext() if gather is None else gather(module)

    def note(self, value: Tensor) -> None:
        self.losses.append(value.detach().sum())

    def act(self) -> None:
        raise NotImplementedError


class Reads(Hooked):
    def act(self) -> None:
        for value in self.state_dict().values():
            self.note(value)


class Edits(Hooked):
    def act(self) -> None:
        with self.gathered(self.blocks[2]), torch.no_grad():
            self.blocks[2].weight.mul_(0.9)


class Calls(Hooked):
    @torch.no_grad()
    def act(self) -> None:
        self.note(self.blocks[2](torch.ones(2, WIDTH)))


class Clears(Hooked):
    def act(self) -> None:
        if len(self.losses) == 2:
            self.optimizers().zero_grad()


PROGRAMS = [Reads, Edits, Calls, Clears]


@pytest.mark.diagonal
@pytest.mark.parametrize("place", ["masters_on_disk", "tight", "tight_recomputed", "all_on_disk"])
@pytest.mark.parametrize("build", PROGRAMS)
def test_what_a_hook_does_behind_an_update_is_refused(
    strategy_at: MakeStrategy, build: type[Hooked], place: str
) -> None:
    with pytest.raises(UsageError, match=r"hook in the backward pass .* has been updated .* on_before_optimizer_step"):
        trained(build, strategy_at(place))


@pytest.mark.diagonal
@pytest.mark.parametrize("place", ["masters_on_disk", "tight", "ram", "tight_recomputed"])
@pytest.mark.parametrize("build", PROGRAMS)
def test_where_updates_wait_for_all_gradients_it_is_as_a_plain_trainer(
    strategy_at: MakeStrategy, build: type[Hooked], place: str
) -> None:
    class Waits(build):  # type: ignore[misc, valid-type]
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            """Makes updates wait."""

    memory = {"spare_pages": 2} if place.startswith("tight") else {}  # no plan counts the call
    compare(Waits, strategy_at(place, **memory))
