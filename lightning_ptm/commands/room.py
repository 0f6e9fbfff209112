"""Activation memory by batch size, and the memory that pages leave to activations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from lightning_ptm.commands.planned_run import PlannedRun
from lightning_ptm.config import format_bytes
from lightning_ptm.forecasting.counting import UnitWork, anatomy
from lightning_ptm.forecasting.estimate import activation_bytes, estimate, offloaded_bytes, resized, sample_count
from lightning_ptm.forecasting.node import Node
from lightning_ptm.forecasting.prediction import LARGEST_BATCH
from lightning_ptm.runtime.autograd.recompute import recomputed_around
from lightning_ptm.runtime.deciding.blueprint import Blueprint
from lightning_ptm.runtime.engine.predicted_memory import PredictedMemory
from lightning_ptm.terms import Tier


class Sizes:
    """Activation memory of a planned run, by batch size."""

    def __init__(self, run: PlannedRun, blueprint: Blueprint, recomputed: frozenset[int]) -> None:
        # Configuration.
        self._run = run
        self._blueprint = blueprint
        self._recomputed = recomputed
        # With undivided experts each expert is recomputed on its own: of thousands, few get tokens.
        self._around = recomputed_around(blueprint.units, recomputed) if blueprint.by_need else {}
        # State.
        self._known: dict[int, tuple[tuple[int, ...], tuple[UnitWork, ...]]] = {}
        run.model.to(run.request.compute)
        self._anatomy = anatomy(run.model, blueprint.units)

    def at(self, samples: int) -> tuple[tuple[int, ...], tuple[UnitWork, ...]]:
        """Bytes of activations at each tick, and the units' work."""
        if samples not in self._known:
            run, blueprint = self._run, self._blueprint
            if samples not in run.works:
                run.works[samples] = estimate(
                    run.model,
                    blueprint.units,
                    resized(run.batch, samples),
                    run.request.compute,
                    blueprint.experts,
                    known=self._anatomy,
                    group=run.group,
                    divided=run.divided,
                )
            works = run.works[samples]
            away = blueprint.activations_to is not None
            ticks = activation_bytes(works, self._recomputed, blueprint.trace, away=away, around=self._around)
            self._known[samples] = ticks, works
        return self._known[samples]

    def ends_with(self, wanted: Literal["auto"] | int | None) -> dict[int, int]:
        """Returns, for units whose backward ends with that of another unit, the other one; independent of the batch
        size (see UnitWork)."""
        works = self.at(wanted if isinstance(wanted, int) else sample_count(self._run.batch))[1]
        return {unit: work.ends_with for unit, work in enumerate(works) if work.ends_with is not None}

    def offloaded(self, works: Sequence[UnitWork]) -> int:
        """Bytes of the units' activations that are offloaded to RAM or disk until the backward."""
        return offloaded_bytes(works, self._recomputed, self._around) if self._blueprint.activations_to else 0

    def largest(self, room: int, away_room: int) -> int:
        """The largest batch whose activations fit; 0: not even one sample."""
        on_device = self._largest(room, lambda samples: max(self.at(samples)[0]))
        away = self._largest(away_room, lambda samples: self.offloaded(self.at(samples)[1]))
        return min(on_device, away)

    @staticmethod
    def _largest(room: int, size_at: Callable[[int], int]) -> int:
        least = size_at(1)
        if least > room:
            return 0
        each = max(1, size_at(2) - least)
        samples = min(LARGEST_BATCH, 1 + (room - least) // each)
        while size_at(samples) > room:  # activations need not grow linearly
            samples = max(1, min(samples - 1, samples * room // size_at(samples)))
        return samples


def activation_room(blueprint: Blueprint, takes: PredictedMemory, node: Node) -> int:
    """Bytes of the device tier left to activations; on a CPU that is RAM, where unused pages take none."""
    if not node.has_own_memory:
        pages = takes.peak(Tier.DEVICE) + takes.peak(Tier.HOST)
        return node.host_memory // node.ranks_per_node - pages - takes.gradients_beside
    return node.device_memory - blueprint.pool_bytes[Tier.DEVICE] - takes.gradients_beside


def away_room(blueprint: Blueprint, node: Node) -> int:
    """Bytes of one rank that pages leave to activations in the tier to which they are offloaded; RAM if they are not."""
    if blueprint.activations_to is Tier.DISK:
        return blueprint.activation_limit_bytes
    return node.host_memory // node.ranks_per_node - blueprint.pool_bytes[Tier.HOST]


def shortage(tier: Tier, samples: int, taken_bytes: int, room: int, node: Node, *, unified: bool) -> str:
    """Returns why activations do not fit, in a sentence."""
    batch = f"{samples} sample{'' if samples == 1 else 's'}"
    if tier is Tier.DISK:
        return (
            f"activations of {batch} a rank take {format_bytes(taken_bytes)} on disk (offload_activations='disk'), and pages "
            f"leave {format_bytes(room)} of {node.name}'s to them"
        )
    if tier is Tier.HOST:
        return (
            f"activations of {batch} a rank take {format_bytes(taken_bytes)} of RAM "
            f"(offload_activations='host'), and pages leave {format_bytes(max(room, 0))} of {node.name}'s to them"
        )
    return (
        f"activations of {batch} a rank take {format_bytes(taken_bytes)} in addition to the pages, which leave "
        f"{format_bytes(max(room, 0))} of {'RAM' if unified else 'the device tier'} to them on {node.name}"
    )
