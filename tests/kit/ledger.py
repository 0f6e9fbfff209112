"""A model whose weights are a ledger: each optimizer step books its own learning rate, so the weights tell which steps were
applied, how often, and with whose hyper-parameters.

The loss is linear in the parameters, so a gradient is a number that the module chooses, whatever the weights are and however
late they come. Learning rates are different powers of two: no sum of some of them is that of others. Where an update takes
the mean of several steps' gradients it finds the same number again, since each step has the same (or is clipped to it).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ptm import UpdateAudit
from lightning_ptm.runtime.updates.audits import StalenessStats

NUMEL = 4224
SIDES = ("left", "right")


class Account(nn.Module):
    """A unit of two parameters, all ones at first. A call uses some of them, and outside training notes what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.ones(NUMEL))
        self.right = nn.Parameter(torch.ones(NUMEL))
        self.read: list[tuple[float, float]] = []

    def forward(self, x: Tensor, sides: Sequence[str], factor: float) -> Tensor:
        if not self.training:
            self.read.append((float(self.left[0]), float(self.right[0])))
        for side in sides:
            x = x + getattr(self, side).float().sum() * factor
        return x


class Ledger(L.LightningModule):
    """Three accounts; all of them are used in each micro-batch. Subclasses change that, or the gradients.

    Args:
        accumulate: micro-batches of a step.
    """

    overflows: tuple[int, ...] = ()
    """Steps that are not taken."""
    clip: float | None = None
    """The norm to which Lightning clips the gradients."""

    def __init__(self, accumulate: int = 1) -> None:
        super().__init__()
        self.accumulate = accumulate
        self.accounts = nn.ModuleList(Account() for _ in range(3))

    def rate(self, step: int) -> float:
        """The learning rate of a step."""
        return 2.0 ** -(step + 1)

    def sides(self, step: int) -> Sequence[str]:
        """The parameters of each account that a step uses."""
        return SIDES

    def factor(self, step: int, rank: int) -> float:
        """The gradient of each element that a step uses; as a mean over two ranks, 2."""
        return 1e6 if step in self.overflows else 1.0 + 2.0 * rank

    def training_step(self, batch: Tensor, index: int) -> Tensor | None:
        step = index // self.accumulate
        for optimizer in self.trainer.optimizers:
            optimizer.param_groups[0]["lr"] = self.rate(step)
        return self.loss(self.accounts, step)

    def loss(self, accounts: Any, step: int) -> Tensor:
        x = torch.zeros(())
        for account in accounts:
            x = account(x, self.sides(step), self.factor(step, self.trainer.global_rank))
        return x

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.loss(self.accounts, 0)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def booked(self, steps: int, ranks: int) -> dict[str, float]:
        """Every weight after so many steps, each applied once."""
        weights = dict.fromkeys((name for name, _ in self.named_parameters()), 1.0)
        for step in range(steps):
            if step in self.overflows:
                continue
            used = [name for name in weights if name.rpartition(".")[2] in self.sides(step)]
            gradient = sum(self.factor(step, rank) for rank in range(ranks)) / ranks
            if self.clip is not None:
                gradient *= min(1.0, self.clip / (gradient * math.sqrt(NUMEL * len(used))))
            for name in used:
                weights[name] -= self.rate(step) * gradient
        return weights


class ByTurns(Ledger):
    """Steps use different parameters of each unit by turns: their gradients cannot be added."""

    def sides(self, step: int) -> Sequence[str]:
        return SIDES[step % 2 :][:1]


class Clipped(Ledger):
    """Gradients differ from step to step; clipped, each by the norm of its own step, they are all alike."""

    clip = 1.0

    def factor(self, step: int, rank: int) -> float:
        return (1.0 + 2.0 * rank) * (step + 1)


class Overflowing(Ledger):
    """In float16 the gradients of two steps are infinite."""

    overflows = (3, 4)


class Adversaries(Ledger):
    """Manual optimization of two optimizers: one steps in each batch, the other, of the last account, in every third. The
    second account is frozen."""

    def __init__(self, accumulate: int = 1) -> None:
        super().__init__(accumulate)
        self.automatic_optimization = False
        self.accounts[1].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return tuple(torch.optim.SGD(self.accounts[index].parameters(), lr=1.0) for index in (0, 2))

    def training_step(self, batch: Tensor, index: int) -> None:
        for place, optimizer in enumerate(self.optimizers()):  # type: ignore[arg-type, var-annotated]
            if place and index % 3:
                continue
            self.toggle_optimizer(optimizer)
            optimizer.param_groups[0]["lr"] = self.rate(index)
            optimizer.zero_grad()
            self.manual_backward(self.loss(self.accounts, index))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def booked(self, steps: int, ranks: int) -> dict[str, float]:
        gradient = sum(self.factor(0, rank) for rank in range(ranks)) / ranks
        periods = {"0": 1, "2": 3}
        weights = {}
        for name, _ in self.named_parameters():
            period = periods.get(name.split(".")[1])
            taken = range(0, steps, period) if period is not None else ()
            weights[name] = 1.0 - gradient * sum(map(self.rate, taken))
        return weights


def pages_of_zeros(count: int) -> DataLoader[Any]:
    """So many micro-batches, of nothing."""
    return DataLoader(torch.zeros(count, 1), batch_size=1)  # type: ignore[arg-type]


class Auditor(L.Callback):
    """Reads the audit after each batch, which must be balanced, and staleness.

    Attributes:
        audits: after each batch.
        staleness: the last.
    """

    def __init__(self, after: Callable[[L.Trainer, int], object] = lambda trainer, batch: None) -> None:
        self._after = after
        self.audits: list[tuple[UpdateAudit, ...]] = []
        self.staleness: StalenessStats | None = None

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
        strategy: Any = trainer.strategy
        self.audits.append(strategy.update_audit())
        self.staleness = strategy.statistics().staleness
        assert all(audit.balanced for audit in self.audits[-1]), self.audits[-1]
        self._after(trainer, index)

    @property
    def most_pending(self) -> int:
        """Gradients of a flat that have waited at once."""
        return max(audit.pending for audits in self.audits for audit in audits)
