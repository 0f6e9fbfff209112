"""Changes with which a run that does not fit would fit, or with which its disk would last; each is tried by the planner.

Owns their order, nearest first: fewer changes before more; of these other sizes of memory, recomputation and a smaller batch
before less precise states, a disk, and adapters (LoRA). Of changes with which the disk lasts, the fastest is first.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_ptm.config import Settings
from lightning_ptm.errors import CapacityError, ConfigError
from lightning_ptm.forecasting.prediction import DiskUse, Prediction, Proposal
from lightning_ptm.memory.endurance import DiskLife

ADAPTER_RANK = 16
"""The rank of the adapters that are tried."""
BATCH, ADAPTERS, STAGING, ACCUMULATE = "batch_size", "lora_rank", "staging_memory", "accumulate_grad_batches"
"""Keys of changes that are no settings of the strategy's."""

_CPU_S = 3.0
"""CPU seconds after which nothing more is tried."""
_ENOUGH = 2
"""Number of single changes that fit, from which on no combination is tried."""
_MOST = 5
_WORTH = 1.25
"""How many times as large a batch has to get for a further change."""

_RECOMPUTE, _BF16, _INT8 = {"recompute": "all"}, {"optimizer_state_dtype": "bf16"}, {"optimizer_state_dtype": "int8"}
_DISK, _LORA = {"disk_path": "/nvme"}, {ADAPTERS: ADAPTER_RANK}
_SINGLE: tuple[dict[str, Any], ...] = (_RECOMPUTE, {}, _BF16, _INT8, _DISK, _LORA)
_COMBINED: tuple[dict[str, Any], ...] = (
    _RECOMPUTE | _BF16,
    _RECOMPUTE | _DISK,
    _RECOMPUTE | _INT8,
    _DISK | _INT8,
    _RECOMPUTE | _DISK | _INT8,
    _LORA | _RECOMPUTE,
    _LORA | _RECOMPUTE | _DISK,
)

_IN_RAM = {"offload_optimizer": "host"}
_MOST_MICRO_BATCHES = 1024
"""Most micro-batches of a step that are proposed."""
_MOST_STEPS_OF_SEARCH = 5
"""Most numbers of micro-batches that are tried for one proposal."""
_NEARLY = 0.999
"""Share of the wanted time from which on a disk is said to last; numbers of micro-batches are whole."""

Try = Callable[[Mapping[str, Any]], tuple[Prediction, int | None]]
"""Returns the prediction with these changes, and the largest batch that fits with them if it is known.

Raises CapacityError if states fit in no placement, and ConfigError for changes that this run cannot have."""


def proposals(
    attempt: Try,
    settings: Settings,
    samples: int,
    sizes: Sequence[Mapping[str, Any]],
    disk: DiskUse | None,
    *,
    adapters: bool,
) -> tuple[Proposal, ...]:
    """Returns what would fit, nearest first; it may be nothing.

    Args:
        attempt: see `Try`.
        settings: those of the run that does not fit.
        samples: its batch.
        sizes: changes of one setting that are sizes of memory.
        disk: the machine's; None: it has none.
        adapters: whether adapters can be tried.
    """
    ends, found = time.process_time() + _CPU_S, list[Proposal]()
    for changes in (*sizes, *_SINGLE, *_COMBINED):
        if time.process_time() > ends or (changes in _COMBINED and len(found) >= _ENOUGH):
            break
        changes_nothing = any(getattr(settings, name, None) == value for name, value in changes.items())
        unavailable = ("disk_path" in changes and (settings.disk_paths or disk is None)) or (
            ADAPTERS in changes and not adapters
        )
        if changes_nothing or unavailable:
            continue
        made = _tried(attempt, changes, samples, disk)
        if made is not None and not any(_no_better(made, each) for each in found):
            found = [each for each in found if not _no_better(each, made)] + [made]
    return tuple(sorted(found, key=lambda each: (ADAPTERS in each.changes, len(each.changes)))[:_MOST])


def _no_better(more: Proposal, less: Proposal) -> bool:
    """Whether a proposal has all changes of another one, and no batch that is worth the others."""
    if not less.changes.keys() <= more.changes.keys():
        return False
    return BATCH not in less.changes or more.changes[BATCH] < _WORTH * less.changes[BATCH]


def _tried(attempt: Try, changes: Mapping[str, Any], samples: int, disk: DiskUse | None) -> Proposal | None:
    try:
        prediction, largest = attempt(changes)
        if prediction.fits and not changes:
            return None
        if not prediction.fits:
            if not largest or largest >= samples:
                return None
            changes = {**changes, BATCH: largest}
            prediction, _ = attempt(changes)
    except (CapacityError, ConfigError):
        return None
    if prediction.seconds is None:
        return None
    used = None
    if disk is not None and "disk_path" in changes:
        used = dataclasses.replace(disk, bytes=prediction.tiers["disk"].taken_bytes)
    return Proposal(dict(changes), prediction.seconds, prediction.samples_per_s, used)


def lasting(attempt: Try, found: Prediction, settings: Settings, wanted_s: float) -> tuple[Proposal, ...]:
    """Returns changes with which the disk of a run that fits lasts for a time; if there are none, the one of those that were
    tried with which it lasts longest.

    What is tried: optimizer states in RAM, the largest batch, more micro-batches in a step, and smaller optimizer states,
    alone and together.

    Args:
        attempt: see `Try`.
        found: the prediction of the run.
        settings: its settings.
        wanted_s: seconds of training.
    """
    ends = time.process_time() + _CPU_S
    larger = {BATCH: found.largest_batch} if (found.largest_batch or 0) > found.batch_size else {}
    made: list[Proposal] = []
    for states in ({}, _BF16, _INT8):
        if states and settings.encodes_states:
            continue
        for more in (_IN_RAM, {}, larger):
            changes = {**states, **more}
            if time.process_time() > ends:
                break
            if not changes or any(getattr(settings, name, None) == value for name, value in changes.items()):
                continue
            made += _proposed(attempt, changes)
        for more in (larger, {}):
            if time.process_time() < ends:
                made += _with_larger_steps(attempt, {**states, **more}, found, wanted_s)
    good = [each for each in made if each.disk_lasts_s is None or each.disk_lasts_s >= _NEARLY * wanted_s]
    if not good:
        longer = [each for each in made if (each.disk_lasts_s or 0.0) > (found.disk_lasts_s or 0.0)]
        return tuple(sorted(longer, key=lambda each: -(each.disk_lasts_s or 0.0))[:1])
    distinct = [each for each in good if not any(_more_changes(each, other) for other in good)]
    # States in RAM change no number.
    order = sorted(distinct, key=lambda each: (len(each.changes), each.changes != _IN_RAM, -each.samples_per_s))
    return tuple(order[:_MOST])


def _more_changes(more: Proposal, less: Proposal) -> bool:
    """Whether a proposal has all changes of another one and further ones, and is no faster."""
    return less.changes.items() < more.changes.items() and more.samples_per_s <= less.samples_per_s


def _proposed(attempt: Try, changes: Mapping[str, Any]) -> list[Proposal]:
    """The changes as a proposal, if the run fits with them."""
    try:
        prediction, _ = attempt(changes)
    except (CapacityError, ConfigError):
        return []
    if prediction.seconds is None:
        return []
    lasts_s = prediction.disk_lasts_s
    return [Proposal(dict(changes), prediction.seconds, prediction.samples_per_s, disk_lasts_s=lasts_s)]


def _with_larger_steps(attempt: Try, changes: Mapping[str, Any], found: Prediction, wanted_s: float) -> list[Proposal]:
    """Returns the changes with about the fewest micro-batches in a step with which the disk lasts, or with the most that are
    proposed.

    Between two numbers of them, bytes and seconds of a step are linear, except where compute gets longer than the disk.
    """
    points: list[tuple[int, float, DiskLife]] = []
    proposed: list[Proposal] = []
    count = 2 * found.accumulate
    for _ in range(_MOST_STEPS_OF_SEARCH):
        changed = {**changes, ACCUMULATE: count}
        try:
            prediction, _ = attempt(changed)
        except (CapacityError, ConfigError):
            break
        if prediction.seconds is None:
            break
        lasts_s = prediction.disk_lasts_s
        proposed.append(Proposal(changed, prediction.seconds, prediction.samples_per_s, disk_lasts_s=lasts_s))
        if prediction.disk_life is None or lasts_s is None:
            break
        points.append((count, prediction.seconds, prediction.disk_life))
        needed = _needed(points[-2], points[-1], wanted_s) if len(points) > 1 else 2 * count
        needed = max(2 * found.accumulate, min(needed, _MOST_MICRO_BATCHES))
        if needed in [each for each, _, _ in points]:
            break
        count = needed
    lasts = [each for each in proposed if (each.disk_lasts_s or math.inf) >= _NEARLY * wanted_s]
    return sorted(lasts, key=lambda each: each.changes[ACCUMULATE])[:1] or proposed[-1:]


def _needed(before: tuple[int, float, DiskLife], after: tuple[int, float, DiskLife], wanted_s: float) -> int:
    """Returns the micro-batches of a step with which the disk lasts, if seconds and bytes grow as between two numbers."""
    (first, first_s, life), (second, second_s, second_life) = before, after
    each_s = (second_s - first_s) / (second - first)
    each_bytes = (second_life.written_bytes - life.written_bytes) / (second - first)
    # Wanted is that rated bytes / bytes of a step * seconds of a step >= wanted_s.
    gain = life.rated_bytes * each_s - wanted_s * each_bytes
    lacking = wanted_s * life.written_bytes - life.rated_bytes * first_s
    if gain <= 0:
        return _MOST_MICRO_BATCHES if lacking > 0 else first
    return first + math.ceil(lacking / gain)
