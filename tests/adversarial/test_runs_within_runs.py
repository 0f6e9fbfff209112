"""A run that begins in a hook of another one, and optimizers that a Trainer is given in mid-run: as with a plain Trainer, or
an error that leaves the module the weights of its last whole step, and nothing of the run behind."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit.judged import Judged, MakeStrategy, assert_alike, batches, trainer
from torch import Tensor
from torch.optim import optimizer as torch_optimizers

from lightning_ptm.errors import AngelPTMError, UsageError

PLACES = ["masters_on_disk", "lock_free", "tight"]
Within = Callable[["Outer", Callable[..., Any]], None]


class Outer(Judged):
    """Calls `within` behind its second batch."""

    within: Within
    make: Callable[..., Any]

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.note(self.head(self.first(batch[0])).sum())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and not hasattr(self, "begun"):
            self.begun = True
            outer = self.trainer
            self.within(self, self.make)
            self.trainer = outer


def fitted(within: Within | None, make: Callable[..., Any], **options: Any) -> Outer:
    torch.manual_seed(0)
    module = Outer()
    module.within = within or (lambda *ignored: None)
    module.make = make
    module.error = None
    try:
        make(**options).fit(module, batches())
    except AngelPTMError as error:
        module.error = error
    return module


def fits_itself(module: Outer, make: Callable[..., Any]) -> None:
    make().fit(module, batches())


def validates_itself(module: Outer, make: Callable[..., Any]) -> None:
    make(limit_val_batches=1).validate(module, batches(), verbose=False)


def fits_one_that_shares(module: Outer, make: Callable[..., Any]) -> None:
    other = Judged()
    other.blocks = module.blocks
    make().fit(other, batches())


@pytest.mark.slow_unless("fits_itself-lock_free", "validates_itself", "fits_one_that_shares-tight")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("within", [fits_itself, validates_itself, fits_one_that_shares])
def test_a_run_of_weights_that_are_in_another_s_pages_is_refused(
    within: Within, place: str, strategy_at: MakeStrategy
) -> None:
    ours = fitted(within, lambda **options: trainer(strategy_at(place), **options))
    assert isinstance(ours.error, UsageError) and "are used by a run that is in progress" in str(ours.error)
    until_then = fitted(None, lambda **options: trainer(None, **options), limit_train_batches=2)
    assert_alike(ours, until_then)


def fits_a_copy(module: Outer, make: Callable[..., Any]) -> None:
    copied = Judged()
    copied.load_state_dict(module.state_dict())
    make().fit(copied, batches())
    for value in copied.parameters():
        module.note(value)


def fits_a_copied_part(module: Outer, make: Callable[..., Any]) -> None:
    other = Judged()
    other.blocks = copy.deepcopy(module.blocks)
    make().fit(other, batches())
    for value in other.parameters():
        module.note(value)


@pytest.mark.parametrize(
    ("within", "place"),
    [(fits_itself, "ram"), (validates_itself, "ram"), (fits_one_that_shares, "ram")]
    + [(within, place) for within in (fits_a_copy, fits_a_copied_part) for place in PLACES],
)
def test_other_runs_within_a_run(within: Within, place: str, strategy_at: MakeStrategy) -> None:
    ours = fitted(within, lambda **options: trainer(strategy_at(place), **options))
    assert ours.error is None
    assert_alike(ours, fitted(within, lambda **options: trainer(None, **options)))


def replaces_optimizers(module: Outer, make: Callable[..., Any]) -> None:
    module.trainer.optimizers = [torch.optim.SGD(module.parameters(), lr=0.1)]


def sets_optimizers_up_again(module: Outer, make: Callable[..., Any]) -> None:
    module.trainer.strategy.setup_optimizers(module.trainer)


@pytest.mark.slow_unless("ram", "replaces_optimizers-masters_on_disk", "sets_optimizers_up_again-tight")
@pytest.mark.parametrize("place", ["ram", *PLACES])
@pytest.mark.parametrize("within", [replaces_optimizers, sets_optimizers_up_again])
def test_other_optimizers_in_mid_run_end_it_and_nothing_is_left_behind(
    within: Within, place: str, strategy_at: MakeStrategy
) -> None:
    hooks = len(torch_optimizers._global_optimizer_pre_hooks)
    ours = fitted(within, lambda **options: trainer(strategy_at(place), **options))
    assert len(torch_optimizers._global_optimizer_pre_hooks) == hooks
    assert "was not returned by configure_optimizers" in str(ours.error)
    until_then = fitted(None, lambda **options: trainer(None, **options), limit_train_batches=2)
    assert_alike(ours, until_then)
    trainer(None).fit(ours, batches())  # pages have let go of it
