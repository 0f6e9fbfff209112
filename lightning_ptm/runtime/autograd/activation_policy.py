"""Policy of `offload_activations="auto"` and `recompute="auto"`: how the activations of each call of a unit are kept.

Decides from measured bytes and seconds; moves nothing. All activations are kept as long as memory suffices. Memory is short
if a call begins and less is left than a quarter of what was free when the first call began, for the loss and for gradients,
and what the largest calls so far have needed (before any is known, what a call with such inputs is expected to need): this
one, one that is computed again or read back in the backward, and the temporaries of that backward. From there on, calls of
this iteration get the first of the allowed handlings whose tier has room. The next iteration measures what each unit saves,
and from then on the handlings are those that planning/activation_choice.py chooses. Both settings are the default, so until
memory is short for the first time, a call costs a comparison, and readings of free memory are far apart: see `_look`.

I1: a handling changes memory and time alone, so ranks need not agree on it. (Where forwards of units exchange something with
    other ranks, nothing is recomputed: see `decide.py`.)
I2: whatever was chosen, a call that begins while memory is short is not kept. So a longer batch is safe, too. Where pages
    take what a traced step has left of the device, every step comes near its end, so handlings are those of the traced
    step (`given`), and trainer/device_budget.py lays pages out again for longer batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Protocol

from lightning_ptm.memory.transfer import LinkStats
from lightning_ptm.planning.activation_choice import ActivationCosts, Handling, OffloadTarget, UnitCost, choose
from lightning_ptm.terms import Tier

_SHORT_SHARE = 1 / 4
"""Share of the free bytes at the begin of an iteration. The loss and gradients of the last units need some, too."""
_LEFT_SHARE = 1 / 16
"""Share of the same bytes that a choice leaves at all times."""
_CHOSEN_SHARE, _CHOSEN_CALLS = 1 / 8, 1.5
"""Bytes that have to be left for a call to be kept as chosen: share of the same bytes, and in those that it saves."""
_OFFLOADED_CALLS = 3
"""Bytes that have to be free for a call to be offloaded before handlings are chosen, in those that a call saves: for it, for
the one before, whose copies may not have ended, and for one that returns."""
_LONGER = 1.1
"""Bytes of the largest call in those of the measured ones from which on the rule before the choice holds again."""
_TEMPORARY_SHARE = 1.5
"""Most bytes of the temporaries of a unit's backward in those that it saves: attention whose scores have a bias that is
trained. Most have less, and a choice assumes as many as it saves."""
_LOOK_S, _MOST_LOOK_S = 0.02, 0.5
"""Least and most time between two readings of free RAM, each of which may take 2 ms. On a device with its own memory there is
none: a reading takes 0.1 ms, and the host may queue a whole forward in less."""
_TAKEN_BYTES_PER_S = 8 << 30
"""Rate at which a process takes RAM at most: the kernel zeroes each page first. So memory that is not short in one reading
cannot be short for some time."""
_BACKWARD_FORWARDS = 2.0
"""Seconds of a backward in those of a forward."""
_SAVED_INPUTS = 16
"""What a unit is expected to save before it is known, in its inputs: about that of a transformer's block."""
_INPUT_SHARE = 1 / 8
"""Bytes of a unit's inputs in those that it saves. A transformer's block has less; it is not measured."""
_RATES = {
    Tier.HOST: ("activations_to_host", "activations_to_device"),
    Tier.DISK: ("activations_to_disk", "activations_from_disk"),
}
"""Names of the links' statistics, there and back."""
_UNMEASURED_BYTES_PER_S = 1e9
"""Rate of a link that nothing has gone over yet."""


class Offloads(Protocol):
    """What the policy asks of `Offload`."""

    refused: set[Tier]

    def links(self) -> Mapping[str, LinkStats]: ...

    def room_bytes(self, tier: Tier) -> float: ...

    def core_s_per_byte(self, tier: Tier) -> float: ...


class ActivationPolicy:
    """Chooses the handling of each call's activations.

    Args:
        options: handlings besides KEEP, the first of which with room is taken while nothing is measured; at least one.
        free_bytes: returns the bytes that activations may still take.
        offload: has the statistics of the copies of activations so far, and the bytes that tiers have for them; None if
            no option offloads.
        device_done: returns when a device with its own memory has computed what is queued; called around units while they
            are measured, since a call returns before its kernels end. None: the CPU computes.
        given: handlings by unit that stay, others are kept; None: they are chosen.
    """

    def __init__(
        self,
        options: Sequence[Handling],
        free_bytes: Callable[[], int],
        offload: Offloads | None = None,
        *,
        device_done: Callable[[], None] | None = None,
        given: Mapping[int, Handling] | None = None,
    ) -> None:
        # Configuration.
        self.options = tuple(options)
        self._free_bytes = free_bytes
        self._offload = offload
        self._device_done = device_done
        self._given = given
        # State.
        self._begins = True
        """Whether no call of the iteration has begun."""
        self._began_bytes = 0
        """Bytes that were free when the first call of the newest iteration began that has begun with a reading."""
        self._free = 0
        self._looks_s = 0.0
        """Time of the next reading."""
        self._looked = False
        """Whether free bytes have been read in this iteration."""
        self._calls = 0
        """Calls of this iteration that are kept, since the newest reading."""
        self._was_short = False
        """Whether memory was short in this iteration."""
        self._counts = given is not None and offload is not None
        """Whether what calls save is counted: memory has been short. So are given handlings', since the end of a counted call
        frees what earlier ones have offloaded, and memory has to be as in the traced step."""
        self._unmeasured = self.options[0]
        """Handling of the calls that begin while memory is short and were to be kept."""
        self.measures = False
        """Whether this iteration measures what units save."""
        self._costs: dict[int, UnitCost] = {}
        """By unit, in the order of calls."""
        self._handlings: dict[int, Handling] = {}
        self._begun_s: dict[int, float] = {}
        self._saved_bytes: dict[int, int] = {}
        """By unit, what it saved when handlings were chosen."""
        self._measured_bytes = 0
        """The most of these."""
        self._largest_bytes = 0
        """Most bytes that a call has saved. If none are counted: the most by which the free bytes fell for one, on average
        between two readings of this iteration."""
        self._expects = True
        """Whether calls are expected to save much before anything is known: in the first iteration, and after short ones."""
        self._expected_bytes = 0
        """Bytes that the call that begins is expected to save."""
        self._chosen: dict[int, Handling] = {}
        """By unit, what became of the newest call that was not kept, since the handlings were chosen."""
        self._smallest = Handling.RECOMPUTE if Handling.RECOMPUTE in self.options else None
        """Handling of calls for which little is left even if they are offloaded, if there is one."""
        self._is_kept = self._recomputes = False
        """Whether the newest call is kept, and whether it is recomputed."""
        self._kept_bytes = 0
        """Bytes that calls of this iteration have saved and that are kept."""
        self._hidden_bytes = 0
        """Bytes of these that took nothing of what was free: allocators had them in freed blocks."""

    @property
    def counts(self) -> bool:
        """Whether what a call saves is to be counted and reported to `call_ended`."""
        return self._counts

    @property
    def handlings(self) -> Mapping[int, Handling]:
        """The chosen handlings by unit; empty where memory has sufficed so far."""
        return self._handlings

    @property
    def in_force(self) -> Mapping[int, Handling]:
        """The handlings, by unit, of calls that were not kept since handlings were chosen last, or were given."""
        return self._chosen if self._given is None else self._given

    @property
    def settled(self) -> bool:
        """Whether the next iteration will have the handlings of the newest one, if its batch is as large."""
        return not self.measures and not self._will_measure()

    def begin_iteration(self) -> None:
        """Begins an iteration that may save activations."""
        if self.measures and self._costs:
            self._choose()
        self.measures = self._will_measure()
        if self.measures:
            self._looks_s = 0.0
        self._expects = self._was_short or not self._looked
        self._was_short = False
        self._costs = {}
        if self._offload is None:
            self._largest_bytes = 0  # others may have taken what was free
        self._kept_bytes = self._calls = 0
        self._begins, self._looked = True, False

    def _will_measure(self) -> bool:
        offloads = any(handling.tier is not None for handling in self.options)  # else there is nothing to choose
        return self._was_short and not self._handlings and offloads

    def call_begins(self, unit: int, input_bytes: Callable[[], int]) -> Handling:
        """Returns the handling of what the call that begins will save.

        Args:
            input_bytes: returns the bytes of the call's inputs.
        """
        if self._given is not None:
            return self._given.get(unit, Handling.KEEP)
        unknown = self._expects and not self._largest_bytes
        self._expected_bytes = _SAVED_INPUTS * input_bytes() if unknown else 0
        if self.measures:
            self._begun_s[unit] = self._now()
            self._looks_s = 0.0
        self._look(unit)
        self._begins = False
        if self.measures:
            self._hidden_bytes = max(0, self._kept_bytes - (self._began_bytes - self._free))
        handling = self._handlings.get(unit, Handling.KEEP)
        if handling is Handling.KEEP and self._free < self._needed_bytes(unit):
            refused = self._offload is not None and self._unmeasured.tier in self._offload.refused
            if refused or not self._was_short:
                self._was_short, self._counts = True, self._offload is not None
                self._unmeasured = self._first_with_room()
            handling = self._unmeasured
            if self._smallest is not None and self._free < _OFFLOADED_CALLS * (
                self._largest_bytes or self._expected_bytes
            ):
                handling = self._smallest
        self._is_kept, self._recomputes = handling is Handling.KEEP, handling.recomputes
        if self._is_kept:
            self._calls += 1
        else:
            self._chosen[unit] = handling
        return handling

    def not_recomputed(self, unit: int, handling: Handling) -> None:
        """Corrects the handling of the call that has begun: it is this one, since the unit cannot be recomputed."""
        self._is_kept, self._recomputes = handling is Handling.KEEP, False
        self._chosen.pop(unit, None)
        if not self._is_kept:
            self._chosen[unit] = handling

    def _needed_bytes(self, unit: int) -> float:
        """Returns the bytes that have to be free for activations of a call that begins to be kept."""
        if unit in self._saved_bytes and self._largest_bytes <= self._measured_bytes * _LONGER:
            return max(self._began_bytes * _CHOSEN_SHARE, _CHOSEN_CALLS * self._saved_bytes[unit])
        return self._began_bytes * _SHORT_SHARE + (2 + _TEMPORARY_SHARE) * (self._largest_bytes or self._expected_bytes)

    def call_ended(self, unit: int, saved_bytes: int) -> None:
        """Records what a call of this iteration has saved, if that is counted."""
        inputs = int(saved_bytes * _INPUT_SHARE)
        if self._recomputes:  # what is counted is inputs
            inputs, saved_bytes = saved_bytes, max(self._largest_bytes, _SAVED_INPUTS * saved_bytes)
        else:
            self._largest_bytes = max(self._largest_bytes, saved_bytes)
        if self._is_kept:
            self._kept_bytes += saved_bytes
        if self.measures:
            forward_s = self._now() - self._begun_s[unit]
            before = self._costs.get(unit)
            if before is not None:  # called several times
                forward_s, saved_bytes = forward_s + before.forward_s, saved_bytes + before.saved_bytes
                inputs += before.input_bytes
            self._costs[unit] = UnitCost(forward_s, _BACKWARD_FORWARDS * forward_s, saved_bytes, inputs, saved_bytes)

    def _first_with_room(self) -> Handling:
        for handling in self.options:
            if handling.tier is None or self._offload is None:
                return handling
            needed = self._largest_bytes or self._expected_bytes
            if handling.tier not in self._offload.refused and self._offload.room_bytes(handling.tier) > needed:
                return handling
        return self.options[0]

    def _now(self) -> float:
        if self._device_done is not None:
            self._device_done()
        return perf_counter()

    def _look(self, unit: int) -> None:
        """Reads the free bytes, if they may have become short for a unit since they were read."""
        if self._device_done is None and perf_counter() < self._looks_s:
            return
        before, self._free = self._free, self._free_bytes()
        if self._begins:
            self._began_bytes = self._free
        elif self._looked and self._calls and not self.counts:
            self._largest_bytes = max(self._largest_bytes, (before - self._free) // self._calls)
        self._looked, self._calls = True, 0
        until_short_s = (self._free - self._needed_bytes(unit)) / _TAKEN_BYTES_PER_S
        self._looks_s = perf_counter() + min(max(_LOOK_S, until_short_s), _MOST_LOOK_S)

    def _choose(self) -> None:
        assert self._offload is not None  # else nothing is measured
        links = self._offload.links()
        targets = {}
        for tier in {handling.tier for handling in self.options} - {None}:
            assert tier is not None
            rates = [links[name].bytes_per_s if name in links else 0.0 for name in _RATES[tier]]
            away, back = (rate or _UNMEASURED_BYTES_PER_S for rate in rates)
            targets[tier] = OffloadTarget(
                away, back, self._offload.room_bytes(tier), self._offload.core_s_per_byte(tier)
            )
        found = choose(
            ActivationCosts(
                tuple(self._costs.values()),
                self._began_bytes * (1 - _LEFT_SHARE) + self._hidden_bytes,
                targets=targets,
                recomputes=any(handling.recomputes for handling in self.options),
                loss_bytes=int(self._began_bytes * (_SHORT_SHARE - _LEFT_SHARE)),
            )
        )
        self._handlings = dict(zip(self._costs, found, strict=True))
        self._chosen = {}
        self._saved_bytes = {unit: cost.saved_bytes for unit, cost in self._costs.items()}
        self._measured_bytes = max(self._saved_bytes.values())
