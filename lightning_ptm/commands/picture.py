"""`plan --plot`: memory of each tier over the ticks of a plan, and busy resources over a step.

Owns the content and colours of a plan's figure; drawing.py draws it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning_ptm.config import format_bytes
from lightning_ptm.drawing import (
    BLUE,
    FREE,
    GREEN,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    YELLOW,
    BusyPanel,
    BusyRow,
    BytesPanel,
    Series,
    draw,
)
from lightning_ptm.forecasting.rates import Activity
from lightning_ptm.planning.simulate import simulate
from lightning_ptm.runtime.deciding.blueprint import Blueprint
from lightning_ptm.terms import Link, Operation, Phase, Tier

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lightning_ptm.forecasting.prediction import Prediction

WIDTH, HEIGHT = 1200, 800
HOMES, HELD, ACTIVATIONS = BLUE, SKY, ORANGE
OPERATIONS = {
    Operation.COMPUTE: BLUE,
    Operation.FETCH: SKY,
    Operation.GATHER: GREEN,
    Operation.REDUCE: PURPLE,
    Operation.OFFLOAD: YELLOW,
    Operation.UPDATE: ORANGE,
    Operation.EXCHANGE: VERMILION,
}


def draw_plan(found: Prediction, blueprint: Blueprint, record: Sequence[Activity]) -> Figure:
    """The figure of one rank's forecast; memory only if it does not fit.

    Raises:
        ConfigError: matplotlib is missing.
    """
    samples = f"batch {max(found.batch_size, 1)}" + (f" x {found.accumulate}" if found.accumulate > 1 else "")
    where = f"{found.nodes} x {found.hardware}" if found.nodes > 1 else found.hardware
    rank = f"one of {found.ranks} ranks" if found.ranks > 1 else "one rank"
    title = f"{found.config} on {where}: {rank}, {found.numel / 1e9:.3g}B parameters, {samples}"
    panels: list[BytesPanel | BusyPanel] = list(_memory(found, blueprint))
    if found.timing is not None:
        panels.append(_busy(found, record))
    return draw(title if found.fits else f"{title}: DOES NOT FIT", panels, WIDTH, HEIGHT)


def _memory(found: Prediction, blueprint: Blueprint) -> list[BytesPanel]:
    per_tick = _bytes_per_tick(found, blueprint)
    phases = [tick.phase for tick in blueprint.trace.ticks]
    marks = [(0, "forward"), (phases.index(Phase.BACKWARD), "backward")] if Phase.BACKWARD in phases else []
    panels: list[BytesPanel] = []
    used = [tier for tier in blueprint.budget if found.tiers[tier.name.lower()].page_bytes]
    for tier in used:
        size = found.tiers[tier.name.lower()]
        use = per_tick[tier]
        count = len(use)
        # After the last tick its gradients still exist, but its activations do not.
        kept = (*found.activation_ticks, 0)[:count] if size.activation_bytes else ()
        home = blueprint.placement.at_home_bytes[tier]
        held = [max(0, there - home) for there in use]
        # The pool is allocated as a whole, so unused pages are not available to activations.
        rest = [max(0, size.page_bytes - home - there) for there in held]
        if tier.computes or blueprint.unified:
            name = "gathered, gradients on their way, staging"
        else:
            name = "staging"
        layers = [Series("homes", [home] * count, HOMES)]
        layers += [Series(name, held, HELD)] if any(held) else []
        layers += [Series(_rest_name(tier), rest, FREE)] if any(rest) else []
        layers += [Series("activations", kept, ACTIVATIONS)] if kept else []
        title = "DEVICE (this CPU's RAM)" if blueprint.unified and tier.computes else tier.name
        panels.append(
            BytesPanel(
                title=title,
                layers=layers,
                limit_name="memory",
                limit=size.have_bytes,
                bound_name="pages may take" if tier.computes else "",
                bound=blueprint.budget[tier] if tier.computes else 0,
                marks=marks,
                axis=tier is used[-1],
                weight=3.0 if tier.computes else 1.0,
            )
        )
    return panels


def _bytes_per_tick(found: Prediction, blueprint: Blueprint) -> dict[Tier, Sequence[int]]:
    """Bytes that pages take at each tick, by tier: the plan's upper bound or, if some units are in no plan, the predicted
    bytes (in RAM and on disk their total at every tick)."""
    if not blueprint.by_need:
        assert found.plan is not None
        simulation = simulate(blueprint.layout, blueprint.placement, found.plan, blueprint.trace, blueprint.budget)
        return {tier: simulation.tier(tier).bytes_per_tick for tier in blueprint.budget}
    taken = {tier: found.tiers[tier.name.lower()].page_bytes for tier in blueprint.budget}
    count = len(found.page_ticks)
    return {tier: found.page_ticks if tier.computes else (taken[tier],) * count for tier in blueprint.budget}


def _rest_name(tier: Tier) -> str:
    return "pages of updates, or not in use" if tier.updates and not tier.computes else "pages not in use"


def _busy(found: Prediction, record: Sequence[Activity]) -> BusyPanel:
    timing = found.timing
    assert timing is not None
    rows = [_row(None, record, timing.compute_s, timing.seconds, "")]
    rows += [
        _row(use.link, record, use.busy_s, timing.seconds, format_bytes(use.bytes)) for use in timing.links if use.bytes
    ]
    seen = {done.operation for done in record}
    needed_s = found.seconds or 0.0
    late = f"; updates need {needed_s:.4g} s a step" if needed_s > timing.seconds * 1.0001 else ""
    return BusyPanel(
        title=f"BUSY during a step of {timing.seconds:.4g} s, {found.samples_per_s:.4g} samples/s in all{late}",
        rows=rows,
        seconds=timing.seconds,
        colours={operation.value: colour for operation, colour in OPERATIONS.items() if operation in seen},
    )


def _row(link: Link | None, record: Sequence[Activity], busy_s: float, seconds: float, moved: str) -> BusyRow:
    # Lock-free updates that take longer than compute's step continue into the next one.
    share = f"{busy_s / seconds:.0%}" if busy_s <= seconds else "behind"
    return BusyRow(
        name="compute" if link is None else link.value.replace("_", " "),
        busy=[(done.start_s, done.seconds, done.operation.value) for done in record if done.link is link],
        note=f"{busy_s:.3g} s, {share}  {moved}".rstrip(),
    )
