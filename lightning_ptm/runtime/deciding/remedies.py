"""Values of settings with which a run that does not fit would fit, for the error that refuses it.

Decides nothing for a run: repeats its decisions with other settings. Not collective.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from lightning_ptm.config import Tuning, format_bytes
from lightning_ptm.errors import CapacityError, ConfigError
from lightning_ptm.planning.placement_data import Budget
from lightning_ptm.runtime.deciding.blueprint import Blueprint, Request
from lightning_ptm.runtime.deciding.budgets import pages_budget
from lightning_ptm.runtime.deciding.planner import make_plan
from lightning_ptm.runtime.machine.machine import Machine
from lightning_ptm.terms import MIN_PAGE_BYTES, Mode, Tier

_BYTES_PER_ELEMENT = 40
"""More than pages take for a parameter: 32 bytes with an Adam in float64."""
_MORE_PAGES = 1024
"""More than staging buffers and units in use take, in pages, beyond the model states."""
_STAGING_PAGES = 16
"""The most pages of one chunk of optimizer states."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """A setting, `staging_memory` of Tuning or one of the strategy's, and the nearest value with which the run fits.

    Attributes:
        free_bytes: free bytes of RAM if the value is larger; None: it is not.
    """

    name: str
    value: str
    free_bytes: int | None = None

    def __str__(self) -> str:
        setting = f"{self.name}='{self.value}'"
        written = f"tuning={Tuning.__name__}({setting})" if self.name == "staging_memory" else setting
        if self.free_bytes is None:
            return written
        return f"{written} (of RAM, {format_bytes(self.free_bytes)} a rank are free)"


def with_remedies(
    error: CapacityError,
    request: Request,
    machine: Machine,
    decide: Callable[[Request, Machine], Blueprint],
) -> CapacityError:
    """Returns the error with the limits of pages, and with `remedies`."""
    unified = _unified(request, machine)
    try:
        budget = pages_budget(request.settings, machine, unified)
    except CapacityError:
        return error  # it names the one limit that there is
    limits = ", ".join(
        f"{format_bytes(budget[tier])} {_setting_tier(tier, unified).place} ({_setting(tier, unified)})"
        for tier in budget
        if budget[tier]
    )
    found = remedies(request, machine, decide)
    enough = f"; another plan would fit with {', or with '.join(map(str, found))}" if found else ""
    return CapacityError(f"{error}. Pages may take {limits}{enough}")


def remedies(request: Request, machine: Machine, decide: Callable[[Request, Machine], Blueprint]) -> tuple[Remedy, ...]:
    """Returns, for each setting that helps on its own, the nearest value that the plan accepts.

    Args:
        decide: makes the decisions of a run on this rank, without collectives.
    """

    def fits(**changed: Any) -> bool | None:
        """Whether the run fits with other settings; None if these are invalid."""
        try:
            settings = dataclasses.replace(request.settings, **changed)
            blueprint = decide(dataclasses.replace(request, settings=settings), machine)
            make_plan(blueprint, Mode.TRAIN, blueprint.planned(blueprint.trace))
        except CapacityError:
            return False
        except ConfigError:
            return None
        return True

    unified = _unified(request, machine)
    try:
        budget = pages_budget(request.settings, machine, unified)
    except CapacityError:
        return ()
    return (
        *_tiers(request, machine, budget, unified, fits),
        *_smaller_pages(request, fits),
        *_staging(request, fits),
    )


def _unified(request: Request, machine: Machine) -> bool:
    return not machine.device_has_own_memory and request.settings.device_bytes is None


def _setting_tier(tier: Tier, unified: bool) -> Tier:
    return Tier.HOST if unified and tier.computes else tier


def _setting(tier: Tier, unified: bool) -> str:
    return f"{_setting_tier(tier, unified).name.lower()}_memory"


def _tiers(
    request: Request, machine: Machine, budget: Budget, unified: bool, fits: Callable[..., bool | None]
) -> Iterator[Remedy]:
    """Yields, for each tier, the least size of it with which the run fits."""
    page = request.settings.page_bytes
    numel = sum(parameter.numel() for parameter in request.module.parameters())
    for tier in budget:
        if not budget[tier]:
            continue
        name = _setting(tier, unified)
        low = budget[tier] // page
        high = low + _MORE_PAGES + numel * _BYTES_PER_ELEMENT // page
        if tier.computes and machine.device_has_own_memory:
            high = min(high, machine.free_device_bytes // page)
        if high <= low or not fits(**{name: high * page}):
            continue
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(**{name: middle * page}) else (middle, high)
        free = machine.free_host_bytes // machine.ranks
        scarce = name == "host_memory" and high * page > free
        yield Remedy(name, as_setting(high * page), free if scarce else None)


def _smaller_pages(request: Request, fits: Callable[..., bool | None]) -> Iterator[Remedy]:
    """Yields the largest smaller page size with which the run fits."""
    page = request.settings.page_bytes // 2
    while page >= MIN_PAGE_BYTES:
        if fits(page_size=page):
            yield Remedy("page_size", as_setting(page))
            return
        page //= 2


def _staging(request: Request, fits: Callable[..., bool | None]) -> Iterator[Remedy]:
    """Yields the least staging memory if the run fits with it."""
    tuning, page = request.settings.tuning, request.settings.page_bytes
    for pages in range(1, _STAGING_PAGES + 1):
        size = pages * page
        if tuning.staging_bytes is not None and size >= tuning.staging_bytes:
            return
        it_fits = fits(tuning=dataclasses.replace(tuning, staging_memory=size))
        if it_fits is None:
            continue
        if it_fits:
            yield Remedy("staging_memory", as_setting(size))
        return


def as_setting(size: int) -> str:
    """Returns a size as a setting takes it, rounded up: 50331648 -> 48MiB."""
    for unit, count in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if size >= 64 * count or size % count == 0:
            return f"{math.ceil(size / count)}{unit}"
    return f"{math.ceil(size / 1024)}KiB"
