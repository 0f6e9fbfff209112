"""The memory of a device that pages of a fit may take where `device_memory` is "auto": the least that a plan needs for the
first step, and then what steps leave at their peak.

Decides from measurements and from the shapes of batches; relayout.py lays the run out again. Owns what was measured, which
outlives a layout.

I1: ranks decide alike: each wants something, and what any of them wants is done on all, unless gradients are pending on one.
I2: nothing oscillates: the budget falls where a step may need more than any before, and grows again only to what that step
    has left; each fall leaves a fourth of a step more, so that growing batches make few of them.
I3: a step is traced in a layout once an optimizer has stepped after a backward in it, on any rank.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from lightning_ptm.errors import format_bytes
from lightning_ptm.memory.backend import Backend
from lightning_ptm.planning.activation_choice import Handling
from lightning_ptm.runtime.deciding.budgets import device_reserve, with_headroom
from lightning_ptm.runtime.engine.activation_peak import ActivationPeak
from lightning_ptm.runtime.tensors.autograd_graphs import tensors_in

_FALL_SHARE = 1 / 4
"""Share of a step's bytes that are left in addition after each fall of the budget (I2)."""

_MOST_LATE_UNITS = 2
"""Most falls of the budget because a batch has called units for the first time: routers may call units at any time (I2)."""

Shapes = tuple[tuple[int, ...], ...]
"""Shapes of a batch's tensors."""


class Wanted(enum.IntFlag):
    """Requests of a rank before a batch, as flags that ranks exchange; other flags of barriers are in runtime/ranks."""

    NOTHING = 0
    FOLLOW = 2048
    """A budget of what the traced steps leave."""
    LEAST = 4096
    """The least budget: the batch may need more than any that was traced."""


class DeviceBudget:
    """Device memory of one rank's fit.

    Args:
        backend: this rank's device.
        measuring: returns the measurement of the present layout, of which no reference is kept; None: there is no layout.
        follows: whether the run trains and its settings give no number.
    """

    def __init__(self, backend: Backend, measuring: Callable[[], ActivationPeak | None], *, follows: bool) -> None:
        # Configuration.
        self._backend = backend
        self._measuring = measuring
        self.follows = follows and backend.has_own_memory
        # State.
        self.beside_bytes: int | None = None
        """Bytes for which the next layout is decided; None: no step was traced, so pages take the least."""
        self._handlings: Mapping[int, Handling] = {}
        """What became of activations, by unit, in the newest traced step; others were kept."""
        self._unsettled = False
        """Whether the next step may treat activations in another way than those so far in this layout."""
        self._left_bytes = 0
        """Bytes that pages and gradients leave to steps at their peak."""
        self._peaks: dict[frozenset[int], int] = {}
        """By the units whose gradients may wait in `.grad` meanwhile, the same as `_step_bytes`."""
        self.gradients_read = False
        """Whether the user has read gradients that are in pages, so that `.grad` has had copies. Read by others."""
        self._other_parameters = False
        """Whether units were numbered for other parameters when peaks were measured."""
        self._pool_bytes = 0
        """Device memory of the pages now."""
        self.least_bytes = 0
        """The newest least budget. Read by others, for further layouts."""
        self._of_steps_bytes = 0
        """As `beside_bytes`, of the traced steps alone, when `follow` was called."""
        self._step_bytes = 0
        """Most bytes that a step has taken in addition to pages, gradients in `.grad`, and what stays between steps."""
        self._falls = 0
        self._steps: int | None = None
        """Number of optimizer steps before the newest batch or layout; None: no batch has come."""
        self._first_step: int | None = None
        """The same before the present layout."""
        self._postponed = False
        """Whether the least budget was wanted while gradients were pending."""
        self._trained: list[Shapes] = []
        """Batches that were trained on, but for those that are smaller than another in every way."""
        self._evaluated: list[Shapes] = []
        self._called: set[int] = set()
        """Units that the batches so far have called."""
        self._late_units = 0
        """Number of times that a batch has called units that no traced step had called."""
        self._differ = self._accumulates = False
        """Whether some batches were smaller than others, and whether a step had several batches."""

    def begin_layout(self, pool_bytes: int, limit_bytes: int) -> None:
        """Begins to measure a layout.

        Args:
            pool_bytes: device memory of its pages.
            limit_bytes: the budget for which it was decided.
        """
        self._pool_bytes = pool_bytes
        self._unsettled = False
        if self.follows and self.beside_bytes is None:
            self.least_bytes = limit_bytes
        self._first_step = self._steps
        if self.follows and (peak := self._measuring()) is not None:
            peak.begin(by_tick=self.beside_bytes is None)

    @property
    def handlings(self) -> Mapping[int, Handling] | None:
        """What becomes of activations in a layout whose budget follows traced steps, by unit; None: steps choose anew."""
        return None if self.beside_bytes is None else self._handlings

    def before_batch(
        self,
        batch: Any,
        backwards: int,
        steps: int,
        called: Collection[int] = (),
        *,
        handlings: Mapping[int, Handling] = MappingProxyType({}),
        settled: bool = True,
    ) -> Wanted:
        """Returns what this rank wants before a training batch.

        Args:
            backwards: backwards of units in the present layout.
            steps: optimizer steps of the run so far.
            called: the units called in the present layout.
            handlings: what became of activations, by unit, in the newest step; others were kept.
            settled: whether that stays so.
        """
        late = self.beside_bytes is not None and not self._called.issuperset(called)
        self._called.update(called)
        self._late_units += late
        if self._first_step is None:  # a checkpoint may have been loaded after the pages were laid out
            self._first_step = steps
        self._accumulates |= steps == self._steps
        self._steps = steps
        shapes = shapes_of(batch)
        exceeds = self._may_exceed(shapes, self._trained)
        self._differ |= any(_growth(each, shapes) > 1 or _growth(shapes, each) > 1 for each in self._trained)
        _add(self._trained, shapes)
        if self.beside_bytes is None:
            self._handlings = handlings
            if self._unsettled and settled and (peak := self._measuring()) is not None:
                peak.begin(by_tick=True)
                self._first_step = steps  # the steps so far are not those that follow
            self._unsettled = not settled
            traced = backwards > 0 and steps > self._first_step and settled
            return Wanted.FOLLOW if traced and not exceeds else Wanted.NOTHING
        late = late and self._late_units <= _MOST_LATE_UNITS
        return Wanted.LEAST if exceeds or late or self._postponed else Wanted.NOTHING

    def before_evaluation(self, batch: Any) -> Wanted:
        """Returns what a single rank wants before a batch of an evaluation, which takes less than a training batch."""
        shapes = shapes_of(batch)
        exceeds = self.beside_bytes is not None and self._may_exceed(shapes, [*self._trained, *self._evaluated])
        _add(self._evaluated, shapes)
        return Wanted.LEAST if exceeds else Wanted.NOTHING

    def postpone(self) -> None:
        """Wants the least budget again before the next batch, since pages cannot be laid out again now."""
        self._postponed = True

    def forget(self, steps: int) -> None:
        """Takes the least budget from the next layout on, until a step was traced in it: other parameters train.

        Args:
            steps: optimizer steps of the run so far.
        """
        self._take_least(steps)
        self._other_parameters = True

    def fall(self, steps: int) -> None:
        """Takes the least budget as `forget` does, and leaves more afterwards: a batch may take more than any before."""
        self._take_least(steps)
        self._falls += 1

    def _take_least(self, steps: int) -> None:
        self._measure()
        self.beside_bytes, self._steps, self._postponed = None, steps, False

    def follow(self, *, varies: bool, classes: Mapping[int, type] = MappingProxyType({})) -> int:
        """Follows the traced peak from the next layout on; returns its bytes.

        Args:
            varies: see `with_headroom`.
            classes: of the units that train. Steps that call further units of a class get room for what the traced step has
                kept for one of them.
        """
        peak = self._measure()
        stays = max(0, self._stays())
        more = int(self._step_bytes * _FALL_SHARE * self._falls)
        measuring = self._measuring()
        kept = {} if measuring is None else measuring.kept
        most = dict[type, int]()
        for unit in kept.keys() & classes.keys():
            most[classes[unit]] = max(most.get(classes[unit], 0), kept[unit])
        more += sum(most.get(of_unit, 0) for unit, of_unit in classes.items() if unit not in kept)
        if self._accumulates and self._differ:  # a longer batch within a step comes too late for another layout
            more += self._step_bytes
        self._of_steps_bytes = stays + self._step_bytes
        self.beside_bytes = self._left_bytes = stays + with_headroom(self._step_bytes, varies=varies) + more
        return peak

    def below_peak(self) -> Mapping[frozenset[int], int] | None:
        """Returns, by the units whose gradients may wait in `.grad` meanwhile, by how much less than at its peak a step
        takes; None: a step may begin with gradients of others."""
        measuring = self._measuring()
        if measuring is None or self._accumulates or self._other_parameters:
            return None
        if self._steps is None or self._first_step is None or measuring.passes > self._steps - self._first_step:
            return None
        return {units: self._step_bytes - taken for units, taken in self._peaks.items()}

    def stay(self) -> None:
        """Goes on with the present layout after `follow`: from now on steps are measured as a whole, and not by tick."""
        if (peak := self._measuring()) is not None:
            peak.begin(by_tick=False)

    def leave(self, beside_bytes: int) -> None:
        """Has the next layout decided for so many bytes beside pages and gradients (`decided_beside`)."""
        self.beside_bytes = beside_bytes

    def lacks(self, more_bytes: int) -> bool:
        """Returns whether the device has no room for the traced steps and so many bytes of pages and gradients."""
        beside_bytes = self._of_steps_bytes - self._backend.bytes_outside_region(self._pool_bytes)
        return beside_bytes + more_bytes > self._free_bytes()

    def without_headroom(self) -> int:
        """Returns the `beside_bytes` for which decisions leave steps only what the traced ones have taken."""
        return max(0, self._of_steps_bytes - device_reserve(self._free_bytes()))

    def _free_bytes(self) -> int:
        """Returns the free bytes of the device, with those of the pages."""
        return self._backend.free_bytes() + self._pool_bytes

    def leave_least(self, limit_bytes: int) -> None:
        """Has the next layout decided for this least budget, in which a step is traced again."""
        self.beside_bytes, self.least_bytes = None, limit_bytes

    def explain(self) -> str:
        """Returns what an allocation that failed on the device has to do with pages, and what to do."""
        taken, most = format_bytes(self._pool_bytes), format_bytes(self._step_bytes)
        less = ""
        if not self.follows:
            less = "set a smaller device_memory, "
        elif self.least_bytes < self._pool_bytes:
            less = f"set device_memory='{self.least_bytes >> 10}KiB' (as in the first step), "
        traced = (
            f", which leave room for steps like those traced so far ({most})" if self.beside_bytes is not None else ""
        )
        return (
            f"Pages of model states take {taken} of the device{traced}. A step that has begun cannot be repeated with fewer "
            f"pages, since it may have changed buffers and parameters, so the run cannot go on; {less}use recompute='all', "
            f"offload_activations='host' or a smaller batch"
        )

    def _measure(self) -> int:
        measuring = self._measuring()
        peak = 0 if measuring is None else measuring.bytes()
        stays = self._stays()
        self._step_bytes = max(self._step_bytes, peak - stays)
        self.gradients_read |= measuring is not None and measuring.read_bytes() > 0
        if measuring is not None and measuring.by_tick:
            for units, taken in measuring.peaks().items():
                self._peaks[units] = max(self._peaks.get(units, 0), taken - stays)
        return peak

    def _stays(self) -> int:
        """Returns the bytes outside pages between steps, without gradients in `.grad`."""
        measuring = self._measuring()
        gradients = 0 if measuring is None else measuring.gradients_now()
        return self._backend.bytes_outside_region(self._pool_bytes) - gradients

    def _may_exceed(self, shapes: Shapes, known: Sequence[Shapes]) -> bool:
        """Whether a batch may take more than the budget leaves, from how much larger it is than a known one."""
        growth = min((_growth(shapes, each) for each in known), default=math.inf)
        if growth <= 1:
            return False
        stays = max(0, self._stays())
        return self.beside_bytes is None or stays + growth * self._step_bytes > self._left_bytes


def shapes_of(batch: Any) -> Shapes:
    """Returns the shapes of a batch's tensors."""
    return tuple(tuple(tensor.shape) for tensor in tensors_in(batch))


def _growth(shapes: Shapes, known: Shapes) -> float:
    """Returns the factor by which activations of a batch may exceed those of a known one: samples count once, every other
    dimension twice (attention)."""
    if list(map(len, shapes)) != list(map(len, known)):
        return math.inf
    found = 1.0
    for ours, theirs in zip(shapes, known, strict=True):
        ratios = [max(1.0, one / max(1, other)) for one, other in zip(ours, theirs, strict=True)]
        found = max(found, math.prod(ratios) * math.prod(ratios[1:]))
    return found


def _add(known: list[Shapes], shapes: Shapes) -> None:
    """Adds shapes to a list without those that are smaller than another in every way."""
    if not any(_growth(shapes, each) <= 1 for each in known):
        known[:] = [*(each for each in known if _growth(each, shapes) > 1), shapes]
