"""Callback that shows a run's plan and the tiers of its model states, on standard output and in TensorBoard.

Owns the number of the last plan shown. I1: nothing here is collective; only rank 0 prints.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_ptm import AngelPTMStrategy

from .where import loop_of, pages_of, preformatted, settings_of, show_text


class PlanPrinter(Callback):
    """Prints, at the start of fit, validate, test or predict, the tier of each kind of model states, the use of the tiers,
    and the plan tick by tick. TensorBoard gets the same as texts: `pages/states`, `pages/plan`, and `pages/settings` with
    the strategy's settings. When a new plan is made from a traced iteration, `pages/plan` is shown again at that step.

    Numbers are of rank 0. Does nothing with other strategies.

    Args:
        show: whether to print; with False only TensorBoard gets the texts.
    """

    def __init__(self, show: bool = True) -> None:
        self.show = show
        self._plans_made = 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Shows the plan at the start of training."""
        self._start(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Shows the plan of a loop outside fit."""
        if loop_of(trainer):
            self._start(trainer)

    on_test_start = on_predict_start = on_validation_start

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        strategy = pages_of(trainer)
        if strategy is None or not trainer.is_global_zero or strategy.plans_made == self._plans_made:
            return
        self._plans_made = strategy.plans_made
        show_text(trainer, "pages/plan", preformatted(strategy.plan_text()))

    def _start(self, trainer: Trainer) -> None:
        strategy = pages_of(trainer)
        if strategy is None or not trainer.is_global_zero:
            return
        self._plans_made = strategy.plans_made
        plan = strategy.plan_text()
        if self.show:
            print(f"{_states(strategy)}\n{plan}", flush=True)
        show_text(trainer, "pages/states", preformatted(_states(strategy)))
        show_text(trainer, "pages/plan", preformatted(plan))
        show_text(trainer, "pages/settings", _settings(strategy))


def _states(strategy: AngelPTMStrategy) -> str:
    """Tables: kinds of states by tier, optimizers, and tiers."""
    rows = [("model states", "tier", "MB", "units")]
    rows += [(row.states, row.tier, f"{row.bytes / 1e6:.1f}", str(row.units)) for row in strategy.states_at_home()]
    if optimizers := strategy.optimizers_in_pages():
        rows += [("", "", "", ""), ("optimizer", "updates", "MB", "")]
        rows += [(each.optimizer, each.kind, f"{each.bytes / 1e6:.1f}", "") for each in optimizers]
    rows += [("", "", "", ""), ("tier", "", "MB in use", "MB in all")]
    rows += [
        (room.tier, "", f"{room.used_bytes / 1e6:.1f}", f"{room.bytes / 1e6:.1f}") for room in strategy.tier_rooms()
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = []
    for row in rows:
        words = [row[0].ljust(widths[0]), row[1].ljust(widths[1]), row[2].rjust(widths[2]), row[3].rjust(widths[3])]
        lines.append("  ".join(words).rstrip() + "\n")
    return "".join(lines)


def _settings(strategy: AngelPTMStrategy) -> str:
    """A markdown table of the strategy's settings."""
    rows = [f"| {name} | `{value}` |\n" for name, value in settings_of(strategy).items()]
    return "| setting | value |\n| --- | --- |\n" + "".join(rows)
