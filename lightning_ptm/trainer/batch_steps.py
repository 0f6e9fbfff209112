"""Steps of a run on the batches of its Trainer: whole batches, and what all kinds of steps have in common.

A run chooses one kind when its hooks are installed (`Run.watch`), and the strategy hands it each batch. The kinds that
divide batches derive from `BatchSteps`: parts of sequences (divided_steps.py), halves in turns (two_batch_steps.py), and
micro-batches in pipeline stages (pipelined.py). Each refuses modules that it cannot train when it is made, and checks, before
some steps, that it trains the same as a whole batch would.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lightning_ptm.terms import Mode

Iteration = Callable[[Mode], AbstractContextManager[None]]
"""Context of a step of the engine."""

_LAST_CHECK = 1024


class CheckSchedule:
    """Optimizer steps after which a batch is checked, whatever its kind: 0, 1, 2, 4... up to 1,024.

    A term of the loss may have a factor of zero at first; after the last of these steps, warm-ups are over.
    """

    def __init__(self) -> None:
        self._next = 0

    def due(self, steps: int) -> bool:
        """Returns whether a batch is checked after so many optimizer steps."""
        return self._next <= steps <= _LAST_CHECK

    def checked(self, steps: int) -> None:
        """Notes that a batch was checked after so many optimizer steps."""
        self._next = max(1, 2 * steps)


class BatchSteps:
    """Steps on whole batches.

    Args:
        iteration: context of a step of the engine.
    """

    def __init__(self, iteration: Iteration) -> None:
        self._iteration = iteration

    @property
    def keeps_gradients(self) -> bool:
        """Whether Lightning, when it clears gradients, has to leave them alone: they are those of the step."""
        return False

    @property
    def ranks_of_sequence(self) -> int:
        """Number of ranks that have the tokens of each sequence that is computed now."""
        return 1

    def batch_starts(self, batch: Any, index: int) -> None:
        """Begins a batch that trains; before some steps, checks how it is divided. Collective.

        Args:
            index: its number in the epoch.
        """

    def train(self, step: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Computes a training step; returns what Lightning takes for its result.

        Args:
            step: the module's step, of a batch or of a part of one.
            args, kwargs: its further arguments.
        """
        with self._iteration(Mode.TRAIN):
            return step(batch, *args, **kwargs)

    def ran_backward(self) -> bool:
        """Returns whether `train` has run the backward passes of the step. Called when Lightning is to run them."""
        return False

    def evaluate(self, step: Callable[[], Any]) -> Any:
        """Computes a step of an evaluation; returns its result."""
        with self._iteration(Mode.FORWARD):
            return step()

    def part_of(self, batch: Any) -> Any:
        """Returns this rank's tokens of a batch that trains."""
        return batch

    def of_forward(self) -> AbstractContextManager[None]:
        """Context of a forward of what `part_of` has returned."""
        return nullcontext()

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Returns the positions, in their sequence, of the `length` tokens that this rank has of each."""
        return torch.arange(length, device=device)

    def close(self) -> None:
        """Removes what is installed in other objects. Idempotent."""


OUTSIDE_OF_RUNS = BatchSteps(lambda mode: nullcontext())
"""Steps of ordinary modules, without an engine."""
