"""Statistics of a run for logs: bytes moved, seconds waited, and updates done so far."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning_ptm.memory.transfer import LinkStats
from lightning_ptm.planning.fetch_policy import Lookups
from lightning_ptm.runtime.ranks.experts import TokenStats
from lightning_ptm.runtime.updates.audits import StalenessStats, UpdateAudit
from lightning_ptm.runtime.updates.lock_free import LockFreeUpdates

if TYPE_CHECKING:
    from lightning_ptm.runtime.engine.engine import Engine


@dataclasses.dataclass(frozen=True, slots=True)
class Statistics:
    """Totals of one rank since the run began.

    Attributes:
        links: bytes, transfers, and seconds with at least one transfer in flight, by link ("disk_to_device" and so on); with
            `activations="host"` also "activations_to_host" and "activations_to_device", on streams of their own.
        stall_s: seconds that compute waited, by cause: "fetch" for parameters, "update" for an update of them, "save" for
            checkpoints.
        busy_s: seconds with a copy in flight on any link (on CUDA, copies between RAM and the device are added up).
        uses: numbers of uses of units' parameters, by where compute found them.
        update_arithmetic_s: seconds of optimizer arithmetic.
        staleness: staleness of the parameters that training read; None for synchronous updates.
        tokens: tokens sent to experts and back; None where experts are not divided over ranks.
        updates_per_step: updates of a parameter per optimizer step; 1 in synchronous runs.
    """

    links: Mapping[str, LinkStats]
    stall_s: Mapping[str, float]
    busy_s: float
    uses: Lookups
    update_arithmetic_s: float
    staleness: StalenessStats | None
    updates_per_step: float
    tokens: TokenStats | None = None


def collect(engine: Engine) -> Statistics:
    """Returns the statistics of an engine up to now. Cheap: waits for nothing."""
    updates = engine.updates if isinstance(engine.updates, LockFreeUpdates) else None
    # An update thread that waits for a checkpoint does not stall compute.
    save_s = engine.save_stall_s + (0.0 if engine.updater.in_thread else engine.updater.stats.save_stall_s)
    links = {
        f"{source.name.lower()}_to_{target.name.lower()}": stats
        for (source, target), stats in engine.allocator.stats().items()
    }
    if engine.offload is not None:
        links |= {name: stats for name, stats in engine.offload.links().items() if stats.transfers}
    return Statistics(
        links=links,
        stall_s={**engine.executor.compute_timing.stall_s, "save": save_s},
        busy_s=engine.allocator.busy_s(),
        uses=dataclasses.replace(engine.executor.fetching.lookups),
        update_arithmetic_s=engine.updater.stats.arithmetic_s,
        staleness=dataclasses.replace(updates.versions.stats) if updates is not None else None,
        updates_per_step=updates.updates_per_step if updates is not None else 1.0,
        tokens=dataclasses.replace(engine.expert_groups.stats) if engine.expert_groups is not None else None,
    )


def together(earlier: Statistics | None, now: Statistics) -> Statistics:
    """Returns the sum of a run's statistics before and after a re-layout; `updates_per_step` is that of the later part."""
    if earlier is None:
        return now
    links = {name: _sum(earlier.links.get(name), now.links.get(name)) for name in {**earlier.links, **now.links}}
    staleness = _sum(earlier.staleness, now.staleness)
    if earlier.staleness is not None and now.staleness is not None:
        staleness = dataclasses.replace(staleness, maximum=max(earlier.staleness.maximum, now.staleness.maximum))
    causes = {**earlier.stall_s, **now.stall_s}
    return Statistics(
        links=links,
        stall_s={cause: earlier.stall_s.get(cause, 0.0) + now.stall_s.get(cause, 0.0) for cause in causes},
        busy_s=earlier.busy_s + now.busy_s,
        uses=_sum(earlier.uses, now.uses),
        update_arithmetic_s=earlier.update_arithmetic_s + now.update_arithmetic_s,
        staleness=staleness,
        updates_per_step=now.updates_per_step,
        tokens=_sum(earlier.tokens, now.tokens),
    )


def _sum(first: Any, second: Any) -> Any:
    """Returns the field-wise sum of two dataclasses of numbers; either may be None."""
    if first is None or second is None:
        return second if first is None else first
    added = {
        field.name: getattr(first, field.name) + getattr(second, field.name) for field in dataclasses.fields(first)
    }
    return dataclasses.replace(second, **added)


def audit(engine: Engine) -> tuple[UpdateAudit, ...]:
    """Returns the record of each flat's gradients and updates; empty for synchronous updates, where none is pending between
    steps."""
    return engine.updates.audit() if isinstance(engine.updates, LockFreeUpdates) else ()


def last_audit(engine: Engine) -> tuple[UpdateAudit, ...]:
    """As `audit`, at the last drain. Waits for nothing, and works after an update has failed."""
    return engine.updates.last_audit if isinstance(engine.updates, LockFreeUpdates) else ()
