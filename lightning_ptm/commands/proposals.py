"""Changes with which a run that does not fit would fit, each tried by the planner.

Owns their order, nearest first: fewer changes before more; of these other sizes of memory, recomputation and a smaller batch
before less precise states, a disk, and adapters (LoRA).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_ptm.config import Settings
from lightning_ptm.errors import CapacityError, ConfigError
from lightning_ptm.forecasting.prediction import DiskUse, Prediction, Proposal

ADAPTER_RANK = 16
"""The rank of the adapters that are tried."""
BATCH, ADAPTERS, STAGING = "batch_size", "lora_rank", "staging_memory"
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
