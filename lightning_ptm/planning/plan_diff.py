"""Layouts and plans as lines of text, one decision each, to find the first line in which two ranks differ.

Owns texts only. Ranks compare digests of these lines (runtime/deciding/planner.py), so that every difference can be
reported as text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from lightning_ptm.planning.layout import ModelLayout
from lightning_ptm.planning.plan import Plan


def layout_lines(layout: ModelLayout) -> Iterator[str]:
    """Yields a line for each parameter: its position, whichever rank holds it, and the optimizers that train it."""
    yield f"pages of {layout.page_size} bytes"
    for place, flat in enumerate(layout.all_flats()):
        for slot in flat.slots:
            spec = slot.spec
            cut = "" if spec.box is None else f", {spec.box.cut}"
            strides = "" if spec.stride is None else f"{',' * bool(cut)} with strides {spec.stride}"
            numbers = " and ".join(map(str, spec.optimizers))
            trained = f"trained by optimizer {numbers}" if spec.trainable else "frozen"
            kind = f"{spec.shape}{cut}{strides}, {spec.dtype}, {trained}"
            owned = f", updated by rank {flat.owner(slot.start)}" if flat.shares else ""
            yield f"{spec.name} of shape {kind}, at element {slot.start} of flat {place}{owned}"


def plan_lines(plan: Plan, layout: ModelLayout) -> Iterator[str]:
    """Yields a line for each task and each place of a gradient: what is issued when, and to which frames.

    Args:
        layout: names the units.
    """
    yield f"a plan of {plan.tick_count} ticks"
    for task in plan.tasks:
        unit = layout.units[task.unit].name or "root"
        place = f", to frames {', '.join(map(str, task.frames))}" if task.frames else ""
        yield f"{task.operation.value} of {unit} ({task.kind.value}) at tick {task.trigger}{place}"
    for each in plan.gradients:
        yield f"{each.pages.value} of flat {each.flat} after tick {each.tick}, to frame {each.frame}"


def digest(lines: Sequence[str]) -> int:
    """Returns 60 bits of SHA-256 of the lines."""
    return int(hashlib.sha256("\n".join(lines).encode()).hexdigest()[:15], 16)


def first_difference(ours: Sequence[str], theirs: Sequence[str]) -> tuple[str, str] | None:
    """Returns the first line that differs, ours and theirs; None if all lines are equal."""
    for mine, other in zip_longest(ours, theirs, fillvalue="nothing more"):
        if mine != other:
            return mine, other
    return None
