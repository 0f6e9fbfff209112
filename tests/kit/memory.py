"""Runs with the least device memory, or RAM, that their plan accepts: what is stale then is not right by chance."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

from lightning.pytorch import Trainer

from lightning_ptm import AngelPTMStrategy
from lightning_ptm.comm import Communicator
from lightning_ptm.errors import CapacityError
from lightning_ptm.runtime.deciding import decide
from lightning_ptm.runtime.deciding.blueprint import Blueprint, Request
from lightning_ptm.runtime.deciding.decide import CheckedParameters
from lightning_ptm.runtime.relayout.previous_state import PreviousState
from lightning_ptm.trainer.builder import Builder

LEAST = "least"
"""The value of `device_memory` or `host_memory` that `strategy_with` understands beside the strategy's own."""
_MOST_PAGES = 1 << 14


class LeastMemoryStrategy(AngelPTMStrategy):
    """Has as many pages of the tier of `setting` as the plan of a run needs, and no more.

    `pages` is what the last run had, `spare_pages` how many it has beside what the plan needs: for what no plan counts.
    """

    pages = 0
    spare_pages = 0
    setting = "device_memory"

    def builder(self, trainer: Trainer) -> Builder:
        made = super().builder(trainer)
        return _LeastMemory(**{field.name: getattr(made, field.name) for field in dataclasses.fields(made)}, least=self)


@dataclasses.dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _LeastMemory(Builder):
    least: LeastMemoryStrategy

    def decided(
        self,
        request: Request,
        communicator: Communicator,
        handed: PreviousState | None,
        checked: CheckedParameters | None = None,
    ) -> Blueprint:
        refused, accepted = 0, 4
        while (made := self._accepted(accepted, request, communicator, handed)) is None:
            refused, accepted = accepted, 2 * accepted
        while accepted - refused > 1:
            pages = (refused + accepted) // 2
            fewer = self._accepted(pages, request, communicator, handed)
            if fewer is None:
                refused = pages
            else:
                accepted, made = pages, fewer
        spare_pages = self.least.spare_pages
        if spare_pages:
            made = self._accepted(accepted + spare_pages, request, communicator, handed)
            assert made is not None
        self.least.pages = accepted + spare_pages
        return made

    def _accepted(
        self, pages: int, request: Request, communicator: Communicator, handed: PreviousState | None
    ) -> Blueprint | None:
        size: Any = {self.least.setting: pages * request.settings.page_bytes}
        settings = dataclasses.replace(request.settings, **size)
        # The texts of these refusals are not used, and the search for settings that fit takes longer than a small fit.
        brief = patch.object(decide, "with_remedies", lambda error, *_: error)
        try:
            with brief if pages < _MOST_PAGES else nullcontext():
                return Builder.decided(self, dataclasses.replace(request, settings=settings), communicator, handed)
        except CapacityError:
            if pages >= _MOST_PAGES:
                raise
            return None


def strategy_with(*, spare_pages: int = 0, **settings: Any) -> AngelPTMStrategy:
    """A strategy; with `device_memory=LEAST` or `host_memory=LEAST`, a `LeastMemoryStrategy` with so many pages to spare."""
    least = next((name for name in ("device_memory", "host_memory") if settings.get(name) == LEAST), None)
    if least is None:
        return AngelPTMStrategy(**settings)
    strategy = LeastMemoryStrategy(**{**settings, least: "64MiB"})
    strategy.setting, strategy.spare_pages = least, spare_pages
    return strategy
