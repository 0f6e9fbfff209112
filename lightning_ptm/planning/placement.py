"""Placement: choice of the home tier of each unit's model states (section 4.2: page placement and dynamic caching).

Owns the choice of homes from budgets. Knows no task, and no time except the trace's ticks. Decides only: allocates
nothing.

I1: homes, staging and the least demand of every tick together fit each tier's budget.
I2: frozen flats have parameters only; units without trainable flats have no gradient and no master bytes anywhere.
I3: home bytes hold for any order in which the homes are allocated (home_bytes.py).
I4: homes are the same on all ranks, and fit each of them where shards differ in length.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import MappingProxyType

from lightning_ptm.errors import CapacityError, ConfigError, InternalError
from lightning_ptm.planning.capacity_words import (
    device_capacity_error,
    format_bytes,
    setting_for,
    tier_in_words,
    with_uses,
)
from lightning_ptm.planning.device_demand import (
    AnyOrder,
    Demand,
    entered_gradients,
    gradient_demands,
    parameter_demands,
    reserved_ticks,
)
from lightning_ptm.planning.home_bytes import Bytes, HomeBytes, less, passing_bytes, together
from lightning_ptm.planning.inventory import What
from lightning_ptm.planning.layout import FlatLayout, ModelLayout, round_up
from lightning_ptm.planning.lifetime import uses_of
from lightning_ptm.planning.page_occupancy import Occupancy
from lightning_ptm.planning.placement_data import (
    Budget,
    GradientRow,
    Gradients,
    Homes,
    PassingPages,
    Placement,
    PlacementWishes,
)
from lightning_ptm.planning.trace import Trace, without_units
from lightning_ptm.terms import Kind, Tier

_NO_WISHES = PlacementWishes()
_UnitHomes = tuple[Tier, Tier]
"""Homes of a unit's parameters and of its gradients."""


def place(
    layout: ModelLayout,
    master_bytes_per_element: Sequence[int],
    trace: Trace,
    budget: Budget,
    *,
    wishes: PlacementWishes = _NO_WISHES,
    unified: bool,
    keep_gradients: bool,
    sums_gradients: bool = False,
    staging_bytes: int,
    update_on_device: bool,
    own_state_bytes: Mapping[int, Sequence[Sequence[int]]] = MappingProxyType({}),
    by_need: Sequence[Sequence[int]] = (),
    around: Collection[int] = (),
    any_order: bool = False,
) -> Placement:
    """Chooses homes: compute parameters on the device first, then master states where memory is left.

    What does not fit on the device goes to the host, then to the disk. Reserves room on the device for a fetch one tick
    ahead as long as everything still finds a home.

    Args:
        layout: the model on this world size.
        master_bytes_per_element: per flat of the layout; 12 for AdamW under mixed precision.
        trace: one iteration.
        budget: bytes of this rank.
        wishes: homes that the user asks for.
        unified: the device tier is RAM: there is no host tier, and the optimizer can always update states in the device
            tier.
        keep_gradients: gradients outlive the backward pass, so they need homes.
        sums_gradients: gradients of several backward passes may be summed at home.
        staging_bytes: bytes through which updates stream; rounded up to pages.
        update_on_device: the optimizer can run on the device, so master states may be cached there.
        own_state_bytes: see Placement.
        by_need: units that no plan contains, by those that are on the device at once. They have device pages of their own
            (`by_need_pages`), whatever the order in which a router calls them.
        around: units in whose ticks those of `by_need` may compute.
        any_order: the units of the trace may be called in another order, in which the root, too, is live throughout.

    Raises:
        ConfigError: a wish names a tier that the run does not have.
        CapacityError: no choice of homes fits; says which tick or states, the bytes, and the setting to raise.
    """
    _check(layout, master_bytes_per_element, budget, wishes, unified=unified, update_on_device=update_on_device)
    staging_bytes = round_up(staging_bytes, layout.page_size)
    if budget[Tier.HOST] and staging_bytes > budget[Tier.HOST]:
        raise CapacityError(
            f"the staging buffers of updates need {format_bytes(staging_bytes)} of RAM, and pages may take "
            f"{format_bytes(budget[Tier.HOST])} of it; raise host_memory, or lower page_size or "
            f"tuning=Tuning(staging_memory=...)"
        )
    problem = _Problem(
        layout,
        tuple(master_bytes_per_element),
        own_state_bytes,
        trace,
        budget,
        wishes,
        keep_gradients,
        sums_gradients,
        unified,
        staging_bytes,
        by_need,
        around,
        caches_masters=update_on_device or unified,
        any_order=any_order,
    )
    return problem.solve()


def by_need_pages(
    layout: ModelLayout,
    by_need: Sequence[Sequence[int]],
    at_home: Callable[[int], bool],
    gradients: Callable[[int], Gradients],
) -> int:
    """Returns the device pages that plans leave free for units that no plan contains: one that computes, one that is fetched,
    and the gradients of one; or those that are on the device at once, of which one leaves before its gradients take pages.

    Args:
        by_need: these units, by those that are on the device at once.
        at_home: whether the device is the home of a unit's parameters.
        gradients: the pages of a unit's gradients.
    """
    most = 0
    for units in by_need:
        full = [layout.full_pages(unit, in_place=at_home(unit)) for unit in units]
        shards = [0 if at_home(unit) else layout.gathered_pages(unit) for unit in units]
        passing = max(each.full + each.beside for each in (gradients(unit).all for unit in units))
        together = sum(full) + max(0, passing - min(full)) if len(units) > 1 else 0
        most = max(most, together + max(shards), 2 * max(full) + max(shards) + passing)
    return most


def _check(
    layout: ModelLayout,
    master_bytes_per_element: Sequence[int],
    budget: Budget,
    wishes: PlacementWishes,
    *,
    unified: bool,
    update_on_device: bool,
) -> None:
    """Raises the ConfigErrors of `place`."""
    if len(master_bytes_per_element) != len(layout.flats):
        raise InternalError(
            f"{len(master_bytes_per_element)} sizes of master states were given for {len(layout.flats)} flats"
        )
    if unified and budget[Tier.HOST]:
        raise InternalError(f"the device tier is RAM, and a host tier has {format_bytes(budget[Tier.HOST])} more of it")
    for setting, tier in (("offload_parameters", wishes.parameter), ("offload_optimizer", wishes.master)):
        if tier is not None and not tier.computes and not budget[tier]:
            raise ConfigError(
                f"{setting}={tier.name.lower()!r}, and pages may take 0 bytes {tier.place}; raise {tier.setting}"
            )
    if wishes.master is Tier.DEVICE and not (update_on_device or unified):
        raise ConfigError(
            "offload_optimizer='device', and the optimizer cannot update in a device tier that device_memory makes on a "
            "CPU; use offload_optimizer='host'"
        )


class _Problem:
    """One call of `place`: its inputs, and the demand of the homes that are being tried."""

    def __init__(
        self,
        layout: ModelLayout,
        master_bytes_per_element: tuple[int, ...],
        own_state_bytes: Mapping[int, Sequence[Sequence[int]]],
        trace: Trace,
        budget: Budget,
        wishes: PlacementWishes,
        keep_gradients: bool,
        sums_gradients: bool,
        unified: bool,
        staging_bytes: int,
        by_need: Sequence[Sequence[int]],
        around: Collection[int],
        *,
        caches_masters: bool,
        any_order: bool,
    ) -> None:
        # Configuration.
        self._layout = layout
        self._per_element = master_bytes_per_element
        self._own_state_bytes = own_state_bytes
        self._bytes = HomeBytes(layout, master_bytes_per_element, own_state_bytes)
        self._by_need = by_need
        self._unplanned = frozenset(unit for units in by_need for unit in units)
        self._around = around
        self._trace = without_units(trace, self._unplanned)
        self._uses = uses_of(self._trace, len(layout.units))
        self._entered = entered_gradients(layout, self._uses)
        self._gradients_at: dict[tuple[int, Tier], Gradients] = {}
        """By (unit, home), what `_gradients` has found."""
        self._changes: dict[tuple[int, _UnitHomes | None, _UnitHomes, bool], tuple[list[Demand], list[Demand]]] = {}
        """By (unit, homes before, homes after, comfortable), the demands that go and that come with such a move."""
        self._by_need_at: dict[tuple[bool, Tier], int] = {}
        """By (whether all parameters are on the device, home of gradients), what `by_need_pages` has found."""
        self._budget = budget
        self._wishes = wishes
        self._keep_gradients = keep_gradients
        self._sums_gradients = sums_gradients
        self._unified = unified
        self._staging_tier = Tier.HOST if budget[Tier.HOST] else Tier.DEVICE
        self._staging_bytes = staging_bytes
        self._caches_masters = caches_masters
        self._units = range(len(layout.units))
        self._pool_bytes = _whole_pages(
            budget[Tier.DEVICE] - (staging_bytes if self._staging_tier.computes else 0),
            layout.page_size,
        )
        self._capacity = {
            **budget,
            self._staging_tier: max(budget[self._staging_tier] - staging_bytes, 0),
            Tier.DEVICE: self._pool_bytes,
        }
        # State, reset by each attempt.
        self._comfortable = False
        self._passes = False
        """Whether gradients that leave the device pass through a pool in RAM, and have no homes."""
        self._assumed_master = Tier.DEVICE
        """Home of master states for which the gradients of device parameters are counted before masters are placed."""
        self._demand = Occupancy(self._uses.tick_count)
        # Plans do not say in which units those of `by_need` are called.
        self._follows_any_order = any_order and not by_need
        self._any_order = AnyOrder()
        self._left: dict[Tier, Bytes] = {}
        self._given: dict[Tier, Counter[str]] = {tier: Counter() for tier in budget}
        """Bytes taken from each tier, by use, for error messages."""

    def solve(self) -> Placement:
        """Returns the first attempt that fits, most wanted first; raises the error of the last when none does."""
        slower = self._slower_tiers(self._wishes.parameter)
        attempts: list[tuple[bool, bool]] = []  # (parameters all on the device, comfortable)
        if self._wishes.parameter in (None, Tier.DEVICE):
            attempts += [(True, True), (True, False)]
        if slower and self._wishes.parameter is not Tier.DEVICE:
            attempts += [(False, True), (False, False)]
        tried = [(*each, False) for each in attempts]
        reason: CapacityError | None = None
        assumed = [Tier.DEVICE]
        if self._has_too_few_bytes():
            tried = tried[-1:]  # for its error
        elif self._budget[Tier.HOST] and not self._keep_gradients:
            tried += [(*each, True) for each in attempts]  # compute waits for updates, so only where nothing else fits
        if len(tried) > 1 and self._wishes.master is None and not self._unified:
            # Gradients that leave may need more of the device than those that stay, which masters then turn out not to do.
            assumed += self._slower_tiers(None)[:1]
        for self._assumed_master in assumed:
            for resident, comfortable, passes in tried:
                try:
                    return self._attempt(resident, comfortable, passes)
                except CapacityError as error:
                    reason = reason if passes or not self._assumed_master.computes else error
        if reason is None:
            raise InternalError(f"{self._wishes} allow no tier")
        raise reason

    def _has_too_few_bytes(self) -> bool:
        """Whether parameters and master states are more than all tiers hold, so that no attempt can fit. Searches for a
        setting with which a run fits (`runtime/deciding/remedies.py`) place many such budgets."""
        have = sum(self._capacity.values())
        return any(sum(sizes) > have for sizes in zip(*self._bytes.parameters, *self._bytes.masters, strict=True))

    def _attempt(self, resident: bool, comfortable: bool, passes: bool) -> Placement:
        self._comfortable, self._passes = comfortable, passes
        self._demand, self._any_order = Occupancy(self._uses.tick_count), AnyOrder()
        self._left = {tier: (size,) * self._bytes.ranks for tier, size in self._capacity.items()}
        self._given = {tier: Counter() for tier in self._budget}
        self._given[self._staging_tier][What.STAGING.value] = self._staging_bytes
        if self._wishes.master is Tier.DEVICE:
            for unit in self._units:
                self._give(Tier.DEVICE, Kind.MASTER, self._bytes.masters[unit])
        pool = passing_bytes(self._layout) if passes else (0,) * self._bytes.ranks
        if passes and self._take((Tier.HOST,), Kind.GRADIENT, pool) is None:
            raise CapacityError(f"gradients need {format_bytes(max(pool))} of RAM to pass through; raise host_memory")
        # Before homes are chosen, and so the most.
        possible = [Tier.DEVICE, *(() if resident else self._slower_tiers(self._wishes.parameter))]
        of_gradients = {*map(self._gradient_home, possible), *(self._slower_tiers(None) if self._by_need else ())}
        pages = max(self._by_need_pages(resident, home) for home in of_gradients)
        for demand in reserved_ticks(self._trace, self._around, pages):
            demand.add_to(self._demand)
        parameter_homes = self._place_parameters(resident)
        if not self._fits_device():
            raise self._device_error()
        master_homes = self._place_masters()
        gradient_homes = self._place_gradients(parameter_homes, master_homes)
        self._move_parameters_in(parameter_homes, master_homes, gradient_homes)
        self._move_masters_in(parameter_homes, master_homes, gradient_homes)
        self._move_up(parameter_homes, master_homes, gradient_homes)
        homes = tuple(map(Homes, parameter_homes, gradient_homes, master_homes))
        gradients = tuple(map(self._gradients, self._units, gradient_homes))
        page = self._layout.page_size
        used = {tier: self._capacity[tier] - min(self._left[tier]) for tier in self._budget}
        used[Tier.DEVICE] = round_up(used[Tier.DEVICE], page)
        most_pages = sum(
            2 * self._layout.full_pages(unit, in_place=home.computes)
            + self._layout.gathered_pages(unit)
            + 2 * (passing.all.full + max(passing.all.beside, sum(row.shard for row in passing.rows)))
            for unit, (home, passing) in enumerate(zip(parameter_homes, gradients, strict=True))
        )
        return Placement(
            homes=homes,
            gradients=gradients,
            master_bytes_per_element=self._per_element,
            keeps_gradients=self._keep_gradients,
            sums_gradients=self._sums_gradients,
            at_home_bytes=used,
            gather_bytes=min(self._pool_bytes - used[Tier.DEVICE], most_pages * page),
            staging_bytes=self._staging_bytes,
            staging_tier=self._staging_tier,
            own_state_bytes=self._own_state_bytes,
            passing_bytes=max(pool),
        )

    def _by_need_pages(self, resident: bool, gradient_home: Tier) -> int:
        key = resident, gradient_home
        if key not in self._by_need_at:
            of_unit = partial(self._gradients, home=gradient_home)
            self._by_need_at[key] = by_need_pages(self._layout, self._by_need, lambda unit: resident, of_unit)
        return self._by_need_at[key]

    def _place_parameters(self, resident: bool) -> list[Tier]:
        """Places parameters: on the device as far as they fit, then on the host, then on the disk.

        Gradients are placed with them where they need homes, unless the update of parameters on the device is known to
        run elsewhere (`_place_gradients`).
        """
        if resident:
            for unit in self._units:
                self._move_unit(unit, None, self._with_gradient_home(Tier.DEVICE))
                self._give(Tier.DEVICE, Kind.PARAMETER, self._parameter_bytes(unit, Tier.DEVICE))
            return [Tier.DEVICE for _ in self._units]
        away = self._slower_tiers(self._wishes.parameter)[0]
        for unit in self._units:
            self._move_unit(unit, None, self._with_gradient_home(away))
        if not self._fits_device():
            raise self._device_error()
        homes: list[Tier] = []
        missing: list[tuple[int, int]] = []
        for unit in self._units:
            if self._wishes.parameter is None and self._move_in(unit, away):
                homes.append(Tier.DEVICE)
                continue
            size = self._parameter_bytes(unit, away)
            tier = self._take(self._slower_tiers(self._wishes.parameter), Kind.PARAMETER, size)
            if tier is None:
                missing.append((unit, max(size)))
            elif tier is not away:  # gradients on disk need more of the device than those in RAM
                self._move_unit(unit, self._with_gradient_home(away), self._with_gradient_home(tier))
            homes.append(away if tier is None else tier)
        if missing:
            raise self._no_home_error(missing, Kind.PARAMETER, self._slower_tiers(self._wishes.parameter))
        return homes

    def _place_masters(self) -> list[Tier]:
        """Places master states unit by unit: device as far as memory is left (the cache), then host, then disk."""
        wish = self._wishes.master
        slower = self._slower_tiers(wish)
        homes: list[Tier] = []
        missing: list[tuple[int, int]] = []
        for unit in self._units:
            size = self._bytes.masters[unit]
            if wish is Tier.DEVICE or (wish is None and not any(size)):  # Taken in `_attempt`, or no bytes.
                homes.append(Tier.DEVICE)
            elif wish is None and self._caches_masters and self._assumed_master.computes and self._fits_device(size):
                self._give(Tier.DEVICE, Kind.MASTER, size)
                homes.append(Tier.DEVICE)
            else:
                tier = self._take(slower, Kind.MASTER, size)
                if tier is None:
                    missing.append((unit, max(size)))
                homes.append(Tier.DEVICE if tier is None else tier)
        if missing:
            devices = (Tier.DEVICE,) if wish is None and self._caches_masters else ()
            raise self._no_home_error(missing, Kind.MASTER, devices + slower)
        return homes

    def _place_gradients(self, parameter_homes: Sequence[Tier], master_homes: Sequence[Tier]) -> list[Tier]:
        """Places the gradients that are not placed with their parameters: those of device parameters that are updated
        elsewhere. They leave the device when their backward ends, for the fastest tier that has room."""
        homes: list[Tier] = []
        missing: list[tuple[int, int]] = []
        for unit, (parameter, master) in enumerate(zip(parameter_homes, master_homes, strict=True)):
            assumed, home = self._gradient_home(parameter), self._gradient_home(parameter, master)
            size = self._bytes.gradients[unit]
            if home is not parameter and not home.computes and any(size) and not self._passes:
                tier = self._take(self._slower_tiers(None), Kind.GRADIENT, size)
                if tier is None:
                    missing.append((unit, max(size)))
                home = home if tier is None else tier
            if home is not assumed and any(size):  # after the choice: what a tier needs on the device differs
                self._move_gradients(unit, parameter, assumed, home)
            homes.append(home)
        if missing:
            raise self._no_home_error(missing, Kind.GRADIENT, self._slower_tiers(None))
        if not self._fits_device():
            raise self._device_error()
        return homes

    def _move_parameters_in(
        self, parameter_homes: list[Tier], master_homes: Sequence[Tier], gradient_homes: Sequence[Tier]
    ) -> None:
        """Makes the device the home of further parameters; their gradients stay where they are.

        `_place_parameters` has counted the gradients of device parameters there; see `_move_masters_in`.
        """
        if self._wishes.parameter is not None or self._unified:
            return
        for unit, (away, gradients) in enumerate(zip(tuple(parameter_homes), gradient_homes, strict=True)):
            size = self._bytes.parameters[unit]
            if away.computes or master_homes[unit].computes or gradients is not away:
                continue
            self._move_unit(unit, (away, gradients), (Tier.DEVICE, gradients))
            if self._fits_device(size):
                self._give(away, Kind.PARAMETER, _minus(size))
                self._give(Tier.DEVICE, Kind.PARAMETER, size)
                parameter_homes[unit] = Tier.DEVICE
            else:
                self._move_unit(unit, (Tier.DEVICE, gradients), (away, gradients))

    def _move_masters_in(
        self, parameter_homes: Sequence[Tier], master_homes: list[Tier], gradient_homes: list[Tier]
    ) -> None:
        """Makes the device the home of further master states, with their gradients.

        `_place_masters` has counted the gradients of all device parameters on the device; those that `_place_gradients` has
        placed elsewhere have left room.
        """
        if self._wishes.master is not None or not self._caches_masters:
            return
        for unit, (parameter, away) in enumerate(zip(parameter_homes, gradient_homes, strict=True)):
            near, size = self._gradient_home(parameter, Tier.DEVICE), self._bytes.masters[unit]
            if away is near:
                continue
            self._move_gradients(unit, parameter, away, near)
            if not self._fits_device(size):
                self._move_gradients(unit, parameter, near, away)
                continue
            if not self._passes:
                self._give(away, Kind.GRADIENT, _minus(self._bytes.gradients[unit]))
            self._give(master_homes[unit], Kind.MASTER, _minus(size))
            self._give(Tier.DEVICE, Kind.MASTER, size)
            master_homes[unit], gradient_homes[unit] = Tier.DEVICE, near

    def _move_up(self, parameter_homes: Sequence[Tier], master_homes: list[Tier], gradient_homes: list[Tier]) -> None:
        """Moves gradients, and then master states, to faster tiers other than the device, where states that have moved to the
        device have left room. The user may ask for one tier of master states."""
        tiers = self._slower_tiers(None)
        for unit, parameter in enumerate(parameter_homes):
            before, size = gradient_homes[unit], self._bytes.gradients[unit]
            if not parameter.computes or before not in tiers or self._passes or not any(size):
                continue  # gradients of other parameters are in the tier of these
            tier = self._take(tiers[: tiers.index(before)], Kind.GRADIENT, size)
            if tier is not None:
                self._give(before, Kind.GRADIENT, _minus(size))
                self._move_unit(unit, (parameter, before), (parameter, tier))
                gradient_homes[unit] = tier
        tiers = self._slower_tiers(self._wishes.master)
        for unit in self._units:
            before, size = master_homes[unit], self._bytes.masters[unit]
            if before in tiers and any(size):
                tier = self._take(tiers[: tiers.index(before)], Kind.MASTER, size)
                if tier is not None:
                    self._give(before, Kind.MASTER, _minus(size))
                    master_homes[unit] = tier

    def _move_gradients(self, unit: int, parameter: Tier, source: Tier, target: Tier) -> None:
        """Moves the gradients of a unit with device parameters to or from the device. The caller counts the other tier's
        bytes."""
        self._move_unit(unit, (parameter, source), (parameter, target))
        if self._keep_gradients and parameter in (source, target):  # given with the parameters
            size = self._bytes.gradients[unit]
            self._give(parameter, Kind.PARAMETER, size if target is parameter else _minus(size))

    def _move_in(self, unit: int, away: Tier) -> bool:
        """Makes the device the home of a unit's parameters if that fits; otherwise changes nothing."""
        size = self._parameter_bytes(unit, Tier.DEVICE)
        if min(less(self._left[Tier.DEVICE], size)) < 0:
            return False
        outside, inside = self._with_gradient_home(away), self._with_gradient_home(Tier.DEVICE)
        self._move_unit(unit, outside, inside)
        if self._fits_device(size):
            self._give(Tier.DEVICE, Kind.PARAMETER, size)
            return True
        self._move_unit(unit, inside, outside)
        return False

    def _take(self, tiers: Sequence[Tier], kind: Kind, size: Bytes) -> Tier | None:
        """Takes bytes of homes in the first tier that has them; returns None when no tier has."""
        for tier in tiers:
            if all(each <= left for each, left in zip(size, self._left[tier], strict=True)):
                self._give(tier, kind, size)
                return tier
        return None

    def _give(self, tier: Tier, kind: Kind, size: Bytes) -> None:
        self._left[tier] = less(self._left[tier], size)
        words = {Kind.MASTER: "master states", Kind.GRADIENT: "gradients"}
        parameters = "parameters and gradients" if self._with_gradients(tier) else "parameters"
        self._given[tier][words.get(kind, parameters)] += max(size)

    def _fits_device(self, size: Bytes | None = None) -> bool:
        left = self._left[Tier.DEVICE] if size is None else less(self._left[Tier.DEVICE], size)
        left_pages = min(left) // self._layout.page_size
        return self._needed_pages() <= left_pages

    def _slower_tiers(self, wish: Tier | None) -> tuple[Tier, ...]:
        """Returns the tiers other than the device that exist and are allowed, fastest first."""
        tiers = self._budget if wish is None else (wish,)
        return tuple([tier for tier in tiers if not tier.computes and self._budget[tier]])

    def _gradient_home(self, parameter_home: Tier, master_home: Tier | None = None) -> Tier:
        """Returns the home of gradients.

        Args:
            master_home: home of their master states; None: not placed yet, so the one that the user asks for, or else
                `_assumed_master`.
        """
        if self._unified:
            # The update reads passing gradients in place: a write to disk would gain nothing.
            return parameter_home if self._keep_gradients else Tier.DEVICE
        master_home = master_home or self._wishes.master or self._assumed_master
        if parameter_home.computes and master_home.computes:
            return parameter_home
        if self._passes:
            return Tier.HOST
        if not parameter_home.computes or master_home.computes:
            return parameter_home
        return next(iter(self._slower_tiers(None)))

    def _demands(self, unit: int, homes: _UnitHomes) -> list[Demand]:
        if unit in self._unplanned:
            return []
        demands = list(parameter_demands(self._layout, self._uses, unit, homes[0], comfortable=self._comfortable))
        of_gradients = gradient_demands(self._uses, unit, self._gradients(unit, homes[1]), self._entered)
        demands += of_gradients.least
        if self._comfortable:
            demands += of_gradients.linger
        return demands

    def _gradients(self, unit: int, home: Tier) -> Gradients:
        """Returns the pages of a unit's gradients that wait in `home`."""
        found = self._gradients_at.get((unit, home))
        if found is None:
            rows = [self._gradient(flat, home) for flat in self._layout.flats_of(unit) if flat.trainable]
            found = Gradients(home.computes and not self._keep_gradients, tuple(rows))
            self._gradients_at[unit, home] = found
        return found

    def _gradient(self, flat: FlatLayout, home: Tier) -> GradientRow:
        reduces = not self._layout.needs_no_reduction(flat)
        added_at_home = not reduces and home.computes and self._keep_gradients
        through_buffer = self._sums_gradients and not home.addressable and not flat.shared
        return GradientRow(
            flat.index,
            reduces,
            full=0 if added_at_home else self._pages(flat.padded_bytes),
            shard=flat.shard_pages,
            sum=self._pages(flat.gradient_bytes) if through_buffer else 0,
        )

    def _pages(self, size: int) -> int:
        return -(-size // self._layout.page_size)

    def _move_unit(self, unit: int, before: _UnitHomes | None, after: _UnitHomes) -> None:
        """Counts the demand of a unit with the homes `after`, in place of `before`. Most demands of both are the same."""
        key = unit, before, after, self._comfortable
        found = self._changes.get(key)
        if found is None:
            old, new = [] if before is None else self._demands(unit, before), self._demands(unit, after)
            for demand in tuple(old):
                if demand in new:
                    old.remove(demand)
                    new.remove(demand)
            found = self._changes[key] = old, new
        for demand in found[0]:
            demand.take_from(self._demand)
        for demand in found[1]:
            demand.add_to(self._demand)
        if self._follows_any_order and self._uses.units[unit].ticks:
            if before is not None:
                self._count_in_any_order(unit, before, -1)
            self._count_in_any_order(unit, after, 1)

    def _count_in_any_order(self, unit: int, homes: _UnitHomes, count: int) -> None:
        in_place = homes[0].computes
        self._any_order.add(
            unit,
            self._layout.full_pages(unit, in_place=in_place),
            0 if in_place else self._layout.gathered_pages(unit),
            self._gradients(unit, homes[1]).all if self._uses.units[unit].backward else PassingPages(0, 0),
            count=count,
        )

    def _with_gradient_home(self, parameter_home: Tier) -> _UnitHomes:
        return parameter_home, self._gradient_home(parameter_home)

    def _needed_pages(self) -> int:
        return max(self._demand.peak(), self._any_order.pages())

    def _parameter_bytes(self, unit: int, home: Tier) -> Bytes:
        """Returns the bytes of a unit's parameter homes, and of its gradient homes if they are with them."""
        size = self._bytes.parameters[unit]
        return together(size, self._bytes.gradients[unit]) if self._with_gradients(home) else size

    def _with_gradients(self, parameter_home: Tier) -> bool:
        """Whether parameters and gradients have one home."""
        home = self._gradient_home(parameter_home)
        return home is parameter_home and (self._keep_gradients or not (home.computes or self._passes))

    def _device_error(self) -> CapacityError:
        left = min(self._left[Tier.DEVICE])
        have_pages = left // self._layout.page_size
        only_ram = self._unified and not self._budget[Tier.DISK]
        return device_capacity_error(
            self._layout,
            self._trace,
            self._demand.peak_instant() // 2,
            need_pages=self._needed_pages(),
            have_pages=have_pages,
            reserved_bytes=_whole_pages(self._budget[Tier.DEVICE], self._layout.page_size) - left,
            unified=self._unified,
            limit_bytes=self._budget[Tier.DEVICE],
            further=" or give a disk_path"
            if only_ram
            else "",  # no other text tells a user with RAM alone of the disk tier
            uses=self._given[Tier.DEVICE],
            any_order=self._any_order.pages() > self._demand.peak(),
        )

    def _no_home_error(self, missing: list[tuple[int, int]], kind: Kind, tiers: Sequence[Tier]) -> CapacityError:
        need_bytes = sum(size for _, size in missing)
        first, last = (self._layout.units[missing[at][0]].name or "root" for at in (0, -1))
        names = f"{len(missing)} units ({first} to {last})" if len(missing) > 1 else first
        what = {Kind.MASTER: "master states", Kind.GRADIENT: "gradients"}.get(kind, "parameters")
        rooms = ", ".join(
            f"{tier_in_words(tier, self._unified)} has {format_bytes(max(min(self._left[tier]), 0))} left of "
            f"{format_bytes(self._budget[tier])}"
            for tier in tiers
        )
        settings = " or ".join(setting_for(tier, self._unified) for tier in tiers)
        if all(tier.addressable for tier in tiers) and self._wishes.master is None:
            settings = f"{settings or setting_for(Tier.DEVICE, self._unified)} or give a disk_path"
        text = (
            f"the {what} of {names} need {format_bytes(need_bytes)}; "
            f"{rooms or 'no tier is left for them'}; raise {settings}"
        )
        # The last tier is the largest that could take them.
        return CapacityError(with_uses(text, tiers[-1], self._given[tiers[-1]], self._unified) if tiers else text)


def _minus(size: Bytes) -> Bytes:
    return tuple(-each for each in size)


def _whole_pages(size: int, page_size: int) -> int:
    return size // page_size * page_size
