"""Layouts and plans as lines, one decision each, and the first one that two ranks made otherwise.

Words only. Ranks compare digests of these lines (runtime/deciding/planner.py), so that whatever differs has words.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from lightning_ptm.planning.layout import ModelLayout
from lightning_ptm.planning.plan import Plan


def layout_lines(layout: ModelLayout) -> Iterator[str]:
    """What lies where, whoever holds it, and who trains it."""
    yield f"pages of {layout.page_size} bytes"
    for place, flat in enumerate(layout.everywhere()):
        for slot in flat.slots:
            spec = slot.spec
            cut = "" if spec.box is None else f", {spec.box.cut}"
            strides = "" if spec.stride is None else f"{',' * bool(cut)} with strides {spec.stride}"
            numbers = " and ".join(map(str, spec.optimizers))
            trained = f"trained by optimizer {numbers}" if spec.trainable else "frozen"
            kind = f"{spec.shape}{cut}{strides}, {spec.dtype}, {trained}"
            owned = f", updated by rank {flat.owner(slot.start)}" if flat.shares else ""
            yield f"{spec.name} of shape {kind}, at {slot.start} of flat {place}{owned}"


def plan_lines(plan: Plan, layout: ModelLayout) -> Iterator[str]:
    """What is issued when.

    Args:
        layout: names the units.
    """
    yield f"a plan of {plan.tick_count} ticks"
    for task in plan.tasks:
        unit = layout.units[task.unit].name or "root"
        yield f"{task.operation.value} of {unit} ({task.kind.value}) at tick {task.trigger}"


def digest(lines: Sequence[str]) -> int:
    """60 bits of SHA-256."""
    return int(hashlib.sha256("\n".join(lines).encode()).hexdigest()[:15], 16)


def first_difference(ours: Sequence[str], theirs: Sequence[str]) -> tuple[str, str] | None:
    """The first line that differs, ours and theirs."""
    for mine, other in zip_longest(ours, theirs, fillvalue="nothing more"):
        if mine != other:
            return mine, other
    return None
