"""Peak of the device bytes that steps take in addition to pages, without the gradients in `.grad`.

The gradients that wait in `.grad` for the optimizer step depend on the homes of states, so they differ between layouts
(`gradients_beside`). Activations, workspaces and what other code allocates are the same in all layouts.

I1: only gradients that exist are subtracted: those of units whose backward has ended in the present pass of the loss. They
    stay until the optimizer step. With manual optimization the user may remove gradients at any time, so none are subtracted.
I2: peaks are kept by the units whose gradients may wait in `.grad` at that time, in any layout: those whose backward has
    ended in this iteration, and those whose forward, which waits for the update of the step before, is not over. Gradients
    that outlive the step (`GradientRoute.outlives_step`) wait until the next pass of the loss, before which they are zeroed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from lightning_ptm.memory.backend import Backend
from lightning_ptm.planning.trace import Trace
from lightning_ptm.runtime.deciding.gradient_route import Until
from lightning_ptm.runtime.gradients.flat_gradient import FlatGradient
from lightning_ptm.runtime.updates.optimizer_groups import FlatUpdate
from lightning_ptm.terms import Phase

_MOST_SETS = 128
"""Most sets of units for which peaks are kept, in each of forward and backward. Every set lists its units, so one set a tick
would take tens of gigabytes in a model with tens of thousands of units (experts)."""


class PeaksByWaitingUnits:
    """Peaks of steps, by the set of units whose gradients may wait in `.grad` at that time, in any layout (I2).

    In a model with more units than `_MOST_SETS`, consecutive ticks share one entry: the highest of their peaks, and all units
    that may wait in any of them. This overestimates memory and never underestimates it.

    Args:
        trained: the units with gradients.
        outliving: those of them whose gradients outlive the step.
    """

    def __init__(self, trained: Iterable[int], outliving: Iterable[int]) -> None:
        self._trained, self._outliving = frozenset(trained), frozenset(outliving)
        self._most_changes = -(-len(self._trained) // _MOST_SETS)
        """Number of units that are added or removed before a new entry begins."""
        self._forward: int | None = None
        """The unit that computes, if it is in its forward."""
        self._before: set[int] = set()
        """Units whose gradients of the step before may wait."""
        self._came: set[int] = set()
        self._peaks: dict[frozenset[int], int] = {}
        self._set: set[int] | None = None
        """The units of the entry in progress, which is not in `_peaks` yet; None: no peak was noted since the last entry."""
        self._peak = self._changes = 0
        """The peak of the entry in progress, and the number of units added or removed in it."""

    def clear(self) -> None:
        """Forgets all peaks."""
        self._set, self._peak, self._changes = None, 0, 0
        self._peaks = {}

    def note(self, peak_bytes: int) -> None:
        """Records a peak that was measured in this tick."""
        if self._set is None:
            self._set = self._before | self._came
        self._peak = max(self._peak, peak_bytes)

    def peaks(self) -> Mapping[frozenset[int], int]:
        """Returns the recorded peaks; ends the entry in progress."""
        self._end_set()
        return self._peaks

    def _end_set(self) -> None:
        if self._set is not None:
            units = frozenset(self._set)
            self._peaks[units] = max(self._peaks.get(units, 0), self._peak)
        self._set, self._peak, self._changes = None, 0, 0

    def _count_change(self) -> None:
        """Counts a unit that is about to be added or removed."""
        self._changes += 1
        if self._changes >= self._most_changes:
            self._end_set()

    def begin_iteration(self) -> None:
        """Begins an iteration: gradients of the step before may wait until their update."""
        self._end_set()
        self._before, self._came, self._forward = set(self._trained), set(), None

    def tick(self, unit: int | None, phase: Phase | None) -> None:
        """Begins a tick.

        Args:
            unit, phase: what computes in it.
        """
        if self._forward in self._before and self._forward not in self._outliving:
            self._count_change()
            self._before.discard(self._forward)
        self._forward = unit if phase is Phase.FORWARD else None

    def pass_begins(self) -> None:
        """Begins the backward pass of the loss: gradients that outlived the step were zeroed."""
        if not self._before.isdisjoint(self._outliving):
            self._end_set()
            self._before -= self._outliving

    def came(self, unit: int) -> None:
        """Adds a unit whose backward has ended."""
        self._count_change()
        self._came.add(unit)
        if self._set is not None:
            self._set.add(unit)


def planned_below_peak(
    trace: Trace, taken_bytes: Sequence[int], trained: Iterable[int], outliving: Iterable[int]
) -> Mapping[frozenset[int], int]:
    """Returns, by the units whose gradients may wait in `.grad` meanwhile, by how much less than at its peak a planned step
    takes.

    Args:
        taken_bytes: what it takes at each tick of the trace, without pages and gradients.
        trained, outliving: see `PeaksByWaitingUnits`.
    """
    trains = frozenset(trained)
    waiting = PeaksByWaitingUnits(trains, outliving)
    waiting.begin_iteration()
    for tick, taken in zip(trace.ticks, taken_bytes, strict=True):
        if tick.phase is Phase.BACKWARD:
            waiting.pass_begins()
        waiting.tick(tick.unit, tick.phase)
        waiting.note(taken)
        if tick.phase is Phase.BACKWARD and tick.unit in trains:
            waiting.came(tick.unit)
    peak = max(taken_bytes)
    return {units: peak - taken for units, taken in waiting.peaks().items()}


class ActivationPeak:
    """Measures the peak of one layout on one rank.

    Args:
        pool_bytes: device memory of pages.
        most_gradients: bytes of gradients in `.grad` at most.
        flats: the trainable flats of each unit.
    """

    def __init__(
        self, backend: Backend, pool_bytes: int, most_gradients: int, flats: Sequence[Sequence[FlatUpdate]]
    ) -> None:
        # Configuration.
        self._backend = backend
        self._pool_bytes = pool_bytes
        self._most_gradients = most_gradients
        self._flats = flats
        # State.
        self.by_tick = False
        """Whether ticks are measured."""
        self.passes = 0
        """Passes of the loss whose gradients have come, since `begin`."""
        self._counts = False
        self._waiting = PeaksByWaitingUnits(
            (unit for unit, of_unit in enumerate(flats) if of_unit),
            (unit for unit, of_unit in enumerate(flats) if any(flat.gradient.route.outlives_step for flat in of_unit)),
        )
        self._in_grad: dict[int, int] = {}
        """By unit, bytes of its gradients in `.grad`."""
        self._forward: tuple[int, int] | None = None
        """The unit whose forward this tick is, and the bytes outside pages before it."""
        self.kept: dict[int, int] = {}
        """By unit, most bytes that a tick of its forward has left for the backward, since `begin`. Read by others."""

    def begin(self, *, by_tick: bool) -> None:
        """Starts a measurement.

        Args:
            by_tick: whether each tick is measured; if not, `most_gradients` are subtracted from the peak of the whole.
        """
        self.by_tick = by_tick
        self.passes = 0
        self._forward = None
        self.kept.clear()
        self._waiting.clear()
        self._backend.begin_peak()

    def begin_iteration(self, *, counts: bool) -> None:
        """Begins an iteration.

        Args:
            counts: whether gradients of backward passes of the loss stay in `.grad` until the optimizer step (I1).
        """
        self.tick()
        self._in_grad, self._counts = {}, counts
        self._waiting.begin_iteration()

    def tick(self, unit: int | None = None, phase: Phase | None = None) -> None:
        """Ends the measurement of a tick, and begins that of the next one.

        Args:
            unit, phase: what computes in the next one.
        """
        if self.by_tick:
            self._end_tick()
            self._backend.next_peak()
            self._waiting.tick(unit, phase)
            now = self._backend.bytes_outside_region(self._pool_bytes)
            if self._forward is not None:
                before, began = self._forward
                self.kept[before] = max(self.kept.get(before, 0), now - began)
            self._forward = (unit, now) if unit is not None and phase is Phase.FORWARD else None

    def pass_begins(self) -> None:
        """Begins a backward pass of the loss."""
        if self.by_tick and self._counts:
            self._end_tick()
            self._backend.next_peak()
            self._waiting.pass_begins()

    def gradients_came(self, unit: int) -> None:
        """Counts the gradients of a unit whose backward, in a pass of the loss, has ended."""
        if not (self.by_tick and self._counts):
            return
        self._end_tick()  # the peak so far may be older than these gradients
        self._backend.next_peak()
        self.passes += not self._in_grad
        self._waiting.came(unit)
        found = [flat.gradient for flat in self._flats[unit]]
        self._in_grad[unit] = _bytes_in_grad(each for each in found if each.route.until is not Until.BACKWARD)

    def gradients_now(self) -> int:
        """Returns the bytes of all gradients in `.grad`, with `read_bytes`; those of a step may stay there until the next
        backward."""
        return _bytes_in_grad(flat.gradient for of_unit in self._flats for flat in of_unit) + self.read_bytes()

    def read_bytes(self) -> int:
        """Returns the bytes of the copies in `.grad` of gradients in pages that the user has read."""
        return sum(flat.gradient.view.read_bytes() for of_unit in self._flats for flat in of_unit)

    def bytes(self) -> int:
        """Returns the peak since `begin`."""
        if self.by_tick:
            return max(self.peaks().values())
        return max(0, self._backend.peak_outside_region(self._pool_bytes) - self._most_gradients)

    def peaks(self) -> Mapping[frozenset[int], int]:
        """Returns the peaks by tick since `begin`, by the units whose gradients may wait in `.grad` meanwhile (I2)."""
        self._end_tick()
        return self._waiting.peaks()

    def _end_tick(self) -> None:
        self._waiting.note(self._backend.peak_outside_region(self._pool_bytes) - sum(self._in_grad.values()))


def _bytes_in_grad(gradients: Iterable[FlatGradient]) -> int:
    views = [each.view for each in gradients if each.route.adds_up_in_grad]
    return sum(tensor.nbytes for view in views for tensor in view.gradients() if tensor is not None)
